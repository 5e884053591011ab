"""The choice of an engine by the device, the net and the cores."""

import sys
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, cast

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import distributed

from pfl_lightning.client import Phase
from pfl_lightning.data import ClientData, Samples
from pfl_lightning.data.streamed import Streamed
from pfl_lightning.engines import threads
from pfl_lightning.engines.base import Engine, Evaluated, Job, Outcome
from pfl_lightning.engines.processes import Processes, cores
from pfl_lightning.engines.sequential import Sequential
from pfl_lightning.engines.vmap.engine import Unvectorisable, Vectorised, outputs_of
from pfl_lightning.messages import tensors

PARAMETERS = 50_000
OUTPUTS = 20_000
"""Up to so many parameters, and values that its layers put out for a sample, a net is small on a CPU."""
OUTPUTS_FOR_CORES = 10_000
"""The same of values where several cores would share the clients out between them. LeNet5 on MNIST is between the two:
vectorised it takes 0.72 to 0.78 of a plain loop's time, with two processes 0.61 to 0.65."""

FILLING = 100_000_000
"""Values that layers put out for a batch, from which on it fills a GPU: to read and write them takes a card of several
TB/s as long as it takes to start the kernels of a step, some tenths of a millisecond. An estimate."""


class Auto(Engine):
    """Takes the engine that should be the fastest, and says in one line which and why.

    On a GPU that is `Vectorised` unless a single client's batch fills it; on a CPU too for small nets, whose steps take
    less time than it takes to start them. Otherwise, and where a method can't be vectorised, it is `Processes` on a CPU
    with several cores, and `Sequential` elsewhere, and for nets so large that several threads share out each of their
    operations. The choice follows from what is given and not from the clock: a run that is
    resumed goes on with the same engine. Takes the arguments of `Engine`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._arguments = args, kwargs
        self._engine: Engine | None = None
        self._parameters = sum(parameter.numel() for parameter in self.module.parameters())

    def run(self, jobs: Iterable[Job]) -> Iterator[Outcome]:
        """Yields outcomes as the engine that was taken does, and takes another where that one can't run the method."""
        jobs = list(jobs)
        if not jobs:
            return
        done = set()
        try:
            for outcome in self._chosen(jobs[0]).complete("training", jobs):
                done.add(outcome.client)
                yield outcome
        except Unvectorisable as error:
            self._take_one_by_one(f"{type(self.module).__name__} can't be vectorised ({error.reason})")
            yield from self.run(job for job in jobs if job.client not in done)

    def evaluate_all(self, jobs: Iterable[Job]) -> Iterator[Evaluated]:
        """Evaluates as the engine that was taken does."""
        jobs = iter(jobs)
        # as they come: what a client is sent is made when its job is
        for first in jobs:
            yield from self._chosen(first).complete("evaluation", chain([first], jobs))

    def adapt(self, phases: list[Phase], job: Job, data: ClientData) -> None:
        """Trains as the engine that was taken does."""
        self._chosen(job).adapt(phases, job, data)

    def _chosen(self, first: Job) -> Engine:
        """The engine; when it has still to be chosen, by a net's work on a sample of the first client."""
        if self._engine is not None:
            return self._engine
        net = type(self.module.net).__name__
        part = first.data.to(self.device, cast(torch.dtype, self.module.dtype)).part("train")
        if isinstance(part, Streamed):
            return self._take_one_by_one("clients are read a batch at a time")
        outputs = self._outputs(part)
        if self.device.type != "cpu":
            if outputs * self.work.batch_size >= FILLING:
                return self._take(Sequential, f"a batch of {net} fills {self.device.type} by itself")
            return self._take(Vectorised, f"many small clients fill {self.device.type}")
        limit = OUTPUTS if self._at_once() == 1 else OUTPUTS_FOR_CORES
        if outputs <= limit and self._parameters <= PARAMETERS:
            return self._take(Vectorised, f"{net} is small")
        return self._take_one_by_one(f"a step of {net} is enough work for a core")

    @torch.no_grad()
    def _outputs(self, part: Samples) -> int:
        """How many values the net's layers put out for a sample."""
        x = part.take(slice(1)).x
        self.set_mode(training=False)
        with self.forward_context():
            return sum(tensor.numel() for tensor in tensors(outputs_of(self.module.net, x)))

    def _take_one_by_one(self, reason: str) -> Engine:
        if not self._has_processes():
            return self._take(Sequential, reason)
        if self._parameters > threads.SMALL and torch.get_num_threads() > 1:
            return self._take(Sequential, f"{reason}, or for several")
        count = self._at_once()
        return self._take(Processes if count > 1 else Sequential, f"{reason}, {count} at a time")

    def _has_processes(self) -> bool:
        """Whether several processes may share out clients here."""
        return self.device.type == "cpu" and sys.platform == "linux" and not distributed.is_initialized()

    def _at_once(self) -> int:
        """Clients that processes would train at once."""
        return (self.workers or cores()) if self._has_processes() else 1

    def _take(self, engine: type[Engine], reason: str) -> Engine:
        args, kwargs = self._arguments
        self._engine = engine(*args, **kwargs)
        rank_zero_info(f"trainer.engine='auto' takes {engine.__name__.lower()}: {reason}.")
        return self._engine
