"""The interface of engines: jobs in, outcomes out. Engines decide about execution, never about results."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, count
from typing import Any, ClassVar, Literal, NamedTuple, NoReturn, Protocol, TypeAlias, cast, overload

import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from torchmetrics import Metric

from pfl_lightning.client import ClientModule, Phase
from pfl_lightning.client.hooks import overrides
from pfl_lightning.data import ClientData, LastBatch, Samples, Split, TargetScale
from pfl_lightning.data.batches import Limit, continued_orders, epoch_order
from pfl_lightning.engines.client_metrics import Evaluated
from pfl_lightning.engines.errors import ClientsLost, during, moment, named
from pfl_lightning.engines.evaluation import evaluate, metrics_of
from pfl_lightning.messages import Message, StateDict, detached, tree_map


class Extent(NamedTuple):
    """The length of a phase.

    Args:
        batch_size: samples per batch.
        last_batch: treatment of an epoch's last, smaller batch.
        epochs: passes over the samples, also a fraction of one.
        steps: optimizer steps, instead of ``epochs`` if given.
        limit: batches of each epoch to use, as for `epoch_order`.
    """

    batch_size: int
    last_batch: LastBatch
    epochs: float | None
    steps: int | None
    limit: Limit

    def most_steps(self, each: int) -> int | None:
        """Return the number of optimizer steps; None for all steps of whole epochs.

        >>> Extent(10, "keep", 1.5, None, 1.0).most_steps(5), Extent(10, "keep", 0.1, None, 1.0).most_steps(5)
        (7, 1)

        Args:
            each: optimizer steps of an epoch.
        """
        if self.steps is not None or self.epochs is None or self.epochs == int(self.epochs):
            return self.steps
        # a product such as 0.29 * 100 lies just below the whole number
        return max(1, int(self.epochs * each + 1e-9))


class PrivateTraining(Protocol):
    """What engines ask of training that is private for each sample, such as `DPSGD`."""

    def train_phase(
        self, engine: Any, part: Samples, phase: Phase, parameters: Any, optimizer: Any, generator: Any
    ) -> Any:
        """Train one client through a phase, and return each batch's number of samples and values."""

    def block_steps(
        self, engine: Any, attributes: Any, slots: Any, phase: Phase, block: Any, parameters: Any
    ) -> tuple[Any, Iterator[Callable[[], StateDict]]]:
        """Return the steps of a block of clients: how many there are, and a function for each one's gradients."""

    def expected_samples(self, work: "LocalWork", phase: Phase, samples: int) -> int:
        """Return the expected number of samples in all batches of a phase."""

    def noised_update(self, update: Message, seed: int) -> Message:
        """Return an update, with noise in what training alone doesn't cover."""

    def releases(self, work: "LocalWork", phases: Sequence[Phase], samples: int) -> Sequence[Any]:
        """Return what a client's round spends."""


@dataclass(frozen=True)
class LocalWork:
    """The settings of a client's local training in a round, the same for all clients.

    Args:
        epochs: passes over the client's training data, also a fraction of one; ignored if ``steps`` is given.
        steps: optimizer steps, over as many passes as needed.
        batch_size: samples per batch.
        last_batch: treatment of an epoch's last, smaller batch.
        clip: the largest norm or value of gradients; None doesn't clip.
        clip_algorithm: whether ``clip`` bounds the joint ``norm`` of all gradients or each ``value``.
        example_privacy: DP-SGD, which makes training differentially private for each sample; None trains without.
        keeps_on_device: whether clients' states stay on the training device between rounds.
        accumulate: batches of an optimizer step, fewer in the last step of an epoch.
        limit: batches of each epoch to use, as for `epoch_order`.
        own_epochs: passes of single clients, by id, instead of ``epochs``.
        rates: factors of single clients' learning rates, by id; others' are 1.
    """

    epochs: float = 1
    steps: int | None = None
    batch_size: int = 10
    last_batch: LastBatch = "keep"
    clip: float | None = None
    clip_algorithm: Literal["norm", "value"] = "norm"
    example_privacy: "PrivateTraining | None" = None
    keeps_on_device: bool = False
    accumulate: int = 1
    limit: Limit = 1.0
    own_epochs: Mapping[int, float] = field(default_factory=dict)
    rates: Mapping[int, float] = field(default_factory=dict)

    def kept(self, record: Any) -> Any:
        """Copy a client's record to the storage of clients' states: the training device or the CPU.

        Args:
            record: tensors in dicts and lists.
        """
        # The clone is needed even on the same device, as the next client overwrites the module's tensors.
        return tree_map(lambda t: t.detach().clone(), record) if self.keeps_on_device else detached(record)

    def share(self, client: int) -> tuple[float, float]:
        """Return a client's epochs and factor of the learning rate, by which clients' training may differ."""
        return self.own_epochs.get(client, self.epochs), self.rates.get(client, 1.0)

    @property
    def groups(self) -> int:
        """Number of groups of clients with the same share, each of which trains in blocks of its own."""
        return len({self.share(client) for client in {*self.own_epochs, *self.rates}}) or 1

    def extent(self, phase: Phase, client: int = -1) -> Extent:
        """Return the length of a phase: the phase's own settings, or else these.

        Args:
            phase: the phase.
            client: the client's id; any other number takes the settings of all.
        """
        # The setting is about clients' samples; a phase's own data, such as a public set, are used in full.
        last: LastBatch = self.last_batch if phase.data is None else "keep"
        limit = self.limit if phase.data is None else 1.0
        own = phase.epochs is not None or phase.steps is not None
        epochs, steps = (phase.epochs, phase.steps) if own else (self.share(client)[0], self.steps)
        return Extent(phase.batch_size or self.batch_size, last, epochs, steps, limit)


@dataclass
class ClientState:
    """A client's state between rounds, on the CPU or the training device.

    Args:
        personal: personal entries of the client module's ``state_dict``.
        optimizers: the ``state_dict`` of each phase's optimizer, if optimizers last for the run.
        scaler: the state of the loss scaler under ``16-mixed``.
        kept: the name under which the client's site stores the state; then the state isn't here.
        once: payload entries that travel once, for a client at a site; elsewhere each payload includes them.
        residual: parts of the client's changes that compressed updates still owe the server, by parameter.
        batches: batches of all rounds by phase, where ``trainer.steps_continue`` goes on within an epoch.
        is_trained: whether ``personal`` is the whole model of a client that joined afterwards, as trained in the end.
    """

    personal: StateDict = field(default_factory=dict)
    optimizers: dict[str, Any] = field(default_factory=dict)
    scaler: dict[str, Any] = field(default_factory=dict)
    kept: str | None = None
    once: Message = field(default_factory=dict)
    residual: StateDict = field(default_factory=dict)
    batches: dict[str, int] = field(default_factory=dict)
    is_trained: bool = False


class ReadsClient(Exception):
    """Code for clients in general looks at one of them, so that clients with equal payloads may differ."""


class AnyClient:
    """Stands for the id or the data of any client, where code must be the same for all: each look at it raises."""

    is_absent = True

    def _refuse(self, *args: Any) -> NoReturn:
        raise ReadsClient("all clients are asked for, and not one of them")

    __getattr__ = __hash__ = __eq__ = __bool__ = __str__ = __repr__ = __format__ = _refuse


class Job(NamedTuple):
    """One client's work in one round.

    Args:
        client: the client's id.
        round: the round's number, from 0.
        state: the client's state at the start of the round; engines don't change it.
        payload: the server's payload for the client.
        data: the client's data.
        seed: the seed of batches and dropout.
        lr_factor: the round's learning rate divided by the configured one.
        evaluate: the splits to evaluate on after training.
        once: names of the payload's entries that travel once.
        has_once: whether the client has these entries from an earlier round.
        order_seed: the seed of the client's sample orders in all rounds, where batches go on from round to round; None
            begins a new order in each round.
        alike: of an evaluation, further clients that have the same state and payload, and so perhaps the same model.
        job_of: returns the job of one of them.
        finish: changes the outcome where the client has trained, as compression does; None leaves it.
    """

    client: int
    round: int
    state: ClientState
    payload: Message
    data: ClientData
    seed: int
    lr_factor: float = 1.0
    evaluate: tuple[Split, ...] = ()
    once: frozenset[str] = frozenset()
    has_once: bool = False
    order_seed: int | None = None
    alike: tuple[int, ...] = ()
    job_of: "Callable[[int], Job] | None" = None
    finish: "Callable[[Outcome, Job], Outcome] | None" = None

    def each(self) -> "Iterator[Job]":
        """Yield the job of each client by itself."""
        yield self._replace(alike=(), job_of=None)
        if self.job_of is not None:
            yield from map(self.job_of, self.alike)

    def continues(self, phase: Phase, extent: Extent) -> bool:
        """Return True if a phase's batches go on where the round before stopped: of steps, and of the client's samples.

        Args:
            phase: the phase.
            extent: the phase's length.
        """
        return self.order_seed is not None and phase.data is None and extent.steps is not None

    def orders(
        self, phase: Phase, extent: Extent, samples: int, smallest: int, generator: torch.Generator
    ) -> tuple[Iterator[Tensor], int]:
        """Return the sample orders of a phase's epochs, and the batches of the first that an earlier round has trained.

        Args:
            phase: the phase.
            extent: the phase's length.
            samples: number of samples, at least one batch.
            smallest: the smallest usable batch.
            generator: draws the orders, one after another as they are asked for.
        """
        size, last, epochs, steps, limit = extent
        if self.continues(phase, extent):
            begun = self.state.batches.get(phase.name, 0)
            return continued_orders(samples, size, last, smallest, cast(int, self.order_seed), begun, limit)
        # As many epochs as its steps take, which only the caller can count.
        passes = count() if steps else range(math.ceil(epochs or 0))
        return (epoch_order(samples, size, last, generator, limit) for _ in passes), 0

    @property
    def travelling(self) -> Message:
        """The payload without entries known to the client from an earlier round."""
        if not self.has_once:
            return self.payload
        return {name: entry for name, entry in self.payload.items() if name not in self.once}


def identities(state: ClientState, payload: Message) -> tuple[object, ...]:
    """Return a key that is the same for equal states and payloads, as long as these exist.

    Args:
        state: a client's state.
        payload: the client's payload.
    """
    return (state.kept or "", *payload, *map(id, chain(state.personal.values(), payload.values())))


class Outcome(NamedTuple):
    """The result of a client's local training.

    Args:
        client: the client's id.
        update: the update for the server, on the CPU.
        state: the client's state from now on.
        metrics: means of the values from ``training_step``, weighted by samples; empty without a batch.
        finite: whether loss, update and personal entries are free of NaN and infinity; under example-level privacy, the
            update alone.
        after: metrics after training, named as by `Engine.evaluate`.
        seconds: the time taken.
        refused: why the result is unusable; empty if it is usable.
        releases: the privacy steps that the training spent under example-level privacy.
        steps: the optimizer steps of the training.
        samples: the samples in the batches of these steps, each as often as it was in one; under example-level privacy
            the expected number, as the drawn one would tell about the draws.
    """

    client: int
    update: Message
    state: ClientState
    metrics: dict[str, float]
    finite: bool
    after: dict[str, dict[str, float]]
    seconds: float
    refused: str = ""
    releases: tuple[Any, ...] = ()
    steps: float = 0
    samples: float = 0

    @property
    def clients(self) -> tuple[int]:
        """The client's id, as `Evaluated` has those of several clients."""
        return (self.client,)


class Engine(ABC):
    """Base class of engines, which run clients through a client module.

    Args:
        module: the client module, on the device where it trains.
        work: the settings of local training.
        precision: the Trainer's precision plugin.
        workers: the largest number of processes, for engines with several; None takes one per core.
        compile: whether to compile local steps, for engines that can.
    """

    may_miss_clients: ClassVar[bool] = False
    """Whether clients may be absent, as clients at sites may; elsewhere a client without a result is an error."""
    finishes: ClassVar[bool] = True
    """Whether `complete` calls `Job.finish`; False where an engine of the same jobs below does."""
    trains_ahead: bool = False
    """Whether evaluations have clients train for the coming round too, so that their time says little."""
    takes_alike: bool = False
    """Whether `evaluate_all` takes jobs that stand for several clients; see `Job.alike`."""
    absent: frozenset[int] = frozenset()
    """Clients out of reach at the moment, as those of lost sites; a round draws its cohort from all others."""
    sums: dict[str, float] | None = None
    """Record of the last round's sum, of an engine whose updates are stand-ins by ``trainer.secure_sum`` already; None
    of one that gives updates as they are."""
    when_clients_miss: ClassVar[str] = "let its run() and evaluate_all() give each job's client once"
    """Advice in the error about clients without a result."""

    def __init__(
        self,
        module: ClientModule,
        work: LocalWork,
        precision: Precision,
        workers: int | None = None,
        compile: bool = False,
    ) -> None:
        self.module = module
        self.device = module.device
        self.work = work
        self.precision = precision
        # The context for forward passes under the Trainer's precision.
        self.forward_context = precision.forward_context
        self.workers = workers
        self.compile = compile
        # A net with its own train(), for frozen layers, must be called; for others, setting the flags directly is
        # faster.
        self._sets_own_modes = any(type(m).train is not nn.Module.train for m in module.modules())
        self.metrics = metrics_of(module)
        for metric in self.metrics.modules():
            if isinstance(metric, Metric):
                # torchmetrics would otherwise reduce each client's metric over all ranks, which hold different clients.
                # bool() is False.
                metric.distributed_available_fn = bool

    @overload
    def complete(self, phase: Literal["training"], jobs: Iterable[Job]) -> Iterator[Outcome]: ...

    @overload
    def complete(self, phase: Literal["evaluation"], jobs: Iterable[Job]) -> Iterator[Evaluated]: ...

    def complete(self, phase: Literal["training", "evaluation"], jobs: Iterable[Job]) -> Iterator[Outcome | Evaluated]:
        """Yield the results of `run` or `evaluate_all`, and check for exactly one result per job.

        Whoever runs an engine uses this method, so that no client is lost or counted twice in silence.

        Args:
            phase: ``training`` calls `run`, ``evaluation`` calls `evaluate_all`.
            jobs: jobs of different clients.

        Raises:
            ClientsLost: if a client has no result although `may_miss_clients` is False, or a second or unrequested
                result.
        """
        jobs = iter(jobs)
        missing: set[int] = set()
        unfinished: dict[int, Job] = {}
        round = 0

        def asked() -> Iterator[Job]:
            nonlocal round
            for job in jobs:
                missing.update((job.client, *job.alike))
                # An evaluation gets the jobs of the coming round, but belongs to the round before.
                round = job.round - (phase == "evaluation")
                if job.finish is not None and self.finishes:
                    unfinished[job.client] = job
                    # an engine that hands jobs on shall not have them finished twice
                    job = job._replace(finish=None)
                yield job

        results: Iterable[Outcome | Evaluated] = (
            self.run(asked()) if phase == "training" else self.evaluate_all(asked())
        )
        engine = f"trainer.engine={type(self).__name__}"
        for result in results:
            clients = result.clients
            if not missing.issuperset(clients):
                raise ClientsLost(
                    f"{engine} gave an unrequested result of {named(sorted(set(clients) - missing))} in the {phase} "
                    f"{moment(phase, round)}, or a second one; {self.when_clients_miss}."
                )
            missing.difference_update(clients)
            if unfinished and isinstance(result, Outcome) and (job := unfinished.pop(result.client, None)) is not None:
                result = cast(Callable[[Outcome, Job], Outcome], job.finish)(result, job)
            yield result
        # Count the jobs that the engine never took.
        for _ in asked():
            pass
        if missing and not self.may_miss_clients:
            raise ClientsLost(
                f"{engine} gave no result of {named(sorted(missing))} in the {phase} {moment(phase, round)}; "
                f"{self.when_clients_miss}."
            )

    @abstractmethod
    def run(self, jobs: Iterable[Job]) -> Iterator[Outcome]:
        """Train each job's client and yield outcomes in any order; `complete` checks for missing ones."""

    def collected(self, states: Mapping[int, ClientState]) -> Mapping[int, ClientState]:
        """Return clients' states to save, in a collective call of all ranks; at least complete on the first rank.

        Args:
            states: the states by client id.
        """
        return states

    def own_states(self, states: Mapping[int, ClientState]) -> dict[int, ClientState]:
        """Return the states to hold in this process after loading.

        Args:
            states: the states of all clients, by id.
        """
        return dict(states)

    def times_asked(self, client: int) -> int:
        """Return how often a client of the round was asked to train, as each time spends privacy anew."""
        return 1

    @abstractmethod
    def adapt(self, phases: list[Phase], job: Job, data: ClientData) -> None:
        """Train the module, which holds the job's client already, through some phases; keep no other state."""

    def evaluate(self, job: Job) -> dict[str, dict[str, float]]:
        """Return the metrics of a client's received model, by the job's splits.

        With `ClientModule.evaluation_phases` the model is adapted first; metrics before the adaptation are under
        ``SPLIT_received``.
        """
        # The job is of the coming round, but the evaluation belongs to the round before.
        with during("evaluation", job.round - 1, job.client):
            return self.evaluate_present(job, self.become(job))

    def evaluate_all(self, jobs: Iterable[Job]) -> Iterator[Evaluated]:
        """Evaluate each job's client and yield metrics in any order; `complete` checks for missing ones."""
        for job in jobs:
            yield Evaluated.of(job.client, self.evaluate(job))

    def evaluate_present(self, job: Job, data: ClientData) -> dict[str, dict[str, float]]:
        """Return the metrics of the module's current model, as `evaluate` does.

        Args:
            job: the job of the client in the module.
            data: the client's data, on the training device.
        """
        received = self.metrics_on(data, job.evaluate)
        phases = self.module.evaluation_phases() if received else []
        if not phases:
            return received
        with torch.enable_grad():
            self.adapt(phases, job, data)
        adapted = self.metrics_on(data, job.evaluate)
        return adapted | {f"{split}_received": values for split, values in received.items()}

    def evaluate_model(self, model: StateDict, samples: Samples, scale: TargetScale | None = None) -> dict[str, float]:
        """Return the metrics of a model without a client, such as the server's.

        Args:
            model: entries of the client module's ``state_dict``; missing entries keep their values.
            samples: the samples to evaluate on.
            scale: the scale of their targets; None where these are as loaded.
        """
        self.set_mode(training=False)
        self.module.assign(model)
        samples = samples.to(self.device, cast(torch.dtype, self.module.dtype))
        return evaluate(self.module, samples, self.metrics, self.forward_context, scale=scale)

    def become(self, job: Job, training: bool = False) -> ClientData:
        """Load a job's client into the module; return the client's data on the training device.

        Sets seed, mode, personal state and payload, and calls the ``on_download`` hook.

        Args:
            job: the client's work.
            training: whether local training follows; else an evaluation.
        """
        data = job.data.to(self.device, cast(torch.dtype, self.module.dtype))
        with during("download", job.round, job.client):
            self.receive(job, data, training)
        return data

    def receive(self, job: Job, data: ClientData | None, training: bool = False) -> None:
        """Load a job's client into the module as `become` does, with other data in place of the client's own.

        Args:
            job: the client's work.
            data: the data, on the training device.
            training: as for `become`.
        """
        self.seed_generators(job.seed)
        self.set_mode(training=False)
        self.module.become(
            job.client,
            job.round,
            job.state.personal,
            job.payload,
            data,
            training_follows=training or overrides(self.module, "evaluation_phases"),
            evaluation_follows=not training or bool(job.evaluate),
            is_trained=job.state.is_trained,
        )

    @contextmanager
    def common(self, job: Job, training: bool = False) -> Iterator[None]:
        """Load what all clients with a job's state and payload have in common, as `become` loads one of them.

        Args:
            job: the work of one of the clients.
            training: as for `become`.

        Raises:
            ReadsClient: if the client counts up to the end of this context, by its samples, id or random numbers.
        """
        self.seed_generators(job.seed)
        before, anyone = self.random_states(), cast(Any, AnyClient())
        try:
            self.receive(job._replace(client=anyone), anyone, training)
            yield
        finally:
            self.set_turn(job)
        if any(not torch.equal(*pair) for pair in zip(before, self.random_states(), strict=True)):
            raise ReadsClient("a client's random numbers are drawn")

    def set_turn(self, job: Job, steps_done: int = 0) -> None:
        """Set the client's id, the round and the number of steps on the module.

        Args:
            job: the client's work.
            steps_done: the client's optimizer steps so far in this round.
        """
        # Written to __dict__, as nn.Module.__setattr__ searches parameters and buffers first, once per client and
        # attribute.
        vars(self.module).update(client_id=job.client, round=job.round, steps_done=steps_done)

    def set_mode(self, training: bool) -> None:
        """Set training or evaluation mode on the module and all submodules.

        Submodules that were in evaluation mode when the module was given are frozen and stay so, as under Lightning's
        own Trainer: a BatchNorm layer after ``eval()``, or layers left out by a net's own ``train()``. `release`
        restores all modes.
        """
        modes = given_modes(self.module)
        if self._sets_own_modes:
            # Calling the override is the only way to its effects; then freeze again what was frozen.
            self.module.train(training)
            for module, trained in modes:
                if not trained:
                    vars(module)["training"] = False
            return
        # nn.Module.train recurses through all submodules and takes as long as a training step of a small net.
        for module, trained in modes:
            vars(module)["training"] = training and trained

    def seed_generators(self, seed: int) -> None:
        """Seed the generators of dropout; `torch.manual_seed` would also queue seeds for missing devices."""
        torch.default_generator.manual_seed(seed)
        if self.device.type == "cuda":
            torch.cuda.manual_seed(seed)

    def random_states(self) -> list[Tensor]:
        """Return the states of the generators of dropout."""
        states = [torch.default_generator.get_state()]
        return [*states, torch.cuda.get_rng_state(self.device)] if self.device.type == "cuda" else states

    def metrics_on(self, data: ClientData, splits: tuple[Split, ...]) -> dict[str, dict[str, float]]:
        """Return the metrics of the module's current model by split; splits without samples are left out."""
        held: dict[str, Samples] = {split: getattr(data, split) for split in splits}
        scale = data.target_scale
        return {
            split: evaluate(self.module, samples, self.metrics, self.forward_context, split, scale)
            for split, samples in held.items()
            if len(samples)
        }


def given_modes(module: ClientModule) -> list[tuple[nn.Module, bool]]:
    """Return all submodules, each with the training mode from before any engine's change.

    Stored in the client module, because several engines may use the same module in turn.
    """
    table = vars(module)
    if "_given_modes" not in table:
        table["_given_modes"] = [(m, m.training) for m in module.modules()]
    modes: list[tuple[nn.Module, bool]] = table["_given_modes"]
    return modes


def release(module: ClientModule) -> None:
    """Restore the modes of a client module's submodules from before any engine's change."""
    for m, training in vars(module).pop("_given_modes", ()):
        vars(m)["training"] = training


EngineMaker: TypeAlias = Callable[[Sequence[ClientModule], LocalWork, Precision], Sequence[Engine]]
"""Returns an engine for each of some client modules, perhaps the same engine for all."""
