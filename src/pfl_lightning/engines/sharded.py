"""Clients shared out to the ranks of several devices: each trains its share, and all know all results."""

import io
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, Literal

import torch
from torch import distributed

from pfl_lightning.client import Phase
from pfl_lightning.data import ClientData
from pfl_lightning.engines.base import Engine, Evaluated, Job, Outcome
from pfl_lightning.engines.errors import Failure


class Sharded(Engine):
    """Runs a rank's share of the clients through an engine, and gathers what all ranks have.

    A client's result depends on its job alone, and results come in the order of the jobs: the same bits from any
    number of ranks. Every rank goes on with the whole federation, so that each could save or resume it.

    Args:
        engine: what runs the clients of this rank.
        rank: number of this rank.
        ranks: how many there are.
    """

    def __init__(self, engine: Engine, rank: int, ranks: int) -> None:
        super().__init__(engine.module, engine.work, engine.precision, engine.workers, engine.compile)
        self.engine = engine
        self.rank = rank
        self.ranks = ranks
        # tensors of outcomes are on the CPU, where a GPU's own backend can't send them from
        self._group: Any = distributed.new_group(backend="gloo")

    def run(self, jobs: Iterable[Job]) -> Iterator[Outcome]:
        """Trains each job's client on one of the ranks, and yields all outcomes in the order of the jobs."""
        jobs = list(jobs)
        ranks_of = deal([job.data.size("train") for job in jobs], self.ranks)
        own = [job for job, rank in zip(jobs, ranks_of, strict=True) if rank == self.rank]
        outcomes = {outcome.client: outcome for outcome in self._gathered("training", own)}
        return (outcomes[job.client] for job in jobs)

    def evaluate_all(self, jobs: Iterable[Job]) -> Iterator[Evaluated]:
        """Evaluates each job's client on one of the ranks."""
        own = islice(jobs, self.rank, None, self.ranks)
        yield from self._gathered("evaluation", own)

    def adapt(self, phases: list[Phase], job: Job, data: ClientData) -> None:
        """Trains on every rank that asks for it."""
        self.engine.adapt(phases, job, data)

    def _gathered(self, phase: Literal["training", "evaluation"], own: Iterable[Job]) -> list[Any]:
        """Return the results of all ranks; raise on all of them the error that one has, the first one's of several.

        Args:
            phase: ``training`` or ``evaluation``.
            own: this rank's jobs.
        """
        error: Exception | None = None
        mine: list[Any] | Failure
        try:
            mine = list(self.engine.complete(phase, own))
        except Exception as raised:
            error, mine = raised, Failure.of(raised)
        buffer = io.BytesIO()
        # unlike pickle it saves storages that tensors share once
        torch.save(mine, buffer)
        everybody: list[bytes] = [b""] * self.ranks
        distributed.all_gather_object(everybody, buffer.getvalue(), group=self._group)
        # its own too, so that all ranks compute with the same
        parts: list[list[Any] | Failure] = [unpacked(data) for data in everybody]
        for rank, part in enumerate(parts):
            if isinstance(part, Failure):
                if error is not None and rank == self.rank:
                    raise error
                part.throw(f"rank {rank}")
        return [result for part in parts if isinstance(part, list) for result in part]


def unpacked(data: bytes) -> Any:
    """What a rank has packed."""
    return torch.load(io.BytesIO(data), weights_only=False)


def deal(sizes: list[int], ranks: int) -> list[int]:
    """Which rank takes which job: the longest ones first, each to the rank that has least.

    >>> deal([10, 40, 20, 30], 2)
    [0, 0, 1, 1]

    Args:
        sizes: of the jobs.
        ranks: how many there are.
    """
    load, ranks_of = [0] * ranks, [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        ranks_of[index] = min(range(ranks), key=load.__getitem__)
        # a client without samples takes its time too
        load[ranks_of[index]] += sizes[index] + 1
    return ranks_of
