"""Distribute clients over the ranks of several devices: each rank trains a share and gets all results."""

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
    """Run a rank's share of the clients with an engine, and gather the results of all ranks.

    A client's result depends on its job alone, and results come in the order of the jobs, so any number of ranks gives
    the same bits. Every rank holds the whole federation, so each could save or resume it.

    Args:
        engine: the engine for this rank's clients.
        rank: this rank's number.
        ranks: the number of ranks.
    """

    def __init__(self, engine: Engine, rank: int, ranks: int) -> None:
        super().__init__(engine.module, engine.work, engine.precision, engine.workers, engine.compile)
        self.engine = engine
        self.takes_alike = engine.takes_alike
        self.rank = rank
        self.ranks = ranks
        # Outcomes are on the CPU, and the GPU backend NCCL sends only from GPU memory.
        self._group: Any = distributed.new_group(backend="gloo")

    def run(self, jobs: Iterable[Job]) -> Iterator[Outcome]:
        """Train each job's client on one of the ranks, and yield all outcomes in the order of the jobs."""
        jobs = list(jobs)
        ranks_of = deal([job.data.size("train") for job in jobs], self.ranks)
        own = [job for job, rank in zip(jobs, ranks_of, strict=True) if rank == self.rank]
        outcomes = {outcome.client: outcome for outcome in self._gathered("training", own)}
        return (outcomes[job.client] for job in jobs)

    def evaluate_all(self, jobs: Iterable[Job]) -> Iterator[Evaluated]:
        """Evaluate each job's client on one of the ranks."""
        # Dealt in turn and not by size, so that jobs can stay an iterator.
        own = islice(jobs, self.rank, None, self.ranks)
        yield from self._gathered("evaluation", own)

    def adapt(self, phases: list[Phase], job: Job, data: ClientData) -> None:
        """Adapt the module on this rank."""
        self.engine.adapt(phases, job, data)

    def _gathered(self, phase: Literal["training", "evaluation"], own: Iterable[Job]) -> list[Any]:
        """Return the results of all ranks, or raise on every rank the error of the first failed rank.

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
        # torch.save stores memory shared by several tensors once; pickle would repeat it.
        torch.save(mine, buffer)
        everybody: list[bytes] = [b""] * self.ranks
        distributed.all_gather_object(everybody, buffer.getvalue(), group=self._group)
        # This rank's own results are unpacked as well, so that all ranks continue with identical tensors.
        parts: list[list[Any] | Failure] = [unpacked(data) for data in everybody]
        for rank, part in enumerate(parts):
            if isinstance(part, Failure):
                if error is not None and rank == self.rank:
                    raise error
                part.throw(f"rank {rank}")
        return [result for part in parts if isinstance(part, list) for result in part]


def unpacked(data: bytes) -> Any:
    """Return the results packed by a rank."""
    return torch.load(io.BytesIO(data), weights_only=False)


def deal(sizes: list[int], ranks: int) -> list[int]:
    """Return each job's rank: the largest jobs first, each to the rank with the least work so far.

    >>> deal([10, 40, 20, 30], 2)
    [0, 0, 1, 1]

    Args:
        sizes: the jobs' numbers of samples.
        ranks: the number of ranks.
    """
    load, ranks_of = [0] * ranks, [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        ranks_of[index] = min(range(ranks), key=load.__getitem__)
        # Plus 1, as a client without samples takes some time too.
        load[ranks_of[index]] += sizes[index] + 1
    return ranks_of
