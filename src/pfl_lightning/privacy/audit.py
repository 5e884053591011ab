r"""Lower bounds on :math:`\epsilon` by one run with many canaries, each included or left out by a coin.

Symbols: m canaries, r guesses on some of them, v right guesses; :math:`q = e^\epsilon / (1 + e^\epsilon)`.
Source: Steinke, Nasr and Jagielski, 2023, Theorem 5.2 (https://arxiv.org/abs/2305.08846).
"""

import numpy as np
from numpy.typing import NDArray

from pfl_lightning.privacy.accountant import check_range

SHARES = (1.0, 0.5, 0.25, 0.125)
"""Shares of canaries that guesses are made on; bounds by several shares divide the probability of an error."""
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
    # here, as sites of a deployment load this package and never come here
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
    r"""Return a lower bound on :math:`\epsilon` by the scores of canaries, the largest for `SHARES` of guesses.

    Canaries are guessed to be included where their scores are above a threshold, the middle between two clusters of
    scores, and those far from the threshold before others. Each share has its part of the probability of an error, so
    that the largest bound has the confidence too.

    Args:
        scores: a number for each canary ``[m]``, which should be larger where it is included; finite.
        included: the coins ``[m]``.
        delta: from 0 to below 1.
        confidence: above 0 and below 1.

    Raises:
        MisconfigurationException: if an argument is out of its range.
    """
    canaries, each = len(scores), 1 - (1 - confidence) / len(SHARES)
    from_middle = scores - middle(scores)
    right = ((from_middle > 0) == included)[np.argsort(-np.abs(from_middle), kind="stable")]
    # fixed before scores are seen, as the theorem asks for the number of guesses
    counts = [int(share * canaries) for share in SHARES]
    return max(epsilon_of_guesses(int(right[:guesses].sum()), guesses, canaries, delta, each) for guesses in counts)


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
