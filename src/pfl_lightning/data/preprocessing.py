"""Statistics of columns, fitted on training rows after a pool has been divided."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pfl_lightning.data.division import Division

FittedOn: TypeAlias = Literal["nothing", "each client", "all clients"]
"""The rows that decide how raw values become inputs: none, each client's own, or those of all clients together."""

Moments: TypeAlias = tuple[NDArray[np.float64], NDArray[np.float64]]
"""Mean and standard deviation of each column, [columns]."""

CHUNK = 65536
"""Rows that are looked at or standardized at once."""


def trained_on(division: Division) -> Tensor:
    """Return positions of the training rows of all clients of the federation, without those of newcomers.

    Args:
        division: Who holds which rows.
    """
    members = division.clients[: len(division.clients) - division.newcomers]
    return torch.cat([held["train"] for held in members])


def moments_of(values: Tensor, rows: Tensor) -> Moments:
    """Return mean and standard deviation of each column over some rows; a constant column has deviation 0.

    >>> moments_of(torch.tensor([[1.0, 7.0], [3.0, 7.0], [9.0, 9.0]]), torch.tensor([0, 1]))
    (array([2., 7.]), array([1., 0.]))

    Args:
        values: The columns, [rows, columns].
        rows: Positions of the rows.
    """
    total = square = np.zeros(values.shape[1])
    low, high = np.full(values.shape[1], np.inf), np.full(values.shape[1], -np.inf)
    for own in chunks(values, rows):
        total = total + own.sum(0)
        low, high = np.minimum(low, own.min(0)), np.maximum(high, own.max(0))
    # where all values are equal, rounding of the sum mustn't make a deviation
    mean = np.where(low == high, low, total / len(rows))
    for own in chunks(values, rows):
        square = square + ((own - mean) ** 2).sum(0)
    return mean, np.sqrt(square / len(rows))


def chunks(values: Tensor, rows: Tensor) -> Iterator[NDArray[np.float64]]:
    """Yield some rows of columns in double precision, so many at a time that no second table is made.

    They are NumPy arrays, as torch's sums over rows have other last bits with another number of threads.

    Args:
        values: The columns, [rows, columns].
        rows: Positions of the rows.
    """
    for part in torch.split(rows, CHUNK):
        yield values[part].double().numpy()


def standardized(values: Tensor, division: Division, by: Literal["table", "client"]) -> tuple[Tensor, list[Moments]]:
    """Subtract each column's mean and divide by its deviation, both of training rows; constant columns become 0.

    Args:
        values: The columns, [rows, columns].
        division: Who holds which rows.
        by: ``table`` takes the training rows of all clients of the federation, for all rows that there are; ``client``
            each client's own, for its rows, and rows of no client become 0.

    Returns:
        The columns in single precision, and the statistics: one for all, or one for each client, newcomers included.
    """
    if by == "table":
        groups = [(trained_on(division), torch.arange(len(values)))]
    else:
        groups = [(held["train"], torch.cat(list(held.values()))) for held in division.clients]
    result = torch.zeros(values.shape, dtype=torch.float32)
    statistics = []
    for fitted, rows in groups:
        mean, deviation = moments_of(values, fitted)
        statistics.append((mean, deviation))
        # division by infinity gives the 0 of constant columns
        width = np.where(deviation > 0, deviation, np.inf)
        for part, own in zip(torch.split(rows, CHUNK), chunks(values, rows), strict=True):
            result[part] = torch.from_numpy((own - mean) / width).float()
    return result, statistics
