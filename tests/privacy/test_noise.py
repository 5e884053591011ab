"""Where noise comes from, and the grid that it lies on."""

import math
import random
from fractions import Fraction

import numpy as np
import pytest
import torch
from scipy.stats import binom, kstest, norm

from pfl_lightning.privacy.noise import (
    discrete_laplace,
    exponential_coin,
    grid_of,
    nearest,
    secure_members,
    secure_normal,
    seeded_normal,
    towards_zero,
)


def test_secure_numbers_are_normal_and_never_the_same():
    drawn = secure_normal(200_000)
    # true for one draw in 10^6
    assert kstest(drawn.numpy(), norm.cdf).pvalue > 1e-6
    assert drawn.dtype == torch.float64 and drawn.unique().numel() == len(drawn)
    assert not torch.equal(secure_normal(8), secure_normal(8)) and secure_normal(0).shape == (0,)


def test_the_extremes_are_finite(monkeypatch):
    for word, expected in ((b"\x00" * 8, 12.95), (b"\xff" * 8, 0.0), (b"\x01" + b"\x00" * 7, -12.95)):
        monkeypatch.setattr("os.urandom", lambda size, word=word: 2 * word)
        assert secure_normal(1).item() == pytest.approx(expected, abs=0.1)


def test_secure_members_are_drawn_with_their_rate():
    sizes = [len(secure_members(2000, 0.3)) for _ in range(50)]
    assert binom.ppf(1e-6, 100_000, 0.3) <= sum(sizes) <= binom.ppf(1 - 1e-6, 100_000, 0.3) and len(set(sizes)) > 10
    rows = secure_members(2000, 0.3)
    assert rows.dtype == torch.int64 and torch.equal(rows, rows.unique())
    assert torch.equal(secure_members(7, 1.0), torch.arange(7)) and secure_members(0, 0.5).shape == (0,)


def test_a_rate_is_never_larger_than_it_is_counted(monkeypatch):
    for rate in (0.5, 1 / 3, 1 - 2**-53, 2**-64):
        words = np.array([math.floor(rate * 2**64) - 1, math.floor(rate * 2**64)], dtype=np.uint64)
        monkeypatch.setattr("os.urandom", lambda size, words=words: words.tobytes())
        assert secure_members(2, rate).tolist() == [0]


@pytest.mark.parametrize("epsilon", [0.05, 0.5, 1.0, 3.0])
def test_integers_of_a_discrete_laplace_distribution(epsilon):
    below = random.Random(0).randrange
    drawn = np.array([discrete_laplace(epsilon, below) for _ in range(20_000)])
    ratio = math.exp(-epsilon)
    sizes = np.arange(0, max(2, round(3 / epsilon)))
    for k in sizes:
        share = (1 - ratio) / (1 + ratio) * ratio**k
        for value in {k, -k}:
            assert binom.ppf(1e-7, 20_000, share) <= (drawn == value).sum() <= binom.ppf(1 - 1e-7, 20_000, share)
    # of a neighbour, whose count is one more, no integer is more likely by more than the factor of epsilon
    assert 1 / ratio == pytest.approx(math.exp(epsilon))


def test_an_exponential_coin_is_exact_in_all_ways_to_throw_it():
    """By all the draws that there can be, weighted: the series of the exponential, to its first terms."""

    def heads(gamma, k=1, depth=8):
        ends = 1 - gamma / k
        return (k % 2) * ends + (gamma / k * heads(gamma, k + 1, depth) if k < depth else 0)

    for gamma in (Fraction(0), Fraction(1, 3), Fraction(1)):
        assert float(heads(gamma)) == pytest.approx(math.exp(-gamma), abs=1e-4)
        below = random.Random(1).randrange
        thrown = sum(exponential_coin(gamma, below) for _ in range(5000))
        assert binom.ppf(1e-7, 5000, math.exp(-gamma)) <= thrown <= binom.ppf(1 - 1e-7, 5000, math.exp(-gamma))


def test_seeded_numbers_are_of_their_key():
    assert torch.equal(seeded_normal(5, 0, "dp", 3), seeded_normal(5, 0, "dp", 3))
    assert not torch.equal(seeded_normal(5, 0, "dp", 3), seeded_normal(5, 0, "dp", 4))


@pytest.mark.parametrize("std", [1e-9, 0.3, 1.0, 7.0, 1e6])
def test_rounding_makes_no_norm_larger_and_sums_exact(std):
    grid = grid_of(std)
    assert np.log2(grid) % 1 == 0 and std * 2**-31 < grid <= std * 2**-30
    values = std * torch.randn(300, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rounded = towards_zero(values, grid)
    assert (rounded.norm(dim=1) <= values.norm(dim=1)).all() and (rounded - values).abs().max() < grid
    # in any order: nothing is lost
    assert torch.equal(rounded.sum(0), rounded.flip(0).cumsum(0)[-1])
    total = rounded.sum(0) + nearest(values[0], grid)
    assert torch.equal(torch.round(total / grid) * grid, total)
