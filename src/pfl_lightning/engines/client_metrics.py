"""The metrics of many clients, a column for each metric."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Columns: TypeAlias = Mapping[str, Sequence[Any]]
"""Values of some clients by metric, in the order of the clients."""


class ClientMetrics(Mapping[int, dict[str, Any]]):
    """Metrics of clients in one split, by client id in rising order.

    Values are kept as a column for each metric: with thousands of clients, a dict for each takes longer than their
    forward passes. A client's dict is made when somebody asks for it.

    >>> metrics = ClientMetrics([([4, 1], {"acc": [0.5, 1.0]}), ([2], {"loss": [0.25]})])
    >>> metrics[4], list(metrics), metrics.column("acc").tolist()
    ({'acc': 0.5}, [1, 2, 4], [1.0, nan, 0.5])

    Args:
        blocks: ids of some clients, each client once, with their columns.
    """

    def __init__(self, blocks: Iterable[tuple[Sequence[int], Columns]] = ()) -> None:
        self.blocks = list(blocks)

    @classmethod
    def of(cls, results: Mapping[int, Mapping[str, Any]]) -> "ClientMetrics":
        """Return the metrics of a mapping of dicts.

        Args:
            results: metrics by client.
        """
        return cls(([client], {name: [value] for name, value in own.items()}) for client, own in results.items())

    @cached_property
    def clients(self) -> NDArray[np.int64]:
        """Ids of the clients, rising."""
        return self._ids[self._order]

    @cached_property
    def names(self) -> list[str]:
        """Names of the metrics."""
        return list(dict.fromkeys(name for _, columns in self.blocks for name in columns))

    def column(self, name: str) -> NDArray[np.float64]:
        """Return a metric's values in the order of `clients`; NaN for clients without it.

        Args:
            name: the metric.
        """
        # sums over clients mustn't depend on which engine or process has evaluated whom first
        parts = [columns.get(name) or [math.nan] * len(clients) for clients, columns in self.blocks]
        return np.fromiter(chain.from_iterable(parts), np.float64, len(self))[self._order]

    def states(self, name: str) -> list[Any]:
        """Return the values of a metric of other types than numbers, in the order of `clients`, without missing ones.

        Args:
            name: the metric.
        """
        held = [
            (*pair,) for clients, columns in self.blocks for pair in zip(clients, columns.get(name, ()), strict=False)
        ]
        return [state for _, state in sorted(held, key=lambda pair: pair[0])]

    def of_clients(self, clients: Iterable[int]) -> "ClientMetrics":
        """Return the metrics of some clients alone.

        Args:
            clients: ids of clients with metrics.
        """
        return ClientMetrics.of({client: self[client] for client in clients})

    def __getitem__(self, client: int) -> dict[str, Any]:
        columns, row = self._places[client]
        return {name: values[row] for name, values in columns.items()}

    def __contains__(self, client: object) -> bool:
        return client in self._places

    def __iter__(self) -> Iterator[int]:
        return iter(self.clients.tolist())

    def __len__(self) -> int:
        return len(self._ids)

    @cached_property
    def _ids(self) -> NDArray[np.int64]:
        """Ids of the clients, block after block."""
        return np.fromiter(chain.from_iterable(clients for clients, _ in self.blocks), np.int64)

    @cached_property
    def _order(self) -> NDArray[np.int64]:
        """Places in the blocks of the clients in rising order."""
        return self._ids.argsort()

    @cached_property
    def _places(self) -> dict[int, tuple[Columns, int]]:
        # made only where somebody looks at single clients
        return {client: (columns, row) for clients, columns in self.blocks for row, client in enumerate(clients)}


class Evaluated(NamedTuple):
    """The metrics of clients that an engine has evaluated together.

    Args:
        clients: ids of all these clients, also of those without samples.
        splits: the metrics by split, of the clients with samples in it.
    """

    clients: Sequence[int]
    splits: dict[str, ClientMetrics]

    @classmethod
    def of(cls, client: int, metrics: Mapping[str, Mapping[str, Any]]) -> "Evaluated":
        """Return one client's metrics.

        Args:
            client: the client's id.
            metrics: its metrics by split.
        """
        return cls([client], {split: ClientMetrics.of({client: own}) for split, own in metrics.items()})

    def metrics(self, client: int) -> dict[str, dict[str, Any]]:
        """Return one client's metrics by split.

        Args:
            client: the client's id.
        """
        return {split: metrics[client] for split, metrics in self.splits.items() if client in metrics}

    def with_further(self, further: Mapping[int, Mapping[str, Mapping[str, float]]]) -> "Evaluated":
        """Return the metrics with further ones of some clients.

        >>> one = Evaluated.of(3, {"val": {"loss": 0.5}, "test": {"loss": 0.25}})
        >>> one.with_further({3: {"val": {"rouge_l": 1.0}}}).metrics(3)
        {'val': {'loss': 0.5, 'rouge_l': 1.0}, 'test': {'loss': 0.25}}

        Args:
            further: metrics by client and split, of splits that are here.
        """
        splits = {
            split: ClientMetrics.of({k: {**own, **further.get(k, {}).get(split, {})} for k, own in metrics.items()})
            for split, metrics in self.splits.items()
        }
        return self._replace(splits=splits)


def by_split(results: Iterable[Evaluated]) -> dict[str, ClientMetrics]:
    """Return the metrics by split of all clients.

    Args:
        results: of different clients.
    """
    blocks: dict[str, list[tuple[Sequence[int], Columns]]] = {}
    for _, splits in results:
        for split, metrics in splits.items():
            blocks.setdefault(split, []).extend(metrics.blocks)
    return {split: ClientMetrics(own) for split, own in blocks.items()}


def by_client(results: Iterable[Evaluated]) -> dict[int, dict[str, dict[str, Any]]]:
    """Return each client's metrics by split; empty for clients without samples.

    Args:
        results: of different clients.
    """
    return {client: each.metrics(client) for each in results for client in each.clients}
