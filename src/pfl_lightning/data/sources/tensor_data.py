"""Data in arrays, tensors and memory maps."""

import os
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.data.datamodule import DataSettings, net_inputs
from pfl_lightning.data.files import read_array
from pfl_lightning.data.samples import Loaded
from pfl_lightning.data.sources.base import OwnedData, single, targets_of
from pfl_lightning.data.trees import Tree, leaves_of, mapped, read, with_leaves
from pfl_lightning.messages import tree_map
from pfl_lightning.nets.inputs import InputShape
from pfl_lightning.settings import Unpack
from pfl_lightning.tasks import Task


class TensorData(OwnedData):
    """Samples in arrays or tensors, in memory or in files.

    Inputs in a memory map, or in any object with a length that returns arrays for ``x[positions]``, stay there and are
    read one client at a time. Paths of ``.npy`` files, and of ``.pt`` files with a tensor, are memory-mapped.

    Args:
        x: inputs, shape [N, ...]: an array, a tensor or a list of numbers; or a dict or tuple of these.
        y: targets in the form of the task, N, given in the same ways.
        task: the prediction task.
        client: client of each sample, N names or numbers; None under another partitioner than `Natural`.
        split: ``train``, ``val`` or ``test`` for each sample.
        time: time of each sample.
        input_shape: shape of an input for the net; None takes the shape of ``x``, of the first array in a dict or
            tuple.
        group: group of each sample, such as its patient, N names or numbers; a client's samples of one group are on one
            side of its splits.
        **kwargs: settings of `FederatedDataModule`; ``root`` and ``download`` have no effect.

    Raises:
        MisconfigurationException: if a file is missing, or an array doesn't hold numbers.
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
        group: Any = None,
        **kwargs: Unpack[DataSettings],
    ) -> None:
        super().__init__(task, **kwargs)
        self._x, self._y = (numbers_in(name, values) for name, values in (("x", x), ("y", y)))
        self._columns = opened("client", client), opened("split", split), opened("time", time), opened("group", group)
        self.input_shape = shape_of(self._x) if input_shape is None else tuple(input_shape)

    def load(self) -> Loaded:
        """Return the given samples."""
        return Loaded(self._x, targets_of(self._y), *self._columns)


def numbers_in(name: str, values: Any) -> Tree:
    """Return inputs or targets as tensors and memory maps, from a file if given by a path.

    Args:
        name: the setting, for the message.
        values: a path, or a tree of arrays.

    Raises:
        MisconfigurationException: if the file can't be read, or an array doesn't hold numbers.
    """
    is_path = isinstance(values, (str, os.PathLike))
    return with_leaves(opened(name, values), f"data.{name}={str(values)!r}" if is_path else f"data.{name}")


def opened(name: str, values: Any) -> Any:
    """Open a file as a memory map, without reading the contents; return anything but a path unchanged.

    Args:
        name: the setting, for the message.
        values: a path, or anything else.

    Raises:
        MisconfigurationException: if the file doesn't exist or holds no array.
    """
    if not isinstance(values, (str, os.PathLike)):
        return values
    return read_array(Path(values), f"data.{name}={str(values)!r}")


def shape_of(x: Tree) -> InputShape:
    """Return the shape of one input; of a tree, the shape of the first leaf, with two of the inputs as an example.

    Args:
        x: the inputs.
    """
    leaves = list(leaves_of(x))
    if not leaves or not len(leaves[0]):
        raise MisconfigurationException("data.x has no samples; give at least one")
    if x is leaves[0]:
        shape = x.shape if hasattr(x, "shape") else read(x, slice(0, 1)).shape
        return InputShape(int(size) for size in shape[1:])
    # twice the first where there is only one: a batch of one could be taken for a constant
    rows = torch.tensor([0, min(1, len(leaves[0]) - 1)])
    return InputShape.like(tree_map(lambda leaf: single(net_inputs(leaf)), mapped(x, lambda leaf: read(leaf, rows))))
