"""Rounds on a graph of clients: neighbours, weights of neighbours, and the bytes of each edge."""

import csv
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.messages import Message, Updates, num_bytes, weighted_mean
from pfl_lightning.seeds import derive_seed
from pfl_lightning.server.base import Aggregator, Server

Neighbours: TypeAlias = dict[int, list[int]]
"""The clients that each client hears, by id, ascending and without itself."""


class GraphAggregator(Aggregator):
    r"""Keeps a model for each client, mixed in each round with the models of neighbours on a graph.

    No client and no server has a model of all. A subclass says in `aggregate` how a client's model and its neighbours'
    become the client's next one. Edges have both directions, and only edges between clients whose models arrived
    count. A client without such a neighbour keeps its model, as one that stays away does.

    A simulation runs in one process, and a deployment has a coordinator: each site sends it a model, and receives its
    own next one. So the coordinator sees all models, and a site none of another site's; without its relay each
    neighbour would see them. The record's ``bytes/up`` and ``bytes/down`` are of this way. What would travel from
    client to client is in ``server/edge_bytes``, one upload for each direction of an edge, and `EdgeTable` writes it
    edge by edge.

    Args:
        graph: ``ring``, on which client k has the neighbours k - 1 and k + 1, and the last client the first one;
            ``random``, drawn anew in each round; ``full``, all clients with all; the neighbours of each client, by id;
            or the path of a CSV file with a header and two ids in each row, an edge. One direction is enough.
        degree: neighbours of each client on a ``random`` graph, at least 1. All clients of a round have as many, but
            one where no graph is so: the degree and the number of clients are odd.

    Raises:
        MisconfigurationException: if ``degree`` is less than 1, or an edge names no two clients of the federation.
    """

    sends = frozenset({"weights"})
    fixed_clients = True

    def __init__(self, graph: str | dict[int, list[int]] = "ring", degree: int = 2) -> None:
        super().__init__()
        if not degree >= 1:
            raise MisconfigurationException(f"aggregator.degree={degree} must be 1 or more neighbours.")
        self.graph, self.degree = graph, degree

    def setup(self, server: Server) -> None:
        """Start from the common initial model at every client, and read a given graph."""
        self.seed = server.seed
        self.state |= {"initial": server.weights, "models": {}, "edges": torch.empty(0, 3, dtype=torch.int64)}
        if self.graph not in ("random", "full"):
            # a resumed run goes on with the checkpoint's, also where the file has changed
            self.state["graph"] = self._given(server.num_clients)

    def _given(self, num_clients: int) -> Neighbours:
        """Return the same graph for all rounds.

        Args:
            num_clients: number of clients.
        """
        if self.graph == "ring":
            edges = [(client, (client + 1) % num_clients) for client in range(num_clients if num_clients > 1 else 0)]
        elif isinstance(self.graph, str):
            edges = read_edges(self.graph)
        else:
            edges = [(client, other) for client, others in self.graph.items() for other in others]
        for client, other in edges:
            if client == other or not {client, other} <= set(range(num_clients)):
                raise MisconfigurationException(
                    f"aggregator.graph={self.graph} has an edge of clients {client} and {other}; an edge is of two "
                    f"different clients, with ids from 0 to {num_clients - 1}."
                )
        return both_ways(range(num_clients), edges)

    def neighbours(self, clients: Sequence[int], round: int) -> Neighbours:
        """Return the neighbours of a round's clients, by id: a function of the clients, the seed and the round.

        Args:
            clients: ids of the clients whose models arrived.
            round: the round's number, from 0.
        """
        if "graph" in self.state:
            there = set(clients)
            graph = self.state["graph"]
            return {client: [other for other in graph[client] if other in there] for client in clients}
        if self.graph == "full":
            return {client: sorted(set(clients) - {client}) for client in clients}
        # by a number of each client's own, so that the others keep their order when one is left out
        circle = sorted(clients, key=lambda client: derive_seed(self.seed, "graph", round, client))
        return regular(circle, self.degree)

    def spread(self, updates: Updates, round: int) -> tuple[Neighbours, dict[str, float]]:
        """Return the round's graph, and the bytes on edges for the record; keep the edges in the state.

        Args:
            updates: updates by client id, at least one.
            round: the round's number, from 0.

        Returns:
            The neighbours, and the numbers ``edges``, counting both directions, ``edge_bytes``, their sum, and
            ``edge_bytes_max``, what the client with the most bytes receives.
        """
        hears = self.neighbours(list(updates), round)
        sizes = {client: num_bytes(update) for client, update in updates.items()}
        rows = [(other, client, sizes[other]) for client, others in hears.items() for other in others]
        self.state["edges"] = torch.tensor(rows, dtype=torch.int64).reshape(-1, 3)
        received = [sum(sizes[other] for other in others) for others in hears.values()]
        return hears, {"edges": len(rows), "edge_bytes": sum(received), "edge_bytes_max": max(received)}

    def download(self, client: int) -> Message:
        """Return the client's model, the common initial one before its first round."""
        return {"weights": self.state["models"].get(client, self.state["initial"])}

    def welcome(self, client: int, update: Message | None) -> Message:
        """Return the mean of all clients' models; a newcomer has no place on the graph."""
        models = list(self.state["models"].values())
        return {"weights": weighted_mean(models, [1 / len(models)] * len(models)) if models else self.state["initial"]}


def both_ways(clients: Sequence[int], edges: Sequence[tuple[int, int]]) -> Neighbours:
    """Return the neighbours of each client, with every edge in both directions, once.

    >>> both_ways([0, 1, 2], [(0, 1), (1, 0)])
    {0: [1], 1: [0], 2: []}

    Args:
        clients: ids.
        edges: pairs of ids.
    """
    found: dict[int, set[int]] = {client: set() for client in clients}
    for client, other in edges:
        found[client].add(other)
        found[other].add(client)
    return {client: sorted(others) for client, others in found.items()}


def regular(circle: Sequence[int], degree: int) -> Neighbours:
    r"""Return a graph on which each client has as many neighbours: the nearest ones on a circle.

    Half of them are before it and half behind it; of an odd number, the last one is on the other side of the circle.
    Drawn anew in each round, circles bring models together as fast as any graph on which all have d neighbours: the
    means of `metropolis` leave, in expectation, :math:`\frac{1 - d / (n - 1)}{d + 1}` of the squared distances of n
    models from their mean.

    >>> regular([4, 0, 7, 2], 2)
    {0: [4, 7], 2: [4, 7], 4: [0, 2], 7: [0, 2]}
    >>> regular([4, 0, 7, 2], 1)
    {0: [2], 2: [0], 4: [7], 7: [4]}

    Args:
        circle: ids in their order.
        degree: d, at least 1; at most all others are neighbours.
    """
    count = len(circle)
    if degree >= count - 1:
        near = [(client, other) for client in circle for other in circle if client != other]
    else:
        near = [(circle[k], circle[(k + far) % count]) for far in range(1, degree // 2 + 1) for k in range(count)]
        near += [(circle[k], circle[k + count // 2]) for k in range(count // 2) if degree % 2]
    return both_ways(sorted(circle), near)


def metropolis(hears: Neighbours) -> list[list[float]]:
    r"""Return Metropolis and Hastings's weights of a graph, symmetric and with rows of sum 1: doubly stochastic.

    .. math:: W_{kj} = \frac{1}{1 + \max(d_k, d_j)} \text{ for neighbours}, \qquad W_{kk} = 1 - \sum_{j \ne k} W_{kj}

    with the number :math:`d_k` of client k's neighbours. Where all have d neighbours, each weight is
    :math:`1 / (d + 1)`.
    Source: Xiao, Boyd and Lall, 2006 (https://stanford.edu/~boyd/papers/avg_metropolis.html).

    >>> metropolis({0: [1], 1: [0, 2], 2: [1], 5: []})[1]
    [0.3333333333333333, 0.33333333333333337, 0.3333333333333333, 0.0]

    Args:
        hears: the neighbours of each client, in both directions.

    Returns:
        ``[n, n]``, in the order of the clients.
    """
    rows = []
    for client, others in hears.items():
        row = {other: 1 / (1 + max(len(others), len(hears[other]))) for other in others}
        row[client] = 1 - math.fsum(row.values())
        rows.append([row.get(other, 0.0) for other in hears])
    return rows


def read_edges(path: str) -> list[tuple[int, int]]:
    """Return the edges of a CSV file.

    Args:
        path: the file's path; a header, and two ids in each row.

    Raises:
        MisconfigurationException: if there is no such file, or a row has something else.
    """
    if not Path(path).is_file():
        raise MisconfigurationException(
            f"aggregator.graph={path} is no file; take ring, random, full, the neighbours of each client, such as "
            "{0: [1, 2]}, or the path of a CSV file of edges."
        )
    with Path(path).open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.reader(file) if row][1:]
    try:
        return [(int(client), int(other)) for client, other in rows]
    except ValueError as error:
        raise MisconfigurationException(
            f"aggregator.graph={path}: {error}; give a header, and in each row two clients' ids, such as 0,1."
        ) from None
