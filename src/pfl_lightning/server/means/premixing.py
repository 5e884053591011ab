"""Means of several uploads in place of single ones, before a rule: honest uploads that differ come nearer.

Sources: Karimireddy, He and Jaggi, 2022 (https://arxiv.org/abs/2006.09365); Allouah et al., 2023
(https://arxiv.org/abs/2302.01772).
"""

import math

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.server.means.base import Assumed, Mean
from pfl_lightning.server.means.vectors import Sum, Vectors


class Bucketing(Mean):
    """Apply a rule to the means of small groups of uploads, drawn anew for each result.

    The rule sees n / size means instead of n uploads, and at most one bad mean a bad upload: set its own ``f`` or
    ``trim`` for as many. Source: Karimireddy et al., 2022 (https://arxiv.org/abs/2006.09365).

    Args:
        mean: the rule.
        size: uploads in a group, at least 1; the last group may have fewer, and 1 is the rule itself.

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
        """Both names, joined by a plus."""
        return f"{type(self).__name__}+{self.mean.name}"

    def check(self, clients: int) -> None:
        """Refuse settings of the rule too large for the number of groups."""
        self.mean.check(math.ceil(clients / self.size))

    def of(self, vectors: Vectors) -> Sum:
        """Return the rule's result for the means of groups."""
        order = torch.randperm(len(vectors), generator=torch.Generator().manual_seed(vectors.seed))
        # without a mixing matrix, so that it is the rule to the last bit, its own draws included
        if self.size == 1:
            return self.mean.of(vectors)
        groups = torch.split(order, self.size)
        mixing = torch.zeros(len(groups), len(vectors), dtype=torch.float64)
        for row, group in zip(mixing, groups, strict=True):
            row[group] = 1 / len(group)
        return self.mean.of(vectors.mixed(mixing))


class NearestNeighbourMixing(Mean):
    """Apply a rule to n means, each of an upload and its nearest neighbours, n - f uploads in all.

    With f = 0 each of these is the mean of all uploads. Source: Allouah et al., 2023 (https://arxiv.org/abs/2302.01772).

    Args:
        mean: the rule.
        f: the number of uploads taken for bad, or the share of the round's uploads, rounded down, below 0.5.

    Raises:
        MisconfigurationException: if ``f`` is out of its range, or the rule counts clients by their samples.
    """

    def __init__(self, mean: Mean, f: int | float = 0.2) -> None:
        check_rule("NearestNeighbourMixing", mean)
        self.mean, self.f = mean, f
        self._bad = Assumed("NearestNeighbourMixing", "f", f, 2, 1)

    @property
    def name(self) -> str:
        """Both names, joined by a plus."""
        return f"{type(self).__name__}+{self.mean.name}"

    def check(self, clients: int) -> None:
        """Refuse an f too large for any round, in these means or in the rule."""
        self._bad.check(clients)
        self.mean.check(clients)

    def of(self, vectors: Vectors) -> Sum:
        """Return the rule's result for the means."""
        n = len(vectors)
        # stable: of uploads equally near the ones with lower ids are taken, whatever the sorting's algorithm
        near = vectors.squared_distances.argsort(dim=1, stable=True)[:, : n - self._bad.among(n)]
        mixing = torch.zeros(n, n, dtype=torch.float64).scatter(1, near, 1 / near.shape[1])
        return self.mean.of(vectors.mixed(mixing))


def check_rule(outer: str, mean: Mean) -> None:
    """Refuse a rule that has to see single uploads.

    Args:
        outer: name of the rule of means.
        mean: the rule behind the means.

    Raises:
        MisconfigurationException: if the rule counts uploads by samples, or judges each.
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
