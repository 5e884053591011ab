"""Stages of a round: what a setting or a callback adds between the steps that every round has."""

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer

from pfl_lightning.client.module import ClientModule
from pfl_lightning.data import FederatedDataModule, Split
from pfl_lightning.engines import ClientState, Engine, Job, LocalWork, Outcome
from pfl_lightning.messages import Message, StateDict, Updates
from pfl_lightning.server.base import Aggregator

__all__ = ["ConfiguredStage", "Federated", "Part", "Plan", "Stage"]

Declared = Mapping[str, str]
"""Reasons, each a predicate behind the setting's name, by the effect on rounds that they are about."""
NOTHING: Declared = MappingProxyType({})


class Plan(NamedTuple):
    """A round's participants, and the clients whose updates arrive.

    Args:
        cohort: ids of the clients whose training ends in the round, or is given up, ascending.
        arrived: ids of the clients whose updates come, in the order of arrival; ids decide at equal times.
        sent: ``round``, ``payload`` and ``lr_factor`` of the start of each client, by id; empty if all start now.
        took: seconds from a client's start to its update, by id, in place of measured ones.
    """

    cohort: list[int]
    arrived: list[int]
    sent: Mapping[int, Mapping[str, Any]] = MappingProxyType({})
    took: Mapping[int, float] = MappingProxyType({})


class Declares(Protocol):
    """Whatever takes part in a run and has effects on rounds, or excludes effects of others."""

    @property
    def setting(self) -> str:
        """The setting, as errors name it, such as ``trainer.secure_sum``."""
        ...

    @property
    def does(self) -> Declared:
        """Effects on rounds."""
        ...

    @property
    def excludes(self) -> Declared:
        """Reasons against other parts' effects."""
        ...


class Part(NamedTuple):
    """What a part of the run that is no stage does and excludes, such as the data.

    Args:
        setting: the setting, as errors name it.
        does: its effects on rounds.
        excludes: effects of others that it doesn't go together with.
    """

    setting: str
    does: Declared = NOTHING
    excludes: Declared = NOTHING


class Federated(Protocol):
    """What a round and its stages see of the federation (`Federation`)."""

    metrics: dict[str, Any]
    """The round's row of the record so far."""
    further_bytes: list[int]
    """Bytes down and up beside those of the updates and of their payloads: sent to clients asked by the selection, or
    whose update comes in a later round or never; and reported up."""

    @property
    def options(self) -> Any:
        """The Trainer's settings, `FederationOptions`."""

    @property
    def trainer(self) -> Any:
        """The Trainer."""

    @property
    def client(self) -> ClientModule:
        """The client module."""

    @property
    def client_modules(self) -> list[ClientModule]:
        """The client module of each architecture."""

    @property
    def aggregator(self) -> Aggregator:
        """The server side."""

    @property
    def data(self) -> FederatedDataModule:
        """The clients' data."""

    @property
    def engines(self) -> list[Engine]:
        """The engine of each architecture."""

    @property
    def evaluations(self) -> Any:
        """The evaluations of clients, `Evaluations`."""

    @property
    def clients(self) -> MutableMapping[int, ClientState]:
        """The states of clients that have trained, by id."""

    @property
    def round(self) -> int:
        """Number of the round, from 0."""

    @property
    def seed(self) -> int | None:
        """The run's seed."""

    @property
    def lr_factor(self) -> float:
        """The round's learning rate divided by the configured one."""

    @property
    def drawn(self) -> tuple[int, list[int]]:
        """Number and cohort of a round that was drawn ahead."""

    @property
    def shared(self) -> StateDict:
        """The initial entries that clients share."""

    @property
    def shared_now(self) -> StateDict:
        """The entries that clients share, in their types of now."""

    def shared_of(self, client: int) -> StateDict:
        """Return entries of the names and shapes that a client shares."""

    @property
    def remembered(self) -> Any:
        """The aggregator's attributes, `Remembered`."""

    @property
    def publishable(self) -> tuple[str, ...]:
        """Columns under a guarantee of privacy; empty without one."""

    @property
    def is_deployed(self) -> bool:
        """Whether clients are at sites."""

    @property
    def is_fitting(self) -> bool:
        """Whether rounds are run, and not an evaluation alone."""

    @property
    def stages(self) -> "list[Stage]":
        """The stages of a round, in the order of their calls."""

    def architecture_of(self, client: int) -> int:
        """Return the index of a client's architecture."""

    def engines_of(self, clients: Sequence[int]) -> Iterable[tuple[Engine, list[int]]]:
        """Return pairs of an engine and its clients."""

    def sizes(self, clients: Iterable[int], split: Split) -> dict[int, int]:
        """Return clients' numbers of samples, by id."""

    def job(
        self, client: int, evaluate: tuple[Split, ...] = (), received: tuple[ClientState, Message] | None = None
    ) -> Job:
        """Return a client's work in the round."""

    def received(self, client: int) -> tuple[ClientState, Message]:
        """Return a client's state, and the payload that it would receive now."""

    def cohort(self, clients: Sequence[int], size: int, draw: int = 0) -> list[int]:
        """Return the ids of a cohort, drawn for the round."""

    def listeners(self, hook: str) -> list[Callable[..., Any]]:
        """Return the callbacks' own methods for a hook."""

    def call(self, hook: str, *args: Any) -> None:
        """Call a hook of all callbacks."""

    def show(self, name: str, value: float, on_bar: bool) -> None:
        """Give a value of the round to callbacks, and to the progress bar."""

    def keep_storable(self) -> None:
        """Convert what checkpoints can't take in the memory of server, selection and stages."""

    def privacy(self, final: bool = False) -> dict[str, Any]:
        """Return the guarantee of privacy so far."""


class Stage:
    """A part that a setting (`ConfiguredStage`) or a callback of the user's own (`FederatedCallback`) adds to rounds.

    A round chooses clients, sends each its payload, trains them, takes their updates, and aggregates these. A stage may
    decide who takes part (`on_plan`), and change what goes down (`on_send`), what comes up (`on_upload`), what the
    server takes (`on_collect`), and what it aggregates (`on_deliver`). The federation calls these hooks of the
    Trainer's settings first, and then of its callbacks, in their order.

    Two stages go together unless one `excludes` what the other `does`. The effects of this package's own stages are
    ``sums`` (the server learns sums alone), ``edits`` (changes single updates at the server), ``parts`` (clients send
    parts of their updates), ``chooses`` (leaves updates out by clients' samples), ``asks`` (asks clients about their
    training samples), ``moves`` (samples move between clients), ``turns`` (clients train in turns), ``clock`` (a
    simulated clock), ``stale`` (updates are of earlier models), ``sites`` (clients are at sites), ``pools`` (one client
    trains on all samples), ``continues`` (local epochs go on from round to round), ``any number`` (cohorts of any
    size), ``after`` (models are evaluated after clients' training), ``changes`` (samples change over the rounds), and
    ``sample level``, ``update level`` and ``sum level``: noise in gradients of samples, in updates, and in their sum.
    """

    does: Declared = NOTHING
    """Effects on rounds, with words for each: a predicate, such as ``{"sums": "hides single updates"}``."""
    excludes: Declared = NOTHING
    """Effects of others that it doesn't go together with, with the reason: a predicate."""
    reads_updates: bool = False
    """Whether it looks at clients' own updates, so that every rank of ``trainer.client_states=rank`` gets each of them
    and not sums alone."""

    @property
    def setting(self) -> str:
        """The setting, as errors name it."""
        return f"trainer.callbacks={type(self).__name__}"

    def on_plan(self, federation: Federated, there: Sequence[int], size: int) -> Plan | None:
        """Return the round's participants, without a change of state; None, the default, for other stages' choice.

        Args:
            federation: the federation.
            there: ids of the clients within reach.
            size: clients to choose, by ``trainer.clients_per_round``.
        """
        return None

    def on_send(self, federation: Federated, job: Job) -> Job:
        """Return a client's work, with a payload that is perhaps another one; its bytes are counted by the payload.

        Args:
            federation: the federation.
            job: the client's work in the round.
        """
        return job

    def on_upload(self, outcome: Outcome, job: Job, module: ClientModule) -> Outcome:
        """Return what leaves the client after its training, such as a compressed update; called at the client.

        Args:
            outcome: the outcome of the training.
            job: the client's work, with the received payload.
            module: the client module of the client's architecture.
        """
        return outcome

    def on_collect(
        self, federation: Federated, cohort: Sequence[int], outcomes: dict[int, Outcome]
    ) -> dict[int, Outcome]:
        """Return what the server learns of a round's outcomes, such as sums in place of updates.

        Args:
            federation: the federation.
            cohort: ids of the round's clients.
            outcomes: of those that answered.
        """
        return outcomes

    def on_deliver(self, federation: Federated, plan: Plan, updates: Updates) -> Updates:
        """Return the updates for the aggregator.

        Args:
            federation: the federation; columns of the round's row go into ``federation.metrics``.
            plan: of the round.
            updates: those that are sound, by client id.
        """
        return updates


class ConfiguredStage(Stage):
    """A stage that a setting of the Trainer adds: with checks before the first round, memory, and accounts of privacy.

    Each federation has a copy of its own.
    """

    publishable: tuple[str, ...] = ()
    """Name patterns of the record's columns under its privacy guarantee; empty without a guarantee."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, such as a budget: plain values and tensors."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with a checkpoint's `state_dict`."""

    def check_options(self, options: Any) -> None:
        """Refuse other settings of the trainer.

        Args:
            options: the settings.

        Raises:
            MisconfigurationException: if one doesn't go together with this.
        """

    def check_size(self, size: int, num_clients: int) -> None:
        """Refuse a size of rounds.

        Args:
            size: clients of a round, by ``trainer.clients_per_round``.
            num_clients: number of clients.

        Raises:
            MisconfigurationException: if it doesn't fit.
        """

    def updates(self, size: int) -> int:
        """Return the number of updates for which a round waits.

        Args:
            size: clients of a round, by ``trainer.clients_per_round``.
        """
        return size

    def check_data(self, client: ClientModule, data: FederatedDataModule) -> None:
        """Refuse data or a net.

        Args:
            client: a client module.
            data: the clients' data.

        Raises:
            MisconfigurationException: if they don't fit.
        """

    def work(
        self, work: LocalWork, modules: Sequence[ClientModule], data: FederatedDataModule, trainer: Trainer
    ) -> LocalWork:
        """Return the settings of clients' local training, with what the stage changes in them.

        Args:
            work: the settings.
            modules: the client modules, on their device.
            data: the clients' data.
            trainer: the Trainer, for precision and rounds.
        """
        return work

    def check(self, federation: Federated) -> None:
        """Refuse a federation for which it isn't made; called when client and aggregator are known.

        Args:
            federation: the federation, without data so far.

        Raises:
            MisconfigurationException: if it isn't made for it.
        """

    def begin(self, federation: Federated) -> None:
        """Start anew before the first round; on resume, `load_state_dict` follows.

        Args:
            federation: the federation, with data and seed.
        """

    def spend(self, federation: Federated, cohort: Sequence[int], outcomes: Mapping[int, Outcome]) -> None:
        """Count what a round's training has spent, before the server sees an update.

        Args:
            federation: the federation.
            cohort: ids of the round's clients.
            outcomes: of those that answered.

        Raises:
            MisconfigurationException: if it is more than there is.
        """

    def end(self, federation: Federated) -> None:
        """Keep what the round has changed; called once its updates are aggregated."""

    def count_lost(self, federation: Federated, cohorts: Sequence[Sequence[int]]) -> None:
        """Count rounds that the checkpoint lacks, but whose models others may have seen.

        Args:
            federation: the federation.
            cohorts: the clients of each of these rounds.
        """

    def statement(self, federation: Federated, guarantee: dict[str, Any]) -> dict[str, Any]:
        """Return the privacy guarantee of the rounds so far.

        Args:
            federation: the federation.
            guarantee: the aggregator's; empty without one.
        """
        return guarantee

    def without_updates(self) -> list[str]:
        """Return settings that may keep all updates from coming, with their values, for a warning."""
        return []

    def of_client(self, federation: Federated, client: int) -> dict[str, float]:
        """Return columns of a client's row in ``clients.csv``, such as its epsilon.

        Args:
            federation: the federation.
            client: the client's id.
        """
        return {}


def refuse_pairs(parts: Iterable[Declares]) -> None:
    """Refuse parts of a run of which one excludes what another does.

    Args:
        parts: the parts.

    Raises:
        MisconfigurationException: if there are two such parts.
    """
    parts = list(parts)
    for part in parts:
        for effect in part.excludes:
            for other in parts:
                # a setting may exclude what it does itself, where two of its kind don't go together
                if other is not part and effect in other.does:
                    raise MisconfigurationException(clash(other, part, effect))


def clash(doer: Declares, excluder: Declares, effect: str) -> str:
    """Return the sentence about two parts that don't go together.

    >>> sums = Part("trainer.secure_sum", does={"sums": "hides single updates"})
    >>> clash(sums, Part("trainer.callbacks=SignFlip", excludes={"sums": "changes them"}), "sums")
    'trainer.secure_sum hides single updates, and trainer.callbacks=SignFlip changes them; leave one of the two out.'

    Args:
        doer: has the effect.
        excluder: excludes it; its reason may end in a remedy of its own, behind a semicolon.
        effect: the effect.
    """
    reason = excluder.excludes[effect]
    remedy = "" if ";" in reason else "; leave one of the two out"
    return f"{doer.setting} {doer.does[effect]}, and {excluder.setting} {reason}{remedy}."
