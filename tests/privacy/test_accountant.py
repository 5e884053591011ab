import math
import sys

import numpy as np
import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException
from scipy.integrate import quad
from scipy.stats import norm

from pfl_lightning.privacy import Release, epsilon, noise_for, tight_epsilon
from pfl_lightning.privacy.accountant import (
    ORDERS,
    PLD,
    accountant_of,
    bounded_epsilon,
    by_binomials,
    by_quadrature,
    converted,
    gaussian_delta,
    gaussian_epsilon,
    renyi,
    within,
)

SAMPLED = [(1.0, 0.01, 1000, 1e-5), (2.0, 0.1, 100, 1e-5)]


def by_orders(z, q, steps, delta):
    return float(converted(steps * renyi(z, q), delta).min())


@pytest.mark.parametrize(
    ("z", "q", "steps", "delta", "expected"),
    [
        (1.0, 0.01, 1000, 1e-5, 2.1014),
        (1.0, 1.0, 1, 1e-5, 4.7285),
        (2.0, 0.1, 100, 1e-5, 2.5806),
        (1.0, 1.0, 50, 1e-2, 44.42),
    ],
)
def test_renyi_gives_what_two_libraries_do(z, q, steps, delta, expected):
    # theirs have coarser orders
    assert expected - 0.015 < by_orders(z, q, steps, delta) < expected + 0.005


def test_orders_near_one_decide_where_epsilon_is_large():
    # two libraries have 35.23 and, by coarser orders, 36.97; integers alone 53.04
    value = by_orders(0.5, 0.1, 100, 1e-5)
    assert 31.37 < value < 35.24
    curve = converted(100 * renyi(0.5, 0.1), 1e-5)
    assert curve[ORDERS == ORDERS.astype(int)].min() > 50


@pytest.mark.parametrize(("z", "steps", "delta", "expected"), [(1.0, 1, 1e-5, 4.3772), (1.0, 50, 1e-2, 40.59)])
def test_without_sampling_it_is_exact(z, steps, delta, expected):
    assert epsilon([Release(z, 1.0, steps)], delta) == pytest.approx(expected, abs=0.005)
    assert epsilon([Release(z, 1.0, steps)], delta) == gaussian_epsilon(z / math.sqrt(steps), delta)


@pytest.mark.parametrize(("z", "q", "steps", "delta"), SAMPLED)
def test_it_is_above_the_tight_value_and_not_far(z, q, steps, delta):
    pytest.importorskip("dp_accounting", reason="the extra privacy")
    own, tight = (bound([Release(z, q, steps)], delta) for bound in (epsilon, tight_epsilon))
    assert tight < own < 1.15 * tight
    expected = {1.0: 1.8282, 2.0: 2.3374}[z]
    assert tight == pytest.approx(expected, abs=0.005)


def test_it_is_no_more_than_another_accountant_of_the_same_kind():
    dp_accounting = pytest.importorskip("dp_accounting", reason="the extra privacy")
    rdp = pytest.importorskip("dp_accounting.rdp")
    for z, q, steps, delta in [(1.0, 0.01, 1000, 1e-5), (2.0, 0.1, 100, 1e-5), (4.0, 0.2, 50, 1e-3)]:
        accountant = rdp.RdpAccountant()
        accountant.compose(dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(z)), steps)
        assert epsilon([Release(z, q, steps)], delta) == pytest.approx(accountant.get_epsilon(delta), abs=0.01)


def test_where_the_extra_is_missing_a_sentence_says_which(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(MisconfigurationException, match=r"pfl-lightning\[privacy\]"):
        tight_epsilon([Release(1.0, 0.1)], 1e-5)
    assert tight_epsilon([Release(1.0)], 1e-5) == epsilon([Release(1.0)], 1e-5)


@pytest.mark.parametrize("z", [0.1, 0.7, 3.0])
@pytest.mark.parametrize("q", [0.01, 0.5])
def test_both_ways_to_a_divergence_agree(z, q):
    orders = [2, 3, 8, 11]
    assert np.allclose(by_quadrature(z, q, orders), [by_binomials(z, q, k) for k in orders], rtol=1e-9, atol=1e-13)


def test_a_fractional_order_is_the_integral_that_it_stands_for():
    z, q, order = 0.8, 0.2, 2.35

    def integrand(x):
        return norm.pdf(x, scale=z) * (1 - q + q * math.exp((2 * x - 1) / (2 * z**2))) ** order

    assert by_quadrature(z, q, [order])[0] == pytest.approx(math.log(quad(integrand, -20, 20)[0]), rel=1e-7)


def test_a_gaussians_delta_is_that_of_its_two_densities():
    for z, eps in [(0.5, 3.0), (1.0, 0.2), (3.0, 0.0)]:

        def loss(x, z=z, eps=eps):
            return max(norm.pdf(x, 1, z) - math.exp(eps) * norm.pdf(x, 0, z), 0.0)

        # the one place where the loss begins
        start = 0.5 + eps * z**2
        assert gaussian_delta(eps, z) == pytest.approx(quad(loss, start, start + 20 * z)[0], rel=1e-6)


@pytest.mark.parametrize(("z", "value"), [(3.0, 0.02), (2.0, 0.7), (1.0, 3.0), (0.5, 20.0)])
def test_a_gaussians_epsilon_is_that_of_its_delta_below_one_too(z, value):
    assert gaussian_epsilon(z, gaussian_delta(value, z)) == pytest.approx(value, rel=1e-9)


def test_trivial_cases():
    assert gaussian_delta(0.0, math.inf) == 0 and gaussian_delta(7.0, 0.0) == 1
    # a large epsilon doesn't overflow
    assert gaussian_delta(2000.0, 0.01) > 0.99 and gaussian_delta(800.0, 1.0) == 0
    # a delta that is the distance of the two distributions leaves nothing to epsilon
    assert epsilon([Release(1.0)], gaussian_delta(0.0, 1.0)) == 0
    assert epsilon([], 1e-5) == epsilon([Release(0.0, 0.5, 0)], 1e-5) == 0
    assert epsilon([Release(0.0, 0.5)], 1e-5) == epsilon([Release(1.0), Release(0.0)], 1e-5) == math.inf
    assert epsilon([Release(1e-3, 0.5)], 1e-5) > 1e4


@pytest.mark.parametrize("q", [0.05, 0.3, 1.0])
def test_epsilon_falls_in_noise_and_delta_and_grows_in_rounds(q):
    values = [epsilon([Release(z, q, 20)], 1e-4) for z in (0.3, 0.5, 1, 2, 4, 8)]
    assert values == sorted(values, reverse=True) and len(set(values)) == 6
    values = [epsilon([Release(1.0, q, steps)], 1e-4) for steps in (1, 2, 5, 50, 500)]
    assert values == sorted(values) and len(set(values)) == 5
    values = [epsilon([Release(1.0, q, 20)], delta) for delta in (1e-8, 1e-5, 1e-3, 1e-1)]
    assert values == sorted(values, reverse=True) and len(set(values)) == 4


def test_epsilon_grows_in_the_rate_up_to_that_without_sampling():
    values = [by_orders(1.0, q, 20, 1e-4) for q in (1e-3, 0.01, 0.1, 0.5, 0.999, 1.0)]
    assert values == sorted(values) and values[-2] == pytest.approx(values[-1], rel=0.01)


def test_rounds_one_by_one_are_rounds_at_once():
    assert epsilon([Release(1.0, 0.1)] * 30, 1e-5) == pytest.approx(epsilon([Release(1.0, 0.1, 30)], 1e-5), rel=1e-12)
    assert epsilon([Release(1.0), Release(1.0)], 1e-5) == pytest.approx(epsilon([Release(0.5**0.5)], 1e-5), rel=1e-9)
    mixed = epsilon([Release(1.0, 0.1, 10), Release(2.0)], 1e-5)
    alone = epsilon([Release(1.0, 0.1, 10)], 1e-5), epsilon([Release(2.0)], 1e-5)
    assert max(alone) < mixed < sum(alone)


@pytest.mark.parametrize(("z", "q", "steps"), [(1.0, 0.1, 100), (0.4, 0.01, 10), (3.0, 1.0, 25)])
@pytest.mark.by_default("1.0-0.1-100")
def test_noise_for_an_epsilon_is_the_noise_that_it_is_of(z, q, steps):
    target = epsilon([Release(z, q, steps)], 1e-5)
    found = noise_for(target, 1e-5, steps, q, tight=False)
    assert found == pytest.approx(z, rel=1e-4)
    assert epsilon([Release(found, q, steps)], 1e-5) <= target


@pytest.mark.exhaustive
def test_calibration_as_others_have_it():
    assert noise_for(2.0, 1e-5, 1000, 0.01, tight=False) == pytest.approx(1.0223, rel=0.01)


@pytest.mark.parametrize(("target", "steps", "rate", "expected"), [(2.0, 1000, 0.01, 0.9591), (2.3374, 100, 0.1, 2.0)])
def test_calibration_by_privacy_loss_distributions_as_google_has_it(target, steps, rate, expected):
    pytest.importorskip("dp_accounting", reason="the extra privacy")
    found = noise_for(target, 1e-5, steps, rate)
    assert found == pytest.approx(expected, rel=1e-3)
    assert target * (1 - 1e-4) <= tight_epsilon([Release(found, rate, steps)], 1e-5) <= target
    assert 1.05 * found < noise_for(target, 1e-5, steps, rate, tight=False)
    # rounds so far within the target, and one more beyond it
    rounds = [Release(found, rate, count) for count in (steps, steps + max(1, steps // 50))]
    assert within(target, 1e-5, rounds[:1]) and not within(target, 1e-5, rounds[1:])
    assert bounded_epsilon(rounds[:1], 1e-5, target) == target < epsilon(rounds[:1], 1e-5)
    assert bounded_epsilon(rounds[1:], 1e-5, target) == epsilon(rounds[1:], 1e-5)


def test_calibration_asks_the_slow_accountant_a_few_times(monkeypatch):
    asked = []

    def quick(releases, delta):
        return 1.2 * releases[0].noise_multiplier ** -1.5

    def slow(releases, delta):
        asked.append(releases)
        return quick(releases, delta) / 1.2

    for name, accountant in (("epsilon", quick), ("tight_epsilon", slow)):
        monkeypatch.setattr(f"pfl_lightning.privacy.accountant.{name}", accountant)
    found = noise_for(2.0, 1e-5, 1000, 0.01, tight=True)
    assert 2.0 * (1 - 1e-4) <= found**-1.5 <= 2.0
    assert len(asked) <= 4


@pytest.mark.exhaustive
def test_calibration_needs_no_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    assert noise_for(2.0, 1e-5, 1000, 0.01) == noise_for(2.0, 1e-5, 1000, 0.01, tight=False)
    with pytest.raises(MisconfigurationException, match=r"pfl-lightning\[privacy\]"):
        noise_for(2.5, 1e-5, 1000, 0.01, tight=True)
    assert not within(1.9, 1e-5, [Release(1.0, 0.01, 1000)])


@pytest.mark.exhaustive
def test_privacy_loss_distributions_are_left_out_where_they_are_exact_or_too_large(monkeypatch):
    def refused(*settings):
        raise AssertionError(settings)

    monkeypatch.setattr("pfl_lightning.privacy.accountant.tight_epsilon", refused)
    assert noise_for(2.0, 1e-5, 10) == noise_for(2.0, 1e-5, 10, tight=True)
    assert noise_for(200.0, 1e-5, 10, 0.1) > 0 and not within(60.0, 1e-5, [Release(0.1, 0.1, 50)])


@pytest.mark.parametrize(
    ("amplified", "value", "target", "name"),
    [
        (False, 2.0, 2.0, "Gaussian, exact"),
        (True, 1.9, 2.0, "Rényi"),
        (True, 3.0, None, "Rényi"),
        (True, 2.0, 2.0, PLD),
    ],
)
def test_the_accountant_has_a_name(amplified, value, target, name):
    assert accountant_of(amplified, value, target) == name


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: epsilon([Release(-1.0)], 1e-5), "noise_multiplier=-1.0 must be"),
        (lambda: epsilon([Release(math.nan)], 1e-5), "noise_multiplier=nan must be"),
        (lambda: epsilon([Release(1.0, 0.0)], 1e-5), "rate=0.0 must be"),
        (lambda: epsilon([Release(1.0, 1.5)], 1e-5), "rate=1.5 must be"),
        (lambda: epsilon([Release(1.0, 0.5, -1)], 1e-5), "steps=-1 must be"),
        (lambda: epsilon([Release(1.0)], 0.0), "delta=0.0 must be"),
        (lambda: epsilon([Release(1.0)], 1.0), "delta=1.0 must be"),
        (lambda: tight_epsilon([Release(1.0)], math.nan), "delta=nan must be"),
        (lambda: noise_for(0.0, 1e-5, 10), "epsilon=0.0 must be"),
        (lambda: noise_for(math.inf, 1e-5, 10), "epsilon=inf must be"),
        (lambda: noise_for(1.0, 1e-5, 0), "steps=0 must be"),
        (lambda: noise_for(1e-6, 1e-5, 10, 0.1), "epsilon=1e-06 is below"),
    ],
)
def test_bad_arguments_are_refused(call, named):
    with pytest.raises(MisconfigurationException, match=named):
        call()


@pytest.mark.parametrize("release", [Release(1.0, 0.1, 30), Release(3.0, 0.02, 300), Release(20.0, 0.5, 200)])
def test_wider_intervals_of_losses_only_make_epsilon_larger_and_hardly_so(release):
    dp_accounting = pytest.importorskip("dp_accounting")
    fine = dp_accounting.pld.PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE, 1e-4)
    noise = dp_accounting.GaussianDpEvent(release.noise_multiplier)
    fine.compose(dp_accounting.PoissonSampledDpEvent(release.rate, noise), release.steps)
    assert fine.get_epsilon(1e-5) <= tight_epsilon([release], 1e-5) * (1 + 1e-9)
    assert tight_epsilon([release], 1e-5) <= fine.get_epsilon(1e-5) * (1 + 2e-5)
