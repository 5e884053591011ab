"""Run several aggregators as one server side."""

from collections.abc import Iterator, Sequence
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.messages import Message, StateDict, Updates
from pfl_lightning.server.base import Aggregator, AnyAggregator, Server, checked_logs


class AggregatorList(Aggregator):
    """Several aggregators as one, each for entries of its own: models by one, prototypes by another.

    A payload is the union of the aggregators' payloads; the global model is that of the first aggregator with one.

    Args:
        aggregators: the aggregators, at least one; no two may send the same entry.

    Raises:
        MisconfigurationException: if there are none, or two send the same entry.
    """

    def __init__(self, aggregators: list[Aggregator]) -> None:
        super().__init__()
        entries = [entry for aggregator in aggregators for entry in aggregator.sends]
        if not aggregators or len(set(entries)) < len(entries):
            names = ", ".join(type(aggregator).__name__ for aggregator in aggregators)
            raise MisconfigurationException(
                f"aggregator.aggregators=[{names}] must be at least one, and no two may send the same entry."
            )
        self.aggregators = aggregators
        # the list demands whatever a part demands, and guarantees only what all parts guarantee
        self.needs = frozenset().union(*(aggregator.needs for aggregator in aggregators))
        self.sends = frozenset(entries)
        self.sends_once = frozenset().union(*(aggregator.sends_once for aggregator in aggregators))
        self.requires = frozenset().union(*(aggregator.requires for aggregator in aggregators))
        self.sums_only = all(aggregator.sums_only for aggregator in aggregators)
        self.fixed_sizes = any(aggregator.fixed_sizes for aggregator in aggregators)
        self.fixed_clients = any(aggregator.fixed_clients for aggregator in aggregators)
        self.fixed_rounds = any(aggregator.fixed_rounds for aggregator in aggregators)
        self.meets_newcomers = any(aggregator.meets_newcomers for aggregator in aggregators)

    @property
    def name(self) -> str:
        """The aggregators' names, joined by ``+``; a subclass has a name of its own."""
        return super().name if type(self) is not AggregatorList else "+".join(each.name for each in self.aggregators)

    @property
    def state(self) -> dict[str, Any]:
        """The aggregators' states, by position."""
        return {str(index): aggregator.state for index, aggregator in enumerate(self.aggregators)}

    @state.setter
    def state(self, state: dict[str, Any]) -> None:
        # looped over the given state: `Aggregator.__init__` sets an empty one before `self.aggregators` exists
        for index, part in state.items():
            self.aggregators[int(index)].state = part

    def setup(self, server: Server) -> None:
        """Set up all aggregators."""
        for aggregator in self.aggregators:
            aggregator.setup(server)

    def turns(self, clients: Sequence[int], round: int) -> list[int] | None:
        """Return the turns of the first aggregator with turns."""
        return next((turns for a in self.aggregators if (turns := a.turns(clients, round)) is not None), None)

    def aggregate(self, updates: Updates, round: int) -> dict[str, float]:
        """Hand the updates to each aggregator.

        Args:
            updates: the round's updates, by client id.
            round: the round's number.

        Returns:
            The union of the aggregators' logs.
        """
        logs: dict[str, float] = {}
        for aggregator in self.aggregators:
            # checked for each part, so that the error names the part
            logs |= checked_logs(aggregator.aggregate(updates, round), aggregator.name)
        return logs

    def download(self, client: int) -> Message:
        """Return the union of the aggregators' payloads for a client."""
        payload: Message = {}
        for aggregator in self.aggregators:
            payload |= aggregator.download(client)
        return payload

    def welcome(self, client: int, update: Message | None) -> Message:
        """Return the union of the aggregators' payloads for a newcomer."""
        payload: Message = {}
        for aggregator in self.aggregators:
            payload |= aggregator.welcome(client, update)
        return payload

    def global_model(self) -> StateDict:
        """Return the global model of the first aggregator with one."""
        return next((model for a in self.aggregators if (model := a.global_model())), {})

    def find(self, kind: type[AnyAggregator]) -> AnyAggregator | None:
        """Return the first aggregator of a class, or None."""
        return super().find(kind) or next((found for a in self.aggregators if (found := a.find(kind))), None)


def parts_of(aggregator: Aggregator) -> Iterator[Aggregator]:
    """Yield an aggregator, or the parts of an `AggregatorList`, at any depth.

    Args:
        aggregator: the aggregator.
    """
    if isinstance(aggregator, AggregatorList):
        for part in aggregator.aggregators:
            yield from parts_of(part)
    else:
        yield aggregator
