r"""Compute the :math:`(\epsilon, \delta)` of rounds with Gaussian noise, and the noise for a target.

Symbols: z is the noise multiplier, the noise's standard deviation over the sensitivity of what it is added to; q the
probability with which each client takes part in a round, by itself (Poisson sampling); :math:`\alpha` a Rényi order.
"""

import importlib.util
import math
from collections.abc import Iterable, Sequence
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np
from lightning.fabric.utilities.exceptions import MisconfigurationException
from numpy.typing import NDArray

FRACTIONAL = tuple(1 + k / 100 for k in range(1, 100)) + tuple(2 + k / 10 for k in range(100))
"""Orders below 12: those near 1 decide where epsilon is large."""
INTEGER = (*range(12, 65), 72, 80, 96, 112, 128, 160, 192, 256, 512, 1024)
ORDERS = np.array(FRACTIONAL + INTEGER)

PLD = "privacy loss distributions (dp-accounting)"
TIGHT_UP_TO = 50.0
"""Largest epsilon by Rényi divergences at which calibration asks dp-accounting too."""


class Release(NamedTuple):
    """Rounds with the same noise.

    Args:
        noise_multiplier: z, at least 0; 0 is no noise.
        rate: q, above 0 and up to 1; 1 counts no sampling.
        steps: how many rounds, at least 0.
    """

    noise_multiplier: float
    rate: float = 1.0
    steps: int = 1


def epsilon(releases: Iterable[Release], delta: float) -> float:
    r"""Return the :math:`\epsilon` of some rounds together.

    Without sampling the rounds are one Gaussian mechanism with an exact :math:`\epsilon` (Balle and Wang, 2018,
    https://arxiv.org/abs/1805.06530). With sampling, :math:`\epsilon` is an upper bound by Rényi differential privacy
    (Mironov, Talwar and Zhang, 2019, https://arxiv.org/abs/1908.10530).

    >>> round(epsilon([Release(1.0)], 1e-5), 4), round(epsilon([Release(1.0, rate=0.01, steps=1000)], 1e-5), 2)
    (4.3772, 2.1)

    Args:
        releases: the rounds, noised in one way or several.
        delta: above 0 and below 1.

    Raises:
        MisconfigurationException: if an argument is out of range.
    """
    check_range("delta", delta, 0 < delta < 1, "above 0 and below 1, such as 1e-5")
    made = [checked(release) for release in releases]
    # no step, no noise multiplier that would count
    made = [release for release in made if release.steps]
    # without noise nothing is hidden, whatever the sampling
    if any(release.noise_multiplier == 0 for release in made):
        return math.inf
    if all(release.rate == 1 for release in made):
        return gaussian_epsilon(together(made), delta)
    rho = np.sum([release.steps * renyi(release.noise_multiplier, release.rate) for release in made], axis=0)
    return max(0.0, float(converted(rho, delta).min()))


def tight_epsilon(releases: Iterable[Release], delta: float) -> float:
    """Return a smaller upper bound by discretised privacy losses (PLD) of the package dp-accounting, within seconds.

    Args:
        releases: as for `epsilon`.
        delta: as for `epsilon`.

    Raises:
        MisconfigurationException: if an argument is out of range, or dp-accounting isn't installed.
    """
    return _tight_epsilon(tuple(releases), delta)


# a federation asks for the same rounds several times: to check, to record, to summarise
@lru_cache(maxsize=256)
def _tight_epsilon(made: tuple[Release, ...], delta: float) -> float:
    least = epsilon(made, delta)
    # exact already, or hopeless
    if not math.isfinite(least) or all(release.rate == 1 for release in made):
        return least
    try:
        import dp_accounting
        from dp_accounting.pld import PLDAccountant
    except ImportError as error:
        raise MisconfigurationException(
            "the tight epsilon needs the package dp-accounting, which isn't installed; pip install "
            "'pfl-lightning[privacy]'."
        ) from error
    # An upper bound with any interval, and larger by a relative 0.1 (interval z / q)^2, so by 1e-5 here; the package's
    # own interval, 1e-4, takes up to ten times as long.
    interval = min(max(1e-4, 0.01 * release.rate / release.noise_multiplier) for release in made)
    accountant = PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE, min(interval, 1e-3))
    for z, rate, steps in made:
        event = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(z))
        accountant.compose(event, steps)
    return min(least, float(accountant.get_epsilon(delta)))


def has_pld(target: float) -> bool:
    """Return whether noise for a target is found by privacy loss distributions: where dp-accounting is installed.

    Args:
        target: the epsilon; above `TIGHT_UP_TO`, where their discretisation takes gigabytes, Rényi divergences decide.
    """
    return target <= TIGHT_UP_TO and importlib.util.find_spec("dp_accounting") is not None


def within(target: float, delta: float, releases: Iterable[Release]) -> bool:
    """Return whether some rounds stay within a target, by privacy loss distributions where these are at hand.

    Args:
        target: the epsilon, above 0.
        delta: above 0 and below 1.
        releases: the rounds.
    """
    made = list(releases)
    # the other accountant takes seconds and is only smaller
    quick = epsilon(made, delta)
    return quick <= target or (quick <= TIGHT_UP_TO and has_pld(target) and tight_epsilon(made, delta) <= target)


def bounded_epsilon(releases: Iterable[Release], delta: float, target: float | None) -> float:
    """Return the epsilon of some rounds, and the target where a bound above is only Rényi's.

    Args:
        releases: the rounds.
        delta: above 0 and below 1.
        target: the epsilon for which the noise was found; None without.
    """
    value = epsilon(made := list(releases), delta)
    return target if target is not None and value > target and within(target, delta, made) else value


def accountant_of(amplified: bool, value: float, target: float | None) -> str:
    """Return the name of the accountant behind a value of `bounded_epsilon`.

    Args:
        amplified: whether some rounds were sampled.
        value: the epsilon.
        target: as for `bounded_epsilon`, which gives the target itself only by privacy loss distributions.
    """
    if not amplified:
        return "Gaussian, exact"
    return PLD if value == target else "Rényi"


def noise_for(target: float, delta: float, steps: int, rate: float = 1.0, tight: bool | None = None) -> float:
    r"""Return the least noise multiplier with which rounds stay within a target, on the safe side.

    Args:
        target: the :math:`\epsilon` of all rounds together, above 0.
        delta: above 0 and below 1.
        steps: how many rounds, at least 1.
        rate: q, above 0 and up to 1.
        tight: as for `least_noise`.

    Raises:
        MisconfigurationException: if an argument is out of range, or no noise reaches the target.
    """
    check_range("steps", steps, steps >= 1, "at least 1")
    return least_noise(target, delta, [Release(1.0, rate, steps)], tight)


def least_noise(target: float, delta: float, releases: Sequence[Release], tight: bool | None = None) -> float:
    r"""Return the factor of the noise of some rounds with which these stay within a target, on the safe side.

    By Rényi divergences the factor is the least one to a relative 1e-6, and by privacy loss distributions, which need 7
    to 10 % less noise, :math:`\epsilon` is within a relative 1e-4 of the target.

    >>> least_noise(2.0, 1e-5, [Release(1.0, 0.1, 30)]) == noise_for(2.0, 1e-5, 30, 0.1)
    True

    Args:
        target: the :math:`\epsilon` of all rounds together, above 0.
        delta: above 0 and below 1.
        releases: the rounds, with noise multipliers above 0.
        tight: whether privacy loss distributions decide, by dp-accounting, within seconds; None where these are
            installed.

    Raises:
        MisconfigurationException: if an argument is out of range, or no noise reaches the target.
    """
    check_range("epsilon", target, 0 < target < math.inf, "above 0, such as 8")
    # also where the other accountant decides: its search begins there
    coarse = _least_by_renyi(target, delta, releases)
    sampled = any(release.rate < 1 for release in releases)
    if not sampled or not (has_pld(target) if tight is None else tight):
        return coarse
    return _least_by_pld(target, delta, releases, coarse)


def _scaled(releases: Sequence[Release], factor: float) -> list[Release]:
    return [Release(factor * z, rate, steps) for z, rate, steps in releases]


def _least_by_pld(target: float, delta: float, releases: Sequence[Release], coarse: float) -> float:
    """Return the least factor by privacy loss distributions, beginning from the one by Rényi divergences."""

    def power(factor: float) -> float:
        """Return the exponent with which epsilon falls in the noise, by the quick accountant."""
        near = [epsilon(_scaled(releases, factor * by), delta) for by in (0.99, 1.01)]
        return math.log(near[0] / near[1]) / math.log(1.01 / 0.99) if near[1] > 0 else 1.0

    # steps by the slope of the other accountant's curve, which has nearly the same shape: three or four suffice, where
    # halving would take twelve of up to 5 s each
    best = factor = coarse
    for _ in range(12):
        value = tight_epsilon(_scaled(releases, factor), delta)
        if value <= target:
            best = min(best, factor)
            if value >= target * (1 - 1e-4):
                break
        factor *= (value / (target * (1 - 3e-5))) ** (1 / max(power(factor), 0.5))
    return best


def _least_by_renyi(target: float, delta: float, releases: Sequence[Release]) -> float:
    """Return the least factor by Rényi divergences, or the exact one without sampling."""

    def within(factor: float) -> bool:
        return epsilon(_scaled(releases, factor), delta) <= target

    # doubling first, as the least noise may be anywhere
    low, high = 0.0, 1.0
    while not within(high):
        low, high = high, 2 * high
        if high > 1e9:
            raise MisconfigurationException(
                f"epsilon={target} is below what any noise is known to give at delta={delta}; take a larger one."
            )
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if within(middle) else (middle, high)
    return high


def gaussian_delta(epsilon: float, noise_multiplier: float) -> float:
    r"""Return the exact :math:`\delta` of one Gaussian mechanism at an :math:`\epsilon` of 0 or more.

    .. math::

        \delta = \Phi(1/2z - \epsilon z) - e^{\epsilon} \Phi(-1/2z - \epsilon z)

    >>> round(gaussian_delta(0.0, 0.5), 4), gaussian_delta(3.0, math.inf), gaussian_delta(3.0, 0.0)
    (0.6827, 0.0, 1.0)
    """
    # imported here: sites load this file and never call this
    from scipy.special import log_ndtr

    z = noise_multiplier
    if z == 0 or math.isinf(z):
        return float(z == 0)
    above = log_ndtr(1 / (2 * z) - epsilon * z)
    below = epsilon + log_ndtr(-1 / (2 * z) - epsilon * z)
    # by logarithms: a large epsilon times a small probability would overflow
    return float(np.exp(above) * -np.expm1(min(below - above, 0.0)))


def gaussian_epsilon(noise_multiplier: float, delta: float) -> float:
    r"""Return the exact :math:`\epsilon` of one Gaussian mechanism: the least with `gaussian_delta` at most delta."""
    if gaussian_delta(0.0, noise_multiplier) <= delta:
        return 0.0
    # doubling first, as little noise makes epsilon arbitrarily large
    low, high = 0.0, 1.0
    while gaussian_delta(high, noise_multiplier) > delta:
        low, high = high, 2 * high
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if gaussian_delta(middle, noise_multiplier) <= delta else (middle, high)
    return high


def together(releases: Sequence[Release]) -> float:
    """Return the noise multiplier of the one Gaussian mechanism with the same guarantee as rounds without sampling."""
    precision = sum(release.steps / release.noise_multiplier**2 for release in releases)
    return 1 / math.sqrt(precision) if precision else math.inf


@cache
def renyi(noise_multiplier: float, rate: float) -> NDArray[np.float64]:
    r"""Return the Rényi divergence of a round at each of `ORDERS`: :math:`\rho(\alpha) = \log A_\alpha / (\alpha - 1)`.

    .. math::

        A_\alpha = \mathbb{E}_{x \sim \mathcal{N}(0, z^2)} \left[ \left( 1 - q + q e^{(2x - 1) / 2z^2} \right)^\alpha
        \right]

    Args:
        noise_multiplier: z, above 0.
        rate: q, above 0 and up to 1.
    """
    z = noise_multiplier
    # next to no noise would take the rule very many points for nothing: sampling only makes epsilon smaller
    if rate == 1 or z < 0.02:
        gaussian: NDArray[np.float64] = ORDERS / (2 * z**2)
        return gaussian
    values = np.concatenate([by_quadrature(z, rate, FRACTIONAL), [by_binomials(z, rate, order) for order in INTEGER]])
    # a divergence can't be negative; rounding of what is nearly 0 can
    divergences: NDArray[np.float64] = np.maximum(values, 0.0) / (ORDERS - 1)
    return divergences


def by_quadrature(z: float, rate: float, orders: Sequence[float]) -> NDArray[np.float64]:
    r"""Return :math:`\log A_\alpha` of any orders above 1, by the trapezoidal rule.

    The integrand is analytic within :math:`\pi z^2` of the real line and falls like a Gaussian, so the error falls
    exponentially in :math:`z^2` over the step, here to below 1e-12.
    """
    # imported here: sites load this file and never call this
    from scipy.special import logsumexp

    # fine enough for the density and for the strip in which the integrand is analytic
    step = min(z / 8, z**2 / 2)
    x = np.arange(-12 * z, max(orders) + 12 * z, step)
    # by logarithms: the ratio overflows for little noise
    ratio = np.logaddexp(math.log1p(-rate), math.log(rate) + (2 * x - 1) / (2 * z**2))
    log_density = -(x**2) / (2 * z**2) + math.log(step) - math.log(z * math.sqrt(2 * math.pi))
    return np.array([logsumexp(log_density + order * ratio) for order in orders])


def by_binomials(z: float, rate: float, order: int) -> float:
    r"""Return :math:`\log A_\alpha` of an integer order from 2 up, the exact sum over binomials."""
    # imported here, as in `by_quadrature`
    from scipy.special import logsumexp

    j = np.arange(order + 1)
    factorials = np.array([math.lgamma(k + 1) for k in j])
    choose = factorials[-1] - factorials - factorials[::-1]
    terms = choose + j * math.log(rate) + (order - j) * math.log1p(-rate) + (j**2 - j) / (2 * z**2)
    # by logarithms: the terms themselves overflow
    return float(logsumexp(terms))


def converted(rho: NDArray[np.float64], delta: float) -> NDArray[np.float64]:
    r"""Return :math:`\epsilon` by each of `ORDERS` (Canonne, Kamath and Steinke, 2020, https://arxiv.org/abs/2004.00010)."""
    values: NDArray[np.float64] = rho + np.log1p(-1 / ORDERS) - (math.log(delta) + np.log(ORDERS)) / (ORDERS - 1)
    return values


def checked(release: Release) -> Release:
    """Return a release, or refuse one with a number out of range."""
    z, rate, steps = release
    check_range("noise_multiplier", z, z >= 0, "0 or more, such as 1")
    check_range("rate", rate, 0 < rate <= 1, "above 0 and up to 1, such as 0.1")
    check_range("steps", steps, steps >= 0, "0 or more")
    return release


def check_range(name: str, value: float, right: bool, words: str) -> None:
    """Refuse a value out of range in a sentence.

    Args:
        name: of the argument.
        value: the argument's.
        right: whether the value is in range.
        words: the range.

    Raises:
        MisconfigurationException: if the value is out of range.
    """
    if not right:
        raise MisconfigurationException(f"{name}={value} must be {words}.")
