"""What all partitioners share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from numpy.typing import NDArray
from torch import Tensor

Rows = NDArray[np.int64]
"""Positions of samples in the pool."""


def rows_of(y: NDArray[np.int64], num_classes: int) -> list[Rows]:
    """The ascending positions of each class's samples.

    >>> [rows.tolist() for rows in rows_of(np.array([1, 0, 1]), 2)]
    [[1], [0, 2]]

    Args:
        y: Labels, shape [N], in [0, num_classes).
        num_classes: Number of classes K.
    """
    ends = np.bincount(y, minlength=num_classes).cumsum()
    return np.split(np.argsort(y, kind="stable"), ends[:-1])


class Partitioner(ABC):
    """Divides a pool, or a part of it, among clients; subclasses say how in `split`.

    Calling a partitioner returns one int64 tensor of pool positions a client. The tensors are disjoint and
    depend on the labels, the sizes and the seed alone: the global random state is neither read nor moved.
    """

    by_class: ClassVar[bool] = True
    """Whether it tells samples apart by their class, or another group that the data module's ``strata`` names."""
    by_owner: ClassVar[bool] = False
    """Whether it is given the owner of each sample in the place of its class."""

    def __call__(self, labels: Tensor, num_clients: int, num_classes: int, seed: int) -> list[Tensor]:
        """Divide the pool.

        Args:
            labels: Labels of the pooled samples, shape [N], in [0, num_classes).
            num_clients: Number of clients M, 1 to N.
            num_classes: Number of classes K.
            seed: Seed of the division, 0 to 2**32 - 1.

        Raises:
            MisconfigurationException: The pool cannot be divided as asked.
        """
        if num_clients > len(labels):
            raise MisconfigurationException(
                f"num_clients={num_clients} is more than the {len(labels)} samples there are; "
                f"use at most {len(labels)} clients"
            )
        y = labels.cpu().numpy()
        classes = rows_of(y, num_classes)
        # the legacy generator: published partitions were drawn from this stream
        rng = np.random.RandomState(seed)
        return [torch.as_tensor(rows) for rows in self.split(classes, num_clients, rng)]

    @abstractmethod
    def split(self, classes: list[Rows], num_clients: int, rng: np.random.RandomState) -> list[Rows]:
        """Divide the pool, given by class.

        Args:
            classes: For each class, the ascending pool positions of its samples.
            num_clients: Number of clients M.
            rng: The only source of randomness to use.

        Returns:
            For each client, the pool positions that it gets.
        """
