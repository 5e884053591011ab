"""Means of the clients' vectors for each class, such as prototypes."""

from collections.abc import Iterable, Mapping

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from pfl_lightning.messages import Message, Updates
from pfl_lightning.server.base import Aggregator, Server
from pfl_lightning.server.means import Averaging, Mean
from pfl_lightning.server.means.base import check_models_alone


class ClassMeans(Aggregator):
    r"""Averages the clients' vectors of each class, such as prototypes.

    .. math:: G_c = \sum_{k \in S_c} m_{kc} F_{kc} \Big/ \sum_{k \in S_c} m_{kc}

    Here :math:`S_c` are the clients of the round that have class c, and :math:`m_{kc}` is client k's number of samples
    :math:`n_{kc}` of the class, or 1. A class without an update in a round keeps its last mean.

    Args:
        entry: name of the entry in updates and payloads: ``{class number: vector}`` for the classes that a client has.
        weighted: whether a client counts by its samples of the class, whose numbers it then sends.
        exclude_self: whether a client receives means without its own part; a class that only it has is then left out.
            The server keeps a vector for each client and class.
        mean: a rule instead of the mean of each class, as for `WeightedAverage`. All clients that have the class count
            alike, unless the rule itself weights by samples, which are those of the class.

    Raises:
        MisconfigurationException: if ``exclude_self`` is given with a ``mean``, from which no client's part can be
            taken.
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
        """The class's name, with the rule's in addition where there is a rule."""
        return super().name if self.mean is None else f"{super().name}+{self.mean.name}"

    def setup(self, server: Server) -> None:
        """Start without any class."""
        self.state |= {"means": {}, "others": {}}
        if self.mean is not None:
            check_models_alone(self.mean, self.name, self.entry)
            self.averaging = Averaging(self.mean, server)

    def aggregate(self, updates: Updates, round: int) -> dict[str, float]:
        """Update the means of the classes in the round's updates, and log the number of these classes.

        Raises:
            MisconfigurationException: if clients with different networks send vectors of different widths.
        """
        if not updates:
            return {}
        check_one_width([vector for update in updates.values() for vector in update[self.entry].values()], self.entry)
        # in a fixed order, so that sums don't depend on who came first
        fed = sorted({c for update in updates.values() for c in update[self.entry]})
        # a new dict, since payloads of earlier rounds have the old one
        self.state["means"] = dict(self.state["means"])
        for c in fed:
            # only clients that have the class: an absent class isn't a zero vector
            have = {client: update for client, update in updates.items() if c in update[self.entry]}
            masses = {client: float(u["class_counts"][c]) if self.by_samples else 1.0 for client, u in have.items()}
            if self.mean is None:
                self._average(c, have, masses)
                continue
            sent = {client: {self.entry: update[self.entry][c]} for client, update in have.items()}
            # a rule that compares with the last mean begins at zero for a class that is new
            now = self.state["means"].get(c, torch.zeros_like(next(iter(sent.values()))[self.entry]))
            found = self.averaging.entries(sent, masses, {self.entry: now}, round, [self.entry])
            self.state["means"][c] = found.entries[self.entry]
        return {f"{self.entry}_fed": float(len(fed))}

    def _average(self, c: int, updates: Updates, masses: Mapping[int, float]) -> None:
        """Compute the mean of a class, and the mean without each client in turn.

        Args:
            c: the class.
            updates: updates of the clients that have it, by id.
            masses: :math:`m_{kc}`, by client id.
        """
        parts = {client: masses[client] * update[self.entry][c].double() for client, update in updates.items()}
        mass, total = sum(masses.values()), torch.stack(list(parts.values())).sum(0)
        dtype = next(iter(updates.values()))[self.entry][c].dtype
        self.state["means"][c] = (total / mass).to(dtype)
        if self.exclude_self:
            self.state["others"][c] = {
                # n subtractions from one sum, in float64, rather than n sums of n - 1 parts
                client: ((total - part) / (mass - masses[client])).to(dtype) if len(parts) > 1 else None
                for client, part in parts.items()
            }

    def download(self, client: int) -> Message:
        """Return the mean of each known class, without the client's own part if ``exclude_self``."""
        others = self.state["others"]
        if not others:
            # one dict for all clients, which is built and measured once
            return {self.entry: self.state["means"]}
        means = {c: others.get(c, {}).get(client, mean) for c, mean in self.state["means"].items()}
        return {self.entry: {c: mean for c, mean in means.items() if mean is not None}}


def check_one_width(vectors: Iterable[Tensor], entry: str) -> None:
    """Refuse vectors of different widths, from clients with different networks.

    Args:
        vectors: vectors ``[d]``.
        entry: name of the entry, for the error.

    Raises:
        MisconfigurationException: if their widths differ.
    """
    widths = sorted({len(vector) for vector in vectors})
    if len(widths) > 1:
        raise MisconfigurationException(
            f"model.net: clients sent {entry} of widths {', '.join(map(str, widths))}, which have no mean; "
            "give networks whose features have one width."
        )
