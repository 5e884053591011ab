"""Distribute clients over the ranks of several devices: each rank trains a share and gets all results."""

import io
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor, distributed

from pfl_lightning.client import Phase
from pfl_lightning.data import ClientData
from pfl_lightning.engines.base import ClientState, Engine, Job, Outcome
from pfl_lightning.engines.client_metrics import Evaluated
from pfl_lightning.engines.errors import Failure
from pfl_lightning.messages import Message, weighted_mean

COUNT = "num_samples"
"""Entry of updates that counts a client's training samples."""
TOGETHER = 32
"""Clients whose updates a rank averages at a time."""


class Sharded(Engine):
    """Run a rank's share of the clients with an engine, and gather the results of all ranks.

    A client's result depends on its job alone, and results come in the order of the jobs, so any number of ranks gives
    the same bits. Every rank holds the whole federation, so each could save or resume it.

    With ``keeps_states`` a client always trains on the same rank, and its state stays there, with the residual of
    compressed updates: the rank that trains a client compresses its update. With ``sums`` a rank sends the mean of its
    clients' updates in place of each: a sum over all clients then adds the ranks' sums, so it is that of one rank
    only up to rounding.

    Args:
        engine: the engine for this rank's clients.
        rank: this rank's number.
        ranks: the number of ranks.
        keeps_states: whether clients' states stay on their ranks.
        sums: the clients' weights in sums over them, ``samples`` or ``uniform``; None sends every update.
    """

    finishes = False

    def __init__(
        self,
        engine: Engine,
        rank: int,
        ranks: int,
        keeps_states: bool = False,
        sums: Literal["samples", "uniform"] | None = None,
    ) -> None:
        super().__init__(engine.module, engine.work, engine.precision, engine.workers, engine.compile)
        self.engine = engine
        self.takes_alike = engine.takes_alike
        self.rank = rank
        self.ranks = ranks
        self.keeps_states = keeps_states
        self.weighting = sums
        # Outcomes are on the CPU, and the GPU backend NCCL sends only from GPU memory.
        self._group: Any = distributed.new_group(backend="gloo")

    def run(self, jobs: Iterable[Job]) -> Iterator[Outcome]:
        """Train each job's client on one of the ranks, and yield all outcomes in the order of the jobs."""
        jobs = list(jobs)
        if self.keeps_states:
            ranks_of = [self.rank_of(job.client) for job in jobs]
        else:
            ranks_of = deal([job.data.size("train") for job in jobs], self.ranks)
        own = [job for job, rank in zip(jobs, ranks_of, strict=True) if rank == self.rank]
        outcomes = {outcome.client: outcome for outcome in self._gathered("training", own)}
        return (outcomes[job.client] for job in jobs)

    def rank_of(self, client: int) -> int:
        """Return the rank on which a client's state stays."""
        return client % self.ranks

    def collected(self, states: Mapping[int, ClientState]) -> Mapping[int, ClientState]:
        """Return all clients' states on the first rank, which saves them; on others, those of this rank."""
        if not self.keeps_states:
            return states
        own = {client: state for client, state in states.items() if self.rank_of(client) == self.rank}
        # To the first rank alone, which writes the checkpoint: the others never hold all states.
        parts: list[dict[int, ClientState]] | None = [{}] * self.ranks if self.rank == 0 else None
        distributed.gather_object(own, parts, dst=0, group=self._group)
        return states if parts is None else {client: state for part in parts for client, state in part.items()}

    def own_states(self, states: Mapping[int, ClientState]) -> dict[int, ClientState]:
        """Return states in which those of other ranks' clients are replaced by the rank's name."""
        if not self.keeps_states:
            return dict(states)
        ranks = {client: self.rank_of(client) for client in states}
        return {k: state if ranks[k] == self.rank else self._name_of(state, ranks[k]) for k, state in states.items()}

    def _name_of(self, state: ClientState, rank: int) -> ClientState:
        # An empty state is the same everywhere, and clients with the same are evaluated together.
        return state if state == ClientState() else ClientState(kept=f"rank {rank}")

    def evaluate_all(self, jobs: Iterable[Job]) -> Iterator[Evaluated]:
        """Evaluate each job's client on one of the ranks."""
        own: Iterable[Job]
        if self.keeps_states:
            own = (job for job in jobs if self.rank_of(job.client) == self.rank)
        else:
            # Dealt in turn and not by size, so that jobs can stay an iterator.
            own = islice(jobs, self.rank, None, self.ranks)
        yield from self._gathered("evaluation", own)

    def adapt(self, phases: list[Phase], job: Job, data: ClientData) -> None:
        """Adapt the module on this rank."""
        self.engine.adapt(phases, job, data)

    def _gathered(self, phase: Literal["training", "evaluation"], jobs: Iterable[Job]) -> list[Any]:
        """Return the results of all ranks, or raise on every rank the error of the first failed rank.

        Args:
            phase: ``training`` or ``evaluation``.
            jobs: this rank's jobs.
        """
        error: Exception | None = None
        mine: list[Any] | Failure
        states: dict[int, ClientState] = {}
        try:
            if phase == "training" and self.keeps_states:
                mine = self._trained(jobs, states)
            else:
                mine = list(self.engine.complete(phase, jobs))
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
        results = [result for part in parts if isinstance(part, list) for result in part]
        if not (phase == "training" and self.keeps_states):
            return results
        return [result._replace(state=states.get(result.client, result.state)) for result in results]

    def _trained(self, own: Iterable[Job], states: dict[int, ClientState]) -> list[Outcome]:
        """Return this rank's outcomes without states, and with ``sums`` their mean in place of each update.

        Args:
            own: this rank's jobs.
            states: takes up the clients' states.
        """
        outcomes: list[Outcome] = []
        results = self.engine.complete("training", own)
        while block := list(islice(results, TOGETHER)):
            states |= {outcome.client: outcome.state for outcome in block}
            block = [outcome._replace(state=self._name_of(outcome.state, self.rank)) for outcome in block]
            # block by block, so that a rank never holds the updates of all of its clients
            outcomes += block if self.weighting is None else averaged(block, self.weighting == "samples")
        return outcomes if self.weighting is None else averaged(outcomes, self.weighting == "samples")


def unpacked(data: bytes) -> Any:
    """Return the results packed by a rank."""
    return torch.load(io.BytesIO(data), weights_only=False)


def averaged(outcomes: list[Outcome], weighted: bool) -> list[Outcome]:
    """Return outcomes whose usable updates are replaced by their mean, which has the same sums over these clients.

    Updates stay as they are where a mean would not have the same sums: where counters beside those of ``weights``
    differ between clients. Counters in ``weights`` take the maximum, as in every mean of models.

    Args:
        outcomes: outcomes of one rank.
        weighted: whether clients count by ``num_samples``; else all alike.
    """
    # One NaN would spoil the mean of all; such outcomes are left out of the aggregation by everybody.
    usable = [outcome for outcome in outcomes if outcome.finite and not outcome.refused]
    if len(usable) < 2:
        return outcomes
    updates = [outcome.update for outcome in usable]
    counts = [float(update[COUNT]) if weighted else 1.0 for update in updates]
    weights = [count / sum(counts) for count in counts]
    try:
        mean = {
            name: mean_of([update[name] for update in updates], weights, name) for name in updates[0] if name != COUNT
        }
    except Uneven:
        return outcomes
    means: dict[int, Message] = {
        outcome.client: mean | {name: entry for name, entry in outcome.update.items() if name == COUNT}
        for outcome in usable
    }
    return [outcome._replace(update=means.get(outcome.client, outcome.update)) for outcome in outcomes]


class Uneven(ValueError):
    """Entries of clients differ where a mean has no meaning."""


def mean_of(parts: list[Any], weights: list[float], name: str) -> Any:
    """Return the weighted mean of an entry of several updates.

    Args:
        parts: the entry of each update: a tensor, or nested dicts and lists of tensors.
        weights: the clients' weights, with sum 1.
        name: the entry's name.

    Raises:
        Uneven: if integers outside ``weights``, numbers or structures differ between clients.
    """
    first = parts[0]
    # Servers take the largest of counters in models, such as the batches that BatchNorm has seen.
    if name == "weights" and isinstance(first, Mapping):
        return weighted_mean(parts, weights)
    if isinstance(first, Tensor):
        if first.is_floating_point() and all(part.shape == first.shape for part in parts):
            return weighted_mean([{name: part} for part in parts], weights)[name]
        if all(torch.equal(part, first) for part in parts):
            return first
        raise Uneven
    if isinstance(first, Mapping) and all(part.keys() == first.keys() for part in parts):
        return {key: mean_of([part[key] for part in parts], weights, f"{name}.{key}") for key in first}
    if isinstance(first, list | tuple) and all(len(part) == len(first) for part in parts):
        return type(first)(mean_of(list(each), weights, name) for each in zip(*parts, strict=True))
    if all(part == first for part in parts):
        return first
    raise Uneven


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
