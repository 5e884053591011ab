"""Gaussian noise for sums: from a seed, so that a run can be repeated, or from the operating system."""

import math
import os
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from pfl_lightning.seeds import derive_seed

Source = Literal["secure", "seeded"]

FINENESS = 30
"""How many times the grid halves the standard deviation of the noise: its steps are a billionth of that."""


def secure_normal(size: int) -> Tensor:
    r"""Return standard normal numbers from the operating system's random source, float64 [size].

    .. math::

        \xi = \pm \Phi^{-1}((k + 1/2) / 2^{64})

    with a random sign and k of 63 random bits: the smallest probability is :math:`2^{-65}`, and numbers go up to 9.2.

    Args:
        size: how many, at least 0.
    """
    drawn = np.frombuffer(os.urandom(8 * size), dtype=np.uint64)
    shares = torch.from_numpy(((drawn >> np.uint64(1)).astype(np.float64) + 0.5) / 2.0**64)
    below = torch.special.ndtri(shares)
    return torch.where(torch.from_numpy((drawn & np.uint64(1)) == 1), below, -below)


def seeded_normal(size: int, *key: int | str) -> Tensor:
    """Return standard normal numbers that are the same for the same key, float64 [size].

    Args:
        size: how many, at least 0.
        *key: seed of the run, purpose and round.
    """
    generator = torch.Generator().manual_seed(derive_seed(*key))
    return torch.randn(size, generator=generator, dtype=torch.float64)


def grid_of(std: float) -> float:
    r"""Return the step of the grid on which sums and their noise lie, a power of two.

    Doubles are not evenly dense, so that which results can occur would tell of the sum below the noise (Mironov, 2012,
    https://doi.org/10.1145/2382196.2382264). Where contributions are rounded to a grid towards zero, which makes no
    norm larger, and noise to the nearest point, every sum of fewer than :math:`2^{53}` steps is exact, and the result
    is a rounding of the Gaussian mechanism's.

    Args:
        std: the noise's standard deviation, above 0.
    """
    return 2.0 ** (math.floor(math.log2(std)) - FINENESS)


def towards_zero(values: Tensor, grid: float) -> Tensor:
    """Return values as multiples of a grid's step, none larger than it was.

    Args:
        values: numbers of any shape.
        grid: of `grid_of`.
    """
    return torch.trunc(values / grid) * grid


def nearest(values: Tensor, grid: float) -> Tensor:
    """Return the multiples of a grid's step that are nearest.

    Args:
        values: numbers of any shape.
        grid: of `grid_of`.
    """
    return torch.round(values / grid) * grid
