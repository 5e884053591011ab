"""Attacks of bad clients who know each other's models, or everybody's, and all send one that passes for honest."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from statistics import NormalDist
from typing import Literal, TypeAlias, get_args

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.aggregators import WeightedAverage, inner_products
from pfl_lightning.callbacks.attacks.uploads import UploadAttack, View, check_positive
from pfl_lightning.choices import check_choices
from pfl_lightning.federation.federation import Federation
from pfl_lightning.messages import StateDict, Updates

Knowledge: TypeAlias = Literal["omniscient", "own"]
"""Whose trained models bad clients know: those of all benign clients of the round, or their own alone."""

Direction: TypeAlias = Literal["best", "std", "mean", "sign"]
"""Along which direction `AdaptiveAttack` goes away from the honest mean."""


class Colluding(UploadAttack):
    r"""Sends a model that is made of the mean :math:`\mu` and the deviation :math:`\sigma` of models that are known.

    They are of each coordinate, and the deviation is that of a population.

    Args:
        fraction: as for `Attack`.
        knowledge: ``omniscient`` knows the models of the round's benign clients, ``own`` those that the bad clients
            themselves trained.

    Raises:
        MisconfigurationException: if a value is out of its range.
    """

    colludes = True

    def __init__(self, fraction: float, knowledge: Knowledge = "omniscient") -> None:
        super().__init__(fraction)
        check_choices("trainer.callbacks", knowledge=(knowledge, ("omniscient", "own")))
        self.knowledge = knowledge

    def seen(self, bad: list[int], updates: Updates) -> list[int]:
        """The benign clients, if they are known and there are some, else the bad ones."""
        benign = sorted(updates.keys() - set(bad))
        return benign if benign and self.knowledge == "omniscient" else bad


class ALIE(Colluding):
    r"""Sends :math:`\mu - z \sigma`, with the largest z at which it still is one of many: a little is enough.

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
        """The mean, less some deviations."""
        mean, deviation = moments(view.known)
        z = largest_z(view.clients, view.bad) if self.z is None else self.z
        return {name: mean[name] - z * deviation[name] for name in mean}


class IPM(Colluding):
    r"""Sends :math:`x - \epsilon (\mu - x)`: with small :math:`\epsilon` within the cloud of others, and against them.

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
        """Against the mean."""
        mean, _ = moments(view.known)
        return {name: x - self.scale * (mean[name] - x) for name, x in view.received.items()}


class MinMax(Colluding):
    r"""Sends :math:`\mu - \gamma \sigma`, as far as it is no further from any known model than two of them are.

    .. math:: \max_i \lVert \mu - \gamma \sigma - h_i \rVert \le \max_{i, j} \lVert h_i - h_j \rVert

    with the largest such :math:`\gamma`. Source: Shejwalkar and Houmansadr, 2021, NDSS
    (https://doi.org/10.14722/ndss.2021.24498). Takes the arguments of `Colluding`.
    """

    def forged(self, view: View) -> StateDict:
        """As far as it may."""
        mean, deviation = moments(view.known)
        gamma = largest_gamma(view.known, mean, deviation)
        return {name: mean[name] - gamma * deviation[name] for name in mean}


class MinSum(Colluding):
    r"""Sends :math:`\mu - \gamma \sigma`, as far as it is no further from all together than one of them is.

    .. math::

        \sum_i \lVert \mu - \gamma \sigma - h_i \rVert^2 \le \max_i \sum_j \lVert h_i - h_j \rVert^2

    over the known models :math:`h_i`, with the largest such :math:`\gamma`: nearer to them than `MinMax` as a rule, and
    harder to tell by sums of distances, such as Krum's. Source: Shejwalkar and Houmansadr, 2021, NDSS
    (https://doi.org/10.14722/ndss.2021.24498). Takes the arguments of `Colluding`.
    """

    def forged(self, view: View) -> StateDict:
        """As far as it may."""
        mean, deviation = moments(view.known)
        gamma = largest_gamma(view.known, mean, deviation, together=True)
        return {name: mean[name] - gamma * deviation[name] for name in mean}


class AdaptiveAttack(Colluding):
    r"""Sends :math:`\mu - \gamma d`, with the scale and direction that lead the server's own rule furthest astray.

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
        """Refuse servers that combine models by more than a mean, or a rule in the place of the mean."""
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
        change = {name: mean[name] - x for name, x in view.received.items()}
        directions = {"std": deviation, "mean": change, "sign": {name: t.sign() for name, t in change.items()}}
        tried = [d for name, d in directions.items() if self.direction in (name, "best")]

        def model(direction: StateDict, scale: float) -> StateDict:
            return {name: mean[name] - scale * direction[name] for name in mean}

        def effect(direction: StateDict, scale: float) -> float:
            led = view.outcome(model(direction, scale))
            squared = sum(float((led[name] - mean[name]).square().sum()) for name in mean)
            return squared if squared < math.inf else -1.0

        found = [largest_effect(partial(effect, d), self.scales(view.known, mean, d)) for d in tried]
        best = max(range(len(tried)), key=lambda index: found[index][1])
        return model(tried[best], found[best][0])

    def scales(self, known: list[StateDict], mean: StateDict, direction: StateDict) -> list[float]:
        """Return the scales to begin with, descending.

        Args:
            known: the benign models.
            mean: their mean.
            direction: d.
        """
        blind = [largest_gamma(known, mean, direction, together) for together in (False, True)]
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


def moments(known: list[StateDict]) -> tuple[StateDict, StateDict]:
    """Mean and deviation of models, coordinate by coordinate."""
    stacks = {name: torch.stack([model[name] for model in known]) for name in known[0]}
    return {n: s.mean(0) for n, s in stacks.items()}, {n: s.std(0, correction=0) for n, s in stacks.items()}


def largest_z(clients: int, bad: int) -> float:
    """How many deviations away a value still has enough honest ones beyond it, for a majority with the bad ones.

    >>> round(largest_z(20, 4), 3), largest_z(2, 1)
    (0.157, 0.0)

    Args:
        clients: of the round, n.
        bad: how many of these are bad, f.
    """
    honest = max(clients - bad, 1)
    supporters = max(clients // 2 + 1 - bad, 1)
    share = (honest - supporters) / honest
    return max(NormalDist().inv_cdf(share), 0.0) if share > 0 else 0.0


def largest_gamma(known: list[StateDict], mean: StateDict, deviation: StateDict, together: bool = False) -> float:
    r"""The largest :math:`\gamma` of `MinMax`, or `MinSum`; 0 where models don't differ.

    Args:
        known: the models.
        mean: theirs.
        deviation: theirs, as by `moments`.
        together: whether it is by the sum of squared distances to all, or by the largest distance.
    """
    names = list(mean)
    among = inner_products([*known, {n: mean[n] - deviation[n] for n in names}], names, mean)[:-1, :-1]
    squares, along = among.diagonal()[:-1], -among[:-1, -1]
    own = float(among[-1, -1])
    if own == 0:
        return 0.0
    pairs = squares[:, None] + squares - 2 * among[:-1, :-1]
    if together:
        # means over i of the terms below, in which those along the deviation cancel
        return math.sqrt(max(float(pairs.mean(1).max() - squares.mean()), 0.0) / own)
    # || mean - gamma deviation - h_i ||^2 = squares + 2 gamma along + gamma^2 own
    roots = ((along**2 + own * (pairs.max() - squares)).clamp_min(0).sqrt() - along) / own
    return float(roots.min())
