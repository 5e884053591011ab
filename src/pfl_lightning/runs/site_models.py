"""Checkpoints of single clients at a site of a deployment."""

from pathlib import Path

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.runs.checkpoint_io import compare_checksums

MODEL, BEST = "model.ckpt", "best.ckpt"
"""A client's model of the last round, and of the round that was best on validation, in the client's folder."""


def models_in(state_dir: Path, best: bool) -> dict[str, Path]:
    """Return the checkpoints of a site's clients, by name and by id.

    Args:
        state_dir: the site's folder of client states.
        best: whether to take the best round's, where there is one, in the place of the last round's.

    Raises:
        MisconfigurationException: if there are none, or a file is damaged.
    """
    found: dict[str, Path] = {}
    for last in sorted(state_dir.glob(f"*/{MODEL}")):
        path = last.with_name(BEST) if best and last.with_name(BEST).is_file() else last
        try:
            compare_checksums(path)
            own = torch.load(path, map_location="cpu", weights_only=True, mmap=True)["federation"].get("own", {})
        except Exception as error:  # as many kinds as there are damages
            raise MisconfigurationException(f"{path} is damaged ({error}); let the site run another round.") from error
        found |= dict.fromkeys(own, path)
    if not found:
        raise MisconfigurationException(
            f"state-dir={str(state_dir)!r} has no client's model; give the folder of a site that ran."
        )
    return found
