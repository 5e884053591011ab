"""New clients: those whom a federation never sees, to whom its result is given afterwards."""

from __future__ import annotations

from dataclasses import replace
from numbers import Integral

import numpy as np

from pfl_lightning.data.division import Division


def how_many(new_clients: float, num_clients: int) -> int:
    """The number of new clients beside those of the federation.

    >>> how_many(3, 9), how_many(0.25, 9), how_many(0.01, 9), how_many(0, 9)
    (3, 3, 1, 0)

    Args:
        new_clients: Their number, or their share of all clients in (0, 1), which is at least one client.
        num_clients: Number of the federation's clients M.
    """
    if isinstance(new_clients, Integral):
        return int(new_clients)
    return max(1, round(num_clients * new_clients / (1 - new_clients)))


def newcomers_last(division: Division, count: int, seed: int) -> Division:
    """Draw which parts of a division are new clients', and put these behind the others, whose order stays.

    Args:
        division: Of the federation's and of the new clients.
        count: Number of new clients; 0 changes nothing.
        seed: Seed of the draw, 0 or more.
    """
    if not count:
        return division
    total = len(division.clients)
    # no stream of the splits, which are (seed, 1 + client, ...) and (seed, 0, ...) with small numbers
    drawn = np.random.default_rng((seed, 0, 0, 1)).permutation(total)[:count]
    order = [*sorted(set(range(total)) - set(drawn.tolist())), *sorted(drawn.tolist())]
    return replace(division, clients=[division.clients[part] for part in order])
