"""What sources of any task have in common."""

from __future__ import annotations

from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from pfl_lightning.data.datamodule import FederatedDataModule
from pfl_lightning.data.inputs import net_inputs
from pfl_lightning.data.partitioners import Natural, Partitioner
from pfl_lightning.data.trees import Tree, mapped, read, with_leaves
from pfl_lightning.messages import tree_map
from pfl_lightning.tasks import Task

RESIDENT = 2**30
"""Bytes of inputs up to which what is in files is read once and kept in memory; more is read a client at a time."""


class OwnedData(FederatedDataModule):
    """Data of any task, by default divided among the clients that they name, all of them.

    Args:
        task: What is predicted.
        num_clients: Number of clients M; None takes all that are named, a number draws so many of them.
        partitioner: How the pool is divided among the clients.
        **kwargs: Settings of `FederatedDataModule`.
    """

    def __init__(
        self,
        task: Task,
        num_clients: int | None = None,
        partitioner: Partitioner = Natural(),  # noqa: B008 - immutable, and a literal for --print_config
        **kwargs: Any,
    ) -> None:
        if not isinstance(task, Task):
            raise MisconfigurationException(
                f"data.task={getattr(task, '__name__', repr(task))} must be a task of pfl_lightning.tasks, such as "
                "Regression() or Classification(num_classes=10)"
            )
        super().__init__(num_clients=num_clients, partitioner=partitioner, **kwargs)
        self._task = task
        if task.has_classes:
            self.num_classes = task.outputs

    @property
    def task(self) -> Task:
        """What is predicted."""
        return self._task

    def transform(self, x: Tree) -> Tree:
        """Make inputs ready for the net: as `FederatedDataModule.transform`, and in single precision.

        Args:
            x: Some inputs of the pool, shape [n, ...].
        """
        return tree_map(lambda t: single(net_inputs(t)), x)


def single(values: Tensor) -> Tensor:
    """Double precision, which NumPy makes and nets don't take, as single; other types as they are."""
    return values.float() if values.dtype == torch.float64 else values


def targets_of(values: Tree) -> Tree:
    """Return targets as tasks take them: integers as int64, quantities in single precision.

    Args:
        values: An array, a list of numbers, a tensor, or what gives one for ``values[positions]``; or a tree of such.
    """
    return mapped(with_leaves(values, "y"), lambda leaf: target_of(read(leaf, slice(None))))


def target_of(y: Tensor) -> Tensor:
    """Return a tensor of targets as tasks take it; see `targets_of`."""
    whole = not (y.is_floating_point() or y.is_complex() or y.dtype == torch.bool)
    return y.long() if whole else single(y)


def resident(leaf: Any, num_bytes: int) -> Any:
    """What is in files, read if it is small, else left where it is.

    Args:
        leaf: Has a length, and gives an array or a tensor for ``leaf[positions]``.
        num_bytes: Its size in memory.
    """
    return read(leaf, slice(None)) if num_bytes <= RESIDENT else leaf
