"""Blocks of clients computed together, and the plan of their batches."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

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


@dataclass
class Member:
    """A client of a block.

    Args:
        job: the client's work in this round.
        data: the client's data, on the training device.
        stream: the client's states of the default random generators.
        steps: the number of batches trained so far.
        optimizers: states of the phases' optimizers, if optimizers last for the run.
        scaler: the state of the loss scaler, after training with one.
        caches: the client's `ClientModule.caches`, by their paths in the module.
        batches: batches of all rounds by phase, where training goes on within an epoch.
    """

    job: Job
    data: ClientData
    stream: Stream
    steps: int = 0
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
        steps: for each step so far: the rows, the samples per row (one number, or one per row), and the values from
            ``training_step``.
    """

    members: list[Member]
    sizes: list[int]
    entries: StateDict
    samples: Batch
    phases: list[Phase]
    seconds: float = 0.0
    steps: list[tuple[Rows, int | NDArray[np.int64], dict[str, Tensor]]] = field(default_factory=list)

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
        rows = samples.flatten()
        batch: Batch = tree_map(lambda t: t.index_select(0, rows).view(*samples.shape, *t.shape[1:]), self.samples)
        return batch

    @property
    def recorded(self) -> dict[str, Tensor]:
        """Values of all steps by name, concatenated: a number per row and step."""
        names = dict.fromkeys(name for *_, values in self.steps for name in values)
        return {name: torch.cat([values[name] for *_, values in self.steps if name in values]) for name in names}

    def means(self, recorded: Mapping[str, Tensor]) -> list[dict[str, float]]:
        """Return each row's means over steps, weighted by samples.

        Args:
            recorded: the values of `recorded`, on the CPU.
        """
        rows = np.arange(len(self.members))
        result: list[dict[str, float]] = [{} for _ in rows]
        for name, scalars in recorded.items():
            found = [(at, size, len(values[name])) for at, size, values in self.steps if name in values]
            where = np.concatenate([rows[at if isinstance(at, slice) else at.cpu().numpy()] for at, *_ in found])
            sizes = np.concatenate([np.broadcast_to(size, count) for _, size, count in found])
            sums = np.bincount(where, sizes * scalars.double().numpy(), len(rows)), np.bincount(where, sizes, len(rows))
            known = np.flatnonzero(sums[1])
            for row, mean in zip(known.tolist(), (sums[0][known] / sums[1][known]).tolist(), strict=True):
                result[row][name] = mean
        return result


class Plan:
    """The batches of a phase, for all clients of a block.

    Args:
        orders: each client's sample numbers in training order, one epoch after another, all of the same length.
        begins: the position of each client's first sample among the block's samples.
        lengths: each client's number of samples per epoch.
        size: samples per batch, except for an epoch's last.
        smallest: the smallest usable batch.
        steps: batches of each client, over as many epochs as needed; None takes all batches of the given epochs.
        skipped: each client's batches at the beginning of its order that are left out; None leaves none out.
    """

    def __init__(
        self,
        orders: list[Tensor],
        begins: NDArray[np.int64],
        lengths: NDArray[np.int64],
        size: int,
        smallest: int,
        steps: int | None,
        skipped: NDArray[np.int64] | None = None,
    ) -> None:
        totals = np.array([order.numel() for order in orders])
        # All orders in one array of the block's sample numbers, so that steps are cut out by arithmetic, without a loop
        # over clients.
        self._flat = torch.cat(orders).numpy() + np.repeat(begins, totals)
        self._starts = np.cumsum(totals) - totals
        self._lengths = lengths
        self.size = size
        self._batches = batches_of(lengths, size, smallest)
        # Clients without a batch have an order of length 0; the maximum avoids a division by zero.
        self._skipped = np.zeros_like(lengths) if skipped is None else skipped
        made = totals // np.maximum(lengths, 1) * self._batches - self._skipped
        self.counts: NDArray[np.int64] = made if steps is None else np.minimum(made, steps)

    def steps(self, device: torch.device) -> Iterator[list[tuple[Rows, Tensor]]]:
        """Yield, for each step, pairs of rows and their samples ``[rows, size]``, one pair per batch size.

        Args:
            device: the device for the numbers of rows and samples.
        """
        steps: list[list[NDArray[np.int64]]] = []
        pieces: list[NDArray[np.int64]] = []
        for index in range(self.counts.max(initial=0)):
            (rows,) = np.nonzero(self.counts > index)
            epoch, batch = np.divmod(index + self._skipped[rows], self._batches[rows])
            first = batch * self.size
            sizes = np.minimum(self._lengths[rows] - first, self.size)
            first += self._starts[rows] + epoch * self._lengths[rows]
            steps.append([])
            for size in dict.fromkeys(sizes.tolist()):
                steps[-1].append(rows[sizes == size])
                pieces.append(self._flat[first[sizes == size, None] + np.arange(size)])
        if not pieces:
            return
        # One transfer to the device for the whole phase, not one per step.
        flat = torch.from_numpy(np.concatenate([piece.ravel() for piece in pieces])).to(device)
        cut = iter(torch.split(flat, [piece.size for piece in pieces]))
        for step in steps:
            yield [(neighbours(rows, device), next(cut).view(len(rows), -1)) for rows in step]


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
