"""Lower bounds on epsilon by guesses."""

import math
from itertools import product

import numpy as np
import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException
from scipy.stats import binom

from pfl_lightning.privacy import Release, epsilon
from pfl_lightning.privacy.audit import (
    FAR,
    HIGH,
    audited_epsilon,
    audited_noise,
    chance_of_guesses,
    epsilon_of_guesses,
)


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


def distribution(coins, epsilon, delta, together):
    """The chances of what a mechanism tells of coins: their randomised response, or with chance delta what they are.

    Args:
        together: whether all coins are told at once, or each by itself.
    """
    q, found = math.exp(epsilon) / (1 + math.exp(epsilon)), {}
    kinds = ((False,) * len(coins), (True,) * len(coins)) if together else product((False, True), repeat=len(coins))
    for told in kinds:
        chance = math.prod(delta if one else 1 - delta for one in (told[:1] if together else told))
        for answers in product((0, 1), repeat=len(coins)):
            parts = [
                float(a == c) if t else q if a == c else 1 - q for a, c, t in zip(answers, coins, told, strict=True)
            ]
            found[told, answers] = chance * math.prod(parts)
    return found


@pytest.mark.parametrize("together", [False, True], ids=["by itself", "together"])
@pytest.mark.parametrize("privacy", [(0.0, 0.0), (0.5, 0.0), (1.0, 0.02), (2.0, 0.2), (0.2, 0.5)])
@pytest.mark.parametrize("guesses", [2, 4])
def test_no_adversary_of_a_private_mechanism_guesses_better_than_the_theorem_allows(privacy, together, guesses):
    canaries = 4
    told = {coins: distribution(coins, *privacy, together) for coins in product((0, 1), repeat=canaries)}
    for coins, chances in told.items():
        assert sum(chances.values()) == pytest.approx(1)
        for place in range(canaries):
            other = told[(*coins[:place], 1 - coins[place], *coins[place + 1 :])]
            above = sum(max(p - math.exp(privacy[0]) * other[output], 0) for output, p in chances.items())
            assert above <= privacy[1] + 1e-12
    counts = np.zeros(guesses + 1)
    for coins, chances in told.items():
        for (kinds, answers), chance in chances.items():
            # the coins that are told for certain first, and no guess on the others
            chosen = sorted(range(canaries), key=lambda place, kinds=kinds: not kinds[place])[:guesses]
            counts[sum(answers[place] == coins[place] for place in chosen)] += chance / 2**canaries
    for right in range(guesses + 1):
        allowed = chance_of_guesses(right, guesses, canaries, np.array([privacy[0]]), privacy[1])[0]
        assert counts[right:].sum() <= allowed + 1e-12
    if privacy[1] == 0:
        assert counts[guesses] == pytest.approx(allowed)


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
    each = 1 - 0.05 / len(FAR + HIGH)
    assert audited_epsilon(coins * 5.0, coins, 1e-5) == epsilon_of_guesses(80, 80, 80, 1e-5, each)
    assert audited_epsilon(coins * -5.0, coins, 1e-5) == 0
    assert audited_epsilon(np.zeros(80), coins, 1e-5) <= 0.5


def test_refusals():
    for right, delta, name in ((11, 0.0, "right"), (-1, 0.0, "right"), (5, 1.0, "delta")):
        with pytest.raises(MisconfigurationException, match=name):
            chance_of_guesses(right, 10, 10, np.zeros(1), delta)
    with pytest.raises(MisconfigurationException, match=r"confidence=1\.5"):
        epsilon_of_guesses(5, 10, 10, 0.0, confidence=1.5)


# Gaussian noise


def scored(z, rng, canaries=200, steps=1, rate=1.0):
    """Coins, and scores of canaries of norm 1 in steps with noise."""
    coins = rng.random(canaries) < 0.5
    times = rng.binomial(steps, rate, canaries)
    return coins * times + z * math.sqrt(steps) * rng.standard_normal(canaries), coins


def noise_of(scores, coins, steps=1, rate=1.0, confidence=0.95):
    return audited_noise(scores, coins, np.full(len(coins), float(steps)), np.full(len(coins), rate), confidence)


@pytest.mark.parametrize("steps, rate", [(1, 1.0), (4, 1.0), (1, 0.9), (5, 0.3), (60, 0.1)])
@pytest.mark.parametrize("z", [0.3, 1.0, 4.0])
@pytest.mark.by_default("1.0-1-1.0")
def test_bounds_of_gaussian_mechanisms_are_seldom_above_their_epsilon(z, steps, rate):
    rng, runs = np.random.default_rng(0), 200
    true = epsilon([Release(z, rate, steps)], 1e-5)
    wrong = {"guesses": 0, "noise": 0}
    for _ in range(runs):
        scores, coins = scored(z, rng, 100, steps, rate)
        wrong["guesses"] += audited_epsilon(scores, coins, 1e-5) > true
        found = noise_of(scores, coins, steps, rate)
        wrong["noise"] += found < math.inf and epsilon([Release(found, rate, steps)], 1e-5) > true
    # with the stated 5 %, more come in one test of ten thousand
    assert max(wrong.values()) <= binom.isf(1e-4, runs, 0.05)


@pytest.mark.parametrize("steps, rate", [(1, 1.0), (5, 0.3)])
def test_a_tenth_of_the_noise_is_found_by_its_size_and_all_of_it_is_not(steps, rate):
    for seed in range(20):
        right, less = (scored(z, np.random.default_rng(seed), 200, steps, rate) for z in (1.0, 0.1))
        assert noise_of(*right, steps, rate, 0.99) > 1 > 5 * noise_of(*less, steps, rate, 0.99) > 0.5


def test_the_noise_found_comes_near_to_the_truth_and_grows_with_it_and_with_confidence():
    rng = np.random.default_rng(0)
    coins, draws = rng.random(20_000) < 0.5, rng.standard_normal(20_000)
    found = [noise_of(coins + z * draws, coins) for z in (0.5, 1.0, 2.0)]
    assert [1.0 < one / z < 1.2 for one, z in zip(found, (0.5, 1.0, 2.0), strict=True)] == [True] * 3
    by_confidence = [noise_of(coins + draws, coins, confidence=sure) for sure in (0.5, 0.9, 0.99, 0.9999)]
    assert by_confidence == sorted(set(by_confidence))
    # the unit of scores has no part in it
    assert noise_of(7 * (coins + draws), coins) == pytest.approx(found[1])


def test_the_noise_of_extreme_scores():
    coins = np.arange(100) % 2 == 0
    assert noise_of(coins * 1.0, coins) == 0
    assert noise_of(-1.0 * coins, coins) == noise_of(np.zeros(100), coins) == math.inf
    for all_alike in (np.zeros(100, dtype=bool), np.ones(100, dtype=bool)):
        assert noise_of(np.ones(100), all_alike) == math.inf
    scores, coins = scored(1.0, np.random.default_rng(0))
    steps, rates = np.ones(200), np.ones(200)
    absent = np.concatenate([scores, [50.0] * 9]), np.concatenate([coins, [False] * 9])
    assert audited_noise(*absent, np.r_[steps, [0.0] * 9], np.ones(209)) == audited_noise(scores, coins, steps, rates)
    with pytest.raises(MisconfigurationException, match="confidence=0"):
        audited_noise(scores, coins, steps, rates, confidence=0.0)


def test_included_canaries_without_a_step_leave_the_others_guesses_their_worth():
    rng = np.random.default_rng(0)
    scores, coins = scored(0.05, rng, 1000, steps=1, rate=0.3)
    # some 150 canaries took part, and a quarter of the highest scores are theirs
    assert audited_epsilon(scores, coins, 1e-5) > 2.5
