"""Trained models of clients that joined a federation afterwards, in a file beside the federation's checkpoints."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

JOINED = "joined.ckpt"
"""Name of the file."""
IDENTITY = ("method", "seed", "names", "sizes")
"""Entries of a saved federation that are the same in all of its checkpoints."""
KeptModels: TypeAlias = Mapping[str, Mapping[str, Any]]
"""Models by the client's name, or by its id in digits where clients have no names."""


def joined_models(checkpoint: Path | str, federation: Mapping[str, Any]) -> KeptModels:
    """Return the models of clients that joined a federation; empty if none has.

    Args:
        checkpoint: a checkpoint of the federation.
        federation: the checkpoint's entry ``federation``.

    Raises:
        MisconfigurationException: if the file beside the checkpoint can't be read.
    """
    found = read(Path(checkpoint).with_name(JOINED))
    models: KeptModels = found["joined"] if found and is_same(found["federation"], federation) else {}
    return models


def read(file: Path) -> dict[str, Any]:
    """Return the content of a file; empty if there is no such file."""
    if not file.is_file():
        return {}
    try:
        content: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    # torch raises many types for a damaged file
    except Exception as error:
        raise MisconfigurationException(
            f"{file} is damaged ({type(error).__name__}); remove it, and let the clients join again."
        ) from error
    return content


def is_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two records are of one federation."""
    return all(one.get(name) == other.get(name) for name in IDENTITY)
