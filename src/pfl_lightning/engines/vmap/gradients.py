"""Compute a training step of stacked clients: the returned values, and the gradients of the loss."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from lightning.pytorch.plugins.precision import Precision
from numpy.typing import NDArray
from torch import Tensor
from torch.func import vmap

from pfl_lightning.client.module import Batch, ClientModule
from pfl_lightning.client.phases import Phase
from pfl_lightning.engines.errors import reason_of
from pfl_lightning.engines.steps import step_values, weighs_batches
from pfl_lightning.engines.vmap.block import Block, Member, Part, Rows
from pfl_lightning.engines.vmap.checks import SharedAttributes, vectorised
from pfl_lightning.engines.vmap.compiled import Compiled, Values
from pfl_lightning.engines.vmap.dense import DenseNet
from pfl_lightning.engines.vmap.dropout import DeviceStates, Stream, Streams, default_generators
from pfl_lightning.engines.vmap.merged import FEW, Merged
from pfl_lightning.engines.vmap.scales import Scales
from pfl_lightning.internals.of_torch import (
    enter_vmap,
    leave_vmap,
    load_decompositions,
    row_of,
    run_backward,
    stack_of,
    version,
)
from pfl_lightning.messages import StateDict, tree_map
from pfl_lightning.tasks import Task

Step = Callable[[StateDict, Any], dict[str, Tensor]]
"""A function of a client's entries and batch."""


class Trial(NamedTuple):
    """A step computed without effect.

    Args:
        values: the values of ``training_step``, a row per client.
        gradients: the gradients of the trained entries.
        entries: the other entries after the step.
        streams: the clients' random streams after the step.
    """

    values: StateDict
    gradients: StateDict
    entries: StateDict
    streams: list[Stream]


CHECKED = 3
"""Padded steps of a phase in which batches of all sizes are checked; later checks are of the largest batches alone."""
ROWS = 4
"""Clients of such a later check at most."""


class OtherPath(Exception):
    """A step of padded batches has called other functions than the checked ones.

    Args:
        calls: the functions.
    """

    def __init__(self, calls: list[Any]) -> None:
        super().__init__()
        self.calls = calls


class Padding:
    """Whether steps may compute short batches together with longer ones, known by checks of a client module's phases.

    A short batch repeats its last sample, and means over samples give the repetitions the weight 0 (`Layers`). That is
    the loss of the short batch unless the loss or a layer, such as BatchNorm, puts samples together otherwise. Each
    round's first padded step of a phase is therefore computed both ways, in float64, near the clients' weights, and
    with the same random numbers; and so is any later step that calls other functions of torch, such as a term that
    begins with a certain batch. After a difference the phase's batches are computed by size, for the rest of the run.

    Args:
        module: the client module.
        precision: the Trainer's precision plugin.
    """

    def __init__(self, module: ClientModule, precision: Precision) -> None:
        # Weights of half precision would leave nothing to compare by.
        exact = str(precision.precision).endswith("-mixed") or str(precision.precision).startswith(("32", "64"))
        # A task that counts errors otherwise than by samples has means in which samples have no weights of their own.
        task = module.task
        self.possible = exact and not task.samples_meet and type(task).weight is Task.weight
        self.refused: set[str] = set()
        """Names of phases whose steps differ if padded."""
        self.steps: dict[str, int] = {}
        """Checked steps by phase."""

    def allows(self, phase: Phase) -> bool:
        """Return whether a phase's batches may be padded, as far as known."""
        return self.possible and phase.name not in self.refused


class Differentiator:
    """Compute training steps of many clients, forward and backward, in a phase of a block.

    Args:
        attributes: the client module's attributes.
        precision: the Trainer's precision plugin.
        compiled: the compiled step; None runs each step uncompiled.
        padding: whether batches of several sizes may be computed at once.
        merged: parts of nets that take the samples of all clients as one batch.
        block: the clients; entries are read, and buffers among the entries updated.
        phase: the phase.
        trained: names of the entries to differentiate with respect to.
        size: samples of a full batch.
        scales: factors of the clients' losses; None leaves the losses unscaled.
        accumulate: batches of an optimizer step, by which gradients are divided unless the task counts errors itself.
    """

    def __init__(
        self,
        attributes: SharedAttributes,
        precision: Precision,
        compiled: Compiled | None,
        padding: Padding,
        merged: Merged,
        block: Block,
        phase: Phase,
        trained: list[str],
        size: int,
        scales: Scales | None = None,
        accumulate: int = 1,
    ) -> None:
        self.attributes = attributes
        self.module = attributes.module
        self.precision = precision
        self.compiled = compiled
        self.padding = padding
        self.merged = merged
        self.slots = attributes.slots
        self.block = block
        self.phase = phase
        self.trained = trained
        self.size = size
        self.scales = scales
        self.weighs = accumulate > 1 and weighs_batches(self.module.task)
        self.accumulate, self.share = accumulate, 1 if self.weighs else 1 / accumulate
        self._ones: Tensor | None = None
        self._paths: list[list[Any]] = []
        """The functions that checked steps called."""
        self._widest = 0
        """Samples of the widest padded batches that were checked."""
        self._moving: set[str] = set()
        """Buffers that checked steps changed."""
        self.dense = None if compiled else DenseNet.of(self.module, precision, self.slots, block, trained)
        merged.see(block.entries)

    def gradients(self, step: list[list[Part]], index: int) -> StateDict:
        """Return the gradients of the trained entries, a row per client, without entries unused by the (scaled) loss.

        Values from `ClientModule.training_step` are stored in the block.

        Args:
            step: the batches of an optimizer step, each in parts. All rows have a first batch.
            index: the step's number.
        """
        if self.accumulate == 1:
            return self._of_batch(step[0], index)
        total = sum(len(part.samples) for part in step[0])
        sums: StateDict = {}
        shares = self._shares(step, total) if self.weighs else None
        for further, batch in enumerate(step):
            for rows, gradients in self._parts(batch, index * self.accumulate + further):
                for name, gradient in gradients.items():
                    if name not in sums:
                        sums[name] = gradient.new_zeros((total, *gradient.shape[1:]))
                    # Copied: a compiled step overwrites the memory of the step before.
                    if shares is None:
                        sums[name][rows] += gradient
                    else:
                        share = shares[further][rows].view(-1, *[1] * (gradient.dim() - 1))
                        sums[name][rows] += gradient * share.to(gradient.dtype)
        return sums

    def _shares(self, step: list[list[Part]], rows: int) -> Tensor:
        """Return the shares of a step's batches in the errors that the task counts, ``[batches, rows]``.

        Args:
            step: as for `gradients`.
            rows: number of rows with a batch.
        """
        weights = torch.zeros(len(step), rows, device=step[0][0].samples.device)
        for counts, batch in zip(weights, step, strict=True):
            for part in batch:
                for own, samples, *_ in part.by_size():
                    counted = vmap(self.module.task.weight)(self.block.batch(samples)[1])
                    counts[own] = cast(Tensor, counted).to(counts)
        return weights / weights.sum(0)

    def _of_batch(self, batch: list[Part], index: int) -> StateDict:
        """Return the gradients of a single batch of each client."""
        parts = self._parts(batch, index)
        # The usual case: all batches are computed at once, and nothing must be copied.
        if len(parts) == 1:
            return parts[0][1]
        joined = {}
        for name, gradient in parts[0][1].items():
            joined[name] = gradient.new_empty((sum(len(part.samples) for part in batch), *gradient.shape[1:]))
            for rows, gradients in parts:
                joined[name][rows] = gradients[name]
        return joined

    def _parts(self, batch: list[Part], index: int) -> list[tuple[Rows, StateDict]]:
        """Return rows and their gradients by part, and record the values of the step."""
        done: list[tuple[Rows, StateDict]] = []
        for part in batch:
            if self.dense is not None:
                x, y = self.block.batch(part.samples)
                values, gradients = self.dense.differentiate(self._entries(part.rows), x, y, part.counts, self.share)
                done.append((part.rows, gradients))
                self.block.record(part.rows, part.samples.shape[1] if part.sizes is None else part.sizes, values)
                continue
            at_once = self._padded(part, index) if part.sizes is not None and self._may_pad(part, index) else None
            if at_once is not None:
                done.append((part.rows, at_once[1]))
                self.block.record(part.rows, cast("NDArray[np.int64]", part.sizes), at_once[0])
                continue
            for rows, samples, *_ in part.by_size():
                # Each batch size needs its own compilation, and short batches are too rare to pay for one.
                compiles = self.compiled is not None and self.compiled.trusted and samples.shape[1] == self.size
                found = self._compiled(rows, samples, index) if compiles else None
                if found is None:
                    members, entries = self.block.of(rows), self._entries(rows)
                    factors = None if self.scales is None else self.scales.of(rows)
                    found = self._differentiate(entries, self.block.batch(samples), index, members, factors, self.share)
                    self._write_back(entries, rows)
                values, gradients = found
                done.append((rows, gradients))
                self.block.record(rows, samples.shape[1], values)
        return done

    def _entries(self, rows: Rows) -> StateDict:
        """Return the entries of some rows: views if the rows are a slice."""
        return {name: stack[rows] for name, stack in self.block.entries.items()}

    def _write_back(self, entries: StateDict, rows: Rows) -> None:
        """Keep the buffers that a step of some rows has updated."""
        if isinstance(rows, Tensor):
            # Indexing by a tensor makes copies (a slice makes views), so write updated buffers back.
            for name in entries.keys() - set(self.trained):
                self.block.entries[name][rows] = entries[name]

    # Padded batches

    def _may_pad(self, part: Part, index: int) -> bool:
        """Return whether a part's batches may be computed at once, which the phase's first part in a round checks."""
        width = part.samples.shape[1]
        # Narrow batches may hide what wider ones show, as halves of two samples.
        if self.padding.allows(self.phase) and (not self._paths or width > self._widest):
            self._widest = width
            self._check(part, index)
        return self.padding.allows(self.phase)

    def _check(self, part: Part, index: int) -> None:
        """Refuse padded batches in this phase if a part shows that they give other results.

        Args:
            part: batches of several sizes.
            index: the step's number.
        """
        seen = self.padding.steps.get(self.phase.name, 0)
        self.padding.steps[self.phase.name] = seen + 1
        groups = sorted(part.by_size(), key=lambda group: -group.samples.shape[1])
        if seen >= CHECKED:
            # The largest batches say most, and single samples are what steps treat apart.
            groups = [group.first(ROWS) for group in (groups[0], groups[-1])]
        if not all(self._is_mean(group, part.samples.shape[1], index) for group in groups):
            self.padding.refused.add(self.phase.name)

    def _is_mean(self, group: Part, width: int, index: int) -> bool:
        """Return whether a step of padded batches gives the loss and gradients of a step of the batches themselves.

        Args:
            group: batches of one size.
            width: the size of the padded batches, at least the group's.
            index: the step's number.
        """
        rows, size = group.samples.shape
        if size == width:
            # Without padding there is nothing to compare.
            size -= size // 2
        own = group.samples[:, :size]
        repeated = torch.cat([own, own[:, -1:].expand(-1, width - size)], 1)
        counts = torch.full((rows,), size, device=repeated.device)
        padded = Part(group.rows, repeated, np.full(rows, size), counts)
        samples, entries = self.block.batch(repeated), self._entries(group.rows)
        for cast_to, tolerance in ((in_float64, 1e-6), (unchanged, 1e-4)):
            given = {name: cast_to(entry.detach()) for name, entry in entries.items()}
            for name in self.trained:
                # Moved away from the received weights, where terms such as a distance to these would vanish.
                given[name] = given[name] * 1.01 + 0.001
            batch = tree_map(cast_to, samples)
            try:
                expected = self._trial(group.rows, given, tree_map(lambda t: t[:, :size], batch), index, None)
            except torch.cuda.OutOfMemoryError:
                raise
            # Tensors outside of the entries, such as frozen weights, keep their type.
            except Exception:
                continue
            try:
                return alike(self._trial(group.rows, given, batch, index, padded), expected, tolerance)
            except torch.cuda.OutOfMemoryError:
                raise
            # Of any type: vmap, layers and the author's code refuse what they can't do in their own ways.
            except Exception:
                return False
        return False

    def _trial(self, rows: Rows, entries: StateDict, batch: Batch, index: int, padded: Part | None) -> Trial:
        """Compute a step without any effect, of whole or of padded batches.

        Args:
            rows: the clients' rows.
            entries: their entries.
            batch: inputs and targets ``[rows, size, ...]``.
            index: the step's number.
            padded: the batches if they are padded; None for batches without padding.
        """
        members = self.block.of(rows)
        streams = [member.stream.copy() for member in members]
        kept = {name: entry.clone() for name, entry in entries.items() if name not in self.trained}
        given = {name: kept.get(name, entry) for name, entry in entries.items()}
        before = {name: version(entry) for name, entry in kept.items()}
        values, gradients = self._differentiate(given, batch, index, members, trial=streams, padded=padded)
        if padded is not None:
            self._moving |= {name for name, entry in kept.items() if version(entry) != before[name]}
        return Trial({name: value.detach() for name, value in values.items()}, gradients, kept, streams)

    def _padded(self, part: Part, index: int) -> Values | None:
        """Run a step of batches of several sizes at once; None if it can't be computed, without any effect."""
        rows = part.rows
        entries = self._entries(rows)
        entries.update({name: entries[name].clone() for name in self._moving})
        buffers = [entry for name, entry in entries.items() if name not in self.trained and name not in self._moving]
        before = list(map(version, buffers))
        factors = None if self.scales is None else self.scales.of(rows)
        batch, members = self.block.batch(part.samples), self.block.of(rows)
        try:
            done = self._differentiate(entries, batch, index, members, factors, self.share, padded=part)
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:
            if list(map(version, buffers)) != before:
                raise
            if isinstance(error, OtherPath):
                self._check(part, index)
                self._paths.append(error.calls)
            else:
                # Possible in the checked step, and not in this one.
                self.padding.refused.add(self.phase.name)
            return self._padded(part, index) if self.padding.allows(self.phase) else None
        for name in self._moving:
            self.block.entries[name][rows] = entries[name]
        self._write_back(entries, rows)
        return done

    def _compiled(self, rows: Rows, samples: Tensor, index: int) -> Values | None:
        """Run the compiled step; return None if it fails or gives other results than the plain one.

        Results of rows without a batch are dropped.
        """
        block, compiled = self.block, cast(Compiled, self.compiled)
        last = rows.stop if isinstance(rows, slice) else int(rows[-1]) + 1
        count = compiled.rows(self.phase.name, len(block.members), last)
        first = samples.new_zeros(count, samples.shape[1])
        first[rows] = samples
        batch, entries = block.batch(first), {name: stack[:count] for name, stack in block.entries.items()}

        def plain(entries: StateDict) -> Values:
            return self._differentiate(entries, batch, index, block.members[:count])

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
        trial: list[Stream] | None = None,
        padded: Part | None = None,
    ) -> Values:
        """Return the values of ``training_step``, and a share of the loss's gradients by the trained entries.

        Args:
            entries: the entries, a row per client.
            batch: inputs and targets, a row per client.
            index: the batch's number.
            members: the clients.
            factors: factors of the gradients ``[clients]``; None leaves them.
            share: a further factor for all.
            trial: streams to draw from in place of the clients' own, in full precision; None trains.
            padded: the batches if they are padded; None for batches without padding.

        Raises:
            OtherPath: if the step of padded batches calls other functions than a checked one.
        """

        def alone() -> None:
            with self.precision.forward_context():
                step_values(self.module, tree_map(lambda stack: stack[0], batch), index)

        explained = trial is None and padded is None
        if explained and self.merged.parts and self.phase.name not in self.merged.checked:
            self._check_merged(entries, batch, index, members)
        at_once = partial(self._values, entries, batch, index, members, trial, padded)
        # What padded batches can't is computed by size, and explained there.
        values = vectorised(self.attributes, members[0], entries, at_once, alone) if explained else at_once()
        loss = values["loss"]
        if factors is not None:
            factors = factors.to(loss.dtype)
        elif self._ones is None or self._ones.shape != loss.shape or self._ones.dtype != loss.dtype:
            # Kept from step to step: backward needs an output gradient per client.
            self._ones = torch.ones_like(loss)
        outputs = cast(Tensor, self._ones) if factors is None else factors
        return values, self._backward(loss, entries, outputs if share == 1 else outputs * share)

    def _check_merged(self, entries: StateDict, batch: Batch, index: int, members: list[Member]) -> None:
        """Refuse nets in parts for all clients at once if the first client alone has other results.

        Args:
            entries: the entries, a row per client.
            batch: inputs and targets, a row per client.
            index: the step's number.
            members: the clients.
        """
        self.merged.checked.add(self.phase.name)
        members = members[:FEW]
        given = {name: entry[:FEW].detach().clone() for name, entry in entries.items()}
        for name in self.trained:
            # Moved away from the received weights: at first half of the gradients of adapters are zeros.
            given[name] = given[name] * 1.01 + 0.001
        alone, streams = {name: entry[:1].clone() for name, entry in given.items()}, [m.stream.copy() for m in members]
        stream = members[0].stream.copy()
        batch = tree_map(lambda stack: stack[:FEW], batch)
        try:
            values, gradients = self._differentiate(given, batch, index, members, trial=streams)
            expected = self._alone(alone, tree_map(lambda stack: stack[0], batch), index, members[0], stream)
        except torch.cuda.OutOfMemoryError:
            raise
        # Of any type: peft, transformers and layers of the user fail in their own ways.
        except Exception as error:
            self.merged.refuse(f"its net can't take all clients' samples as one batch ({reason_of(error)})")
            return
        rest = {name: entry[:1] for name, entry in given.items() if name not in self.trained}
        values, gradients = ({name: t[:1].detach() for name, t in found.items()} for found in (values, gradients))
        narrow = any(p.is_floating_point() and p.element_size() < 4 for p in self.module.parameters())
        if not alike(Trial(values, gradients, rest, streams[:1]), expected, 0.1 if narrow else 1e-3):
            self.merged.refuse("its net gives other results for all clients' samples as one batch")

    def _alone(self, entries: StateDict, batch: Batch, index: int, member: Member, stream: Stream) -> Trial:
        """Compute a step of one client without ``vmap`` and without effect.

        Args:
            entries: its entries, ``[1, ...]``, which the step may change.
            batch: its inputs and targets.
            index: the step's number.
            member: the client.
            stream: its stream to draw from.
        """
        with self.attributes.first_turn(member, entries):
            current = {slot.name: slot.current for slot in self.slots}
            stream.restore()
            values = step_values(self.module, batch, index)
            stream.keep()
            leaves = [cast(Tensor, current[name]) for name in self.trained]
            found = torch.autograd.grad(values["loss"], leaves, allow_unused=True)
        gradients = {name: g[None] for name, g in zip(self.trained, found, strict=True) if g is not None}
        rest = {name: cast(Tensor, current[name])[None] for name in entries if name not in self.trained}
        return Trial({name: value.detach()[None] for name, value in values.items()}, gradients, rest, [stream])

    def _values(
        self,
        entries: StateDict,
        batch: Batch,
        index: int,
        members: list[Member],
        trial: list[Stream] | None,
        padded: Part | None,
    ) -> dict[str, Tensor]:
        """Return the values of ``training_step``, ``[clients]``; arguments as for `_differentiate`."""
        for name in self.trained:
            entries[name].requires_grad_()
        states = DeviceStates([member.stream for member in members] if trial is None else trial)
        # Each client draws dropout from its own stream, as it would alone.
        streams = Streams(default_generators(self.module.device)[-1], states)
        forward = self.precision.forward_context if trial is None else nullcontext
        weights = None
        if padded is not None:
            streams.sizes = cast("NDArray[np.int64]", padded.sizes).tolist()
            counts = cast(Tensor, padded.counts)[:, None]
            exact = torch.promote_types(entries[self.trained[0]].dtype, torch.float32)
            weights = (torch.arange(padded.samples.shape[1], device=counts.device) < counts).to(exact) / counts

        def one(entries: StateDict, given: tuple[Batch, Tensor | None]) -> dict[str, Tensor]:
            batch, streams.weights = given
            streams.trained = [entries[name] for name in self.trained]
            streams.classes = batch[1] if self.module.task.has_classes else None
            return self.slots.call(step_values, entries, self.module, batch, index)

        with forward(), streams, self.merged.at_once(streams) if padded is None else nullcontext():
            values = mapped(one, entries, (batch, weights), len(members))
        if padded is not None:
            if trial is not None:
                self._paths.append(streams.calls)
            elif streams.calls not in self._paths:
                raise OtherPath(streams.calls)
        states.move(streams.states)
        return values

    def _backward(self, loss: Tensor, entries: StateDict, outputs: Tensor) -> StateDict:
        """Return gradients by the trained entries, in one backward pass: no client's loss depends on another's entries.

        Args:
            loss: the losses.
            entries: the entries.
            outputs: the losses' factors.
        """
        leaves = tuple(entries[name] for name in self.trained)
        gradients = run_backward(
            (loss,), (outputs,), False, False, leaves, allow_unreachable=True, accumulate_grad=False
        )
        return {name: g for name, g in zip(self.trained, gradients, strict=True) if g is not None}


def mapped(step: Step, entries: StateDict, batch: Any, count: int) -> dict[str, Tensor]:
    """Compute ``vmap(step)(entries, batch)`` with a fifth of the overhead, which otherwise equals a small net's layer.

    Args:
        step: the function of one client.
        entries: parameters and buffers, a row per client.
        batch: inputs and targets, a row per client.
        count: the number of clients.
    """
    # Some operations have a rule for vmap only after this call, which does nothing when repeated.
    load_decompositions()
    # "error" refuses random functions, apart from those that `Streams` replaces.
    level = enter_vmap(count, "error")

    def row(stack: Tensor) -> Tensor:
        return row_of(stack, 0, level)

    try:
        values = step({name: row(stack) for name, stack in entries.items()}, tree_map(row, batch))
        # A value without a row per client is repeated for each.
        return {name: stack_of(value, level, count, 0) for name, value in values.items()}
    finally:
        leave_vmap()


def in_float64(tensor: Tensor) -> Tensor:
    """Return a tensor in float64, if it is floating and the device has float64."""
    return tensor.double() if tensor.is_floating_point() and tensor.device.type != "mps" else tensor


def unchanged(tensor: Tensor) -> Tensor:
    """Return the tensor."""
    return tensor


def alike(trial: Trial, expected: Trial, tolerance: float) -> bool:
    """Return whether two computations of a step have the same values, gradients, buffers and random states.

    Args:
        trial: one computation.
        expected: the other.
        tolerance: the largest difference of each row's values, gradients or buffers, relative to their norm.
    """
    for one, other in zip(trial[:3], expected[:3], strict=True):
        if one.keys() != other.keys():
            return False
        if not one:
            continue
        rows = len(next(iter(other.values())))
        numbers, exact = (
            torch.cat([t.reshape(rows, -1).double() for t in side.values()], 1)
            for side in (one, {n: other[n] for n in one})
        )
        size = exact.norm(dim=1)
        # A diverged client is no evidence.
        if not ((numbers - exact).norm(dim=1) <= tolerance * size + 1e-9).logical_or(~size.isfinite()).all():
            return False
    drawn = [[stream.states[-1] for stream in side.streams if stream.is_made] for side in (trial, expected)]
    return len(drawn[0]) == len(drawn[1]) and all(map(torch.equal, *drawn))
