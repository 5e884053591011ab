"""What an engine takes and gives: jobs in, outcomes out. It decides how clients run, never what they compute."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias, cast, overload

import torch
from lightning.pytorch.plugins.precision import Precision
from torch import nn
from torchmetrics import Metric

from pfl_lightning.client import ClientModule, Phase
from pfl_lightning.client.hooks import overrides
from pfl_lightning.data import ClientData, LastBatch, Samples, Split
from pfl_lightning.engines.errors import ClientsLost, during, moment, named
from pfl_lightning.engines.evaluation import evaluate, metrics_of
from pfl_lightning.engines.heap import keep_freed
from pfl_lightning.messages import Message, StateDict, detached, tree_map
from pfl_lightning.privacy.accountant import Release
from pfl_lightning.privacy.dp_sgd import DPSGD


class Extent(NamedTuple):
    """How far a phase goes.

    Args:
        batch_size: samples a batch.
        last_batch: what becomes of an epoch's last, smaller batch.
        epochs: passes over the samples.
        steps: batches, in the place of ``epochs`` where they are given.
    """

    batch_size: int
    last_batch: LastBatch
    epochs: int | None
    steps: int | None


@dataclass(frozen=True)
class LocalWork:
    """How much a client trains in a round, the same for all.

    Args:
        epochs: passes over the client's training data; ignored where ``steps`` is given.
        steps: batches, over as many passes as they take.
        batch_size: samples a batch.
        last_batch: what becomes of an epoch's last, smaller batch.
        clip: largest norm or value of gradients; None doesn't clip.
        clip_algorithm: whether ``clip`` bounds the ``norm`` of all gradients together or each ``value``.
        example_privacy: makes training differentially private in each sample; None trains as ever.
        keeps_on_device: whether what stays with clients is left on the device where they train.
    """

    epochs: int = 1
    steps: int | None = None
    batch_size: int = 10
    last_batch: LastBatch = "keep"
    clip: float | None = None
    clip_algorithm: Literal["norm", "value"] = "norm"
    example_privacy: DPSGD | None = None
    keeps_on_device: bool = False

    def kept(self, record: Any) -> Any:
        """What a client keeps, as copies of its own where it is kept."""
        return tree_map(lambda t: t.detach().clone(), record) if self.keeps_on_device else detached(record)

    def extent(self, phase: Phase) -> Extent:
        """How far a phase goes: what it says itself, and these settings where it says nothing."""
        last: LastBatch = self.last_batch if phase.data is None else "keep"
        own = phase.epochs is not None or phase.steps is not None
        epochs, steps = (phase.epochs, phase.steps) if own else (self.epochs, self.steps)
        return Extent(phase.batch_size or self.batch_size, last, epochs, steps)


@dataclass
class ClientState:
    """What stays with a client between rounds, on the CPU or, if it is left there, where it trains.

    Args:
        personal: personal entries of the client module's ``state_dict``.
        optimizers: ``state_dict`` of each phase's optimizer, where they live for the run.
        scaler: state of the loss scaler under ``16-mixed``.
        kept: name that the client's site has given to all of this, where it is kept there and not here.
        once: entries of a payload that travel once, where the client is at a site; elsewhere each payload has them.
    """

    personal: StateDict = field(default_factory=dict)
    optimizers: dict[str, Any] = field(default_factory=dict)
    scaler: dict[str, Any] = field(default_factory=dict)
    kept: str | None = None
    once: Message = field(default_factory=dict)


class Job(NamedTuple):
    """One client's work in one round.

    Args:
        client: id of the client.
        round: the round's number, from 0.
        state: its state when the round begins; not changed by the engine.
        payload: what the server sends it.
        data: its data.
        seed: seed of its batches and of its dropout.
        lr_factor: the round's learning rate over the configured one.
        evaluate: the splits to evaluate on after training.
        once: names of the payload's entries that travel once.
        has_once: whether the client has kept these from an earlier round.
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

    @property
    def travelling(self) -> Message:
        """The payload without what the client has kept from an earlier round."""
        if not self.has_once:
            return self.payload
        return {name: entry for name, entry in self.payload.items() if name not in self.once}


Evaluated: TypeAlias = tuple[int, dict[str, dict[str, float]]]
"""A client's id, and its metrics by the split that they were computed on."""


class Outcome(NamedTuple):
    """What a client's local training gave.

    Args:
        client: id of the client.
        update: what it sends to the server, on the CPU.
        state: its state from now on.
        metrics: means of what its ``training_step`` returned, weighted by samples; empty if it had no batch.
        finite: whether its loss, its update and its personal entries are free of NaN and infinity; of its update alone
            where its training is differentially private in each sample.
        after: metrics after training, as `Engine.evaluate` names them.
        seconds: time that it took.
        refused: why nothing of it can be used, where that is so.
        releases: the steps that its training has spent, where it is differentially private in each sample.
    """

    client: int
    update: Message
    state: ClientState
    metrics: dict[str, float]
    finite: bool
    after: dict[str, dict[str, float]]
    seconds: float
    refused: str = ""
    releases: tuple[Release, ...] = ()


class Engine(ABC):
    """Runs clients through a client module.

    Args:
        module: the client module; it stands on the device where it trains.
        work: how much each client trains.
        precision: the Trainer's precision plugin.
        workers: processes to use at most, for engines that use several; None takes one a core.
        compile: whether local steps are compiled, by engines that can.
    """

    may_miss_clients: ClassVar[bool] = False
    """Whether clients may be gone, as those at sites; elsewhere one without a result is an error."""
    sums: dict[str, float] | None = None
    """Record of the last round's sum, of an engine whose updates are stand-ins by ``trainer.secure_sum`` already; None
    of one that gives updates as they are."""
    when_clients_miss: ClassVar[str] = "let its run() and evaluate_all() give each job's client once"
    """Advice for the message about clients that have no result."""

    def __init__(
        self,
        module: ClientModule,
        work: LocalWork,
        precision: Precision,
        workers: int | None = None,
        compile: bool = False,
    ) -> None:
        if module.device.type == "cpu":
            keep_freed()
        self.module = module
        self.work = work
        self.precision = precision
        self.workers = workers
        self.compile = compile
        self._sets_own_modes = any(type(m).train is not nn.Module.train for m in module.modules())
        self.metrics = metrics_of(module)
        for metric in self.metrics.modules():
            if isinstance(metric, Metric):
                # bool() is False: else a rank's clients would be measured together with those of other ranks
                metric.distributed_available_fn = bool

    def forward_context(self) -> AbstractContextManager[None]:
        """The context of forward passes under the Trainer's precision."""
        return self.precision.forward_context()

    @overload
    def complete(self, phase: Literal["training"], jobs: Iterable[Job]) -> Iterator[Outcome]: ...

    @overload
    def complete(self, phase: Literal["evaluation"], jobs: Iterable[Job]) -> Iterator[Evaluated]: ...

    def complete(self, phase: Literal["training", "evaluation"], jobs: Iterable[Job]) -> Iterator[Outcome | Evaluated]:
        """Yield the results of `run` or `evaluate_all`, and count them against the jobs.

        Whoever asks an engine for results asks here, so that no client is lost or counted twice without a word.

        Args:
            phase: ``training`` runs `run`, ``evaluation`` `evaluate_all`.
            jobs: of different clients.

        Raises:
            ClientsLost: if a client has no result where `may_miss_clients` is False, or if one has several, or was not
                asked for.
        """
        jobs = iter(jobs)
        missing: set[int] = set()
        when = ""

        def asked() -> Iterator[Job]:
            nonlocal when
            for job in jobs:
                missing.add(job.client)
                # an evaluation's is the job of the round to come
                when = when or moment(phase, job.round - (phase == "evaluation"))
                yield job

        results: Iterable[Outcome | Evaluated] = (
            self.run(asked()) if phase == "training" else self.evaluate_all(asked())
        )
        engine = f"trainer.engine={type(self).__name__}"
        for result in results:
            client = result[0]
            if client not in missing:
                raise ClientsLost(
                    f"{engine} gave a result of client {client} in the {phase} {when} that nobody had asked "
                    f"for, or a second one; {self.when_clients_miss}."
                )
            missing.remove(client)
            yield result
        # of an engine that has stopped before the last job
        missing.update(job.client for job in asked())
        if missing and not self.may_miss_clients:
            raise ClientsLost(
                f"{engine} gave no result of {named(sorted(missing))} in the {phase} {when}; {self.when_clients_miss}."
            )

    @abstractmethod
    def run(self, jobs: Iterable[Job]) -> Iterator[Outcome]:
        """Train each job's client and yield its outcome, in any order; `complete` counts them."""

    @abstractmethod
    def adapt(self, phases: list[Phase], job: Job, data: ClientData) -> None:
        """Trains the module, which is the job's client already, and keeps nothing else of it."""

    def evaluate(self, job: Job) -> dict[str, dict[str, float]]:
        """Metrics of a client's model as it receives it, by the splits that the job names.

        A method's `ClientModule.evaluation_phases` come first; what the model is without them is ``SPLIT_received``.
        """
        # it is the job of the round to come
        with during("evaluation", job.round - 1, job.client):
            return self.evaluate_present(job, self.become(job))

    def evaluate_all(self, jobs: Iterable[Job]) -> Iterator[Evaluated]:
        """Evaluate each job's client and yield its id and metrics, in any order; `complete` counts them."""
        for job in jobs:
            yield job.client, self.evaluate(job)

    def evaluate_present(self, job: Job, data: ClientData) -> dict[str, dict[str, float]]:
        """The same of the module as it stands.

        Args:
            job: the job whose client the module is.
            data: the client's data, where it trains.
        """
        received = self.metrics_on(data, job.evaluate)
        phases = self.module.evaluation_phases() if received else []
        if not phases:
            return received
        with torch.enable_grad():
            self.adapt(phases, job, data)
        adapted = self.metrics_on(data, job.evaluate)
        return adapted | {f"{split}_received": values for split, values in received.items()}

    def evaluate_model(self, model: StateDict, samples: Samples) -> dict[str, float]:
        """Metrics of a model that is no client's.

        Args:
            model: entries of the client module's ``state_dict``; the others are left as they are.
            samples: what to evaluate it on.
        """
        self.set_mode(training=False)
        self.module.assign(model)
        samples = samples.to(self.device, cast(torch.dtype, self.module.dtype))
        return evaluate(self.module, samples, self.metrics, self.forward_context)

    def become(self, job: Job, training: bool = False) -> ClientData:
        """Make the module the job's client, as it stands when the round begins; return its data, where it trains.

        Args:
            job: the client's work.
            training: whether local training follows; else the client is evaluated as it is.
        """
        module = self.module
        self.set_turn(job)
        data = self.data_of(job)
        self._seed(job.seed)
        self.set_mode(training=False)
        vars(module).update(
            training_follows=training or overrides(module, "evaluation_phases"),
            evaluation_follows=not training or bool(job.evaluate),
        )
        try:
            with torch.no_grad(), during("download", job.round, job.client):
                module.receive(job.state.personal, job.payload, data)
        finally:
            # whoever else lets the module receive something may do both with it
            vars(module).update(training_follows=True, evaluation_follows=True)
        return data

    def set_turn(self, job: Job, steps_done: int = 0) -> None:
        """Tells the module whose turn it is.

        Args:
            job: the client's work.
            steps_done: batches that it has trained in this round.
        """
        # past `nn.Module.__setattr__`, which looks for parameters first
        vars(self.module).update(client_id=job.client, round=job.round, steps_done=steps_done)

    def data_of(self, job: Job) -> ClientData:
        """The data of a job's client, where it trains."""
        return job.data.to(self.device, cast(torch.dtype, self.module.dtype))

    def set_mode(self, training: bool) -> None:
        """Set training or evaluation mode on the module and all in it.

        What was in evaluation mode when the module was given is frozen and stays so, as under Lightning's own Trainer:
        a BatchNorm layer after its ``eval()``, or what a net's own ``train()`` leaves out. `release` puts all back.
        """
        modes = given_modes(self.module)
        if self._sets_own_modes:
            # the only way to what an override of `train` does
            self.module.train(training)
            for module, trained in modes:
                if not trained:
                    vars(module)["training"] = False
            return
        # past `nn.Module.train`, which calls itself on each submodule and takes as long as a step of a small net
        for module, trained in modes:
            vars(module)["training"] = training and trained

    def _seed(self, seed: int) -> None:
        """Seeds what dropout draws from; `torch.manual_seed` would also queue seeds for devices that aren't there."""
        torch.default_generator.manual_seed(seed)
        if self.device.type == "cuda":
            torch.cuda.manual_seed(seed)

    def metrics_on(self, data: ClientData, splits: tuple[Split, ...]) -> dict[str, dict[str, float]]:
        """Metrics of the module as it stands, by split; splits without samples are left out."""
        held: dict[str, Samples] = {split: getattr(data, split) for split in splits}
        return {
            split: evaluate(self.module, samples, self.metrics, self.forward_context)
            for split, samples in held.items()
            if len(samples)
        }

    @property
    def device(self) -> torch.device:
        """Where clients train."""
        return self.module.device


def given_modes(module: ClientModule) -> list[tuple[nn.Module, bool]]:
    """Return each module in a client module, with whether it was in training mode when engines first set its mode.

    They are kept in the client module, as several engines may run it in turn.
    """
    table = vars(module)
    if "_given_modes" not in table:
        table["_given_modes"] = [(m, m.training) for m in module.modules()]
    modes: list[tuple[nn.Module, bool]] = table["_given_modes"]
    return modes


def release(module: ClientModule) -> None:
    """Put the modes of a client module back as they were given, when engines are done with it."""
    for m, training in vars(module).pop("_given_modes", ()):
        vars(m)["training"] = training


EngineMaker: TypeAlias = Callable[[Sequence[ClientModule], LocalWork, Precision], Sequence[Engine]]
"""Gives the engine of each of some client modules, which may be one for all of them."""
