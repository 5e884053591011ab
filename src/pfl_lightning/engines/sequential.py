"""Train clients one after another: the reference for every other engine."""

import math
import operator
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from itertools import chain, islice
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pfl_lightning.client import Phase
from pfl_lightning.client.hooks import overrides
from pfl_lightning.contract.attributes import Leaks
from pfl_lightning.data import ClientData, Samples
from pfl_lightning.data.batches import batches_of
from pfl_lightning.data.trees import rows_in, shortened
from pfl_lightning.engines.alike import Alike
from pfl_lightning.engines.base import ClientState, Engine, Job, Outcome, PrivateTraining
from pfl_lightning.engines.client_metrics import Evaluated
from pfl_lightning.engines.errors import during
from pfl_lightning.engines.steps import Layout, adjusted_gradients, local_optimizer, step_values, weighs_batches
from pfl_lightning.engines.threads import is_for_one_thread, one_thread
from pfl_lightning.internals.of_torch import take_step
from pfl_lightning.messages import detached, is_finite
from pfl_lightning.nets.batch_norm import smallest_batch

Step: TypeAlias = tuple[int, dict[str, Tensor]]
Divisor: TypeAlias = Tensor | float | None


class Sequential(Engine):
    """Train the clients of a round one after another, in a single client module.

    Each client's state is copied into the module, trained, and copied out again. The arguments are those of `Engine`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.alike = Alike(self)
        # A subclass with another way to evaluate a client would be passed over.
        own = type(self)
        self.takes_alike = own.evaluate is Sequential.evaluate and own.become is Engine.become
        # The context for a client's number of threads.
        self._threads = one_thread if is_for_one_thread(self.module) else nullcontext
        self.leaks = Leaks(self.module)
        # BatchNorm refuses a batch of one sample, whose variance is no statistic.
        self.smallest_batch = smallest_batch(self.module)
        # Looked up once, as finding overridden hooks takes too long for every step.
        self._calls_after_backward = overrides(self.module, "on_after_backward")
        self._calls_before_step = overrides(self.module, "on_before_optimizer_step")
        self._adjusts = overrides(self.module, "adjust_gradients")
        self._scales = getattr(self.precision, "scaler", None) is not None

    def run(self, jobs: Iterable[Job]) -> Iterator[Outcome]:
        """Train each job's client and yield the outcomes in the order of the jobs.

        Raises:
            MisconfigurationException: if the client module stores a client's data in a plain attribute.
        """
        layout = Layout.of(self.module)
        with self.leaks.of("local work", whole_round=True):
            for job in jobs:
                # Not around the yield: between clients the caller may use all threads.
                with self._threads():
                    outcome = self.train(job, layout)
                yield outcome

    def evaluate(self, job: Job) -> dict[str, dict[str, float]]:
        """Return the metrics of a client's received model, as `Engine.evaluate` describes."""
        with self._threads():
            return super().evaluate(job)

    def evaluate_all(self, jobs: Iterable[Job]) -> Iterator[Evaluated]:
        """Evaluate each job's clients, those with the same model together."""
        for several in self.alike.neighbours(jobs):
            yield from self.evaluate_each(*several)

    def evaluate_each(self, *jobs: Job) -> list[Evaluated]:
        """Return the metrics of all clients of a job, or of several jobs with one model."""
        if (found := self.evaluate_alike(jobs)) is not None:
            return [found]
        return [Evaluated.of(one.client, self.evaluate(one)) for job in jobs for one in job.each()]

    def evaluate_alike(self, jobs: Sequence[Job]) -> Evaluated | None:
        """Return the metrics of the jobs' clients, of one model; None if they must be evaluated one by one."""
        if not jobs[0].alike:
            return None
        with self._threads():
            return self.alike.evaluate(jobs)

    def adapt(self, phases: list[Phase], job: Job, data: ClientData) -> None:
        """Train phase by phase with new optimizers, and leave the module in evaluation mode."""
        layout = Layout.of(self.module)
        self.set_mode(training=True)
        generator = torch.Generator().manual_seed(job.seed)
        # Nothing of an adaptation is kept, so that it has no place in an epoch to go on from.
        job = job._replace(order_seed=None)
        for phase in phases:
            self._train_phase(phase, job, layout, data.train, generator, ClientState(), None)
        self.set_mode(training=False)

    def train(self, job: Job, layout: Layout) -> Outcome:
        """Train one client through all phases.

        Args:
            job: the client's work in this round.
            layout: the module's layout.
        """
        start = time.perf_counter()
        module, private = self.module, self.work.example_privacy
        # A hook must not store a client's data in plain attributes of the module, which all clients share.
        with self.leaks.of("on_download"):
            data = self.become(job, training=True)
        self.set_mode(training=True)
        # Batches have their own generator, so that the order of samples doesn't depend on how often dropout draws.
        generator = torch.Generator().manual_seed(job.seed)
        state = ClientState(batches=dict(job.state.batches))
        steps: list[Step] = []
        samples = 0
        with self.leaks.of("training_step"), during("training", job.round, job.client):
            phases = module.local_phases()
            for phase in phases:
                # A phase whose result stays with the client and never leaves it needs no noise.
                privacy = None if phase.stays else private
                made = self._train_phase(phase, job, layout, data.train, generator, state, privacy)
                steps += made
                expected = None if privacy is None else privacy.expected_samples(self.work, phase, len(data.train))
                samples += sum(size for size, _ in made) if expected is None else expected
        # Read before an evaluation, whose adaptation takes steps too.
        taken = module.steps_done
        metrics = means(steps)
        self.set_mode(training=False)
        with torch.no_grad(), self.leaks.of("upload"), during("upload", job.round, job.client):
            update = detached(module.upload(data))
            if private is not None:
                update = private.noised_update(update, job.seed)
        if layout.personal:
            own = module.state_dict()
            state.personal = self.work.kept({name: own[name] for name in layout.personal})
        after: dict[str, dict[str, float]] = {}
        if job.evaluate:
            with during("evaluation", job.round, job.client):
                # Evaluation may adapt the module, so it comes after update and state are copied.
                after = self.evaluate_present(job, data)
        # Under privacy judged by the update alone: NaN elsewhere would reveal samples without noise.
        finite = is_finite(update)
        spent: tuple[Any, ...] = ()
        if private is None:
            finite = finite and all(map(math.isfinite, metrics.values())) and is_finite(state.personal)
        else:
            spent = tuple(private.releases(self.work, phases, len(data.train)))
        seconds = time.perf_counter() - start
        return Outcome(job.client, update, state, metrics, finite, after, seconds, "", spent, taken, samples)

    def _train_phase(
        self,
        phase: Phase,
        job: Job,
        layout: Layout,
        part: Samples,
        generator: torch.Generator,
        state: ClientState,
        privacy: PrivateTraining | None,
    ) -> list[Step]:
        """Train one phase; return each batch's number of samples and values.

        Args:
            phase: the phase.
            job: the client's job.
            layout: the module's layout.
            part: the client's training samples.
            generator: draws the order of samples.
            state: receives the optimizer's state.
            privacy: DP-SGD, or None.
        """
        module = self.module
        module.phase = phase
        with layout.training(phase) as parameters:
            trained = list(parameters.values())
            optimizer = local_optimizer(module, phase, job, trained, self.work)
            # The scale continues from the phase before, or else from the client's last round.
            scaler = self._scaler(state.scaler or job.state.scaler) if self._scales else None
            steps, taken, index = [], 0, 0
            if phase.data is not None:
                part = phase.data
            if privacy is not None:
                steps = privacy.train_phase(self, part, phase, parameters, optimizer, generator)
                taken = len(steps)
            else:
                for x, y, divisor, ends in self._batches(part, phase, generator, job):
                    with self.forward_context():
                        values = step_values(module, (x, y), index)
                    if index == taken * self.work.accumulate:
                        forget_gradients(trained)
                    loss = values["loss"] if divisor is None else values["loss"] / divisor
                    torch.autograd.backward(loss if scaler is None else scaler.scale(loss))
                    if self._calls_after_backward:
                        module.on_after_backward()
                    if ends:
                        self._step(optimizer, scaler, parameters)
                        taken += 1
                    # Engines of several clients count steps, and a step at the end of an epoch may have fewer batches.
                    index = taken * self.work.accumulate if ends else index + 1
                    # Left on the device; `means` fetches all steps at once.
                    steps.append((rows_in(y), {name: value.detach() for name, value in values.items()}))
            # Drop the gradients: a parameter frozen in the next phase would otherwise keep a gradient, and momentum
            # would keep moving it.
            forget_gradients(trained)
        if module.optimizer_lifetime == "run":
            state.optimizers[phase.name] = self.work.kept(optimizer.state_dict())
        if scaler is not None:
            state.scaler = scaler.state_dict()
        if job.continues(phase, self.work.extent(phase, job.client)):
            state.batches[phase.name] = job.state.batches.get(phase.name, 0) + len(steps)
        module.steps_done += taken
        return steps

    def _batches(
        self, part: Samples, phase: Phase, generator: torch.Generator, job: Job
    ) -> Iterator[tuple[Any, Any, Divisor, bool]]:
        """Yield a phase's batches: inputs, targets, the loss's divisor, and whether an optimizer step follows.

        Each epoch is one shuffled copy of the samples, cut into views.

        Args:
            part: the samples.
            phase: the phase.
            generator: draws the order of samples.
            job: the client's job.
        """
        extent, accumulate = self.work.extent(phase, job.client), self.work.accumulate
        size, most = extent.batch_size, extent.steps
        # Without this, a number of steps would loop over endless epochs without a single batch.
        if len(part) < self.smallest_batch:
            return
        orders, done = job.orders(phase, extent, len(part), self.smallest_batch, generator)
        if done:
            orders = chain([next(orders)[done * size :]], orders)
        made = 0
        for order in orders:
            if not made:
                most = extent.most_steps(-(-batches_of(order.numel(), size, self.smallest_batch) // accumulate))
            batches = (batch for batch in part.take(order).chunks(size) if rows_in(batch[1]) >= self.smallest_batch)
            # The last group of an epoch may have fewer batches, as under Lightning's own Trainer.
            while group := list(islice(batches, accumulate)):
                divisors = self._divisors([y for _, y in group])
                for number, ((x, y), divisor) in enumerate(zip(group, divisors, strict=True), 1):
                    yield *shortened(x, y, self.module.task.length(y)), divisor, number == len(group)
                made += 1
                if made == most:
                    return

    def _divisors(self, targets: list[Any]) -> list[Divisor]:
        """Return the divisors of the losses of an optimizer step's batches.

        Args:
            targets: the batches' targets.
        """
        if self.work.accumulate == 1:
            return [None]
        task = self.module.task
        if not weighs_batches(task):
            return [self.work.accumulate] * len(targets)
        # The mean over all errors that the task counts: batches of texts have different numbers of counted tokens.
        weights = [task.weight(y) for y in targets]
        return [sum(weights) / weight for weight in weights]

    def _scaler(self, state: dict[str, float]) -> torch.amp.GradScaler:
        """Return the client's own loss scaler, as a shared one's scale would depend on the order of the clients."""
        scaler = torch.amp.GradScaler(self.device.type)
        if state:
            scaler.load_state_dict(state)
        return scaler

    def _step(
        self, optimizer: Optimizer, scaler: torch.amp.GradScaler | None, parameters: dict[str, nn.Parameter]
    ) -> None:
        """Take one optimizer step, with Lightning's hooks in Lightning's order."""
        if scaler is not None and (self._adjusts or self._calls_before_step or self.work.clip is not None):
            # Hooks and clipping must see gradients in their true size.
            scaler.unscale_(optimizer)
        self.adjust(parameters)
        # Before clipping, in Lightning's order.
        if self._calls_before_step:
            self.module.on_before_optimizer_step(optimizer)
        if self.work.clip is not None:
            if self.work.clip_algorithm == "norm":
                nn.utils.clip_grad_norm_(parameters.values(), self.work.clip)
            else:
                nn.utils.clip_grad_value_(parameters.values(), self.work.clip)
        if scaler is None:
            take_step(optimizer)
        else:
            scaler.step(optimizer)
            scaler.update()

    @torch.no_grad()
    def adjust(self, parameters: dict[str, nn.Parameter]) -> None:
        """Replace the gradients by the result of `ClientModule.adjust_gradients`.

        Args:
            parameters: the trained parameters by name.
        """
        if not self._adjusts:
            return
        gradients = {name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}
        for name, gradient in adjusted_gradients(self.module, gradients).items():
            parameters[name].grad = gradient


def forget_gradients(parameters: list[nn.Parameter]) -> None:
    """Set gradients to None, without the profiler record of each ``Optimizer.zero_grad`` call."""
    for parameter in parameters:
        parameter.grad = None


def means(steps: list[Step]) -> dict[str, float]:
    """Return the means over steps, weighted by samples."""
    named: dict[str, list[tuple[int, Tensor]]] = {}
    for samples, values in steps:
        for name, value in values.items():
            named.setdefault(name, []).append((samples, value))
    result = {}
    for name, pairs in named.items():
        sizes, tensors = zip(*pairs, strict=True)
        # One transfer from the device per name, not one per step.
        scalars = torch.stack(tensors).tolist()
        result[name] = sum(map(operator.mul, sizes, scalars)) / sum(sizes)
    return result
