"""Training of stacked clients: a step of all of them is one computation."""

from itertools import groupby
from typing import Any, cast

import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.func import vmap

from pfl_lightning.client import Batch, Phase
from pfl_lightning.data import epoch_order
from pfl_lightning.engines.sequential import Sequential
from pfl_lightning.engines.steps import step_values
from pfl_lightning.engines.vmap.block import Block, Member, Plan, Rows, batches_of
from pfl_lightning.engines.vmap.checks import Unvectorisable, Watch, reason_of
from pfl_lightning.engines.vmap.compiled import Compiled, Values
from pfl_lightning.engines.vmap.dropout import Drawn, Streams, default_generators
from pfl_lightning.engines.vmap.optimizers import ELEMENTWISE, Lane, counters
from pfl_lightning.engines.vmap.slots import Places
from pfl_lightning.messages import StateDict


class Stacked(Sequential):
    """Trains the clients of a block at once; the stack is sorted by their samples, the largest first."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._watch = Watch(self.module)
        self._compiled = Compiled(self.module, self.precision) if self.compile else None

    def _look(self) -> None:
        """Walks the module, and remembers where its parameters and buffers are."""
        super()._look()
        self._places = Places(self.module)

    def _train_stack(self, block: Block) -> None:
        """Runs all phases."""
        self._set_mode(training=True)
        with self._watch.nobody_in_turn():
            for phase in block.phases:
                before = self._watch.attributes()
                with self._leaks.of("training_step"):
                    self._train_together(phase, block)
                self._watch.compare(before, "its steps change {}, which is no buffer")

    def _train_together(self, phase: Phase, block: Block) -> None:
        """Runs a phase of all clients of a block."""
        self.module.phase = phase
        lanes = self._lanes(phase, block)
        trained = list(self._trained(phase))
        plan = self._plan(phase, block)
        for index, step in enumerate(plan.steps(self.device)):
            self._narrow(lanes, int((plan.counts > index).sum()), phase, block)
            gradients = self._gradients(step, index, block, trained, plan.size)
            self._clip(gradients)
            for lane in lanes:
                lane.step(gradients)
        self._narrow(lanes, 0, phase, block)
        for member, count in zip(block.members, plan.counts.tolist(), strict=True):
            member.steps += count

    def _trained(self, phase: Phase) -> dict[str, nn.Parameter]:
        """The parameters that a phase trains, by their names in the stack."""
        return {name: parameter for name, parameter in self._parameters.items() if phase.trains(name)}

    def _plan(self, phase: Phase, block: Block) -> Plan:
        """The batches of each client, in the orders that `Sequential` draws."""
        size, last, epochs, steps = self._extent(phase)
        sizes = np.array(block.sizes)
        orders, lengths = [torch.empty(0, dtype=torch.int64)] * len(sizes), np.zeros_like(sizes)
        for row, (member, samples) in enumerate(zip(block.members, block.sizes, strict=True)):
            if samples < self._smallest_batch:
                continue
            generator = member.generator
            drawn = [epoch_order(samples, size, last, generator)]
            lengths[row] = length = drawn[0].numel()
            made = max(batches_of(length, size, self._smallest_batch), 1)
            passes = -(-steps // made) if steps else cast(int, epochs)
            drawn += [epoch_order(samples, size, last, generator) for _ in range(1, passes)]
            orders[row] = torch.cat(drawn) if passes > 1 else drawn[0]
        return Plan(orders, np.cumsum(sizes) - sizes, lengths, size, self._smallest_batch, steps)

    def _gradients(
        self, step: list[tuple[Rows, Tensor]], index: int, block: Block, trained: list[str], size: int
    ) -> StateDict:
        """Gradients of the trained entries, a row a client, as far as the loss depends on them."""
        parts: list[tuple[Rows, StateDict]] = []
        for rows, samples in step:
            # short batches are too rare to be compiled
            done = self._differentiate_compiled if samples.shape[1] == size else self._differentiate
            values, slopes = done(rows, samples, index, block, trained)
            parts.append((rows, slopes))
            block.steps.append((rows, samples.shape[1], {name: value.detach() for name, value in values.items()}))
        if len(parts) == 1:
            return parts[0][1]
        gradients = {}
        for name, gradient in parts[0][1].items():
            gradients[name] = gradient.new_empty((sum(len(samples) for _, samples in step), *gradient.shape[1:]))
            for rows, slopes_of in parts:
                gradients[name][rows] = slopes_of[name]
        return gradients

    def _differentiate(self, rows: Rows, samples: Tensor, index: int, block: Block, trained: list[str]) -> Values:
        """What ``training_step`` returns, and the gradients of its loss, of some rows."""
        entries = {name: stack[rows] for name, stack in block.entries.items()}
        done = self._slopes(entries, block.batch(samples), index, trained, block.of(rows))
        if isinstance(rows, Tensor):
            # copies, in which buffers have moved
            for name in entries.keys() - set(trained):
                block.entries[name][rows] = entries[name]
        return done

    def _differentiate_compiled(
        self, rows: Rows, samples: Tensor, index: int, block: Block, trained: list[str]
    ) -> Values:
        """The same by a compiled step, where there is one.

        It is one of all rows, so that it is compiled once: those that don't learn now are computed too, and left.
        """
        if self._compiled is None or not self._compiled.trusted:
            return self._differentiate(rows, samples, index, block, trained)
        everyone = samples.new_zeros(len(block.members), samples.shape[1])
        everyone[rows] = samples
        batch, entries, members = block.batch(everyone), dict(block.entries), block.members

        def plain(entries: StateDict) -> Values:
            return self._slopes(entries, batch, index, trained, members)

        done = self._compiled.differentiate(plain, entries, batch, index, trained)
        if done is None:
            return self._differentiate(rows, samples, index, block, trained)
        for name in entries.keys() - set(trained):
            block.entries[name][rows] = entries[name][rows]
        values, slopes = done
        return {name: value[rows] for name, value in values.items()}, {name: g[rows] for name, g in slopes.items()}

    def _slopes(
        self, entries: StateDict, batch: Batch, index: int, trained: list[str], members: list[Member]
    ) -> Values:
        """What ``training_step`` returns, and the gradients of its loss as far as it depends on the trained entries."""
        leaves = [entries[name].requires_grad_() for name in trained]
        values = self._values(entries, batch, index, trained, members)
        slopes = torch.autograd.grad(values["loss"].sum(), leaves, allow_unused=True)
        return values, {name: slope for name, slope in zip(trained, slopes, strict=True) if slope is not None}

    def _values(
        self, entries: StateDict, batch: Batch, index: int, trained: list[str], members: list[Member]
    ) -> dict[str, Tensor]:
        """What ``training_step`` returns, a row a client."""
        drawn = Drawn([member.stream for member in members])
        streams = Streams(default_generators(self.device)[-1], drawn)

        def training_step(batch: Batch, index: int) -> dict[str, Tensor]:
            return step_values(self.module, batch, index)

        def one(entries: StateDict, batch: Batch) -> dict[str, Tensor]:
            streams.trained = [entries[name] for name in trained]
            return self._places.call(training_step, entries, batch, index)

        try:
            with self.forward_context(), streams:
                values: dict[str, Tensor] = vmap(one)(entries, batch)
        except (MisconfigurationException, torch.cuda.OutOfMemoryError):
            raise
        except Exception as error:
            raise Unvectorisable(self.module, reason_of(error)) from error
        drawn.move(streams.states)
        return values

    def _clip(self, gradients: StateDict) -> None:
        """Clips each client's gradients as torch does."""
        clip = self.work.clip
        if clip is None or not gradients:
            return
        if self.work.clip_algorithm == "value":
            gradients.update({name: g.clamp(-clip, clip) for name, g in gradients.items()})
            return
        norms = [torch.linalg.vector_norm(g.reshape(len(g), -1), dim=1) for g in gradients.values()]
        factor = (clip / (torch.linalg.vector_norm(torch.stack(norms), dim=0) + 1e-6)).clamp(max=1)
        gradients.update({name: g * factor.view(-1, *[1] * (g.dim() - 1)) for name, g in gradients.items()})

    def _lanes(self, phase: Phase, block: Block) -> list[Lane]:
        """Optimizers of the stack: one, unless clients come back after different numbers of steps."""
        parameters = list(self._trained(phase).values())
        jobs = [member.job for member in block.members]
        if any(phase.name in job.state.optimizers for job in jobs):
            optimizers = [self._optimizer(phase, job, parameters) for job in jobs]
            runs = [list(alike) for _, alike in groupby(optimizers, counters)]
        else:
            optimizers = [self._optimizer(phase, jobs[0], parameters)]
            runs = [optimizers * len(jobs)]
        if type(optimizers[0]) not in ELEMENTWISE:
            self._watch.refuse(f"a {type(optimizers[0]).__name__} of many clients would mix them")
        names = {p.tensor: p.name for p in self._places if isinstance(p.tensor, nn.Parameter)}
        lanes: list[Lane] = []
        for alike in runs:
            lanes.append(Lane(alike, sum(lane.rows for lane in lanes), block.entries, names))
        return lanes

    def _narrow(self, lanes: list[Lane], end: int, phase: Phase, block: Block) -> None:
        """Lets go of clients that have made their steps."""
        for lane in lanes:
            if self.module.optimizer_lifetime == "run":
                for row, state in lane.state_dicts(end):
                    block.members[row].optimizers[phase.name] = state
            lane.narrow(end)
