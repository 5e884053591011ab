"""Checkpoint files, either complete or absent: of runs, and of single clients at a site of a deployment."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins.io import TorchCheckpointIO

from pfl_lightning.data.files import read_checkpoint
from pfl_lightning.messages import tree_map
from pfl_lightning.runs.whole_files import replacing
from pfl_lightning.stopping import postponed

HANDED_OVER = ".temp.ckpt"
"""Name of the file in which Lightning's processes pass weights, and nothing else, to the first process."""


class AtomicCheckpointIO(TorchCheckpointIO):
    """Lightning's checkpoint files, put in place in one step: a run killed while saving keeps the last checkpoint.

    Lightning writes through a temporary file too, but in the system's temporary folder: a move from another file system
    is a copy, which may be cut short. Lightning also builds the whole file in memory first, which for large clients
    takes as much memory as all of their states again.

    Args:
        mapped: whether to load local files memory-mapped, so that tensors are read on first use.
    """

    def __init__(self, mapped: bool = False) -> None:
        self.mapped = mapped

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Save beside the path, then rename.

        Args:
            checkpoint: entries of the checkpoint.
            path: the file, or an address that Lightning writes to.
            storage_options: passed to Lightning.

        Raises:
            OSError: if the file can't be written; an earlier file stays.
        """
        if "callbacks" in checkpoint:
            # scores lie on the GPU of the models, and a machine without GPU couldn't load them
            checkpoint = checkpoint | {"callbacks": tree_map(lambda t: t.cpu(), checkpoint["callbacks"])}
        # a remote store has no rename; Lightning's own way serves it
        if "://" in str(path) or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with replacing(Path(path)) as partial:
            save(checkpoint, partial)

    def link_checkpoint(self, written: Any, path: Any) -> None:
        """Put a checkpoint in a second place, in one step: as a link, or as a copy where links aren't possible.

        Args:
            written: the file, which is only ever replaced and never changed.
            path: the second place, on the same machine.

        Raises:
            OSError: if the file can't be copied; an earlier file stays.
        """
        with postponed(), replacing(Path(path)) as partial:
            partial.unlink(missing_ok=True)
            try:
                os.link(written, partial)
            except OSError:
                shutil.copyfile(written, partial)

    def load_checkpoint(
        self,
        path: Any,
        map_location: Callable[..., Any] | None = lambda storage, location: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Load a checkpoint after comparing its bytes with the checksums inside.

        Args:
            path: the file, or an address that Lightning reads.
            map_location: as for `torch.load`.
            weights_only: True allows only tensors and plain values; None means True here, while Lightning's None means
                False for files from the network.

        Raises:
            MisconfigurationException: if the file isn't a complete checkpoint of a federation, or differs from the
                saved one.
        """
        # a remote store, and a user's own wish to load Python objects, are Lightning's
        is_own = "://" not in str(path) and weights_only is not False
        if is_own and Path(path).name != HANDED_OVER:
            return read_checkpoint(path, map_location=map_location, mapped=self.mapped)
        return super().load_checkpoint(path, map_location, weights_only is not False)


def save(content: Any, path: Path) -> None:
    """Save by `torch.save`, with a checksum of each part, and raise the system's errors.

    Args:
        content: content of the file.
        path: the file.

    Raises:
        OSError: if the file can't be written; torch's own error for a full disk complains of an unexpected position.
    """
    try:
        # a signal in the middle of torch's writing can abort the whole process
        with postponed(), path.open("wb") as file:
            torch.save(content, file)
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


MODEL, BEST = "model.ckpt", "best.ckpt"
"""A client's model of the last round, and of the round that was best on validation, in the client's folder."""


def federation_in(state_dir: Path) -> Path:
    """Return the folder of a site's federation: of the only one in the site's folder, or the folder itself.

    Args:
        state_dir: the site's folder, which has one of each federation, or the folder of a federation.

    Raises:
        MisconfigurationException: if there are several federations.
    """
    if any(state_dir.glob(f"*/{MODEL}")):
        return state_dir
    folders = sorted({path.parents[1] for path in state_dir.glob(f"*/*/{MODEL}")})
    if len(folders) > 1:
        raise MisconfigurationException(
            f"state-dir={str(state_dir)!r} has models of several federations; give the folder of one, "
            f"{' or '.join(map(str, folders))}."
        )
    return folders[0] if folders else state_dir


def models_in(state_dir: Path, best: bool) -> dict[str, Path]:
    """Return the checkpoints of a site's clients, by name and by id.

    Args:
        state_dir: the site's folder of client states.
        best: whether to take the best round's, where there is one, in place of the last round's.

    Raises:
        MisconfigurationException: if there are none, or a file is damaged.
    """
    paths: dict[str, Path] = {}
    for last in sorted(state_dir.glob(f"*/{MODEL}")):
        path = last.with_name(BEST) if best and last.with_name(BEST).is_file() else last
        saved = read_checkpoint(path, str(path), instead="let the site run another round")
        paths |= dict.fromkeys(saved["federation"].get("own", {}), path)
    if not paths:
        raise MisconfigurationException(
            f"state-dir={str(state_dir)!r} has no client's model; give the folder of a site that ran."
        )
    return paths
