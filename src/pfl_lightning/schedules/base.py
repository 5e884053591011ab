"""The base class of schedules: speeds of devices, and what a clock changes in a round."""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from random import Random
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeAlias, TypedDict, cast, get_args

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from pfl_lightning.federation.stages import ConfiguredStage, Federated, Plan
from pfl_lightning.messages import Updates, num_bytes, tree_map
from pfl_lightning.runs.run_status import SIMULATED
from pfl_lightning.seeds import derive_seed
from pfl_lightning.selection.availability import read_by_client
from pfl_lightning.server.aggregator_list import parts_of
from pfl_lightning.settings import as_call, check_choices, check_least

Distribution: TypeAlias = Literal["constant", "lognormal", "uniform", "exponential", "halfnormal"]
"""Distributions of the clients' seconds per sample."""


class Turn(NamedTuple):
    """A round about to start, as a schedule sees it.

    Args:
        round: number of the round, from 0.
        clients: ids of all clients, ascending.
        size: number of clients that train at once, by ``trainer.clients_per_round``.
        draw: chooses clients, by ``trainer.cohort``: of some ids, so many, in the round's draw of a number from 0.
        samples: returns the number of samples that a client's local training processes, every pass counted.
        send: sends a client the present payload, and returns a record of it.
    """

    round: int
    clients: Sequence[int]
    size: int
    draw: Callable[[Sequence[int], int, int], list[int]]
    samples: Callable[[int], int]
    send: Callable[[int], dict[str, Any]]


class Course(NamedTuple):
    """The course of a round on the clock.

    Args:
        plan: who takes part.
        seconds: length of the round on the simulated clock.
        state: the schedule's state after the round.
    """

    plan: Plan
    seconds: float
    state: dict[str, Any]


class SpeedSettings(TypedDict, total=False):
    """Settings of `Schedule`, for the ``**kwargs`` of subclasses."""

    seconds: float
    distribution: Distribution
    spread: float
    delay: float
    table: str | None
    dropout: float
    timeout: float | None


class Schedule(ConfiguredStage):
    """Base class of schedules, with the speeds of clients' devices.

    A client's training takes its delay, and its seconds per sample times the samples of all local passes:
    ``trainer.local_epochs`` or ``trainer.local_steps``, while phases of a method's own don't count. Seconds per sample
    are drawn once per client, by the run's seed and the client's id, or read from a table. Times of the schedule depend
    on nothing that is measured, so that they are equal under every engine and in a resumed run.

    Args:
        seconds: seconds per sample, above 0: of every client, or the scale of the distribution.
        distribution: ``constant``, ``seconds`` for every client; ``lognormal``, ``seconds`` times e to the power of
            ``spread`` times a standard normal number, so that ``seconds`` is the median; ``uniform``, ``seconds`` times
            a number from 1 - ``spread`` to 1 + ``spread``; ``exponential``, with the mean ``seconds``; ``halfnormal``,
            ``seconds`` times the absolute value of a standard normal number.
        spread: width of ``lognormal`` (0 or more) and of ``uniform`` (from 0 to 1).
        delay: seconds of the network, for download and upload together, 0 or more.
        table: path of a CSV file instead of a distribution, with a header and one row per client: the client's id, its
            seconds per sample, and optionally a delay of its own in place of ``delay``.
        dropout: probability that a client's update never arrives, from 0 to below 1, drawn for each training by itself.
        timeout: seconds for which the server waits for an update, above 0; None waits for all.

    Raises:
        MisconfigurationException: if a value is out of range.
    """

    does = MappingProxyType(
        {
            "chooses": "leaves updates out by the clients' numbers of samples",
            "clock": "is a clock of clients that train at once, each on its device",
        }
    )
    excludes = MappingProxyType(
        {
            "sites": "simulates a clock, where these have the real one; leave it out, and set the app's min-results, "
            "grace, timeout and late-rounds",
        }
    )

    def __init__(
        self,
        seconds: float = 0.01,
        distribution: Distribution = "lognormal",
        spread: float = 1.0,
        delay: float = 0.0,
        table: str | None = None,
        dropout: float = 0.0,
        timeout: float | None = None,
    ) -> None:
        check_choices("trainer.schedule", distribution=(distribution, get_args(Distribution)))
        check_least("trainer.schedule", spread=(spread, 0), delay=(delay, 0))
        if not 0 < seconds < math.inf:
            raise MisconfigurationException(f"trainer.schedule.seconds={seconds} must be above 0, such as 0.01.")
        if not spread < math.inf or (distribution == "uniform" and spread > 1):
            raise MisconfigurationException(
                f"trainer.schedule.spread={spread} must be from 0 to 1 for distribution='uniform', and finite for any."
            )
        if not delay < math.inf:
            raise MisconfigurationException(f"trainer.schedule.delay={delay} must be finite, such as 1.0.")
        if not 0 <= dropout < 1:
            raise MisconfigurationException(
                f"trainer.schedule.dropout={dropout} must be a probability from 0 to below 1, such as 0.1."
            )
        if timeout is not None and not timeout > 0:
            raise MisconfigurationException(
                f"trainer.schedule.timeout={timeout} must be a number of seconds above 0, such as 600; leave it out to "
                "wait for all."
            )
        self.seconds, self.distribution, self.spread, self.delay = seconds, distribution, spread, delay
        self.table, self.dropout, self.timeout = table, dropout, timeout
        self.state: dict[str, Any] = {}

    def __repr__(self) -> str:
        return as_call(self)

    @property
    def setting(self) -> str:
        """The setting, as errors name it."""
        return f"trainer.schedule={type(self).__name__}"

    def begin(self, federation: Federated) -> None:
        """Start the clock, and refuse a timeout before the end of every client's training."""
        data, clients = federation.data, federation.data.num_clients
        self.setup(cast(int, federation.seed), clients)
        # samples that move between clients may be enough later
        if federation.is_fitting and not data.redivides:
            self.check_timeout(((k, samples_of(federation, k)) for k in range(clients)), data.client_label)

    def on_plan(self, federation: Federated, there: Sequence[int], size: int) -> Plan:
        """Return the course of a round, and count the payloads that travel."""
        copies: dict[int, tuple[Tensor, Tensor]] = {}

        def send(client: int) -> dict[str, Any]:
            job = federation.job(client)
            federation.further_bytes[0] += num_bytes(job.travelling)
            # Copies, as servers may change their tensors in place; one of each tensor for all clients that start in
            # the round.
            payload = tree_map(lambda t: copies.setdefault(id(t), (t, t.detach().clone()))[1], job.payload)
            return {"payload": payload, "lr_factor": federation.lr_factor}

        turn = Turn(federation.round, there, size, federation.cohort, partial(samples_of, federation), send)
        self._course = self.course(turn)
        plan = self._course.plan
        if not plan.sent:
            # payloads of updates that don't arrive have travelled, too
            absent = sorted(set(plan.cohort).difference(plan.arrived))
            federation.further_bytes[0] += sum(num_bytes(federation.job(client).travelling) for client in absent)
        return plan

    def on_deliver(self, federation: Federated, plan: Plan, updates: Updates) -> Updates:
        """Return the updates, with the entry ``arrival`` for servers that read it, and record the clock."""
        stale = {k: federation.round - plan.sent[k]["round"] if plan.sent else 0 for k in updates}
        federation.metrics[SIMULATED] = self._course.seconds
        if plan.sent and stale:
            federation.metrics["staleness"] = sum(stale.values()) / len(stale)
        if not any(part.reads_arrivals for part in parts_of(federation.aggregator)):
            return updates
        places = {client: place for place, client in enumerate(plan.arrived)}
        added: Updates = {}
        for client, update in updates.items():
            payload = plan.sent[client]["payload"] if plan.sent else federation.aggregator.download(client)
            counts = {"place": torch.tensor(places[client]), "staleness": torch.tensor(stale[client])}
            added[client] = {**update, "arrival": counts | {"weights": payload.get("weights", {})}}
        return added

    def end(self, federation: Federated) -> None:
        """Move the clock on."""
        self.state = self._course.state

    def state_dict(self) -> dict[str, Any]:
        """Return the clock, and what is under way."""
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with a checkpoint's clock."""
        self.state = self.state | state

    def without_updates(self) -> list[str]:
        """Return the settings that keep updates from coming."""
        settings = {"timeout": self.timeout, "dropout": self.dropout or None}
        return [f"trainer.schedule.{name}={value}" for name, value in settings.items() if value is not None]

    def setup(self, seed: int, num_clients: int) -> None:
        """Start the clock before the first round; on resume, the checkpoint's ``state`` follows.

        Args:
            seed: the federation's seed.
            num_clients: number of clients.

        Raises:
            MisconfigurationException: if the table can't be read, or lacks a client.
        """
        self.seed = seed
        if self.table is None:
            self.speeds = {client: (self._drawn(client), self.delay) for client in range(num_clients)}
        else:
            self.speeds = read_speeds(self.table, self.delay)
            if missing := sorted(set(range(num_clients)) - self.speeds.keys()):
                raise MisconfigurationException(
                    f"trainer.schedule.table={self.table} has no row for client {missing[0]}; give each of the "
                    f"{num_clients} clients one row, with ids from 0 to {num_clients - 1}."
                )
        self.state = {"now": 0.0}

    def _drawn(self, client: int) -> float:
        """Return a client's seconds per sample by the distribution."""
        # a stream of each client's own, so that further clients leave the others' speeds as they are
        draw = Random(derive_seed(self.seed, "speed", client))
        factors: dict[str, Callable[[], float]] = {
            "constant": lambda: 1.0,
            "lognormal": lambda: math.exp(self.spread * draw.gauss(0, 1)),
            "uniform": lambda: draw.uniform(1 - self.spread, 1 + self.spread),
            "exponential": lambda: draw.expovariate(1),
            "halfnormal": lambda: abs(draw.gauss(0, 1)),
        }
        return self.seconds * factors[self.distribution]()

    def took(self, client: int, samples: int) -> float:
        """Return the seconds of a client's training, with download and upload.

        Args:
            client: the client's id.
            samples: number of samples of all local passes.
        """
        per_sample, delay = self.speeds[client]
        return delay + per_sample * samples

    def check_timeout(self, samples: Iterable[tuple[int, int]], label: Callable[[int], str]) -> None:
        """Refuse a timeout before the end of every client's training, with which no update would ever come.

        Args:
            samples: each client's id and number of samples of all local passes.
            label: returns a client's id and name for messages.

        Raises:
            MisconfigurationException: if no client is fast enough.
        """
        if self.timeout is None:
            return
        took = {client: self.took(client, count) for client, count in samples}
        fastest = min(took, key=took.__getitem__)
        if took[fastest] > self.timeout:
            raise MisconfigurationException(
                f"trainer.schedule.timeout={self.timeout} ends before the training of every client: the fastest, "
                f"client {label(fastest)}, takes {took[fastest]:.3g} seconds; take more than that."
            )

    def is_lost(self, client: int, round: int) -> bool:
        """Return True if the update of a client's training never arrives.

        Args:
            client: the client's id.
            round: number of the round in which the training starts, from 0.
        """
        # no draw at 0, so that a schedule without dropouts costs nothing here
        return self.dropout > 0 and Random(derive_seed(self.seed, "dropout", round, client)).random() < self.dropout

    @abstractmethod
    def updates(self, size: int) -> int:
        """Return the number of updates for which a round waits.

        Args:
            size: number of clients that train at once.
        """

    def check_size(self, size: int, num_clients: int) -> None:
        """Refuse settings that don't fit the number of clients.

        Args:
            size: number of clients that train at once.
            num_clients: number of clients.

        Raises:
            MisconfigurationException: if a setting doesn't fit.
        """

    @abstractmethod
    def course(self, turn: Turn) -> Course:
        """Return the course of a round, and change nothing.

        Args:
            turn: the round about to start.
        """


def samples_of(federation: Federated, client: int) -> int:
    """Return the number of samples that a client's local training processes, every pass counted.

    Args:
        federation: the federation.
        client: the client's id.
    """
    data = federation.data
    # of the engine, as names of clients are looked up but once
    work = federation.engines[0].work
    return int(federation.options.samples_trained(data.size(client, "train"), work, client))


def read_speeds(path: str, delay: float) -> dict[int, tuple[float, float]]:
    """Return seconds per sample and delay of each client, by id.

    Args:
        path: path of the CSV file.
        delay: delay of clients if the table has none.

    Raises:
        MisconfigurationException: if the file is no such table.
    """
    _, lines = read_by_client(path, "trainer.schedule.table")
    speeds: dict[int, tuple[float, float]] = {}
    for line, client, values in lines:
        fits = len(values) in (1, 2) and 0 < values[0] < math.inf and all(0 <= each < math.inf for each in values)
        if client in speeds or not fits:
            raise MisconfigurationException(
                f"trainer.schedule.table={path}, line {line}: give the id of a client that has no other line, its "
                "seconds per sample above 0 and, where the header has a third column, its delay of 0 or more."
            )
        speeds[client] = values[0], values[1] if len(values) > 1 else delay
    return speeds
