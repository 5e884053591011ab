"""Train a block of clients: all clients take each step together."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.optim import Optimizer

from pfl_lightning.client.hooks import overrides
from pfl_lightning.client.phases import Phase
from pfl_lightning.data.batches import batches_of
from pfl_lightning.engines.errors import during
from pfl_lightning.engines.sequential import Sequential
from pfl_lightning.engines.steps import adjusted_gradients, local_optimizer
from pfl_lightning.engines.vmap.block import Block, Plan, Planned
from pfl_lightning.engines.vmap.checks import SharedAttributes, Unvectorisable, vectorised
from pfl_lightning.engines.vmap.compiled import Compiled
from pfl_lightning.engines.vmap.gradients import Differentiator, Padding
from pfl_lightning.engines.vmap.merged import Merged
from pfl_lightning.engines.vmap.optimizers import ELEMENTWISE, SKIPPING, RowsOptimizer, can_skip, rows_optimizers
from pfl_lightning.engines.vmap.scales import Scales
from pfl_lightning.messages import StateDict, detached


class BlockTrainer:
    """Train the clients of a block at once, each with the same batches and optimizer as alone.

    Args:
        sequential: the engine of one client, with the module.
        attributes: the module's attributes, which steps must not change.
        merged: parts of nets that take the samples of all clients as one batch.
        compile: whether to compile steps.
    """

    def __init__(self, sequential: Sequential, attributes: SharedAttributes, merged: Merged, compile: bool) -> None:
        self.sequential = sequential
        self.module = sequential.module
        self.work = sequential.work
        self.attributes = attributes
        self.merged = merged
        self._adjusts = overrides(self.module, "adjust_gradients")
        self._scaled = getattr(sequential.precision, "scaler", None) is not None
        self.compiled = Compiled(self.module, sequential.precision) if compile else None
        self.padding = Padding(self.module, sequential.precision)

    def train(self, block: Block) -> None:
        """Train all phases, and change the block's entries in place.

        Args:
            block: the clients, largest first.

        Raises:
            Unvectorisable: if a step can't be computed for many clients at once.
        """
        self.sequential.set_mode(training=True)
        round = block.members[0].job.round
        with self.attributes.without_turn():
            for phase in block.phases:
                before = self.attributes.look()
                with self.attributes.of("training_step"), during("training", round, *block.rows):
                    self._train_phase(phase, block)
                self.attributes.refuse_changes(before, "its steps change {}, which is no buffer")

    def _train_phase(self, phase: Phase, block: Block) -> None:
        """Train a phase, step by step; clients with fewer batches stop earlier."""
        self.module.phase = phase
        trained = self.attributes.layout.trained(phase)
        optimizers = self._optimizers(phase, block, list(trained.values()))
        scales = self._scales(block) if self._scaled else None
        plan, steps = self._steps(phase, block, trained, scales)
        counts = plan.counts
        # Clients are sorted by size, so clients that still have batches are the first rows of the stack.
        left = len(counts) - np.searchsorted(np.sort(counts), np.arange(counts.max(initial=0)), side="right")
        for rows, gradients_of in zip(left.tolist(), steps, strict=True):
            self._narrow(optimizers, rows, phase, block)
            gradients, left_out = gradients_of(), None
            if scales is not None:
                gradients, left_out = scales.unscaled(gradients)
            if self._adjusts and gradients:
                gradients = self._adjusted(gradients, block)
            if self.work.clip is not None and gradients:
                self._clip(gradients, self.work.clip)
            for optimizer in optimizers:
                optimizer.step(gradients, left_out)
            # The gradients of the next step take the same memory, which is still in the processor's cache.
            del gradients
        self._narrow(optimizers, 0, phase, block)
        if scales is not None:
            for member, state in zip(block.members, scales.state_dicts(), strict=True):
                member.scaler = state
        extent = self.work.extent(phase)
        totals = counts.tolist(), plan.batches.tolist(), plan.samples.tolist()
        for member, count, made, samples in zip(block.members, *totals, strict=True):
            member.steps += count
            member.samples += samples
            if member.job.continues(phase, extent):
                member.batches[phase.name] = member.job.state.batches.get(phase.name, 0) + made

    def _scales(self, block: Block) -> Scales:
        """Return the clients' loss scales."""
        if self.compiled is not None:
            raise Unvectorisable(
                self.module, "trainer.compile doesn't support the loss scales of trainer.precision=16-mixed"
            )
        return Scales([member.scaler or member.job.state.scaler for member in block.members], self.module.device)

    def _steps(
        self,
        phase: Phase,
        block: Block,
        trained: dict[str, nn.Parameter],
        scales: Scales | None,
    ) -> tuple[Planned, Iterator[Callable[[], StateDict]]]:
        """Return the plan of all clients' batches, and a function per step for the gradients, a row each."""
        device, privacy = self.module.device, None if phase.stays else self.work.example_privacy
        if privacy is not None:
            return privacy.block_steps(self.sequential, self.attributes, self.attributes.slots, phase, block, trained)
        plan = self._plan(phase, block)
        pads, apart = self.padding.allows(phase), self.compiled is not None and self.compiled.trusted
        differentiator = Differentiator(
            self.attributes,
            self.sequential.precision,
            self.compiled,
            self.padding,
            self.merged,
            block,
            phase,
            list(trained),
            plan.size,
            scales,
            self.work.accumulate,
        )
        return (
            plan,
            (
                partial(differentiator.gradients, step, index)
                for index, step in enumerate(plan.steps(device, pads, apart))
            ),
        )

    def _optimizers(self, phase: Phase, block: Block, parameters: list[nn.Parameter]) -> list[RowsOptimizer]:
        """Return the stack's optimizers, with the clients' saved states."""

        def new(row: int) -> Optimizer:
            job = block.members[row].job
            # Only the settings are loaded here; states of parameters are stacked with those of other clients below.
            kept = {name: {**state, "state": {}} for name, state in job.state.optimizers.items()}
            return local_optimizer(
                self.module, phase, job._replace(state=replace(job.state, optimizers=kept)), parameters, self.work
            )

        first = new(0)
        # Exact types, because a subclass may mix elements of different clients.
        if type(first) not in ELEMENTWISE:
            raise Unvectorisable(self.module, f"a {type(first).__name__} of many clients would mix them")
        if self._scaled and not can_skip(first):
            raise Unvectorisable(
                self.module,
                f"trainer.precision=16-mixed skips steps of single clients, which {type(first).__name__} can't for a "
                f"stack of clients; only {', '.join(sorted(kind.__name__ for kind in SKIPPING))} without dampening can",
            )
        names = {slot.tensor: slot.name for slot in self.attributes.slots if isinstance(slot.tensor, nn.Parameter)}
        saved = [member.job.state.optimizers.get(phase.name) for member in block.members]
        fresh = saved.index(None) if None in saved else None
        # A client without a saved state begins with a fresh optimizer's, so that all rows have the same entries.
        begun = {} if fresh is None else detached((new(fresh) if fresh else first).state_dict())
        states = [(state or begun)["state"] for state in saved]
        return rows_optimizers(new, states, block.entries, names, skips=self._scaled)

    def _plan(self, phase: Phase, block: Block) -> Plan:
        """Return the batches of each client, in the same order as `Sequential`."""
        # the same for all clients of a block
        extent, smallest = self.work.extent(phase, block.members[0].job.client), self.sequential.smallest_batch
        size, _, epochs, *_ = extent
        accumulate = self.work.accumulate
        sizes = np.array(block.sizes)
        orders, lengths = [torch.empty(0, dtype=torch.int64)] * len(sizes), np.zeros_like(sizes)
        skipped, most = np.zeros_like(sizes), np.full_like(sizes, np.iinfo(np.int64).max)
        generator = torch.Generator()
        known: dict[tuple[int, int], tuple[int | None, int]] = {}
        for row, (member, samples) in enumerate(zip(block.members, block.sizes, strict=True)):
            if samples < smallest:
                continue
            # With several phases the client's generator continues from phase to phase, as in `Sequential`.
            own = member.generator if len(block.phases) > 1 else generator.manual_seed(member.job.seed)
            epochs_left, done = member.job.orders(phase, extent, samples, smallest, own)
            if (first := next(epochs_left, None)) is None:
                continue
            lengths[row], skipped[row] = first.numel(), done
            if (samples, done) not in known:
                # Optimizer steps of an epoch, and of the first one, which may have begun in an earlier round.
                each = batches_of(first.numel(), size, smallest)
                whole, rest = (-(-batches // accumulate) for batches in (each, each - done))
                bound = extent.most_steps(whole)
                # Enough epochs for the steps, rounded up; `Plan` drops what is too much. No more are drawn, as a later
                # phase's orders come from the same generator.
                further = cast(int, epochs) - 1 if bound is None else -(-max(bound - rest, 0) // max(whole, 1))
                known[samples, done] = bound, further
            bound, further = known[samples, done]
            most[row] = most[row] if bound is None else bound
            orders[row] = torch.cat([first, *islice(epochs_left, further)]) if further else first
        return Plan(orders, np.cumsum(sizes) - sizes, lengths, size, smallest, most, skipped, accumulate)

    def _narrow(self, optimizers: list[RowsOptimizer], end: int, phase: Phase, block: Block) -> None:
        """Release clients after their last step, and keep the optimizers' states with a lifetime of the run."""
        for optimizer in optimizers:
            if self.module.optimizer_lifetime == "run":
                for row, state in optimizer.state_dicts(end, self.work):
                    block.members[row].optimizers[phase.name] = state
            optimizer.narrow(end)

    @torch.no_grad()
    def _adjusted(self, gradients: StateDict, block: Block) -> StateDict:
        """Return the gradients after the module's `ClientModule.adjust_gradients`, a row per client."""
        rows = len(next(iter(gradients.values())))

        def one(entries: StateDict, gradients: StateDict) -> StateDict:
            return self.attributes.slots.call(adjusted_gradients, entries, self.module, gradients)

        def at_once() -> StateDict:
            entries = {name: stack[:rows] for name, stack in block.entries.items()}
            return vmap(one)(entries, gradients)

        def alone() -> None:
            adjusted_gradients(self.module, {name: stack[0] for name, stack in gradients.items()})

        return vectorised(self.attributes, block.members[0], block.entries, at_once, alone)

    def _clip(self, gradients: StateDict, clip: float) -> None:
        """Clip each client's gradients by torch's formula."""
        if self.work.clip_algorithm == "value":
            gradients.update({name: g.clamp(-clip, clip) for name, g in gradients.items()})
            return
        norms: list[Tensor] = [torch.linalg.vector_norm(g.reshape(len(g), -1), dim=1) for g in gradients.values()]
        # The 1e-6 is that of torch.nn.utils.clip_grad_norm_.
        factor = (clip / (torch.linalg.vector_norm(torch.stack(norms), dim=0) + 1e-6)).clamp(max=1)
        gradients.update({name: g * factor.view(-1, *[1] * (g.dim() - 1)) for name, g in gradients.items()})
