"""Blocks: clients that are computed together, and which of them learns when from which samples."""

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
from pfl_lightning.engines.base import Job
from pfl_lightning.engines.vmap.dropout import Stream
from pfl_lightning.messages import StateDict, tree_map

Rows: TypeAlias = slice | Tensor
"""Rows of a stack: neighbours, or any."""


@dataclass
class Member:
    """A client of a block.

    Args:
        job: its work in this round.
        data: its data, where it trains.
        stream: its states of the default random generators.
        steps: batches that it has trained.
        optimizers: states of its phases' optimizers, where they live for the run.
        scaler: state of its loss scaler, once it has trained with one.
        caches: its `ClientModule.caches`, by their paths in the module.
    """

    job: Job
    data: ClientData
    stream: Stream
    steps: int = 0
    optimizers: dict[str, Any] = field(default_factory=dict)
    scaler: dict[str, Any] = field(default_factory=dict)
    caches: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def generator(self) -> torch.Generator:
        """What the orders of its samples are drawn from."""
        return torch.Generator().manual_seed(self.job.seed)


@dataclass
class Block:
    """Clients that train together.

    Args:
        members: the clients, those with the most samples first.
        sizes: training samples of each.
        entries: their parameters and buffers, stacked: ``[clients, ...]``.
        samples: training samples of all of them, one client after another.
        phases: their local phases.
        seconds: time that each client's training took, on average.
        steps: of each step so far, its rows, its samples per row (of each, or the same of all), and what
            ``training_step`` returned.
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
        """The block of some clients: the largest come first, so that those with a batch left are neighbours.

        Args:
            members: the clients.
            entries: their parameters and buffers, a row for each client.
            phases: their local phases.
        """
        sizes = [member.data.size("train") for member in members]
        if sizes != sorted(sizes, reverse=True):
            order = sorted(range(len(members)), key=lambda row: -sizes[row])
            members, sizes = [members[row] for row in order], [sizes[row] for row in order]
            entries = {name: stack[torch.tensor(order, device=stack.device)] for name, stack in entries.items()}
        samples = whole_of([member.data for member in members], "train")
        return cls(members, sizes, entries, (samples.x, samples.y), phases)

    @cached_property
    def rows(self) -> dict[int, int]:
        """The row of each client."""
        return {member.job.client: row for row, member in enumerate(self.members)}

    def of(self, rows: Rows) -> list[Member]:
        """The members of some rows."""
        return self.members[rows] if isinstance(rows, slice) else [self.members[row] for row in rows.tolist()]

    def batch(self, samples: Tensor) -> Batch:
        """Inputs and targets of samples ``[rows, size]`` of the block."""
        rows = samples.flatten()
        batch: Batch = tree_map(lambda t: t.index_select(0, rows).view(*samples.shape, *t.shape[1:]), self.samples)
        return batch

    @property
    def recorded(self) -> dict[str, Tensor]:
        """What the steps returned, by name: a number for each row of each step that has it, one step after another."""
        names = dict.fromkeys(name for *_, values in self.steps for name in values)
        return {name: torch.cat([values[name] for *_, values in self.steps if name in values]) for name in names}

    def means(self, recorded: Mapping[str, Tensor]) -> list[dict[str, float]]:
        """Each row's means over its steps, weighted by their samples.

        Args:
            recorded: `recorded`, on the CPU.
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
    """The batches of a phase, of all clients of a block.

    Args:
        orders: of each client, its samples in the order of its epochs, one epoch after another of the same length.
        begins: the first of each client's samples among those of the block.
        lengths: samples of one epoch of each client.
        size: samples per batch, but for an epoch's last.
        smallest: samples that a batch must have.
        steps: batches of each client, over as many epochs as they take; None takes all.
    """

    def __init__(
        self,
        orders: list[Tensor],
        begins: NDArray[np.int64],
        lengths: NDArray[np.int64],
        size: int,
        smallest: int,
        steps: int | None,
    ) -> None:
        totals = np.array([order.numel() for order in orders])
        self._flat = torch.cat(orders).numpy() + np.repeat(begins, totals)
        self._starts = np.cumsum(totals) - totals
        self._lengths = lengths
        self.size = size
        self._batches = batches_of(lengths, size, smallest)
        # a client that has no batches has no epochs either
        made = totals // np.maximum(lengths, 1) * self._batches
        self.counts: NDArray[np.int64] = made if steps is None else np.minimum(made, steps)

    def steps(self, device: torch.device) -> Iterator[list[tuple[Rows, Tensor]]]:
        """Step by step, which rows of the stack learn from which samples ``[rows, size]``, one size at a time.

        Args:
            device: where the numbers of rows and samples shall be.
        """
        steps: list[list[NDArray[np.int64]]] = []
        pieces: list[NDArray[np.int64]] = []
        for index in range(self.counts.max(initial=0)):
            (rows,) = np.nonzero(self.counts > index)
            epoch, batch = np.divmod(index, self._batches[rows])
            first = batch * self.size
            sizes = np.minimum(self._lengths[rows] - first, self.size)
            first += self._starts[rows] + epoch * self._lengths[rows]
            steps.append([])
            for size in dict.fromkeys(sizes.tolist()):
                steps[-1].append(rows[sizes == size])
                pieces.append(self._flat[first[sizes == size, None] + np.arange(size)])
        if not pieces:
            return
        # one transfer, not one for each step
        flat = torch.from_numpy(np.concatenate([piece.ravel() for piece in pieces])).to(device)
        cut = iter(torch.split(flat, [piece.size for piece in pieces]))
        for step in steps:
            yield [(neighbours(rows, device), next(cut).view(len(rows), -1)) for rows in step]


def batches_of(length: Any, size: int, smallest: int) -> Any:
    """Batches of an epoch, without those that are too small.

    Args:
        length: samples of the epoch.
        size: samples per batch, but for the last.
        smallest: samples that a batch must have.
    """
    return length // size * (size >= smallest) + (length % size >= smallest)


def neighbours(rows: NDArray[np.int64], device: torch.device) -> Rows:
    """Rows as a slice if they are neighbours, so that they needn't be copied.

    Args:
        rows: at least one, rising.
        device: where their numbers shall be otherwise.
    """
    if rows[-1] - rows[0] < len(rows):
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return torch.from_numpy(rows).to(device)
