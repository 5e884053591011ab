"""Lower bounds on epsilon by guesses."""

import math

import numpy as np
import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException
from scipy.stats import binom

from pfl_lightning.privacy.audit import SHARES, audited_epsilon, chance_of_guesses, epsilon_of_guesses


def plainly(right, guesses, canaries, epsilon, delta):
    """The theorem's probability, term by term."""
    q = math.exp(epsilon) / (1 + math.exp(epsilon))
    chances = [binom.pmf(k, guesses, q) for k in range(guesses + 1)]
    largest = max((sum(chances[right - i : right]) / i for i in range(1, right + 1)), default=0.0)
    return min(1.0, sum(chances[right:]) + 2 * canaries * delta * largest)


@pytest.mark.parametrize("right, guesses, canaries", [(0, 10, 10), (7, 10, 10), (30, 30, 100), (41, 60, 60)])
@pytest.mark.parametrize("delta", [0.0, 1e-5, 1e-2])
def test_the_chance_is_that_of_the_theorem(right, guesses, canaries, delta):
    epsilons = np.array([0.0, 0.3, 1.0, 4.0])
    found = chance_of_guesses(right, guesses, canaries, epsilons, delta)
    expected = [plainly(right, guesses, canaries, epsilon, delta) for epsilon in epsilons]
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-300)


@pytest.mark.parametrize("right, delta", [(60, 0.0), (60, 1e-4), (50, 1e-5)])
def test_the_bound_is_the_last_epsilon_that_guesses_refute(right, delta):
    bound = epsilon_of_guesses(right, 60, 60, delta)
    assert plainly(right, 60, 60, bound, delta) <= 0.05 < plainly(right, 60, 60, bound + 0.01, delta)


def test_bounds_grow_with_guesses_that_are_right_and_fall_with_delta():
    bounds = [epsilon_of_guesses(right, 100, 100, 1e-5) for right in (50, 65, 80, 100)]
    assert bounds[0] == 0 and bounds == sorted(set(bounds))
    by_delta = [epsilon_of_guesses(100, 100, 100, delta) for delta in (0.0, 1e-4, 1e-3, 1e-2)]
    assert by_delta == sorted(set(by_delta), reverse=True)


@pytest.mark.parametrize("epsilon", [0.0, 1.0, 3.0])
def test_the_bound_of_randomised_response_is_seldom_above_its_epsilon(epsilon):
    rng = np.random.default_rng(0)
    bounds = []
    for _ in range(200):
        coins = rng.random(300) < 0.5
        told = np.where(rng.random(300) < 1 / (1 + math.exp(-epsilon)), coins, ~coins)
        bounds.append(audited_epsilon(told + 0.1 * rng.random(300), coins, 0.0))
    assert np.mean(np.array(bounds) > epsilon) <= 0.05
    assert np.mean(bounds) > epsilon / 2 if epsilon else np.mean(bounds) < 0.05


def test_scores_that_say_all_give_what_the_number_of_canaries_can_show():
    coins = np.random.default_rng(1).random(80) < 0.5
    each = 1 - 0.05 / len(SHARES)
    assert audited_epsilon(coins * 5.0, coins, 1e-5) == epsilon_of_guesses(80, 80, 80, 1e-5, each)
    assert audited_epsilon(coins * -5.0, coins, 1e-5) == 0
    assert audited_epsilon(np.zeros(80), coins, 1e-5) <= 0.5


def test_refusals():
    for right, delta, name in ((11, 0.0, "right"), (-1, 0.0, "right"), (5, 1.0, "delta")):
        with pytest.raises(MisconfigurationException, match=name):
            chance_of_guesses(right, 10, 10, np.zeros(1), delta)
    with pytest.raises(MisconfigurationException, match=r"confidence=1\.5"):
        epsilon_of_guesses(5, 10, 10, 0.0, confidence=1.5)
