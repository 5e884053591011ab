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
from pfl_lightning.data.trees import Tree, leaves_of, read, with_leaves
from pfl_lightning.tasks import Task


class TensorData(OwnedData):
    """Samples that are there as arrays or tensors, in memory or in files.

    Inputs that are a memory map, or whatever else has a length and gives arrays for ``x[positions]``, stay where they
    are and are read a client at a time. Paths of ``.npy`` files are mapped, and of ``.pt`` files with a tensor too.

    Args:
        x: Inputs, shape [N, ...]: an array, a tensor or a list of numbers; or a dict or tuple of such.
        y: Targets as the task has them, N, given in the same ways.
        task: What is predicted.
        client: Who holds each sample, N names or numbers; None under another partitioner than `Natural`.
        split: ``train``, ``val`` or ``test`` for each sample.
        time: When each sample came.
        input_shape: Shape of an input for the net; None is that of ``x``, of the first array in a dict or tuple.
        **kwargs: Settings of `FederatedDataModule`; ``root`` and ``download`` have no effect.

    Raises:
        MisconfigurationException: A file is missing, or an array isn't of numbers.
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
        self._x, self._y = (numbers_in(name, values) for name, values in (("x", x), ("y", y)))
        self._columns = opened("client", client), opened("split", split), opened("time", time)
        self.input_shape = shape_of(self._x) if input_shape is None else tuple(input_shape)

    def load(self) -> Loaded:
        """Give what there is."""
        client, split, time = self._columns
        return Loaded(self._x, targets_of(self._y), client, split, time)


def numbers_in(name: str, values: Any) -> Tree:
    """Return inputs or targets, from a file where they are a path, as tensors and memory maps.

    Args:
        name: The setting, for the message.
        values: A path, or a tree of arrays.

    Raises:
        MisconfigurationException: The file can't be read, or an array isn't of numbers.
    """
    is_path = isinstance(values, (str, os.PathLike))
    return with_leaves(opened(name, values), f"data.{name}={str(values)!r}" if is_path else f"data.{name}")


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
            found: Any = np.lib.format.open_memmap(path, mode="r")
        elif path.suffix in (".pt", ".pth"):
            found = torch.load(path, mmap=True, weights_only=True)
        else:
            raise MisconfigurationException(f"data.{name}={str(path)!r} must be a .npy or .pt file")
    except MisconfigurationException:
        raise
    # no file, no array in it, or one of objects
    except Exception as error:
        reason = " ".join(str(error).split())[:100]
        raise MisconfigurationException(
            f"data.{name}={str(path)!r} cannot be read ({reason}); give a file with an array or a tensor"
        ) from None
    return found


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
