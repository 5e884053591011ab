"""Means and deviations of columns, fitted on training rows after the division of a pool."""

from collections.abc import Iterator, Mapping
from typing import Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pfl_lightning.data.division import Division

FittedOn: TypeAlias = Literal["nothing", "each client", "all clients"]
"""Rows that decide how raw values become inputs: none, each client's own, or all clients' together."""

Moments: TypeAlias = tuple[NDArray[np.float64], NDArray[np.float64]]
"""Mean and standard deviation of each column, [columns]."""

CHUNK = 65536
"""Rows read or standardized at a time."""


def trained_on(division: Division) -> Tensor:
    """Return the positions of the training rows of all the federation's clients, without new clients.

    Args:
        division: the pool positions of each client's rows.
    """
    members = division.clients[: len(division.clients) - division.newcomers]
    return torch.cat([held["train"] for held in members])


def moments_of(values: Tensor, rows: Tensor) -> Moments:
    """Return mean and standard deviation of each column over some rows; a constant column has deviation 0.

    >>> moments_of(torch.tensor([[1.0, 7.0], [3.0, 7.0], [9.0, 9.0]]), torch.tensor([0, 1]))
    (array([2., 7.]), array([1., 0.]))

    Args:
        values: the columns, [rows, columns].
        rows: positions of the rows.
    """
    total = square = np.zeros(values.shape[1])
    low, high = np.full(values.shape[1], np.inf), np.full(values.shape[1], -np.inf)
    for own in chunks(values, rows):
        total = total + own.sum(0)
        low, high = np.minimum(low, own.min(0)), np.maximum(high, own.max(0))
    # in a constant column, rounding of the sum would leave a tiny deviation, and standardizing would blow noise up to 1
    mean = np.where(low == high, low, total / len(rows))
    # two passes: sums of squares minus squared means lose all digits where the mean is large
    for own in chunks(values, rows):
        square = square + ((own - mean) ** 2).sum(0)
    return mean, np.sqrt(square / len(rows))


def chunks(values: Tensor, rows: Tensor) -> Iterator[NDArray[np.float64]]:
    """Yield some rows of columns in double precision, in chunks, so that no second table lies in memory.

    The chunks are NumPy arrays: the last bits of torch's sums over rows depend on the number of threads.

    Args:
        values: the columns, [rows, columns].
        rows: positions of the rows.
    """
    for part in torch.split(rows, CHUNK):
        yield values[part].double().numpy()


def standardized(
    values: Tensor, division: Division, by: Literal["table", "client"], known: Mapping[int, Moments] | None = None
) -> tuple[Tensor, list[Moments]]:
    """Subtract each column's mean and divide by the deviation, both over training rows; constant columns become 0.

    Args:
        values: the columns, [rows, columns].
        division: the pool positions of each client's rows.
        by: ``table`` fits on the training rows of all the federation's clients and applies the result to all rows;
            ``client`` fits on each client's training rows for that client's rows, and rows of no client become 0.
        known: moments in the place of fitted ones, by the client's position in the division; 0 under ``table``.

    Returns:
        The columns in single precision, and the moments: one pair for all clients, or one per client, new clients
        included.
    """
    if by == "table":
        groups = [(trained_on(division), torch.arange(len(values)))]
    else:
        groups = [(held["train"], torch.cat(list(held.values()))) for held in division.clients]
    result = torch.zeros(values.shape, dtype=torch.float32)
    statistics = []
    for place, (fitted, rows) in enumerate(groups):
        mean, deviation = known[place] if known and place in known else moments_of(values, fitted)
        statistics.append((mean, deviation))
        # division by infinity gives the 0 of constant columns
        width = np.where(deviation > 0, deviation, np.inf)
        for part, own in zip(torch.split(rows, CHUNK), chunks(values, rows), strict=True):
            result[part] = torch.from_numpy((own - mean) / width).float()
    return result, statistics
