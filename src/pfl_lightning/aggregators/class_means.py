"""Averaging class by class."""

from collections.abc import Iterable

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from pfl_lightning.aggregators.base import Aggregator, Server
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
    """

    def __init__(self, entry: str = "prototypes", weighted: bool = True, exclude_self: bool = False) -> None:
        super().__init__()
        self.entry, self.weighted, self.exclude_self = entry, weighted, exclude_self
        self.sends = frozenset({entry})
        self.needs = self.sends | ({"class_counts"} if weighted else set())

    def setup(self, server: Server) -> None:
        """Starts with no class known."""
        self.state |= {"means": {}, "others": {}}

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
            self._average(c, {client: update for client, update in updates.items() if c in update[self.entry]})
        return {f"{self.entry}_fed": float(len(fed))}

    def _average(self, c: int, updates: Updates) -> None:
        """The mean of a class over clients that have it, and for each of them the mean of the others."""
        masses = {client: float(u["class_counts"][c]) if self.weighted else 1.0 for client, u in updates.items()}
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
