"""The sequential engine: one client after another. It is the reference for every other engine."""

import math
import operator
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import chain, islice, repeat
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pfl_lightning.client import Batch, Phase
from pfl_lightning.client.hooks import overrides
from pfl_lightning.data import ClientData, LastBatch, Samples, epoch_order
from pfl_lightning.engines.base import ClientState, Engine, Job, Outcome
from pfl_lightning.engines.leaks import Leaks
from pfl_lightning.engines.steps import step_values
from pfl_lightning.engines.threads import is_for_one_thread, one_thread
from pfl_lightning.messages import detached, is_finite
from pfl_lightning.nets.batch_norm import smallest_batch

Step: TypeAlias = tuple[int, dict[str, Tensor]]


class Sequential(Engine):
    """Trains the clients of a round one after another in the one resident module."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._for_one_thread = is_for_one_thread(self.module)
        self._leaks = Leaks(self.module)
        self._calls_after_backward = overrides(self.module, "on_after_backward")
        self._calls_before_step = overrides(self.module, "on_before_optimizer_step")

    def run(self, jobs: Iterable[Job]) -> Iterator[Outcome]:
        """Yields outcomes in the order of the jobs.

        Raises:
            MisconfigurationException: if the client module keeps something of a client in a plain attribute.
        """
        self._look()
        with self._leaks.of_a_round():
            for job in jobs:
                with self._threads():
                    outcome = self._run(job)
                yield outcome

    def evaluate(self, job: Job) -> dict[str, dict[str, float]]:
        """Metrics of a client's model as it receives it, as of any engine."""
        with self._threads():
            return super().evaluate(job)

    def _threads(self) -> AbstractContextManager[None]:
        """The context in which a client is computed; not entered between clients, where others do their work."""
        return one_thread() if self._for_one_thread else nullcontext()

    def _look(self) -> None:
        """Walks the module, which takes as long as a small net's step: once a block, not several times a client."""
        # the mean and the variance of one sample are no statistics, and BatchNorm refuses them
        self._smallest_batch = smallest_batch(self.module)
        # without what the method itself has frozen, which stays so when a phase ends
        self._parameters = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        self._personal = [name for name in self.module.state_dict() if self.module.is_personal(name)]

    def adapt(self, phases: list[Phase], job: Job, data: ClientData) -> None:
        """Trains phase by phase, with optimizers of their own, and leaves the module in evaluation mode."""
        self._look()
        self._set_mode(training=True)
        generator = torch.Generator().manual_seed(job.seed)
        for phase in phases:
            self._train(phase, job, data.train, generator, ClientState())
        self._set_mode(training=False)

    def _run(self, job: Job) -> Outcome:
        start = time.perf_counter()
        module = self.module
        with self._leaks.of("on_download"):
            data = self.become(job)
        self._set_mode(training=True)
        generator = torch.Generator().manual_seed(job.seed)
        state = ClientState()
        steps: list[Step] = []
        with self._leaks.of("training_step"):
            for phase in module.local_phases():
                steps += self._train(phase, job, data.train, generator, state)
        return self._outcome(job, data, state, means(steps), start)

    def _outcome(
        self, job: Job, data: ClientData, state: ClientState, metrics: dict[str, float], start: float
    ) -> Outcome:
        """What the module, which is the job's client after its training, gives and keeps.

        Args:
            job: the job.
            data: the client's data, where it trains.
            state: what its optimizers keep; its personal entries are added.
            metrics: of its training.
            start: when its work began.
        """
        module = self.module
        self._set_mode(training=False)
        with torch.no_grad(), self._leaks.of("upload"):
            update = detached(module.upload(data))
        if self._personal:
            own = module.state_dict()
            state.personal = detached({name: own[name] for name in self._personal})
        return Outcome(
            client=job.client,
            update=update,
            state=state,
            metrics=metrics,
            finite=all(map(math.isfinite, metrics.values())) and is_finite(update) and is_finite(state.personal),
            after=self.evaluate_present(job, data),
            seconds=time.perf_counter() - start,
        )

    def _train(
        self,
        phase: Phase,
        job: Job,
        part: Samples,
        generator: torch.Generator,
        state: ClientState,
    ) -> list[Step]:
        """Runs a phase; returns what its steps returned, each with its number of samples."""
        module = self.module
        module.phase = phase
        trained = [parameter for name, parameter in self._parameters.items() if phase.trains(name)]
        frozen = [parameter for name, parameter in self._parameters.items() if not phase.trains(name)]
        for parameter in frozen:
            parameter.requires_grad_(False)
        optimizer = self._optimizer(phase, job, trained)
        scaler = self._scaler(state.scaler or job.state.scaler)
        steps = []
        if phase.data is not None:
            part = phase.data
        for index, (x, y) in enumerate(self._batches(part, phase, generator)):
            with self.forward_context():
                values = step_values(module, (x, y), index)
            optimizer.zero_grad()
            self._step(values["loss"], optimizer, scaler, trained)
            steps.append((len(y), {name: value.detach() for name, value in values.items()}))
        # grad=None and not zeros: momentum would go on moving a parameter whose next phase freezes it
        optimizer.zero_grad()
        for parameter in frozen:
            parameter.requires_grad_(True)
        if module.optimizer_lifetime == "run":
            state.optimizers[phase.name] = detached(optimizer.state_dict())
        if scaler is not None:
            state.scaler = scaler.state_dict()
        module.steps_done += len(steps)
        return steps

    def _batches(self, part: Samples, phase: Phase, generator: torch.Generator) -> Iterator[Batch]:
        """The batches of a phase: an order an epoch, gathered at once and cut into views."""
        size, last, epochs, steps = self._extent(phase)

        def epoch() -> Iterator[Batch]:
            order = epoch_order(len(part), size, last, generator).to(part.y.device)
            batches = zip(*(torch.split(tensor[order], size) for tensor in (part.x, part.y)), strict=True)
            return ((x, y) for x, y in batches if len(y) >= self._smallest_batch)

        if len(part) < self._smallest_batch:
            return iter(())
        passes = repeat(None) if steps else repeat(None, cast(int, epochs))
        return islice(chain.from_iterable(epoch() for _ in passes), steps)

    def _extent(self, phase: Phase) -> tuple[int, LastBatch, int | None, int | None]:
        """A phase's samples a batch, what becomes of an epoch's last one, its epochs, and its steps in their place."""
        work = self.work
        size, last = phase.batch_size or work.batch_size, work.last_batch if phase.data is None else "keep"
        if phase.epochs is None and phase.steps is None:
            return size, last, work.epochs, work.steps
        return size, last, phase.epochs, phase.steps

    def _optimizer(self, phase: Phase, job: Job, parameters: list[nn.Parameter]) -> Optimizer:
        """The phase's optimizer, new or as the client left it, at the round's learning rate."""
        optimizer = self.module.local_optimizer(phase, parameters)
        factor = job.lr_factor if phase.scheduled else 1.0
        rates = [group["lr"] * factor for group in optimizer.param_groups]
        if phase.name in job.state.optimizers:
            # a copy: an optimizer takes the tensors as they are, and steps in place
            optimizer.load_state_dict(detached(job.state.optimizers[phase.name]))
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        self.module.learning_rate = rates[0]
        return optimizer

    def _scaler(self, state: dict[str, float]) -> torch.amp.GradScaler | None:
        """The client's own loss scaler where the precision asks for one: a shared one would depend on the order."""
        if getattr(self.precision, "scaler", None) is None:
            return None
        scaler = torch.amp.GradScaler(self.device.type)
        if state:
            scaler.load_state_dict(state)
        return scaler

    def _step(
        self,
        loss: Tensor,
        optimizer: Optimizer,
        scaler: torch.amp.GradScaler | None,
        parameters: list[nn.Parameter],
    ) -> None:
        torch.autograd.backward(loss if scaler is None else scaler.scale(loss))
        if self._calls_after_backward:
            self.module.on_after_backward()
        if scaler is not None and (self._calls_before_step or self.work.clip is not None):
            scaler.unscale_(optimizer)
        # before clipping, as Lightning has it
        if self._calls_before_step:
            self.module.on_before_optimizer_step(optimizer)
        if self.work.clip is not None:
            if self.work.clip_algorithm == "norm":
                nn.utils.clip_grad_norm_(parameters, self.work.clip)
            else:
                nn.utils.clip_grad_value_(parameters, self.work.clip)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()


def means(steps: list[Step]) -> dict[str, float]:
    """Means over steps, weighted by their samples; one transfer from the device a name, not one a step."""
    named: dict[str, list[tuple[int, Tensor]]] = {}
    for samples, values in steps:
        for name, value in values.items():
            named.setdefault(name, []).append((samples, value))
    result = {}
    for name, pairs in named.items():
        sizes = [samples for samples, _ in pairs]
        scalars = torch.stack([value for _, value in pairs]).tolist()
        result[name] = sum(map(operator.mul, sizes, scalars)) / sum(sizes)
    return result
