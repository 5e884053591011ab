"""The sequential engine: one client after another. It is the reference for every other engine."""

import math
import operator
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import chain, islice, repeat
from typing import Any, TypeAlias, cast

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.optim import Optimizer

from pfl_lightning.client import Batch, Phase
from pfl_lightning.client.hooks import overrides
from pfl_lightning.data import ClientData, Samples, epoch_order
from pfl_lightning.data.trees import rows_in
from pfl_lightning.engines.base import ClientState, Engine, Job, Outcome
from pfl_lightning.engines.errors import computed, during
from pfl_lightning.engines.examples import Draws, ExampleGradients, noised, releases_of, with_noisy_counts
from pfl_lightning.engines.layout import Layout
from pfl_lightning.engines.leaks import Leaks
from pfl_lightning.engines.local_optimizer import local_optimizer
from pfl_lightning.engines.slots import Slots
from pfl_lightning.engines.steps import adjusted_gradients, step_values
from pfl_lightning.engines.threads import is_for_one_thread, one_thread
from pfl_lightning.messages import detached, is_finite
from pfl_lightning.privacy.dp_sgd import DPSGD
from pfl_lightning.privacy.noise import secure_seed

Step: TypeAlias = tuple[int, dict[str, Tensor]]


class Sequential(Engine):
    """Trains the clients of a round one after another in the one resident module."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._for_one_thread = is_for_one_thread(self.module)
        self.leaks = Leaks(self.module)
        self._calls_after_backward = overrides(self.module, "on_after_backward")
        self._calls_before_step = overrides(self.module, "on_before_optimizer_step")
        self._adjusts = overrides(self.module, "adjust_gradients")

    def run(self, jobs: Iterable[Job]) -> Iterator[Outcome]:
        """Yields outcomes in the order of the jobs.

        Raises:
            MisconfigurationException: if the client module keeps something of a client in a plain attribute.
        """
        layout = Layout.of(self.module)
        with self.leaks.of_a_round():
            for job in jobs:
                with self._threads():
                    outcome = self.train(job, layout)
                yield outcome

    def evaluate(self, job: Job) -> dict[str, dict[str, float]]:
        """Metrics of a client's model as it receives it, as of any engine."""
        with self._threads():
            return super().evaluate(job)

    def _threads(self) -> AbstractContextManager[None]:
        """The context in which a client is computed; not entered between clients, where others do their work."""
        return one_thread() if self._for_one_thread else nullcontext()

    def adapt(self, phases: list[Phase], job: Job, data: ClientData) -> None:
        """Trains phase by phase, with optimizers of their own, and leaves the module in evaluation mode."""
        layout = Layout.of(self.module)
        self.set_mode(training=True)
        generator = torch.Generator().manual_seed(job.seed)
        for phase in phases:
            self._train_phase(phase, job, layout, data.train, generator, ClientState(), None)
        self.set_mode(training=False)

    def train(self, job: Job, layout: Layout) -> Outcome:
        """Trains one client, through all of its phases.

        Args:
            job: its work in this round.
            layout: the module's.
        """
        start = time.perf_counter()
        module = self.module
        with self.leaks.of("on_download"):
            data = self.become(job, training=True)
        self.set_mode(training=True)
        generator = torch.Generator().manual_seed(job.seed)
        state = ClientState()
        steps: list[Step] = []
        with self.leaks.of("training_step"), during("training", job.round, job.client):
            phases = module.local_phases()
            for phase in phases:
                privacy = None if phase.stays else self.work.example_privacy
                steps += self._train_phase(phase, job, layout, data.train, generator, state, privacy)
        spent = releases_of(self.work, phases, len(data.train))
        return self.outcome(job, layout, data, state, means(steps), start)._replace(releases=tuple(spent))

    def outcome(
        self, job: Job, layout: Layout, data: ClientData, state: ClientState, metrics: dict[str, float], start: float
    ) -> Outcome:
        """What the module, which is the job's client after its training, gives and keeps.

        Args:
            job: the job.
            layout: the module's.
            data: the client's data, where it trains.
            state: what its optimizers keep; its personal entries are added.
            metrics: of its training.
            start: when its work began.
        """
        self.set_mode(training=False)
        with torch.no_grad(), self.leaks.of("upload"), during("upload", job.round, job.client):
            update = with_noisy_counts(self.work, job.seed, detached(self.module.upload(data)))
        if layout.personal:
            own = self.module.state_dict()
            state.personal = self.work.kept({name: own[name] for name in layout.personal})
        with during("evaluation", job.round, job.client):
            after = self.evaluate_present(job, data)
        return Outcome(
            client=job.client,
            update=update,
            state=state,
            metrics=metrics,
            # under example privacy by the upload alone: the rest tells of samples without noise
            finite=is_finite(update)
            and (
                self.work.example_privacy is not None
                or (all(map(math.isfinite, metrics.values())) and is_finite(state.personal))
            ),
            after=after,
            seconds=time.perf_counter() - start,
        )

    def _train_phase(
        self,
        phase: Phase,
        job: Job,
        layout: Layout,
        part: Samples,
        generator: torch.Generator,
        state: ClientState,
        privacy: DPSGD | None,
    ) -> list[Step]:
        """Runs a phase; returns what its steps returned, each with its number of samples."""
        module = self.module
        module.phase = phase
        parameters = layout.trained(phase)
        trained = list(parameters.values())
        frozen = [parameter for name, parameter in layout.parameters.items() if name not in parameters]
        with standing_still(frozen):
            optimizer = local_optimizer(module, phase, job, trained)
            scaler = self._scaler(state.scaler or job.state.scaler)
            steps = []
            if phase.data is not None:
                part = phase.data
            if privacy is not None:
                steps = self._private_steps(privacy, part, phase, parameters, optimizer, generator)
            else:
                for index, (x, y) in enumerate(self._batches(part, phase, layout.smallest_batch, generator)):
                    values = self._values((x, y), index)
                    forget_gradients(trained)
                    self._step(values["loss"], optimizer, scaler, parameters)
                    steps.append((rows_in(y), {name: value.detach() for name, value in values.items()}))
            # momentum would go on moving a parameter by zeros whose next phase freezes it
            forget_gradients(trained)
        if module.optimizer_lifetime == "run":
            state.optimizers[phase.name] = self.work.kept(optimizer.state_dict())
        if scaler is not None:
            state.scaler = scaler.state_dict()
        module.steps_done += len(steps)
        return steps

    def _private_steps(
        self,
        privacy: DPSGD,
        part: Samples,
        phase: Phase,
        parameters: dict[str, nn.Parameter],
        optimizer: Optimizer,
        generator: torch.Generator,
    ) -> list[Step]:
        """Steps by bounded gradients of single samples and noise; a batch of nobody returns nothing."""
        slots = Slots(self.module)
        draws = Draws.of(self.work, phase, len(part))
        gradients = ExampleGradients(self.module, slots, list(parameters), privacy, self.forward_context)
        if privacy.is_secure:
            # dropout's masks go by places in the batch, so that one sample more would change the others' known masks
            self._seed(secure_seed())
        # of the same memory as what the optimizer steps in
        entries = slots.current()
        steps: list[Step] = []
        for index in range(draws.steps):
            rows = privacy.drawn(len(part), draws.rate, generator)
            noise = privacy.drawn_noise(parameters.values(), generator)
            sums: dict[str, Tensor] = {}
            totals: dict[str, Tensor] = {}
            if count := len(rows):
                chosen = part.take(rows)
                batch, taken = (chosen.x, chosen.y), torch.ones(count, device=self.device)
                sums, totals = computed(
                    partial(gradients.sums, entries, batch, taken, index),
                    partial(self._values, batch, index),
                    self._without_examples,
                )
            steps.append((count, {name: total / count for name, total in totals.items()}))
            for name, gradient in noised(sums, noise, parameters, draws.expected).items():
                parameters[name].grad = gradient
            if self._adjusts:
                self._adjust(parameters)
            optimizer.step()
        return steps

    def _values(self, batch: Batch, index: int) -> dict[str, Tensor]:
        """What a step returns and logs, under the Trainer's precision."""
        with self.forward_context():
            return step_values(self.module, batch, index)

    def _without_examples(self, reason: str) -> MisconfigurationException:
        """The refusal of a step that has no gradients of single samples."""
        return MisconfigurationException(
            f"trainer.example_privacy takes the gradient of each sample, and {type(self.module).__name__}'s "
            f"training_step can't be computed so: {reason}; leave it out, or let the step be free of what samples "
            "share."
        )

    def _batches(self, part: Samples, phase: Phase, smallest: int, generator: torch.Generator) -> Iterator[Batch]:
        """The batches of a phase: an order an epoch, gathered at once and cut into views."""
        size, last, epochs, steps = self.work.extent(phase)

        def epoch() -> Iterator[Batch]:
            batches = part.take(epoch_order(len(part), size, last, generator)).chunks(size)
            return ((x, y) for x, y in batches if rows_in(y) >= smallest)

        if len(part) < smallest:
            return iter(())
        passes = repeat(None) if steps else repeat(None, cast(int, epochs))
        return islice(chain.from_iterable(epoch() for _ in passes), steps)

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
        parameters: dict[str, nn.Parameter],
    ) -> None:
        torch.autograd.backward(loss if scaler is None else scaler.scale(loss))
        if self._calls_after_backward:
            self.module.on_after_backward()
        if scaler is not None and (self._adjusts or self._calls_before_step or self.work.clip is not None):
            scaler.unscale_(optimizer)
        if self._adjusts:
            self._adjust(parameters)
        # before clipping, as Lightning has it
        if self._calls_before_step:
            self.module.on_before_optimizer_step(optimizer)
        if self.work.clip is not None:
            if self.work.clip_algorithm == "norm":
                nn.utils.clip_grad_norm_(parameters.values(), self.work.clip)
            else:
                nn.utils.clip_grad_value_(parameters.values(), self.work.clip)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()

    @torch.no_grad()
    def _adjust(self, parameters: dict[str, nn.Parameter]) -> None:
        gradients = {name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}
        for name, gradient in adjusted_gradients(self.module, gradients).items():
            parameters[name].grad = gradient


@contextmanager
def standing_still(parameters: list[nn.Parameter]) -> Iterator[None]:
    """Make a context in which parameters require no gradient; an error in it doesn't leave them so for a later run."""
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)


def forget_gradients(parameters: list[nn.Parameter]) -> None:
    """What ``zero_grad`` of their optimizer does, without the record that it makes for profilers at each step."""
    for parameter in parameters:
        parameter.grad = None


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
