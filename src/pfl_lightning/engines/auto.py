"""Choose an engine by device, net and cores."""

import sys
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, cast

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info
from numpy.typing import NDArray
from torch import Tensor, distributed, nn
from torch.nn.modules.module import register_module_forward_hook

from pfl_lightning.client import Phase
from pfl_lightning.data import ClientData, Samples
from pfl_lightning.data.streamed import Streamed
from pfl_lightning.data.trees import rows_in
from pfl_lightning.engines import threads
from pfl_lightning.engines.base import Engine, Job, LocalWork, Outcome
from pfl_lightning.engines.client_metrics import Evaluated
from pfl_lightning.engines.processes import Processes
from pfl_lightning.engines.sequential import Sequential
from pfl_lightning.engines.slots import Slots
from pfl_lightning.engines.threads import cores
from pfl_lightning.engines.vmap.engine import Unvectorisable, Vectorised, outputs_of
from pfl_lightning.engines.vmap.merged import Merged
from pfl_lightning.messages import tensors
from pfl_lightning.nets.batch_norm import smallest_batch

PARAMETERS = 50_000
OUTPUTS = 20_000
"""Upper limits, for a net that counts as small on a CPU, of its parameters and of its layers' output values per
sample."""
OUTPUTS_FOR_CORES = 10_000
"""The limit of output values if several cores could share the clients. LeNet5 on MNIST lies between the two limits:
vectorised it takes 0.72 to 0.78 of a plain loop's time, with two processes 0.61 to 0.65."""

TOGETHER = 3
"""Clients of a step on average, from which vectorised steps pay on a CPU. With three equal clients a round takes 1.63
of a plain loop's time by vectorised and 1.60 by sequential for an MLP, 1.07 and 1.15 for LeNet5; with four 1.23 and
1.43, 0.98 and 1.16."""

LSTM_STEPS = 20
"""Steps of time up to which an LSTM is vectorised on a CPU, in rounds of at least as many clients a step. torch has one
operation for all steps of one client, and none under vmap. With 64 hidden values and 20 clients, vectorised takes 0.6
of a plain loop's time for 10 steps, 0.9 for 20, 1.3 for 40 and 1.8 for 80; with 10 clients 0.7, 1.2, 1.8 and 2.3. GRUs
and plain RNNs, of which torch computes one client step by step too, take less than a loop at each length."""

FOR_A_CORE = 32
"""Clients with adapters that a core's cache holds (`Merged`), for each core that clients could have to themselves. With
8 clients of a round and one core, vectorised steps are 3.1 times as fast as one client after another if 128 fit, 2.7 if
64 fit, 1.9 for 32, 1.6 for 16, 1.2 for 8, and 1.02 for 2."""

FILLING = 100_000_000
"""Output values of a batch from which a single client fills a GPU. A card with several TB/s then reads and writes them
in some tenths of a millisecond, as long as it takes to launch a step's kernels. An estimate."""


class Auto(Engine):
    """Choose the fastest engine by estimates, and log the choice and the reason.

    On a GPU the choice is `Vectorised`, unless a single client's batch fills the GPU. On a CPU `Vectorised` is chosen
    for small nets, whose operations take less time than launching them, in rounds whose clients are many and alike
    enough to take steps together (`TOGETHER`; `LSTM_STEPS` for an LSTM), and for nets with low-rank adapters if a
    core's cache holds several clients' hidden states (`Merged`). Otherwise, and for methods that can't be vectorised,
    the choice is `Processes` on a CPU with several cores, and else `Sequential`, also for nets so large that several
    threads share each operation. The choice depends on net, data, the round's clients and machine, never on the clock,
    so a resumed run uses the same engines. The arguments are those of `Engine`.
    """

    takes_alike = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # The engine is made at the first job, which has the samples to judge the net by.
        self._arguments = args, kwargs
        self._engine: Engine | None = None
        self._alone: Engine | None = None
        """The engine of rounds with too few clients a step for `Vectorised`; None before the first."""
        self._least = TOGETHER
        """Clients a step from which `Vectorised` takes a round on a CPU."""
        self._parameters = sum(parameter.numel() for parameter in self.module.parameters())
        self._reasons: dict[Engine, str] = {}
        self._told: Engine | None = None
        """The engine of whole runs that a line has named; None before the line."""

    def run(self, jobs: Iterable[Job]) -> Iterator[Outcome]:
        """Train with the chosen engine; if the method can't be vectorised, choose another for the remaining clients."""
        jobs = list(jobs)
        if not jobs:
            return
        done = set()
        try:
            for outcome in (engine := self._for_round(jobs)).run(jobs):
                self._tell(engine)
                done.add(outcome.client)
                yield outcome
        except Unvectorisable as error:
            # Raised before a block's first outcome, so finished clients keep theirs and the others run again.
            self._take_one_by_one(f"{type(self.module).__name__} can't be vectorised ({error.reason})")
            yield from self.run(job for job in jobs if job.client not in done)

    def evaluate_all(self, jobs: Iterable[Job]) -> Iterator[Evaluated]:
        """Evaluate with the chosen engine."""
        jobs = iter(jobs)
        # Jobs stay an iterator: each payload is made when its job is taken, and all at once could fill the memory.
        for first in jobs:
            for evaluated in (engine := self._chosen(first)).evaluate_all(chain([first], jobs)):
                self._tell(engine)
                yield evaluated

    def adapt(self, phases: list[Phase], job: Job, data: ClientData) -> None:
        """Train with the chosen engine."""
        self._chosen(job).adapt(phases, job, data)

    def _chosen(self, first: Job) -> Engine:
        """Return the engine, chosen at the first call by the net's work on a sample of the first client."""
        if self._engine is not None:
            return self._engine
        net = type(self.module.net).__name__
        part = first.data.to(self.device, cast(torch.dtype, self.module.dtype)).part("train")
        if isinstance(part, Streamed):
            return self._take_one_by_one("clients are read a batch at a time")
        outputs, steps = self._looked_at(part)
        if self.device.type != "cpu":
            if outputs * self.work.batch_size >= FILLING:
                return self._take(Sequential, f"a batch of {net} fills {self.device.type} by itself")
            return self._take(Vectorised, f"many small clients fill {self.device.type}")
        if steps > LSTM_STEPS:
            return self._take_one_by_one(f"an LSTM of {steps} steps of time is faster client by client")
        self._least = max(TOGETHER, steps)
        limit = OUTPUTS if self._at_once() == 1 else OUTPUTS_FOR_CORES
        if outputs <= limit and self._parameters <= PARAMETERS:
            return self._take(Vectorised, f"{net} is small")
        if (together := self._adapters_together(part, outputs)) >= (
            2 if self._at_once() == 1 else FOR_A_CORE * self._at_once()
        ):
            # By vmap too, where a step's results differ, such a net is twice as fast as one client after another.
            return self._take(Vectorised, f"adapters of {net} train beside each other, {together} clients at once")
        return self._take_one_by_one(f"a step of {net} is enough work for a core")

    def _for_round(self, jobs: list[Job]) -> Engine:
        """Return the engine of a round.

        Args:
            jobs: the round's clients, at least one.
        """
        engine = self._chosen(jobs[0])
        if not isinstance(engine, Vectorised) or self.device.type != "cpu":
            return engine
        sizes = np.array([job.data.size("train") for job in jobs])
        together = clients_a_step(sizes, self.work, smallest_batch(self.module)) / self.work.groups
        if together >= self._least:
            return engine
        if self._alone is None:
            self._take_one_by_one(f"of a round's {len(jobs)} clients {together:.1f} on average take a step together")
            # Other rounds may have more clients, or clients of other sizes.
            self._engine, self._alone = engine, self._engine
        return self._alone

    @torch.no_grad()
    def _looked_at(self, part: Samples) -> tuple[int, int]:
        """Return the number of output values of all layers for one sample, and the steps of time of the longest LSTM.

        Args:
            part: a client's samples.
        """
        steps = [0]

        def look(layer: nn.Module, _: Any, output: Any) -> None:
            # other kinds of output are of packed sequences, which can't be vectorised
            if isinstance(layer, nn.LSTM) and isinstance(output[0], Tensor):
                steps.append(output[0].shape[1 if layer.batch_first and output[0].dim() == 3 else 0])

        # one sample is enough: its length in time is that of all, as batches are tensors
        self.set_mode(training=False)
        with self.forward_context(), register_module_forward_hook(look):
            outputs = sum(tensor.numel() for tensor in tensors(outputs_of(self.module, part.take(slice(1)))))
        return outputs, max(steps)

    def _adapters_together(self, part: Samples, outputs: int) -> int:
        """Return the number of clients whose adapters `Merged` trains together; 0 for a net that it can't take.

        Args:
            part: a client's samples.
            outputs: the number of output values of all layers for one of them.
        """
        merged = Merged(self.module)
        merged.settle(Slots(self.module))
        if merged.reason:
            return 0
        x = part.take(slice(self.work.batch_size)).x
        with self.forward_context():
            return merged.clients_at_once(x, rows_in(x) * outputs * torch.float32.itemsize)

    def _take_one_by_one(self, reason: str) -> Engine:
        """Choose between processes and a plain loop."""
        if not self._has_processes():
            return self._take(Sequential, reason)
        # The operations of a large net occupy several cores already.
        if self._parameters > threads.SMALL and torch.get_num_threads() > 1:
            return self._take(Sequential, f"{reason}, or for several")
        count = self._at_once()
        return self._take(Processes if count > 1 else Sequential, f"{reason}, {count} at a time")

    def _has_processes(self) -> bool:
        """Return True if the engine ``processes`` works here."""
        return self.device.type == "cpu" and sys.platform == "linux" and not distributed.is_initialized()

    def _at_once(self) -> int:
        """Return the number of clients trained at once by processes here."""
        return (self.workers or cores()) if self._has_processes() else 1

    def _take(self, engine: type[Engine], reason: str) -> Engine:
        """Make the engine."""
        args, kwargs = self._arguments
        self._engine = engine(*args, **kwargs)
        self._reasons[self._engine] = reason
        return self._engine

    def _tell(self, engine: Engine) -> None:
        """Log the choice once; not before a first result, as a method may turn out not to be vectorisable.

        A second line comes only where a later step can't be vectorised. Rounds that alternate between two engines are
        named in the first one.

        Args:
            engine: the engine in use.
        """
        if self._told is self._engine or engine not in self._reasons:
            return
        self._told, reason = self._engine, self._reasons[engine]
        if isinstance(self._engine, Vectorised) and self.device.type == "cpu":
            if engine is self._alone:
                reason += f", and vectorised in rounds of at least {self._least} clients a step"
            else:
                reason += f"; rounds of fewer than {self._least} clients a step take another engine"
        rank_zero_info(f"trainer.engine='auto' takes {type(engine).__name__.lower()}: {reason}.")


def clients_a_step(sizes: NDArray[np.int64], work: LocalWork, smallest: int) -> float:
    """Return how many clients take a vectorised step together, on average over an epoch's computations.

    >>> clients_a_step(np.array([20, 15, 5]), LocalWork(batch_size=10), 1)
    2.5
    >>> clients_a_step(np.array([20, 15, 5]), LocalWork(batch_size=10), 2)
    1.25

    Args:
        sizes: each client's training samples, at least one client.
        work: how much each client trains.
        smallest: the smallest batch; a net with BatchNorm, which takes 2, computes short batches by size.
    """
    size, last, _, steps, limit = work.extent(Phase())
    if steps is not None:
        return float(np.count_nonzero(sizes))
    full, rest = np.divmod(sizes, size)
    if last == "drop":
        rest = np.where(full > 0, 0, rest)
    elif last == "wrap":
        full, rest = full + (rest > 0), np.zeros_like(rest)
    rest = np.where(rest < smallest, 0, rest)
    batches = full + (rest > 0)
    used = np.maximum(batches * limit, 1).astype(int) if isinstance(limit, float) else np.minimum(batches, limit)
    used = np.minimum(used, batches)
    full, rest = np.minimum(full, used), np.where(used < batches, 0, rest)
    short = set(zip(full[rest > 0].tolist(), rest[rest > 0].tolist(), strict=True))
    computations = full.max() + len(short) if smallest > 1 else used.max()
    return float(used.sum() / max(computations, 1))
