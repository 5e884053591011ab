"""Trained models of clients that joined a federation afterwards, in a file beside the federation's checkpoints."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from pfl_lightning.data.files import read_checkpoint

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
    # in memory, as the file may be replaced while its models are in use
    instead = "remove it, and let the clients join again"
    return read_checkpoint(file, str(file), needed=("federation", "joined"), instead=instead, mapped=False)


def is_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two records are of one federation."""
    return all(one.get(name) == other.get(name) for name in IDENTITY)
