"""The vectorised engine: many clients of one architecture at once, each with own weights, batches and optimizer."""

import time
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook

from pfl_lightning.client.module import ClientModule
from pfl_lightning.client.phases import Phase
from pfl_lightning.data import ClientData, Samples
from pfl_lightning.data.memory import free_memory
from pfl_lightning.engines.base import Engine, Job, Outcome
from pfl_lightning.engines.client_metrics import Evaluated
from pfl_lightning.engines.sequential import Sequential
from pfl_lightning.engines.steps import step_values
from pfl_lightning.engines.threads import threads_for
from pfl_lightning.engines.vmap.block import Block
from pfl_lightning.engines.vmap.block_io import BlockIO
from pfl_lightning.engines.vmap.checks import SharedAttributes, Unvectorisable, refuse_gradients_of_one
from pfl_lightning.engines.vmap.evaluator import BlockEvaluator
from pfl_lightning.engines.vmap.merged import Merged
from pfl_lightning.engines.vmap.recurrent import weights_exchanged
from pfl_lightning.engines.vmap.training import BlockTrainer
from pfl_lightning.messages import num_bytes
from pfl_lightning.nets.lightning_net import Deferred, LightningNet

__all__ = ["Unvectorisable", "Vectorised"]

CALM = 10
"""Rounds without a lack of memory after which a halved block is doubled."""


class Vectorised(Engine):
    """Train many clients in one computation, by ``torch.func.vmap``, with the results of `Sequential`.

    All parameters and buffers of a block of clients are stacked, ``[clients, ...]``. A step of all clients consists of
    one `ClientModule.training_step` under vmap, one backward pass, and one step of an optimizer of the stack. Clients
    with fewer batches stop earlier: the stack is sorted by numbers of samples, and its first rows take a step. Short
    last batches are computed together with others of the same size. Hooks run client by client, except for
    `ClientModule`'s own, which run for the whole block. Evaluation is one forward pass of many clients, if the method
    allows it.

    Results equal those of `Sequential` up to the order in which sums are rounded. That includes dropout, whose masks
    are drawn from each client's own stream; only for inputs that aren't contiguous in memory the masks differ.

    Refused with an error in one sentence are: steps whose control flow depends on values, or that draw random numbers
    by other functions than ``F.dropout``, ``torch.rand``, ``torch.randn``, ``torch.randint`` and ``F.gumbel_softmax``;
    client modules that keep client data in plain attributes read by steps; phases with samples of their own; optimizers
    that aren't elementwise. Under ``precision="16-mixed"`` each client has a loss scale of its own (`Scales`) and
    counts its own steps; the optimizer must be Adadelta, Adam, AdamW, RMSprop or SGD without dampening. An optimizer's
    settings must not depend on the client. Evaluation that isn't possible at once runs client by client.

    Args:
        *args: the arguments of `Engine`; ``workers`` is unused, and ``compile`` uses `Compiled`.
        block_size: clients at once, at least 1; None takes as many as half of the free memory should hold. A block that
            a GPU can't hold is halved in any case, and doubled after `CALM` rounds without lack of memory, up to this
            size. A block of one client runs as in `Sequential`.
        **kwargs: the keyword arguments of `Engine`.
    """

    takes_alike = True

    def __init__(self, *args: Any, block_size: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.block_size = block_size
        self.fitting: int | None = None
        """Clients at once since the last lack of memory; None without one."""
        self._calm = 0
        self.sequential = Sequential(self.module, self.work, self.precision)
        self.attributes = self.sequential.leaks = SharedAttributes(self.module)
        self.merged = Merged(self.module)
        self.trainer = BlockTrainer(self.sequential, self.attributes, self.merged, self.compile)
        self.evaluator = BlockEvaluator(self.sequential, self.attributes, self.merged)
        self.block_io = BlockIO(self.sequential, self.attributes, self.evaluator)

    def run(self, jobs: Iterable[Job]) -> Iterator[Outcome]:
        """Train each job's client, and yield outcomes in the order of the jobs, block by block.

        Raises:
            Unvectorisable: if the client module can't be vectorised; before the first outcome of a block.
        """
        self.attributes.renew()
        self.merged.settle(self.attributes.slots)
        self.merged.tell()
        self._double()
        with weights_exchanged(self.module), self.attributes.of("local work", whole_round=True):
            for block in self._blocks(jobs):
                yield from self._run_block(block)

    def evaluate(self, job: Job) -> dict[str, dict[str, float]]:
        """Evaluate one client as `Sequential` does."""
        return self.sequential.evaluate(job)

    def evaluate_all(self, jobs: Iterable[Job]) -> Iterator[Evaluated]:
        """Evaluate clients with the same model together, and the others block by block."""
        self.attributes.renew()
        self.merged.settle(self.attributes.slots)
        together: list[Evaluated] = []

        def others() -> Iterator[Job]:
            for several in self.sequential.alike.neighbours(jobs):
                if (found := self.sequential.evaluate_alike(several)) is None:
                    # Padding would change the outputs of such a net, too.
                    self.evaluator.usable &= not self.sequential.alike.samples_meet
                    yield from chain.from_iterable(job.each() for job in several)
                else:
                    together.append(found)

        with weights_exchanged(self.module):
            for block in self._blocks(others()):
                yield from self._evaluate_block(block)
        yield from together

    def adapt(self, phases: list[Phase], job: Job, data: ClientData) -> None:
        """Train one client as `Sequential` does."""
        self.sequential.adapt(phases, job, data)

    # Blocks

    def _blocks(self, jobs: Iterable[Job]) -> Iterator[list[Job]]:
        """Yield the jobs of each block, of clients with the same epochs and the same factor of the learning rate."""
        waiting: dict[tuple[float, float], list[Job]] = {}
        for job in jobs:
            if self.block_size is None:
                self.block_size = self._room(job)
            # a block's clients are sorted by size, and must stop in this order
            kind = self.work.share(job.client)
            block = waiting.setdefault(kind, [])
            block.append(job)
            # looked at for each block, as a lack of memory makes later ones smaller
            if len(block) >= (self.block_size if self.fitting is None else min(self.fitting, self.block_size)):
                yield waiting.pop(kind)
        yield from waiting.values()

    def _halves(self, jobs: list[Job]) -> tuple[list[Job], list[Job]]:
        """Return the halves of a block too large for the memory; later blocks are no larger."""
        self.fitting, self._calm = -(-len(jobs) // 2), 0
        return jobs[: self.fitting], jobs[self.fitting :]

    def _double(self) -> None:
        """Double halved blocks after `CALM` rounds without a lack of memory."""
        if self.fitting is not None and self._calm == CALM:
            self.fitting, self._calm = 2 * self.fitting, 0
            if self.block_size is not None and self.fitting >= self.block_size:
                self.fitting = None
        self._calm += 1

    def _room(self, job: Job) -> int:
        """Return the number of clients for half of the free memory, judged by a forward pass of one."""
        part = self.become(job).train
        with torch.no_grad(), self.forward_context():
            outputs = outputs_of(self.module, part.take(slice(self.work.batch_size)))
        entries = sum(tensor.nbytes for tensor in self.attributes.slots.current().values())
        # Five copies per entry: value, gradient, two of the optimizer's, and a temporary one. Outputs have gradients
        # too.
        need = 5 * entries + 2 * num_bytes(outputs) + 2 * num_bytes((part.x, part.y))
        room = max(1, free_memory(self.device) // (2 * need))
        if self.device.type != "cpu":
            return room
        with torch.no_grad(), self.forward_context():
            together = self.merged.clients_at_once(part.take(slice(self.work.batch_size)).x, num_bytes(outputs))
        return min(room, together or room)

    def _run_block(self, jobs: list[Job]) -> Iterator[Outcome]:
        """Yield the outcomes of a block, or of halves if memory is short."""
        if len(jobs) == 1:
            # A stack of one client costs time and saves none.
            yield self.sequential.train(jobs[0], self.attributes.layout)
            return
        with threads_for(self.module, len(jobs)):
            outcomes = self._trained_block(jobs)
        if outcomes is not None:
            yield from outcomes
            return
        for half in self._halves(jobs):
            yield from self._run_block(half)

    def _trained_block(self, jobs: list[Job]) -> Iterator[Outcome] | None:
        """Return the outcomes of a block; None if memory is short, with all of the block's memory free again."""
        try:
            start = time.perf_counter()
            refuse_gradients_of_one(self.module)
            block = Block.of_members(*self.block_io.receive(jobs, training=True))
            self.trainer.train(block)
            block.seconds = (time.perf_counter() - start) / len(jobs)
            outcomes = self.block_io.outcomes(jobs, block)
            # Computed here, so that a lack of memory shows before any outcome, when the block can still be halved.
            first = next(outcomes)
        except torch.cuda.OutOfMemoryError:
            # Returned and not raised: the error's traceback would keep the tensors alive, and a variable here as well.
            return None
        return chain([first], outcomes)

    def _evaluate_block(self, jobs: list[Job]) -> Iterator[Evaluated]:
        """Yield the metrics of a block, or of halves if memory is short."""
        try:
            with threads_for(self.module, len(jobs)):
                metrics = self._measure_block(jobs)
        except torch.cuda.OutOfMemoryError:
            halves = self._halves(jobs)
        else:
            if metrics is None:
                yield from self.sequential.evaluate_all(jobs)
            else:
                yield metrics
            return
        # Outside the except block, as above.
        for half in halves:
            yield from self._evaluate_block(half)

    def _measure_block(self, jobs: list[Job]) -> Evaluated | None:
        """Return the metrics of the received models; None if the clients can't be evaluated at once."""
        if len(jobs) == 1 or not self.evaluator.usable:
            return None
        try:
            members, entries, _ = self.block_io.receive(jobs, training=False)
        # Remembered for later rounds, too: the clients can't share a block, and are evaluated one by one.
        except Unvectorisable:
            self.evaluator.usable = False
            return None
        return self.evaluator.evaluate(members, entries)


def outputs_of(module: ClientModule, samples: Samples) -> list[Any]:
    """Return the outputs of all parts of a client module's net.

    Args:
        module: the client module.
        samples: some samples.
    """
    outputs: list[Any] = []
    with register_module_forward_hook(lambda module, args, output: outputs.append(output)):
        if isinstance(module.net, LightningNet) and not isinstance(samples.x, Tensor):
            # its forward may take a part of a batch, so that only a training step is known to run
            module.phase = module.local_phases()[0]
            step_values(module, (samples.x, samples.y), 0)
        else:
            module.net(samples.x)
    # stand-ins for features and outputs are no tensors
    return [output for output in outputs if not isinstance(output, Deferred)]
