"""What chooses the clients of a round: its base class, and what it knows when a round starts."""

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

Told: TypeAlias = Mapping[int, Mapping[str, float]]
"""What clients tell of themselves, by id and name."""


class RoundStart(NamedTuple):
    """A round that is about to start.

    Args:
        round: its number, from 0.
        clients: ids of all clients, ascending.
        size: how many shall take part, by ``trainer.clients_per_round``.
        random: the round's own stream, a function of the run's seed and of the round.
        losses: asks clients how the model that they receive now fares on their training samples; those who don't answer
            have none. Each of them is sent its payload for it, which is counted.
    """

    round: int
    clients: Sequence[int]
    size: int
    random: random.Random
    losses: Callable[[Sequence[int]], Mapping[int, float]]


class Sampling(NamedTuple):
    """How cohorts are drawn, as a guarantee of privacy counts it: never by what clients hold or tell.

    Args:
        expected: how many clients a round has, on average or at most: what sums are divided by, whoever came.
        rate: probability with which each client takes part by itself, in each round anew; 1 where it isn't so.
    """

    expected: float
    rate: float = 1.0


class Selection(ABC):
    """Chooses the clients of each round; subclasses say how in `choose`.

    All that it remembers is in its ``state``, plain values that a checkpoint holds, and changes in `remember` alone.
    Whatever it draws, it draws from the stream of the round.
    """

    asks: frozenset[str] = frozenset()
    """What clients have to tell, of what their `ClientModule.tells` offers."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    def setup(self, sizes: Mapping[int, int]) -> None:
        """Starts anew, before the first round; on resume the checkpoint's entries of ``state`` follow.

        Args:
            sizes: training samples of all clients, by id.

        Raises:
            MisconfigurationException: if its settings don't fit them.
        """
        self.sizes = sizes
        self.state = {}

    def check(self, share: float, size: int, num_clients: int) -> None:  # noqa: B027 - most fit any
        """Refuses settings that don't fit the size of a round.

        Args:
            share: ``trainer.clients_per_round`` as it is given.
            size: how many clients that is.
            num_clients: how many there are.

        Raises:
            MisconfigurationException: if they don't.
        """

    def sampling(self, size: int, num_clients: int) -> Sampling | None:
        """How it draws; None where that depends on what clients hold or tell. Each class says so itself.

        Args:
            size: how many shall take part, by ``trainer.clients_per_round``.
            num_clients: how many there are.
        """
        return None

    @abstractmethod
    def choose(self, start: RoundStart) -> Sequence[int]:
        """The ids of the clients that take part, each once, in any order; there may be none.

        Args:
            start: the round that is about to start.
        """

    def remember(self, told: Told, round: int) -> None:  # noqa: B027 - some remember nothing
        """Takes note of a round that is over.

        Args:
            told: of each client whose update counts, what it `asks` for, by name.
            round: the round's number, from 0.
        """


def drawn_by_weight(draw: random.Random, clients: Sequence[int], size: int, weights: Mapping[int, float]) -> list[int]:
    """Clients drawn one after another without replacement, each draw by the weights of those who are left.

    Where all weights are equal, it is `random.Random.sample`, bit for bit.

    >>> drawn_by_weight(random.Random(0), [0, 1, 2], 2, {0: 1.0, 1: 0.0, 2: 5.0})
    [2, 0]

    Args:
        draw: what to draw from.
        clients: ids.
        size: how many of them, at most all.
        weights: by id, at least 0; those of weight 0 come last.
    """
    if len({weights[client] for client in clients}) <= 1:
        return draw.sample(list(clients), size)
    # the first to ring of clocks with these rates; one that never rings is behind all others
    rings = {
        client: -math.log(1 - draw.random()) / weights[client] if weights[client] else math.inf for client in clients
    }
    return sorted(clients, key=lambda client: (rings[client], client))[:size]
