"""Averaging class by class."""

from collections.abc import Iterable, Mapping

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from pfl_lightning.aggregators.base import Aggregator, Server
from pfl_lightning.aggregators.means import Averaging, Mean
from pfl_lightning.aggregators.means.base import check_models_alone
from pfl_lightning.messages import Message, Updates


class ClassMeans(Aggregator):
    r"""Averages class by class what clients send for each class, such as prototypes.

    .. math:: G_c = \sum_{k \in S_c} m_{kc} F_{kc} \Big/ \sum_{k \in S_c} m_{kc}

    over the clients :math:`S_c` of the round that have the class, where :math:`m_{kc}` is their number of samples
    :math:`n_{kc}` of it, or 1. A class that nobody fed in a round keeps its last mean.

    Args:
        entry: the entry of updates and payloads: a vector by class number, of the classes that there are.
        weighted: whether clients count by their samples of the class, which they then send.
        exclude_self: whether a client's own part is taken out of what it receives; a class that only it fed is then
            left out. The server keeps a vector for each client and class to do so.
        mean: a rule in the place of the mean of each class, as for `WeightedAverage`. All clients that have the class
            then count alike, unless the rule itself counts by samples, which are those of the class.

    Raises:
        MisconfigurationException: if ``exclude_self`` is asked for with a ``mean``, from which nobody can be taken out.
    """

    def __init__(
        self,
        entry: str = "prototypes",
        weighted: bool = True,
        exclude_self: bool = False,
        mean: Mean | None = None,
    ) -> None:
        super().__init__()
        if mean is not None and exclude_self:
            raise MisconfigurationException(
                f"aggregator.mean={mean.name} has no part of each client that aggregator.exclude_self=true could take "
                "out; leave one of the two out."
            )
        self.entry, self.weighted, self.exclude_self = entry, weighted, exclude_self
        self.mean = mean
        self.by_samples = weighted if mean is None else mean.weighted
        self.sends = frozenset({entry})
        self.needs = self.sends | ({"class_counts"} if self.by_samples else set())

    @property
    def name(self) -> str:
        """With the rule's, where there is one."""
        return super().name if self.mean is None else f"{super().name}+{self.mean.name}"

    def setup(self, server: Server) -> None:
        """Starts with no class known."""
        self.state |= {"means": {}, "others": {}}
        if self.mean is not None:
            check_models_alone(self.mean, self.name, self.entry)
            self.averaging = Averaging(self.mean, server)

    def aggregate(self, updates: Updates, round: int) -> dict[str, float]:
        """Takes the means of the classes that were fed, and logs how many these are.

        Raises:
            MisconfigurationException: if clients with different networks send vectors of different widths.
        """
        if not updates:
            return {}
        check_one_width([vector for update in updates.values() for vector in update[self.entry].values()], self.entry)
        fed = sorted({c for update in updates.values() for c in update[self.entry]})
        for c in fed:
            have = {client: update for client, update in updates.items() if c in update[self.entry]}
            masses = {client: float(u["class_counts"][c]) if self.by_samples else 1.0 for client, u in have.items()}
            if self.mean is None:
                self._average(c, have, masses)
                continue
            sent = {client: {self.entry: update[self.entry][c]} for client, update in have.items()}
            now = self.state["means"].get(c, torch.zeros_like(next(iter(sent.values()))[self.entry]))
            found = self.averaging.entries(sent, masses, {self.entry: now}, round, [self.entry])
            self.state["means"][c] = found.entries[self.entry]
        return {f"{self.entry}_fed": float(len(fed))}

    def _average(self, c: int, updates: Updates, masses: Mapping[int, float]) -> None:
        """The mean of a class over clients that have it, and for each of them the mean of the others."""
        parts = {client: masses[client] * update[self.entry][c].double() for client, update in updates.items()}
        mass, total = sum(masses.values()), torch.stack(list(parts.values())).sum(0)
        dtype = next(iter(updates.values()))[self.entry][c].dtype
        self.state["means"][c] = (total / mass).to(dtype)
        if self.exclude_self:
            self.state["others"][c] = {
                client: ((total - part) / (mass - masses[client])).to(dtype) if len(parts) > 1 else None
                for client, part in parts.items()
            }

    def download(self, client: int) -> Message:
        """The mean of each class that is known."""
        others = self.state["others"]
        means = {c: others.get(c, {}).get(client, mean) for c, mean in self.state["means"].items()}
        return {self.entry: {c: mean for c, mean in means.items() if mean is not None}}


def check_one_width(vectors: Iterable[Tensor], entry: str) -> None:
    """Refuses vectors that clients with different networks sent, if their widths differ.

    Args:
        vectors: ``[d]`` each.
        entry: what they are called.

    Raises:
        MisconfigurationException: if they do.
    """
    widths = sorted({len(vector) for vector in vectors})
    if len(widths) > 1:
        raise MisconfigurationException(
            f"model.net: clients sent {entry} of widths {', '.join(map(str, widths))}, which have no mean; "
            "give networks whose features have one width."
        )
