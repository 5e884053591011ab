r"""Lower bounds on :math:`\epsilon` by one run with many canaries, each included or left out by a coin.

Symbols: m canaries, r guesses on some of them, v right guesses; :math:`q = e^\epsilon / (1 + e^\epsilon)`.
Sources: Steinke, Nasr and Jagielski, 2023, Theorem 5.2 (https://arxiv.org/abs/2305.08846), for guesses; after Andrew et
al., 2024 (https://arxiv.org/abs/2302.03098), for the noise behind scores.
"""

import math

import numpy as np
from numpy.typing import NDArray

from pfl_lightning.privacy.accountant import check_range

FAR = (1.0, 0.5)
"""Shares of canaries that are guessed by the first way, those far from the threshold."""
HIGH = (0.5, 0.25, 0.125)
"""Shares of canaries that are guessed by the second way, those with the highest scores."""
PER_UNIT = 100
"""Values of epsilon that are looked at between one integer and the next; bounds are rounded down to them."""


def chance_of_guesses(
    right: int, guesses: int, canaries: int, epsilon: NDArray[np.float64], delta: float
) -> NDArray[np.float64]:
    r"""Return the largest probability of so many right guesses under :math:`(\epsilon, \delta)`-differential privacy.

    .. math::

        P[B \ge v] + 2 m \delta \max_{1 \le i \le v} \frac{P[v - i \le B < v]}{i}, \qquad B \sim \text{Binomial}(r, q)

    >>> chance_of_guesses(10, 10, 10, np.zeros(1), delta=0.0) == 0.5**10
    array([ True])

    Args:
        right: v, from 0 to ``guesses``.
        guesses: r, from 0 to ``canaries``.
        canaries: m, each included with probability ½ by itself.
        epsilon: several of them ``[n]``, each at least 0.
        delta: from 0 to below 1.

    Raises:
        MisconfigurationException: if a number is out of its range.
    """
    # imported here: sites load this package and never call this
    from scipy.stats import binom

    check_range("right", right, 0 <= right <= guesses <= canaries, f"from 0 to guesses={guesses}")
    check_range("delta", delta, 0 <= delta < 1, "0 or more and below 1, such as 1e-5")
    q = 1 / (1 + np.exp(-epsilon))
    chance: NDArray[np.float64] = binom.sf(right - 1, guesses, q)
    if right and delta:
        below = np.cumsum(binom.pmf(np.arange(right - 1, -1, -1), guesses, q[:, None]), axis=1)
        chance = chance + 2 * canaries * delta * np.max(below / np.arange(1, right + 1), axis=1)
    return np.minimum(chance, 1.0)


def epsilon_of_guesses(right: int, guesses: int, canaries: int, delta: float, confidence: float = 0.95) -> float:
    r"""Return the largest :math:`\epsilon` refuted by guesses, rounded down to hundredths; 0 if none.

    Every smaller :math:`\epsilon` is refuted too: the probability of a bound above a true :math:`\epsilon` is at most
    one minus the confidence.

    >>> epsilon_of_guesses(100, 100, 100, delta=1e-5)
    3.49

    Args:
        right: guesses that are right, from 0 to ``guesses``.
        guesses: how many there are, from 0 to ``canaries``.
        canaries: m.
        delta: from 0 to below 1.
        confidence: above 0 and below 1.

    Raises:
        MisconfigurationException: if an argument is out of its range.
    """
    check_range("confidence", confidence, 0 < confidence < 1, "above 0 and below 1, such as 0.95")
    # upwards and not by halving, since the second term of the chance needn't grow in epsilon
    steps = np.arange(PER_UNIT)
    while True:
        held = chance_of_guesses(right, guesses, canaries, steps / PER_UNIT, delta) > 1 - confidence
        if held.any():
            return float(max(steps[held.argmax()] - 1, 0) / PER_UNIT)
        steps = steps + PER_UNIT


def audited_epsilon(
    scores: NDArray[np.float64], included: NDArray[np.bool_], delta: float, confidence: float = 0.95
) -> float:
    r"""Return a lower bound on :math:`\epsilon` by the scores of canaries, the largest for some numbers of guesses.

    There are two ways to guess. By the first, canaries are guessed to be included where their scores are above a
    threshold, the middle between two clusters of scores, and those far from the threshold before others. By the second,
    those with the highest scores are guessed to be included, and nothing of others, as many included ones may have had
    no part in any step. Each number of guesses by each way has its part of the probability of an error, so that the
    largest bound has the confidence too.

    Args:
        scores: a number for each canary ``[m]``, which should be larger where it is included; finite.
        included: the coins ``[m]``.
        delta: from 0 to below 1.
        confidence: above 0 and below 1.

    Raises:
        MisconfigurationException: if an argument is out of its range.
    """
    canaries, each = len(scores), 1 - (1 - confidence) / len(FAR + HIGH)
    from_middle = scores - middle(scores)
    far = ((from_middle > 0) == included)[np.argsort(-np.abs(from_middle), kind="stable")]
    high = included[np.argsort(-scores, kind="stable")]
    # numbers of guesses that are fixed before scores are seen, as the theorem asks
    guessed = [right[: int(share * canaries)] for right, shares in ((far, FAR), (high, HIGH)) for share in shares]
    return max(epsilon_of_guesses(int(right.sum()), len(right), canaries, delta, each) for right in guessed)


def audited_noise(
    scores: NDArray[np.float64],
    included: NDArray[np.bool_],
    steps: NDArray[np.float64],
    rates: NDArray[np.float64],
    confidence: float = 0.95,
) -> float:
    r"""Return an upper bound on the noise multiplier behind scores of Gaussian mechanisms; infinity if there is none.

    The assumption is that a canary's score is, in some unit that all have in common,

    .. math::

        s_i = c_i B_i + z \sqrt{T_i} \xi_i, \quad B_i \sim \text{Binomial}(T_i, q_i), \quad \xi_i \sim \mathcal{N}(0, 1)

    with the coin :math:`c_i`, and steps :math:`T_i` and rates :math:`q_i` as declared. Then z is the root of the mean
    of :math:`s_i^2 / T_i` over absent canaries, divided by the slope of :math:`s_i / \sqrt{T_i}` over
    :math:`q_i \sqrt{T_i}` of included ones. What else is in scores, such as other clients' changes, makes the bound
    larger and not wrong. A half of the error's probability is the root's (chi-squared), a half the slope's (Student).

    Args:
        scores: a number for each canary ``[m]``, finite.
        included: the coins ``[m]``.
        steps: T, at least 0 ``[m]``; canaries without a step don't count.
        rates: q, above 0 and up to 1 ``[m]``.
        confidence: above 0 and below 1.

    Raises:
        MisconfigurationException: if the confidence is out of its range.
    """
    from scipy.stats import chi2, t

    check_range("confidence", confidence, 0 < confidence < 1, "above 0 and below 1, such as 0.95")
    there, absent = included & (steps > 0), ~included & (steps > 0)
    counts, each = (int(there.sum()), int(absent.sum())), (1 - confidence) / 2
    if min(counts) < 2:
        return math.inf
    x, y = (rates * np.sqrt(steps))[there], scores[there] / np.sqrt(steps[there])
    slope = float(x @ y / (x @ x))
    # residuals of their own, as few steps and many differ in their variance
    error = math.sqrt(float(((x * (y - slope * x)) ** 2).sum()) * counts[0] / (counts[0] - 1)) / float(x @ x)
    least = slope - float(t.isf(each, counts[0] - 1)) * error
    largest = math.sqrt(float((scores[absent] ** 2 / steps[absent]).sum()) / float(chi2.ppf(each, counts[1])))
    return largest / least if least > 0 else math.inf


def middle(scores: NDArray[np.float64]) -> float:
    """Return the threshold between two clusters of numbers, by Lloyd's algorithm from their mean.

    >>> middle(np.array([0.0, 1.0, 10.0]))
    5.25

    Args:
        scores: at least one, finite.
    """
    threshold = float(scores.mean())
    for _ in range(20):
        above = scores > threshold
        if above.any() and not above.all():
            threshold = float(scores[above].mean() + scores[~above].mean()) / 2
    return threshold
