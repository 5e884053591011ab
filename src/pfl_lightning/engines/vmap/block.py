"""Blocks of clients computed together, and the plan of their batches."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pfl_lightning.client.module import Batch
from pfl_lightning.client.phases import Phase
from pfl_lightning.data import ClientData, whole_of
from pfl_lightning.data.batches import batches_of
from pfl_lightning.engines.base import Job
from pfl_lightning.engines.vmap.dropout import Stream
from pfl_lightning.messages import StateDict, tree_map

Rows: TypeAlias = slice | Tensor
"""Rows of a stack: a slice, or any row numbers."""
PLANNED = 16_384
"""Optimizer steps of all clients together that are planned at once."""


class Part(NamedTuple):
    """The batches of some clients, to be computed at once.

    Args:
        rows: the clients' rows.
        samples: numbers of samples of the block ``[rows, size]``; a shorter batch repeats its last sample.
        sizes: each batch's number of samples, on the CPU; None if all are ``size``.
        counts: the same ``[rows]`` on the device of ``samples``.
    """

    rows: Rows
    samples: Tensor
    sizes: NDArray[np.int64] | None = None
    counts: Tensor | None = None

    def first(self, count: int) -> "Part":
        """Return the part of the first clients, of batches of one size.

        Args:
            count: clients at most.
        """
        rows = self.rows
        if isinstance(rows, slice):
            return Part(slice(rows.start, min(rows.stop, rows.start + count)), self.samples[:count])
        return Part(rows[:count], self.samples[:count])

    def by_size(self) -> list["Part"]:
        """Return the same batches in parts of equal size."""
        if self.sizes is None:
            return [self]
        device = self.samples.device
        numbers = (
            np.arange(self.rows.start, self.rows.stop) if isinstance(self.rows, slice) else self.rows.cpu().numpy()
        )
        parts = []
        for size in dict.fromkeys(self.sizes.tolist()):
            (own,) = np.nonzero(self.sizes == size)
            samples = self.samples[torch.from_numpy(own).to(device), :size]
            parts.append(Part(neighbours(numbers[own], device), samples))
        return parts


@dataclass
class Member:
    """A client of a block.

    Args:
        job: the client's work in this round.
        data: the client's data, on the training device.
        stream: the client's states of the default random generators.
        steps: the number of optimizer steps so far.
        samples: the number of samples in the batches of these steps.
        optimizers: states of the phases' optimizers, if optimizers last for the run.
        scaler: the state of the loss scaler, after training with one.
        caches: the client's `ClientModule.caches`, by their paths in the module.
        batches: batches of all rounds by phase, where training goes on within an epoch.
    """

    job: Job
    data: ClientData
    stream: Stream
    steps: int = 0
    samples: int = 0
    optimizers: dict[str, Any] = field(default_factory=dict)
    scaler: dict[str, Any] = field(default_factory=dict)
    caches: dict[str, Any] = field(default_factory=dict)
    batches: dict[str, int] = field(default_factory=dict)

    @cached_property
    def generator(self) -> torch.Generator:
        """The generator of the client's sample orders."""
        return torch.Generator().manual_seed(self.job.seed)


@dataclass
class Block:
    """Clients trained together.

    Args:
        members: the clients, sorted by number of samples, largest first.
        sizes: each client's number of training samples.
        entries: parameters and buffers, stacked: ``[clients, ...]``.
        samples: the training samples of all clients, one client after another.
        phases: the clients' local phases.
        seconds: the training time per client, on average.
        recorded: values from ``training_step`` by name; for each batch so far the rows, the samples per row (one
            number, or one per row), and the values, one per row.
    """

    members: list[Member]
    sizes: list[int]
    entries: StateDict
    samples: Batch
    phases: list[Phase]
    seconds: float = 0.0
    recorded: dict[str, list[tuple[Rows, int | NDArray[np.int64], Tensor]]] = field(default_factory=dict)

    @classmethod
    def of_members(cls, members: list[Member], entries: StateDict, phases: list[Phase]) -> "Block":
        """Return the block of some clients, largest first, to keep clients with batches left in neighbouring rows.

        Args:
            members: the clients.
            entries: parameters and buffers, a row per client.
            phases: the clients' local phases.
        """
        sizes = [member.data.size("train") for member in members]
        if sizes != sorted(sizes, reverse=True):
            # Stable, so clients of equal size keep the order of the jobs.
            order = sorted(range(len(members)), key=lambda row: -sizes[row])
            members, sizes = [members[row] for row in order], [sizes[row] for row in order]
            entries = {name: stack[torch.tensor(order, device=stack.device)] for name, stack in entries.items()}
        samples = whole_of([member.data for member in members], "train")
        return cls(members, sizes, entries, (samples.x, samples.y), phases)

    @cached_property
    def rows(self) -> dict[int, int]:
        """Each client's row."""
        return {member.job.client: row for row, member in enumerate(self.members)}

    def of(self, rows: Rows) -> list[Member]:
        """Return the members of some rows."""
        return self.members[rows] if isinstance(rows, slice) else [self.members[row] for row in rows.tolist()]

    def batch(self, samples: Tensor) -> Batch:
        """Return inputs and targets of the block's samples with numbers ``[rows, size]``."""
        return batches_at(self.samples, samples)

    def record(self, rows: Rows, samples: int | NDArray[np.int64], values: Mapping[str, Tensor]) -> None:
        """Keep the values of a step.

        Args:
            rows: the rows that took the step.
            samples: the samples per row, one number or one per row.
            values: the values by name, one per row.
        """
        for name, value in values.items():
            self.recorded.setdefault(name, []).append((rows, samples, value.detach()))

    def means(self, recorded: Mapping[str, Tensor]) -> list[dict[str, float]]:
        """Return each row's means over steps, weighted by samples.

        Args:
            recorded: the values of `recorded` by name, concatenated over steps, on the CPU.
        """
        rows = np.arange(len(self.members))
        result: list[dict[str, float]] = [{} for _ in rows]
        for name, scalars in recorded.items():
            steps = self.recorded[name]
            where = np.concatenate([rows[at if isinstance(at, slice) else at.cpu().numpy()] for at, *_ in steps])
            sizes = np.concatenate([np.broadcast_to(size, len(values)) for _, size, values in steps])
            sums = np.bincount(where, sizes * scalars.double().numpy(), len(rows)), np.bincount(where, sizes, len(rows))
            known = np.flatnonzero(sums[1])
            for row, mean in zip(known.tolist(), (sums[0][known] / sums[1][known]).tolist(), strict=True):
                result[row][name] = mean
        return result


def batches_at(samples: Batch, numbers: Tensor) -> Batch:
    """Return inputs and targets of several clients' batches, ``[rows, size, ...]``.

    Args:
        samples: samples of all clients, one after another.
        numbers: numbers of samples ``[rows, size]``.
    """
    rows = numbers.flatten()
    batch: Batch = tree_map(lambda t: t.index_select(0, rows).view(*numbers.shape, *t.shape[1:]), samples)
    return batch


class Planned(Protocol):
    """How much each client trains in a phase: optimizer steps, batches, and samples in these ``[clients]``."""

    counts: NDArray[np.int64]
    batches: NDArray[np.int64]
    samples: NDArray[np.int64]


class Plan:
    """The batches of a phase, for all clients of a block.

    Args:
        orders: each client's sample numbers in training order, one epoch after another, all of the same length.
        begins: the position of each client's first sample among the block's samples.
        lengths: each client's number of samples per epoch.
        size: samples per batch, except for an epoch's last.
        smallest: the smallest usable batch.
        steps: optimizer steps of each client at most, over as many of the given epochs as needed.
        skipped: each client's batches at the beginning of its order that are left out; None leaves none out.
        accumulate: batches of an optimizer step, fewer in the last step of an epoch.
    """

    def __init__(
        self,
        orders: list[Tensor],
        begins: NDArray[np.int64],
        lengths: NDArray[np.int64],
        size: int,
        smallest: int,
        steps: NDArray[np.int64],
        skipped: NDArray[np.int64] | None = None,
        accumulate: int = 1,
    ) -> None:
        totals = np.array([order.numel() for order in orders])
        # All orders in one array of the block's sample numbers, so that steps are cut out by arithmetic, without a loop
        # over clients.
        self._flat = torch.cat(orders).numpy() + np.repeat(begins, totals)
        self._starts = np.cumsum(totals) - totals
        self._lengths = lengths
        self.size, self._accumulate = size, accumulate
        self._batches = batches_of(lengths, size, smallest)
        self._skipped = np.zeros_like(lengths) if skipped is None else skipped
        # Clients without a batch have an order of length 0; the maximum avoids a division by zero.
        epochs = totals // np.maximum(lengths, 1)
        # Optimizer steps of an epoch, and of the first one, which may have begun in an earlier round.
        self._each = -(-self._batches // accumulate)
        self._first = np.minimum(-(-(self._batches - self._skipped) // accumulate), epochs * self._each)
        made = self._first + np.maximum(epochs - 1, 0) * self._each
        self.counts: NDArray[np.int64] = np.minimum(made, steps)
        """Optimizer steps of each client."""
        ends = self._place(self.counts - 1, np.arange(len(lengths)))
        self.batches: NDArray[np.int64] = np.where(self.counts, ends[0] * self._batches + ends[2] - self._skipped, 0)
        """Batches of each client."""
        # Samples of a too small last batch are in no batch.
        whole = np.minimum(self._batches * size, lengths)
        skipped = self._skipped * size
        self.samples: NDArray[np.int64] = np.where(
            self.counts, ends[0] * whole + np.minimum(ends[2] * size, whole) - skipped, 0
        )
        """Samples in the batches of each client."""

    def _place(
        self, step: NDArray[np.int64] | int, rows: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return epochs of some rows' optimizer steps, and the numbers in the epoch of first batch and end."""
        later = step - self._first[rows]
        epoch, group = np.divmod(later, np.maximum(self._each[rows], 1))
        begun = later < 0
        first = np.where(begun, self._skipped[rows] + step * self._accumulate, group * self._accumulate)
        return np.where(begun, 0, epoch + 1), first, np.minimum(first + self._accumulate, self._batches[rows])

    def steps(self, device: torch.device, pads: bool, apart: bool) -> Iterator[list[list[Part]]]:
        """Yield each optimizer step's batches, each as parts that are computed at once.

        Args:
            device: the device for the numbers of rows and samples.
            pads: whether batches of different sizes share a part.
            apart: whether full batches never share a part with shorter ones.
        """
        most, together = self.counts.max(initial=0), max(1, PLANNED // len(self.counts))
        for first in range(0, most, together):
            yield from self._steps(np.arange(first, min(first + together, most)), device, pads, apart)

    def _steps(
        self, steps: NDArray[np.int64], device: torch.device, pads: bool, apart: bool
    ) -> Iterator[list[list[Part]]]:
        """Yield some of the steps, planned at once; arguments as for `steps`."""
        index, rows = np.nonzero(self.counts > steps[:, None])
        index += steps[0]
        epochs, begins, ends = self._place(index, rows)
        # Each batch of each client: clients near the end of an epoch may have fewer in a step than others.
        made = ends - begins
        of = np.repeat(np.arange(len(rows)), made)
        further = np.arange(len(of)) - np.repeat(np.cumsum(made) - made, made)
        index, rows, first = index[of], rows[of], (begins[of] + further) * self.size
        sizes = np.minimum(self._lengths[rows] - first, self.size)
        first += self._starts[rows] + epochs[of] * self._lengths[rows]
        # Batches with the same key are a part: of one batch of a step and, where these aren't filled up, of one size.
        kinds = np.zeros_like(sizes) if pads and not apart else sizes == self.size if pads else sizes
        batches = index * self._accumulate + further
        keys = batches * (self.size + 1) + self.size - kinds
        order = keys.argsort(kind="stable")
        keys, batches, rows, sizes, first = (column[order] for column in (keys, batches, rows, sizes, first))
        starts = np.flatnonzero(np.diff(keys, prepend=-1))
        widths, shortest = (end.reduceat(sizes, starts) for end in (np.maximum, np.minimum))
        # A short batch repeats its last sample.
        numbers = self._flat[first[:, None] + np.minimum(np.arange(self.size), sizes[:, None] - 1)]
        columns = starts, [*starts[1:], len(rows)], widths, widths > shortest, batches[starts]
        parts = [*zip(*(map(int, column) for column in columns), strict=True)]
        pieces: list[NDArray[np.int64]] = []
        for start, end, width, is_ragged, _ in parts:
            pieces += [numbers[start:end, :width].ravel(), *([sizes[start:end]] if is_ragged else [])]
        # One transfer to the device, not one per step.
        flat = torch.from_numpy(np.concatenate(pieces)).to(device)
        cut = iter(torch.split(flat, [piece.size for piece in pieces]))

        def part(start: int, end: int, width: int, is_ragged: int, _: int) -> Part:
            at = neighbours(rows[start:end], device), next(cut).view(end - start, width)
            return Part(*at, sizes[start:end], next(cut)) if is_ragged else Part(*at)

        for _, step in groupby(parts, lambda part: part[-1] // self._accumulate):
            yield [[part(*each) for each in batch] for _, batch in groupby(step, lambda part: part[-1])]


def neighbours(rows: NDArray[np.int64], device: torch.device) -> Rows:
    """Return rows as a slice if contiguous, as indexing by a slice makes no copy.

    Args:
        rows: row numbers in rising order, at least one.
        device: the device for the row numbers if they aren't contiguous.
    """
    if rows[-1] - rows[0] < len(rows):
        # Distinct rising numbers that span no more than their count have no gaps.
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return torch.from_numpy(rows).to(device)
