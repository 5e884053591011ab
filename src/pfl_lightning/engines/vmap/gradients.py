"""Compute a training step of stacked clients: the returned values, and the gradients of the loss."""

from typing import cast

import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor

from pfl_lightning.client.module import Batch
from pfl_lightning.engines.slots import Slots
from pfl_lightning.engines.steps import step_values
from pfl_lightning.engines.vmap.block import Block, Member, Rows
from pfl_lightning.engines.vmap.checks import SharedAttributes, vectorised
from pfl_lightning.engines.vmap.compiled import Compiled, Values
from pfl_lightning.engines.vmap.dropout import DeviceStates, Streams, default_generators
from pfl_lightning.engines.vmap.mapping import mapped
from pfl_lightning.engines.vmap.scales import Scales
from pfl_lightning.messages import StateDict, tree_map


class Differentiator:
    """Compute training steps of many clients, forward and backward, in a phase of a block.

    Args:
        attributes: the client module's attributes.
        precision: the Trainer's precision plugin.
        compiled: the compiled step; None runs each step uncompiled.
        slots: the module's slots.
        block: the clients; entries are read, and buffers among the entries updated.
        trained: names of the entries to differentiate with respect to.
        size: samples of a full batch.
        scales: factors of the clients' losses; None leaves the losses unscaled.
        accumulate: batches of an optimizer step, by which gradients are divided.
    """

    def __init__(
        self,
        attributes: SharedAttributes,
        precision: Precision,
        compiled: Compiled | None,
        slots: Slots,
        block: Block,
        trained: list[str],
        size: int,
        scales: Scales | None = None,
        accumulate: int = 1,
    ) -> None:
        self.attributes = attributes
        self.module = attributes.module
        self.precision = precision
        self.compiled = compiled
        self.slots = slots
        self.block = block
        self.trained = trained
        self.size = size
        self.scales = scales
        self.accumulate, self.share = accumulate, 1 / accumulate
        self._ones: Tensor | None = None

    def gradients(self, step: list[list[tuple[Rows, Tensor]]], index: int) -> StateDict:
        """Return the gradients of the trained entries, a row per client, without entries unused by the (scaled) loss.

        Values from `ClientModule.training_step` are stored in the block.

        Args:
            step: the batches of an optimizer step, each as pairs of rows and their samples ``[rows, size]``. All rows
                have a first batch.
            index: the step's number.
        """
        if self.accumulate == 1:
            return self._of_batch(step[0], index)
        total = sum(len(samples) for _, samples in step[0])
        sums: StateDict = {}
        for further, batch in enumerate(step):
            for rows, gradients in self._parts(batch, index * self.accumulate + further):
                for name, gradient in gradients.items():
                    if name not in sums:
                        sums[name] = gradient.new_zeros((total, *gradient.shape[1:]))
                    # Copied: a compiled step overwrites the memory of the step before.
                    sums[name][rows] += gradient
        return sums

    def _of_batch(self, batch: list[tuple[Rows, Tensor]], index: int) -> StateDict:
        """Return the gradients of a single batch of each client."""
        parts = self._parts(batch, index)
        # The usual case: all batches have one size, and nothing must be copied.
        if len(parts) == 1:
            return parts[0][1]
        joined = {}
        for name, gradient in parts[0][1].items():
            joined[name] = gradient.new_empty((sum(len(samples) for _, samples in batch), *gradient.shape[1:]))
            for rows, gradients in parts:
                joined[name][rows] = gradients[name]
        return joined

    def _parts(self, batch: list[tuple[Rows, Tensor]], index: int) -> list[tuple[Rows, StateDict]]:
        """Return rows and their gradients by batch size, and record the values of the step."""
        parts: list[tuple[Rows, StateDict]] = []
        for rows, samples in batch:
            # Each batch size needs its own compilation, and short batches are too rare to pay for one.
            compiles = self.compiled is not None and self.compiled.trusted and samples.shape[1] == self.size
            done = self._compiled(rows, samples, index) if compiles else None
            values, gradients = self._plain(rows, samples, index) if done is None else done
            parts.append((rows, gradients))
            self.block.record(rows, samples.shape[1], values)
        return parts

    def _plain(self, rows: Rows, samples: Tensor, index: int) -> Values:
        """Run the uncompiled step of some rows."""
        entries = {name: stack[rows] for name, stack in self.block.entries.items()}
        factors = None if self.scales is None else self.scales.of(rows)
        done = self._differentiate(entries, self.block.batch(samples), index, self.block.of(rows), factors, self.share)
        if isinstance(rows, Tensor):
            # Indexing by a tensor makes copies (a slice makes views), so write updated buffers back.
            for name in entries.keys() - set(self.trained):
                self.block.entries[name][rows] = entries[name]
        return done

    def _compiled(self, rows: Rows, samples: Tensor, index: int) -> Values | None:
        """Run the compiled step; return None if it fails or gives other results than the plain one.

        Always run all rows, to compile only once; results of rows without a batch are dropped.
        """
        block, compiled = self.block, cast(Compiled, self.compiled)
        everyone = samples.new_zeros(len(block.members), samples.shape[1])
        everyone[rows] = samples
        batch, entries = block.batch(everyone), dict(block.entries)

        def plain(entries: StateDict) -> Values:
            return self._differentiate(entries, batch, index, block.members)

        done = compiled.differentiate(plain, entries, batch, index, self.trained)
        if done is None:
            return None
        for name in entries.keys() - set(self.trained):
            # Copied, as the next step may overwrite the graph's memory.
            block.entries[name][rows] = entries[name][rows]
        values, gradients = done
        # Divided here: the compiled step is compared with one of the whole loss.
        gradients = {name: g[rows] if self.share == 1 else g[rows] * self.share for name, g in gradients.items()}
        return {name: v[rows] for name, v in values.items()}, gradients

    def _differentiate(
        self,
        entries: StateDict,
        batch: Batch,
        index: int,
        members: list[Member],
        factors: Tensor | None = None,
        share: float = 1.0,
    ) -> Values:
        """Return the values of ``training_step``, and a share of the loss's gradients by the trained entries."""
        leaves = [entries[name].requires_grad_() for name in self.trained]
        states = DeviceStates([member.stream for member in members])
        # Each client draws dropout from its own stream, as it would alone.
        streams = Streams(default_generators(self.module.device)[-1], states)

        def one(entries: StateDict, batch: Batch) -> dict[str, Tensor]:
            streams.trained = [entries[name] for name in self.trained]
            streams.classes = batch[1] if self.module.task.has_classes else None
            return self.slots.call(step_values, entries, self.module, batch, index)

        def at_once() -> dict[str, Tensor]:
            with self.precision.forward_context(), streams:
                return mapped(one, entries, batch, len(members))

        def alone() -> None:
            with self.precision.forward_context():
                step_values(self.module, tree_map(lambda stack: stack[0], batch), index)

        values = vectorised(self.attributes, self.slots, members[0], entries, at_once, alone)
        states.move(streams.states)
        # One backward pass for all clients: losses of different rows don't depend on each other's entries.
        loss = values["loss"]
        if factors is not None:
            factors = factors.to(loss.dtype)
        elif self._ones is None or self._ones.shape != loss.shape or self._ones.dtype != loss.dtype:
            # Kept from step to step: backward needs an output gradient per client.
            self._ones = torch.ones_like(loss)
        outputs = cast(Tensor, self._ones) if factors is None else factors
        gradients = torch.autograd.grad(loss, leaves, outputs if share == 1 else outputs * share, allow_unused=True)
        return values, {name: g for name, g in zip(self.trained, gradients, strict=True) if g is not None}
