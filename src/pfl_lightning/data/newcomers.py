"""New clients: absent from a federation's training, they join afterwards."""

from __future__ import annotations

from dataclasses import replace
from numbers import Integral

import numpy as np
from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.data.division import Division


def how_many(new_clients: float, num_clients: int | None, total: int = 0) -> int:
    """Return the number of new clients.

    >>> how_many(3, 9), how_many(0.25, 9), how_many(0.01, 9), how_many(0, 9), how_many(0.25, None, total=12)
    (3, 3, 1, 0, 3)

    Args:
        new_clients: number of new clients, or their share of all clients in (0, 1), which means at least one client.
        num_clients: number of the federation's clients M; None if all existing clients take part or are new.
        total: number of all clients, if M is None.

    Raises:
        MisconfigurationException: no client is left for the federation.
    """
    if isinstance(new_clients, Integral):
        count = int(new_clients)
    elif num_clients is None:
        count = max(1, round(total * new_clients))
    else:
        # the share is of all clients together: M are (1 - share) of them
        count = max(1, round(num_clients * new_clients / (1 - new_clients)))
    if num_clients is None and count >= max(total, 1):
        raise MisconfigurationException(
            f"data.new_clients={new_clients} leaves none of {total} clients for the federation; take fewer"
        )
    return count


def newcomers_last(division: Division, count: int, seed: int) -> Division:
    """Draw the new clients of a division and put them last; the order of the remaining clients stays.

    Args:
        division: the division among the federation's and the new clients.
        count: number of new clients; 0 changes nothing.
        seed: seed of the draw, 0 or more.
    """
    if not count:
        return division
    total = len(division.clients)
    # a stream of its own: splits draw from (seed, 1 + client, ...) and (seed, 0, small number)
    drawn = np.random.default_rng((seed, 0, 0, 1)).permutation(total)[:count]
    order = [*sorted(set(range(total)) - set(drawn.tolist())), *sorted(drawn.tolist())]
    clients = [division.clients[part] for part in order]
    names = [division.names[part] for part in order] if division.names else []
    return replace(division, clients=clients, names=names, newcomers=count)
