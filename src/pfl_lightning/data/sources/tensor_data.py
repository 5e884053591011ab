"""Arrays, tensors and memory maps."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.data.loaded import Loaded
from pfl_lightning.data.sources.base import OwnedData, targets_of
from pfl_lightning.data.trees import Tree, leaves_of, read
from pfl_lightning.tasks import Task


class TensorData(OwnedData):
    """Samples that are there as arrays or tensors, in memory or in files.

    Inputs that are a memory map, or whatever else has a length and gives arrays for ``x[positions]``, stay where they
    are and are read a client at a time. Paths of ``.npy`` files are mapped, and of ``.pt`` files with a tensor too.

    Args:
        x: Inputs, shape [N, ...]; or a dict or tuple of such.
        y: Targets as the task has them, N.
        task: What is predicted.
        client: Who holds each sample, N names or numbers; None under another partitioner than `Natural`.
        split: ``train``, ``val`` or ``test`` for each sample.
        time: When each sample came.
        input_shape: Shape of an input for the net; None is that of ``x``, of the first array in a dict or tuple.
        **kwargs: Settings of `FederatedDataModule`; ``root`` and ``download`` have no effect.

    Raises:
        MisconfigurationException: A file is missing or holds no array.
    """

    def __init__(
        self,
        x: Any,
        y: Any,
        task: Task,
        client: Any = None,
        split: Any = None,
        time: Any = None,
        input_shape: tuple[int, ...] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(task, **kwargs)
        self._x, self._y = opened("x", x), opened("y", y)
        self._columns = opened("client", client), opened("split", split), opened("time", time)
        self.input_shape = shape_of(self._x) if input_shape is None else tuple(input_shape)

    def load(self) -> Loaded:
        """Give what there is."""
        client, split, time = self._columns
        return Loaded(self._x, targets_of(self._y), client, split, time)


def opened(name: str, values: Any) -> Any:
    """What is in a file, mapped and not read; anything but a path as it is.

    Args:
        name: The setting, for the message.
        values: A path, or anything else.

    Raises:
        MisconfigurationException: It is no file with an array.
    """
    if not isinstance(values, (str, os.PathLike)):
        return values
    path = Path(values)
    try:
        if path.suffix == ".npy":
            return np.load(path, mmap_mode="r")
        if path.suffix in (".pt", ".pth"):
            return torch.load(path, mmap=True, weights_only=True)
    # no file, no array in it, or one of objects
    except Exception as error:
        reason = " ".join(str(error).split())[:100]
        raise MisconfigurationException(
            f"data.{name}={str(path)!r} cannot be read ({reason}); give a file with an array or a tensor"
        ) from None
    raise MisconfigurationException(f"data.{name}={str(path)!r} must be a .npy or .pt file")


def shape_of(x: Tree) -> tuple[int, ...]:
    """The shape of one input, the first one in a tree.

    Args:
        x: Inputs.
    """
    leaf = next(leaves_of(x), None)
    if leaf is None or not len(leaf):
        raise MisconfigurationException("data.x has no samples; give at least one")
    shape = leaf.shape if hasattr(leaf, "shape") else read(leaf, slice(0, 1)).shape
    return tuple(int(size) for size in shape[1:])
