"""Bound what one client changes, and draw noise for sums and counts: from a seed, or from the operating system."""

import math
import os
from collections.abc import Callable, Sequence
from fractions import Fraction
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

        \xi = (a + b) / \sqrt 2, \qquad a, b = \pm \Phi^{-1}((k + 1/2) / 2^{64})

    with random signs and k of 63 random bits. One such number alone leaves gaps in the tails, above 6.5 standard
    deviations wider than the grid of `grid_of`, where a value would tell of the sum below; the sum of two fills these
    gaps, and reaches 12.9. The idea of adding several draws is of Holohan and Braghin, 2021
    (https://arxiv.org/abs/2107.10138). Densities are right up to the rounding of doubles.

    Args:
        size: how many, at least 0.
    """
    drawn = np.frombuffer(os.urandom(16 * size), dtype=np.uint64).reshape(2, size)
    shares = torch.from_numpy(((drawn >> np.uint64(1)).astype(np.float64) + 0.5) / 2.0**64)
    below = torch.special.ndtri(shares)
    signed = torch.where(torch.from_numpy((drawn & np.uint64(1)) == 1), below, -below)
    return signed.sum(0) / math.sqrt(2)


def secure_members(samples: int, rate: float) -> Tensor:
    """Return the rows of a Poisson sample, rising, drawn from the operating system's random source, int64.

    Each row is drawn with the probability rate, rounded down to a multiple of 2^-64.

    Args:
        samples: rows, at least 0.
        rate: probability of each row, above 0 and up to 1.
    """
    if rate >= 1:
        return torch.arange(samples)
    words = np.frombuffer(os.urandom(8 * samples), dtype=np.uint64)
    # never a larger probability than the accountant counts
    return torch.from_numpy(np.flatnonzero(words < np.uint64(math.floor(math.ldexp(rate, 64)))))


def discrete_laplace(epsilon: float, below: Callable[[int], int]) -> int:
    r"""Draw an integer with probability proportional to :math:`e^{-\epsilon |k|}`, exactly, by integers alone.

    Source: Canonne, Kamath and Steinke, 2020, Algorithm 2 (https://arxiv.org/abs/2004.00010).

    Args:
        epsilon: from 1e-6; rounded down to a multiple of 2^-32, which is more noise and never less.
        below: draws a uniform integer from 0 to below an integer.
    """
    rate = Fraction(math.floor(math.ldexp(epsilon, 32)), 1 << 32)
    s, t = rate.numerator, rate.denominator
    while True:
        part = below(t)
        if not exponential_coin(Fraction(part, t), below):
            continue
        # the size is drawn in units of 1 / epsilon first
        whole = 0
        while exponential_coin(Fraction(1), below):
            whole += 1
        size, negative = (part + t * whole) // s, below(2)
        # zero would count twice
        if size or not negative:
            return -size if negative else size


def exponential_coin(gamma: Fraction, below: Callable[[int], int]) -> bool:
    r"""Return heads with the probability :math:`e^{-\gamma}`, exactly.

    Args:
        gamma: from 0 to 1.
        below: draws a uniform integer from 0 to below an integer.
    """
    k = 1
    while below(gamma.denominator * k) < gamma.numerator:
        k += 1
    return k % 2 == 1


def secure_seed() -> int:
    """Return a seed from the operating system's random source, for torch's own generators: 0 to 2^63 - 1."""
    return int.from_bytes(os.urandom(8), "little") >> 1


def seeded_normal(size: int, *key: int | str) -> Tensor:
    """Return standard normal numbers by a key, the same for the same key, float64 [size].

    Args:
        size: how many, at least 0.
        *key: seed of the run, purpose and round.
    """
    # in float64 too, so that seeded runs show what secure ones do
    generator = torch.Generator().manual_seed(derive_seed(*key))
    return torch.randn(size, generator=generator, dtype=torch.float64)


def grid_of(std: float) -> float:
    r"""Return the step of the grid on which sums and their noise lie, a power of two.

    Doubles are not evenly dense, so that the set of possible results would tell of the sum below the noise (Mironov,
    2012, https://doi.org/10.1145/2382196.2382264). Contributions are rounded to a grid towards zero, a step that makes
    no norm larger, and noise to the nearest point. Every sum of fewer than :math:`2^{53}` steps is then exact, and the
    result is the Gaussian mechanism's, rounded.

    Args:
        std: the noise's standard deviation, above 0.
    """
    return 2.0 ** (math.floor(math.log2(std)) - FINENESS)


def towards_zero(values: Tensor, grid: float) -> Tensor:
    """Return values rounded towards zero to multiples of a grid's step.

    Args:
        values: numbers of any shape.
        grid: of `grid_of`.
    """
    return torch.trunc(values / grid) * grid


def nearest(values: Tensor, grid: float) -> Tensor:
    """Return values rounded to the nearest multiples of a grid's step.

    Args:
        values: numbers of any shape.
        grid: of `grid_of`.
    """
    return torch.round(values / grid) * grid


def clipped(change: Tensor, clip: float, sizes: Sequence[int] | None = None) -> Tensor:
    r"""Return a change within a norm, :math:`\Delta \min(1, C / \|\Delta\|)`, and zero for one with NaN or infinity.

    >>> clipped(torch.tensor([3.0, 4.0], dtype=torch.float64), 1.0)
    tensor([0.6000, 0.8000], dtype=torch.float64)

    Args:
        change: :math:`\Delta` ``[d]``, in float64.
        clip: C, above 0; infinite bounds nothing.
        sizes: lengths of L entries that follow one another in it, each of which then has the bound
            :math:`C / \sqrt{L}`, so that all together have C; None bounds it as a whole.
    """
    if sizes is not None:
        # squares add up to C squared
        bound = clip / math.sqrt(len(sizes))
        return torch.cat([clipped(part, bound) for part in torch.split(change, list(sizes))])
    norm = float(torch.linalg.vector_norm(change))
    # zero is within any bound, and NaN times zero is NaN
    if not math.isfinite(norm):
        return torch.zeros_like(change)
    return change * (clip / norm) if norm > clip else change


def noise_beside_counts(noise_multiplier: float, count_noise: float) -> float:
    r"""Return the noise multiplier of the sum, where sum and count of clients share one.

    .. math::

        z_\Delta = \left( z^{-2} - (2 \sigma_b)^{-2} \right)^{-1/2}

    Source: Andrew et al., 2021, Theorem 1 (https://arxiv.org/abs/1905.03871).

    Args:
        noise_multiplier: z, that both together shall have, at least 0 and below :math:`2 \sigma_b`.
        count_noise: :math:`\sigma_b`, standard deviation of the count's noise; a client moves it by ½.
    """
    if noise_multiplier == 0:
        return 0.0
    return 1 / math.sqrt(noise_multiplier**-2 - (2 * count_noise) ** -2)


def next_clip(clip: float, share: float, quantile: float, rate: float) -> float:
    r"""Return the bound of the next round, :math:`C e^{-\eta (\tilde b - \gamma)}`.

    The bound falls where more than a quantile of the norms are within, and grows where fewer are.
    Source: Andrew et al., 2021 (https://arxiv.org/abs/1905.03871).

    Args:
        clip: C.
        share: :math:`\tilde b`, of clients whose norms are within it, with noise.
        quantile: :math:`\gamma`, the share that shall be.
        rate: :math:`\eta`.
    """
    return clip * math.exp(-rate * (share - quantile))
