"""Means of some uploads in the place of single ones, before a rule: honest ones that differ come nearer together.

Sources: Karimireddy, He and Jaggi, 2022 (https://arxiv.org/abs/2006.09365); Allouah et al., 2023
(https://arxiv.org/abs/2302.01772).
"""

import math

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.aggregators.means.base import Assumed, Mean
from pfl_lightning.aggregators.means.vectors import Sum, Vectors


class Bucketing(Mean):
    """A rule of the means of small groups, which are drawn anew in each mean.

    The rule sees n / size means instead of n uploads, of which as many are bad as uploads are, at most: set its own
    ``f`` or ``trim`` for that. Source: Karimireddy et al., 2022 (https://arxiv.org/abs/2006.09365).

    Args:
        mean: the rule.
        size: uploads in a group, at least 1, which is the rule itself; the last group may have fewer.

    Raises:
        MisconfigurationException: if ``size`` is less than 1, or the rule counts clients by their samples.
    """

    def __init__(self, mean: Mean, size: int = 2) -> None:
        check_rule("Bucketing", mean)
        if size < 1:
            raise MisconfigurationException(f"aggregator.mean=Bucketing: size={size} must be 1 or more, such as 2.")
        self.mean, self.size = mean, size

    @property
    def name(self) -> str:
        """With the rule's."""
        return f"{type(self).__name__}+{self.mean.name}"

    def check(self, clients: int) -> None:
        """Asks the rule, which gets fewer."""
        self.mean.check(math.ceil(clients / self.size))

    def of(self, vectors: Vectors) -> Sum:
        """Draws the groups, and hands their means to the rule."""
        order = torch.randperm(len(vectors), generator=torch.Generator().manual_seed(vectors.seed))
        if self.size == 1:
            return self.mean.of(vectors)
        groups = torch.split(order, self.size)
        mixing = torch.zeros(len(groups), len(vectors), dtype=torch.float64)
        for row, group in zip(mixing, groups, strict=True):
            row[group] = 1 / len(group)
        return self.mean.of(vectors.mixed(mixing))


class NearestNeighbourMixing(Mean):
    """A rule of means in the place of uploads, each of the n - f that are nearest to one, itself among them.

    With f = 0 all of these are the mean. Source: Allouah et al., 2023 (https://arxiv.org/abs/2302.01772).

    Args:
        mean: the rule.
        f: how many uploads are taken for bad, or the share of the round's that they are, rounded down, below 0.5.

    Raises:
        MisconfigurationException: if ``f`` is out of its range, or the rule counts clients by their samples.
    """

    def __init__(self, mean: Mean, f: int | float = 0.2) -> None:
        check_rule("NearestNeighbourMixing", mean)
        self.mean, self.f = mean, f
        self._bad = Assumed("NearestNeighbourMixing", "f", f, 2, 1)

    @property
    def name(self) -> str:
        """With the rule's."""
        return f"{type(self).__name__}+{self.mean.name}"

    def check(self, clients: int) -> None:
        """Refuses an f that no round can bear, and asks the rule."""
        self._bad.check(clients)
        self.mean.check(clients)

    def of(self, vectors: Vectors) -> Sum:
        """Mixes, and hands the means to the rule."""
        n = len(vectors)
        near = vectors.squared_distances.argsort(dim=1, stable=True)[:, : n - self._bad.among(n)]
        mixing = torch.zeros(n, n, dtype=torch.float64).scatter(1, near, 1 / near.shape[1])
        return self.mean.of(vectors.mixed(mixing))


def check_rule(outer: str, mean: Mean) -> None:
    """Refuses a rule that needs to know more of single uploads than means of several tell.

    Raises:
        MisconfigurationException: if it counts them by samples, or judges each.
    """
    if mean.own_model:
        raise MisconfigurationException(
            f"aggregator.mean={outer}: {mean.name} judges each client's own upload, and {outer} gives it means of "
            "several; take it by itself."
        )
    if mean.weighted:
        raise MisconfigurationException(
            f"aggregator.mean={outer}: {mean.name} counts clients by their samples, and {outer} gives it means of "
            "several; set its weighted=false."
        )
