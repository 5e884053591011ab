"""Train clients one after another: the reference for every other engine."""

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
from pfl_lightning.data.batches import continued_orders
from pfl_lightning.data.trees import rows_in
from pfl_lightning.engines.base import ClientState, Engine, Job, Outcome
from pfl_lightning.engines.errors import computed, during
from pfl_lightning.engines.examples import Draws, ExampleGradients, noised, releases_of, with_noisy_counts
from pfl_lightning.engines.layout import Layout
from pfl_lightning.engines.local_optimizer import local_optimizer
from pfl_lightning.engines.slots import Slots
from pfl_lightning.engines.state_leaks import Leaks
from pfl_lightning.engines.steps import adjusted_gradients, step_values
from pfl_lightning.engines.threads import is_for_one_thread, one_thread
from pfl_lightning.messages import detached, is_finite
from pfl_lightning.privacy.dp_sgd import DPSGD
from pfl_lightning.privacy.noise import secure_seed

Step: TypeAlias = tuple[int, dict[str, Tensor]]


class Sequential(Engine):
    """Train the clients of a round one after another, in a single client module.

    Each client's state is copied into the module, trained, and copied out again. The arguments are those of `Engine`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._for_one_thread = is_for_one_thread(self.module)
        self.leaks = Leaks(self.module)
        # Looked up once, as finding overridden hooks takes too long for every step.
        self._calls_after_backward = overrides(self.module, "on_after_backward")
        self._calls_before_step = overrides(self.module, "on_before_optimizer_step")
        self._adjusts = overrides(self.module, "adjust_gradients")

    def run(self, jobs: Iterable[Job]) -> Iterator[Outcome]:
        """Train each job's client and yield the outcomes in the order of the jobs.

        Raises:
            MisconfigurationException: if the client module stores a client's data in a plain attribute.
        """
        layout = Layout.of(self.module)
        with self.leaks.of_a_round():
            for job in jobs:
                # Not around the yield: between clients the caller may use all threads.
                with self._threads():
                    outcome = self.train(job, layout)
                yield outcome

    def evaluate(self, job: Job) -> dict[str, dict[str, float]]:
        """Return the metrics of a client's received model, as `Engine.evaluate` describes."""
        with self._threads():
            return super().evaluate(job)

    def _threads(self) -> AbstractContextManager[None]:
        """Return the context for a client's number of threads."""
        return one_thread() if self._for_one_thread else nullcontext()

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
        module = self.module
        # A hook must not store a client's data in plain attributes of the module, which all clients share.
        with self.leaks.of("on_download"):
            data = self.become(job, training=True)
        self.set_mode(training=True)
        # Batches have their own generator, so that the order of samples doesn't depend on how often dropout draws.
        generator = torch.Generator().manual_seed(job.seed)
        state = ClientState(batches=dict(job.state.batches))
        steps: list[Step] = []
        with self.leaks.of("training_step"), during("training", job.round, job.client):
            phases = module.local_phases()
            for phase in phases:
                # A phase whose result stays with the client and never leaves it needs no noise.
                privacy = None if phase.stays else self.work.example_privacy
                steps += self._train_phase(phase, job, layout, data.train, generator, state, privacy)
        spent = releases_of(self.work, phases, len(data.train))
        return self.outcome(job, layout, data, state, means(steps), start)._replace(releases=tuple(spent))

    def outcome(
        self, job: Job, layout: Layout, data: ClientData, state: ClientState, metrics: dict[str, float], start: float
    ) -> Outcome:
        """Collect the update, the new state and the metrics from the module after a client's training.

        Args:
            job: the client's job.
            layout: the module's layout.
            data: the client's data, on the training device.
            state: the optimizers' state; personal entries are added.
            metrics: the metrics of the training.
            start: the time when the client's work began.
        """
        self.set_mode(training=False)
        with torch.no_grad(), self.leaks.of("upload"), during("upload", job.round, job.client):
            update = with_noisy_counts(self.work, job.seed, detached(self.module.upload(data)))
        if layout.personal:
            own = self.module.state_dict()
            state.personal = self.work.kept({name: own[name] for name in layout.personal})
        with during("evaluation", job.round, job.client):
            # Evaluation may adapt the module, so it comes after update and state are copied.
            after = self.evaluate_present(job, data)
        return Outcome(
            client=job.client,
            update=update,
            state=state,
            metrics=metrics,
            # Under example-level privacy judge by the update alone: NaN elsewhere would reveal samples without noise.
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
        """Train one phase; return each step's number of samples and values.

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
        parameters = layout.trained(phase)
        trained = list(parameters.values())
        frozen = [parameter for name, parameter in layout.parameters.items() if name not in parameters]
        # Without requires_grad, autograd skips the frozen parameters' part of the backward pass.
        with standing_still(frozen):
            optimizer = local_optimizer(module, phase, job, trained)
            # The scale continues from the phase before, or else from the client's last round.
            scaler = self._scaler(state.scaler or job.state.scaler)
            steps = []
            if phase.data is not None:
                part = phase.data
            if privacy is not None:
                steps = self._private_steps(privacy, part, phase, parameters, optimizer, generator)
            else:
                batches = self._batches(part, phase, layout.smallest_batch, generator, job)
                for index, (x, y) in enumerate(batches):
                    values = self._values((x, y), index)
                    forget_gradients(trained)
                    self._step(values["loss"], optimizer, scaler, parameters)
                    # Left on the device; `means` fetches all steps at once.
                    steps.append((rows_in(y), {name: value.detach() for name, value in values.items()}))
            # Drop the gradients: a parameter frozen in the next phase would otherwise keep a gradient, and momentum
            # would keep moving it.
            forget_gradients(trained)
        if module.optimizer_lifetime == "run":
            state.optimizers[phase.name] = self.work.kept(optimizer.state_dict())
        if scaler is not None:
            state.scaler = scaler.state_dict()
        if job.continues(phase, self.work):
            state.batches[phase.name] = job.state.batches.get(phase.name, 0) + len(steps)
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
        """Train by DP-SGD: bounded gradients of single samples plus noise; an empty batch logs no values.

        Args:
            privacy: bound, noise and sampling of DP-SGD.
            part: the client's training samples.
            phase: the phase.
            parameters: the trained parameters by name.
            optimizer: the phase's optimizer.
            generator: draws batches and noise.
        """
        slots = Slots(self.module)
        draws = Draws.of(self.work, phase, len(part))
        gradients = ExampleGradients(self.module, slots, list(parameters), privacy, self.forward_context)
        if privacy.is_secure:
            # dropout's masks go by places in the batch, so that one sample more would change the others' known masks
            self._seed(secure_seed())
        # Views of the parameters' memory, so each step sees the optimizer's changes.
        entries = slots.current()
        steps: list[Step] = []
        for index in range(draws.steps):
            # Poisson sampling: each sample joins independently, so batches vary in size and may be empty.
            rows = privacy.drawn(len(part), draws.rate, generator)
            # Drawn for an empty batch too: a step without noise would reveal that no sample was drawn.
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
        """Return the values returned and logged by ``training_step``, under the Trainer's precision."""
        with self.forward_context():
            return step_values(self.module, batch, index)

    def _without_examples(self, reason: str) -> MisconfigurationException:
        """Return the error for a step without per-sample gradients."""
        return MisconfigurationException(
            f"trainer.example_privacy needs the gradient of each sample, which {type(self.module).__name__}."
            f"training_step doesn't allow: {reason}; leave it out, or keep samples independent of each other in the "
            "step."
        )

    def _batches(
        self, part: Samples, phase: Phase, smallest: int, generator: torch.Generator, job: Job
    ) -> Iterator[Batch]:
        """Return the batches of a phase; each epoch is one shuffled copy of the samples, cut into views.

        Args:
            part: the samples.
            phase: the phase.
            smallest: the smallest usable batch, for BatchNorm; smaller ones are skipped.
            generator: draws the order of samples.
            job: the client's job.
        """
        size, last, epochs, steps = self.work.extent(phase)

        def epoch(order: Tensor) -> Iterator[Batch]:
            batches = part.take(order).chunks(size)
            return ((x, y) for x, y in batches if rows_in(y) >= smallest)

        if len(part) < smallest:
            # Without this, a number of steps would loop over endless epochs without a single batch.
            return iter(())
        if job.continues(phase, self.work):
            begun = job.state.batches.get(phase.name, 0)
            orders, done = continued_orders(len(part), size, last, smallest, cast(int, job.order_seed), begun)
            orders = chain([next(orders)[done * size :]], orders)
        else:
            passes = repeat(None) if steps else repeat(None, cast(int, epochs))
            orders = (epoch_order(len(part), size, last, generator) for _ in passes)
        return islice(chain.from_iterable(map(epoch, orders)), steps)

    def _scaler(self, state: dict[str, float]) -> torch.amp.GradScaler | None:
        """Return the client's own loss scaler if the precision needs one.

        A shared scaler's scale would depend on the order of the clients.
        """
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
        """Take one optimizer step, with Lightning's hooks in Lightning's order."""
        torch.autograd.backward(loss if scaler is None else scaler.scale(loss))
        if self._calls_after_backward:
            self.module.on_after_backward()
        if scaler is not None and (self._adjusts or self._calls_before_step or self.work.clip is not None):
            # Hooks and clipping must see gradients in their true size.
            scaler.unscale_(optimizer)
        if self._adjusts:
            self._adjust(parameters)
        # Before clipping, in Lightning's order.
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
        """Replace the gradients by the result of `ClientModule.adjust_gradients`."""
        gradients = {name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}
        for name, gradient in adjusted_gradients(self.module, gradients).items():
            parameters[name].grad = gradient


@contextmanager
def standing_still(parameters: list[nn.Parameter]) -> Iterator[None]:
    """Freeze parameters inside this context, and unfreeze afterwards, also after an error."""
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)


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
        sizes = [samples for samples, _ in pairs]
        # One transfer from the device per name, not one per step.
        scalars = torch.stack([value for _, value in pairs]).tolist()
        result[name] = sum(map(operator.mul, sizes, scalars)) / sum(sizes)
    return result
