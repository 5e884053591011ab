"""Client selection: the base class, what is known at the start of a round, and choices that ask no client."""

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.settings import is_count

Reports: TypeAlias = Mapping[int, Mapping[str, float]]
"""Numbers that clients report about themselves, by id and name."""


class RoundStart(NamedTuple):
    """A round about to start.

    Args:
        round: number of the round, from 0.
        clients: ids of all clients, ascending.
        size: number of clients to select, by ``trainer.clients_per_round``.
        random: the round's own random stream, a function of the run's seed and of the round; under a guarantee that
            counts on secret cohorts it is the operating system's.
        losses: asks clients for the loss of the model that they would receive now, on their training samples; clients
            without an answer are absent from the result. Each asked client is sent its payload for this, and the bytes
            are counted.
    """

    round: int
    clients: Sequence[int]
    size: int
    random: random.Random
    losses: Callable[[Sequence[int]], Mapping[int, float]]


class Sampling(NamedTuple):
    """The sampling of cohorts, as a privacy guarantee counts it: independent of clients' samples and reports.

    Args:
        expected: number of clients per round, on average or at most: the divisor of sums, whatever the cohort.
        rate: probability with which each client takes part, independently of others and anew in each round; 1 without
            independent sampling.
    """

    expected: float
    rate: float = 1.0


class Selection(ABC):
    """Choose the clients of each round; subclasses implement `choose`.

    All memory is in ``state``, plain values that a checkpoint holds, and changes only in `remember`. All random numbers
    come from the round's stream.
    """

    asks: frozenset[str] = frozenset()
    """Names of the numbers that clients must report, among those that `ClientModule.tells` offers."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    def setup(self, sizes: Mapping[int, int]) -> None:
        """Start anew before the first round; on resume, the checkpoint's entries of ``state`` follow.

        Args:
            sizes: training samples of all clients, by id.

        Raises:
            MisconfigurationException: if the settings don't fit the clients.
        """
        self.sizes = sizes
        self.state = {}

    def check(self, share: float, size: int, num_clients: int) -> None:  # noqa: B027 - most fit any
        """Refuse settings that don't fit the size of a round.

        Args:
            share: ``trainer.clients_per_round`` as given.
            size: ``trainer.clients_per_round`` as a number of clients.
            num_clients: number of clients.

        Raises:
            MisconfigurationException: if the settings don't fit.
        """

    def sampling(self, size: int, num_clients: int) -> Sampling | None:
        """Return the sampling for privacy guarantees; None if clients' samples or reports influence the choice.

        Each class must define this method itself; an inherited one doesn't count.

        Args:
            size: number of clients per round, by ``trainer.clients_per_round``.
            num_clients: number of clients.
        """
        # No guarantee unless a class states one itself: a subclass may choose otherwise, and its parent's sampling
        # would be false.
        return None

    @property
    def states_sampling(self) -> bool:
        """Whether its own class states the sampling."""
        # Not inherited: a subclass may choose otherwise, and its parent's scheme would make a false guarantee.
        return "sampling" in vars(type(self))

    @abstractmethod
    def choose(self, start: RoundStart) -> Sequence[int]:
        """Return the ids of the round's clients, each once, in any order; an empty list is allowed.

        Args:
            start: the beginning round.
        """

    def remember(self, reports: Reports, round: int) -> None:  # noqa: B027 - some remember nothing
        """Take note of a finished round.

        Args:
            reports: the numbers named in ``asks``, by name, of each client whose update counts.
            round: number of the round, from 0.
        """


def enough(min_results: int | float, asked: int, cohort: int) -> int:
    """Return the number of answers that ends a phase of a round.

    >>> enough(0.8, 10, cohort=20), enough(8, 100, cohort=10)
    (8, 80)

    Args:
        min_results: a share of the asked clients, or a number of a full round's.
        asked: number of clients asked.
        cohort: number of clients in a full round.
    """
    share = min_results / cohort if is_count(min_results) else min_results
    # 1e-9: a share such as 8 / 10 times 10 may be 8.000000000000002
    return min(asked, math.ceil(share * asked - 1e-9))


def drawn_by_weight(draw: random.Random, clients: Sequence[int], size: int, weights: Mapping[int, float]) -> list[int]:
    """Draw clients one after another without replacement, with probabilities proportional to weights.

    Equal weights give `random.Random.sample`, bit for bit.

    >>> drawn_by_weight(random.Random(0), [0, 1, 2], 2, {0: 1.0, 1: 0.0, 2: 5.0})
    [2, 0]

    Args:
        draw: the random stream.
        clients: ids.
        size: number of clients to draw, at most all.
        weights: weight by id, at least 0; clients of weight 0 come last.
    """
    if len({weights[client] for client in clients}) <= 1:
        return draw.sample(list(clients), min(size, len(clients)))
    # Exponential clocks with the weights as rates: the order in which they ring is that of weighted draws without
    # replacement, with one random number per client. A clock of rate 0 never rings.
    rings = {
        client: -math.log(1 - draw.random()) / weights[client] if weights[client] else math.inf for client in clients
    }
    # the id decides among clients of weight 0, which are all at infinity
    return sorted(clients, key=lambda client: (rings[client], client))[:size]


class Uniform(Selection):
    """Draw ``trainer.clients_per_round`` clients without replacement, all equally likely.

    Source: McMahan et al., 2017, Algorithm 1 (https://arxiv.org/abs/1602.05629).
    """

    def sampling(self, size: int, num_clients: int) -> Sampling:
        """Return the size, the only influence on cohorts.

        Args:
            size: number of clients per round, by ``trainer.clients_per_round``.
            num_clients: ignored.
        """
        return Sampling(size)

    def choose(self, start: RoundStart) -> list[int]:
        """Return the cohort of the round.

        Args:
            start: the beginning round.
        """
        return start.random.sample(list(start.clients), start.size)


class Cyclic(Selection):
    """Take ``trainer.clients_per_round`` clients in turn, by their ids, and begin again after the last one.

    With m of N clients each comes back after N / m rounds, rounded down, or later: the separation that `DPFTRL` asks
    for. Nothing is drawn.
    """

    def sampling(self, size: int, num_clients: int) -> Sampling:
        """Return the size of cohorts; nothing is random, and so nothing amplified."""
        return Sampling(size)

    def choose(self, start: RoundStart) -> list[int]:
        """Return the next clients."""
        first = start.round * start.size
        return [start.clients[(first + k) % len(start.clients)] for k in range(start.size)]


class Poisson(Selection):
    """Draw each client independently with the same probability, so that cohorts differ in size.

    Analyses of client-level differential privacy call this Poisson sampling. A round may have no client: its row then
    has ``clients`` 0 and an empty ``cohort``, the aggregator receives no updates, by default keeps its state, and the
    run goes on. The rate alone decides the size of a round, so ``trainer.clients_per_round`` must be left out.

    Args:
        rate: probability of each client, above 0 and up to 1.

    Raises:
        MisconfigurationException: if ``rate`` is out of its range.
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        if not 0 < rate <= 1:
            raise MisconfigurationException(f"trainer.cohort.rate={rate} must be above 0 and up to 1, such as 0.1.")
        self.rate = rate

    def check(self, share: float, size: int, num_clients: int) -> None:
        """Refuse a size of rounds in addition to the rate.

        Args:
            share: ``trainer.clients_per_round`` as given.
            size: ``trainer.clients_per_round`` as a number of clients.
            num_clients: number of clients.
        """
        # 1.0 is the default and means "not set"; the integer 1 means one client
        if share != 1.0 or isinstance(share, int):
            raise MisconfigurationException(
                f"trainer.clients_per_round={share} fixes the size of a round, and trainer.cohort=Poisson draws each "
                "client by its rate; take clients_per_round=1.0, which is the default."
            )

    def sampling(self, size: int, num_clients: int) -> Sampling:
        """Return the expected size and the rate.

        Args:
            size: ignored.
            num_clients: number of clients.
        """
        return Sampling(self.rate * num_clients, self.rate)

    def choose(self, start: RoundStart) -> list[int]:
        """Return the cohort of the round.

        Args:
            start: the beginning round.
        """
        return [client for client in start.clients if start.random.random() < self.rate]
