"""Attacks by bad clients with knowledge of other clients' models: all of them send one forged model."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from statistics import NormalDist
from typing import Literal, TypeAlias, get_args

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.callbacks.attacks.uploads import UploadAttack, View, check_positive
from pfl_lightning.federation.federation import Federation
from pfl_lightning.messages import StateDict, Updates
from pfl_lightning.server import WeightedAverage, inner_products
from pfl_lightning.settings import check_choices

Knowledge: TypeAlias = Literal["omniscient", "own"]
"""The trained models known to bad clients: those of all benign clients of the round, or their own alone."""

Direction: TypeAlias = Literal["best", "std", "mean", "sign"]
"""The direction of `AdaptiveAttack` away from the benign mean."""


class Colluding(UploadAttack):
    r"""Send a model made of the mean :math:`\mu` and the standard deviation :math:`\sigma` of known models.

    Both are by coordinate, and the deviation is of a population (divided by n).

    Args:
        fraction: as for `Attack`.
        knowledge: ``omniscient`` for the models of the round's benign clients, ``own`` for the models trained by the
            bad clients themselves.

    Raises:
        MisconfigurationException: if a value is out of its range.
    """

    colludes = True

    def __init__(self, fraction: float, knowledge: Knowledge = "omniscient") -> None:
        super().__init__(fraction)
        check_choices("trainer.callbacks", knowledge=(knowledge, ("omniscient", "own")))
        self.knowledge = knowledge

    def seen(self, bad: list[int], updates: Updates) -> list[int]:
        """Return the benign clients, if these are known and the round has some, else the bad ones."""
        benign = sorted(updates.keys() - set(bad))
        return benign if benign and self.knowledge == "omniscient" else bad


class ALIE(Colluding):
    r"""Send :math:`\mu - z \sigma`, with the largest z at which enough honest values lie beyond: a little is enough.

    .. math:: z = \Phi^{-1}\Bigl(\frac{n - f - s}{n - f}\Bigr), \qquad s = \lfloor n/2 \rfloor + 1 - f

    of n clients of the round of which f are bad, and at least 0.
    Source: Baruch et al., 2019 (https://arxiv.org/abs/1902.06156).

    Args:
        fraction: as for `Attack`.
        z: above 0; None takes the formula's.
        knowledge: as for `Colluding`.

    Raises:
        MisconfigurationException: if a value is out of its range.
    """

    def __init__(self, fraction: float, z: float | None = None, knowledge: Knowledge = "omniscient") -> None:
        super().__init__(fraction, knowledge)
        check_positive(self, z=1.0 if z is None else z)
        self.z = z

    def forged(self, view: View) -> StateDict:
        """Return the mean, less z deviations."""
        mean, deviation = moments(view.known)
        z = largest_z(view.clients, view.bad) if self.z is None else self.z
        return {name: mean[name] - z * deviation[name] for name in mean}


class IPM(Colluding):
    r"""Send :math:`x - \epsilon (\mu - x)`: against the mean change, with small :math:`\epsilon` among honest uploads.

    A mean over all goes backwards where :math:`\epsilon f > n - f`.
    Source: Xie et al., 2019 (https://arxiv.org/abs/1903.03936).

    Args:
        fraction: as for `Attack`.
        scale: :math:`\epsilon`, above 0.
        knowledge: as for `Colluding`.

    Raises:
        MisconfigurationException: if a value is out of its range.
    """

    def __init__(self, fraction: float, scale: float = 0.5, knowledge: Knowledge = "omniscient") -> None:
        super().__init__(fraction, knowledge)
        check_positive(self, scale=scale)
        self.scale = scale

    def forged(self, view: View) -> StateDict:
        """Return the received model, moved against the mean change."""
        mean, _ = moments(view.known)
        return {name: x - self.scale * (mean[name] - x) for name, x in view.received.items()}


class MinMax(Colluding):
    r"""Send :math:`\mu - \gamma \sigma`, no further from any known model than two known models from each other.

    .. math:: \max_i \lVert \mu - \gamma \sigma - h_i \rVert \le \max_{i, j} \lVert h_i - h_j \rVert

    with the largest such :math:`\gamma`. Source: Shejwalkar and Houmansadr, 2021, NDSS
    (https://doi.org/10.14722/ndss.2021.24498). Takes the arguments of `Colluding`.
    """

    def forged(self, view: View) -> StateDict:
        """Return the mean, less as many deviations as the bound allows."""
        mean, deviation = moments(view.known)
        gamma = largest_gamma(view.known, mean, deviation)
        return {name: mean[name] - gamma * deviation[name] for name in mean}


class MinSum(Colluding):
    r"""Send :math:`\mu - \gamma \sigma`, with squared distances to all known models of no more than one model's sum.

    .. math::

        \sum_i \lVert \mu - \gamma \sigma - h_i \rVert^2 \le \max_i \sum_j \lVert h_i - h_j \rVert^2

    over the known models :math:`h_i`, with the largest such :math:`\gamma`: nearer to them than `MinMax` as a rule, and
    harder to tell by sums of distances, such as Krum's. Source: Shejwalkar and Houmansadr, 2021, NDSS
    (https://doi.org/10.14722/ndss.2021.24498). Takes the arguments of `Colluding`.
    """

    def forged(self, view: View) -> StateDict:
        """Return the mean, less as many deviations as the bound allows."""
        mean, deviation = moments(view.known)
        gamma = largest_gamma(view.known, mean, deviation, together=True)
        return {name: mean[name] - gamma * deviation[name] for name in mean}


class AdaptiveAttack(Colluding):
    r"""Send :math:`\mu - \gamma d`, with the scale and direction of the largest error of the server's own rule.

    .. math:: \max_{\gamma, d} \lVert R(\mu - \gamma d, \ldots, h_1, \ldots, h_m) - \mu \rVert, \qquad
        0 < \gamma \le \text{limit} \cdot \gamma_d

    for the rule R, the benign models :math:`h_i` of the round with mean :math:`\mu` and deviation :math:`\sigma`, and
    the received model x. Directions d are :math:`\sigma`, :math:`\mu - x` and :math:`\operatorname{sign}(\mu - x)`;
    :math:`\gamma_d` is the larger one of the two scales at which `MinMax` and `MinSum` stop along d; both are tried, so
    that neither of these leads the rule further. The attack computes R by the server's own ``mean``, draws of groups
    included, for some 40 models a round: an adversary who knows everything. A plain mean goes as far as ``limit``
    allows.
    Sources: Fang et al., 2020 (https://arxiv.org/abs/1911.11815); Shejwalkar and Houmansadr, 2021, NDSS
    (https://doi.org/10.14722/ndss.2021.24498).

    Args:
        fraction: as for `Attack`.
        direction: ``std``, ``mean`` or ``sign`` in the order above; ``best`` tries all three in each round.
        limit: the largest scale, in multiples of :math:`\gamma_d`, at least 1.

    Raises:
        MisconfigurationException: if a value is out of its range; before the first round, if the server takes no mean.
    """

    def __init__(self, fraction: float, direction: Direction = "best", limit: float = 10.0) -> None:
        super().__init__(fraction)
        check_choices("trainer.callbacks", direction=(direction, get_args(Direction)))
        if not 1 <= limit < math.inf:
            raise MisconfigurationException(f"AdaptiveAttack: limit={limit} must be 1 or more and finite, such as 10.")
        self.direction, self.limit = direction, limit

    def check(self, federation: Federation) -> None:
        """Refuse servers that combine models by more than a mean, or a rule in place of the mean."""
        super().check(federation)
        server = federation.aggregator
        if not isinstance(server, WeightedAverage) or not server.takes_mean:
            raise MisconfigurationException(
                f"trainer.callbacks: AdaptiveAttack tries uploads on the server's mean, and {server.name} combines "
                "models by a rule of its own; take MinMax, or a method such as FedAvg."
            )

    def forged(self, view: View) -> StateDict:
        """Return the model of the largest effect among those tried."""
        mean, deviation = moments(view.known)
        # of three lengths: `scales` measures each direction by the same distances between honest models
        change = {name: mean[name] - x for name, x in view.received.items()}
        directions = {"std": deviation, "mean": change, "sign": {name: t.sign() for name, t in change.items()}}
        tried = [d for name, d in directions.items() if self.direction in (name, "best")]

        # all in float64, while the server's rule sees the types that are sent
        def model(direction: StateDict, scale: float) -> StateDict:
            return {name: mean[name] - scale * direction[name] for name in mean}

        def effect(direction: StateDict, scale: float) -> float:
            led = view.outcome(model(direction, scale))
            squared = sum(float((led[name] - mean[name]).square().sum()) for name in mean)
            # an overflow would end the run, which is no accuracy to compare
            return squared if squared < math.inf else -1.0

        found = [largest_effect(partial(effect, d), self.scales(view.known, mean, d)) for d in tried]
        best = max(range(len(tried)), key=lambda index: found[index][1])
        return model(tried[best], found[best][0])

    def scales(self, models: list[StateDict], mean: StateDict, direction: StateDict) -> list[float]:
        """Return the scales to begin with, descending.

        Args:
            models: the benign models.
            mean: their mean.
            direction: d.
        """
        blind = [largest_gamma(models, mean, direction, together) for together in (False, True)]
        # by factors of 2, whose intervals are halved later: rules that select uploads have their best scale near the
        # blind ones, and rules by coordinate far above, where they saturate
        halved = [self.limit * max(blind) / 2**power for power in range(8)]
        return sorted([*halved, *blind], reverse=True)


def largest_effect(effect: Callable[[float], float], scales: Sequence[float], halvings: int = 4) -> tuple[float, float]:
    """Return the scale of the largest effect, and the effect; of equal effects the largest scale.

    Rules that select uploads drop a forged one from some scale on, and rules by coordinate bend at each upload: neither
    has a slope to follow. The search halves the intervals on both sides of the best scale instead.

    >>> largest_effect(lambda scale: scale if scale < 3.3 else 0.0, [8.0, 4.0, 2.0, 1.0])
    (3.25, 3.25)

    Args:
        effect: the effect of a scale.
        scales: the scales to begin with, at least one, descending.
        halvings: how often both intervals are halved.
    """
    # max takes the first of equal ones, which is the largest scale: a saturated rule then gets a safe margin
    effects = [effect(scale) for scale in scales]
    at = max(range(len(scales)), key=effects.__getitem__)
    best, most = scales[at], effects[at]
    low, high = [*scales, 0.0][at + 1], scales[max(at - 1, 0)]
    for _ in range(halvings):
        below, above = (low + best) / 2, (best + high) / 2
        if (reached := effect(above)) > most:
            low, best, most = best, above, reached
        elif (reached := effect(below)) > most:
            best, high, most = below, best, reached
        else:
            low, high = below, above
    return best, most


def moments(models: list[StateDict]) -> tuple[StateDict, StateDict]:
    """Return mean and standard deviation of models, coordinate by coordinate.

    Args:
        models: the models, at least one.
    """
    # of a population, as the papers have them; of one model the deviation is then 0 and not NaN
    stacks = {name: torch.stack([model[name] for model in models]) for name in models[0]}
    return {n: s.mean(0) for n, s in stacks.items()}, {n: s.std(0, correction=0) for n, s in stacks.items()}


def largest_z(clients: int, bad: int) -> float:
    """Return the largest distance, in deviations, at which honest values beyond make a majority with the bad ones.

    >>> round(largest_z(20, 4), 3), largest_z(2, 1)
    (0.157, 0.0)

    Args:
        clients: number of clients in the round, n.
        bad: number of bad clients among these, f.
    """
    honest = max(clients - bad, 1)
    supporters = max(clients // 2 + 1 - bad, 1)
    share = (honest - supporters) / honest
    # the quantile of 0 is infinite, and below the median the value would pull towards honest ones
    return max(NormalDist().inv_cdf(share), 0.0) if share > 0 else 0.0


def largest_gamma(models: list[StateDict], mean: StateDict, deviation: StateDict, together: bool = False) -> float:
    r"""Return the largest :math:`\gamma` of `MinMax`, or `MinSum`; 0 where models don't differ.

    Args:
        models: the models.
        mean: the models' mean.
        deviation: the direction: the models' deviation, or any other.
        together: True bounds the sum of squared distances to all models (`MinSum`), False the largest distance.
    """
    names = list(mean)
    # the bounds need inner products of differences to the mean alone
    among = inner_products([*models, {n: mean[n] - deviation[n] for n in names}], names, mean)[:-1, :-1]
    squares, along = among.diagonal()[:-1], -among[:-1, -1]
    own = float(among[-1, -1])
    if own == 0:
        return 0.0
    pairs = squares[:, None] + squares - 2 * among[:-1, :-1]
    if together:
        # the mean over i of the equation below: the terms linear in gamma cancel, as the differences sum to 0
        return math.sqrt(max(float(pairs.mean(1).max() - squares.mean()), 0.0) / own)
    # || mean - gamma deviation - h_i ||^2 = squares + 2 gamma along + gamma^2 own
    # the product of both roots is 0 or less, so that the one with the plus sign is the largest scale of each model
    roots = ((along**2 + own * (pairs.max() - squares)).clamp_min(0).sqrt() - along) / own
    return float(roots.min())
