"""Differentially private steps of many clients at once, with batches, bound and noise of each client's own."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import vmap

from pfl_lightning.client.module import Batch
from pfl_lightning.client.phases import Phase
from pfl_lightning.engines.base import LocalWork
from pfl_lightning.engines.sequential import Sequential
from pfl_lightning.engines.slots import Slots
from pfl_lightning.engines.steps import step_values
from pfl_lightning.engines.vmap.block import Block
from pfl_lightning.engines.vmap.checks import SharedAttributes, vectorised
from pfl_lightning.messages import StateDict, tree_map
from pfl_lightning.privacy.example_steps import Draws, ExampleGradients, Mechanism, Values, noised


class PrivateStep(NamedTuple):
    """The samples and the noise of a step, for the first rows of a block.

    Args:
        samples: of each row, numbers of samples of the block ``[rows, widest]``; what is beyond a row's own repeats.
        taken: 1 for a row's own samples, 0 for what repeats ``[rows, widest]``.
        noise: that is added to its sums ``[rows, numbers of all trained entries]``.
        expected: samples that it has on average ``[rows]``.
    """

    samples: Tensor
    taken: Tensor
    noise: Tensor
    expected: Tensor


class PoissonPlan:
    """The batches and the noise of a phase for all clients of a block, drawn as by `Sequential`.

    Args:
        privacy: how training is private.
        work: how much each client trains.
        phase: the phase.
        block: the clients, the largest first.
        trained: the parameters by name.
    """

    def __init__(
        self, privacy: Mechanism, work: LocalWork, phase: Phase, block: Block, trained: dict[str, nn.Parameter]
    ) -> None:
        self.privacy = privacy
        self.block = block
        self.trained = trained
        self.draws = [Draws.of(work, phase, samples) for samples in block.sizes]
        self.counts: NDArray[np.int64] = np.array([draws.steps for draws in self.draws], dtype=np.int64)
        self.batches = self.counts
        self.samples: NDArray[np.int64] = np.array([draws.samples for draws in self.draws], dtype=np.int64)

    def steps(self, device: torch.device) -> Iterator[PrivateStep]:
        """Yield each step's samples and noise, for the first rows only, as larger clients have more steps.

        Args:
            device: where the tensors shall be.
        """
        begins = np.cumsum(self.block.sizes) - self.block.sizes
        for index in range(self.counts.max(initial=0)):
            rows = int((self.counts > index).sum())
            drawn, noise = [], []
            for row in range(rows):
                # the client's own, in the order in which `Sequential` draws
                generator = self.block.members[row].generator
                drawn.append(self.privacy.drawn(self.block.sizes[row], self.draws[row].rate, generator))
                noise.append(self.privacy.drawn_noise(self.trained.values(), generator))
            # clients draw batches of different sizes, and a stack has one
            widest = max(map(len, drawn))
            samples = torch.zeros(rows, widest, dtype=torch.int64)
            taken = torch.zeros(rows, widest)
            for row, own in enumerate(drawn):
                samples[row] = int(begins[row])
                samples[row, : len(own)] += own
                taken[row, : len(own)] = 1
            expected = torch.tensor([self.draws[row].expected for row in range(rows)])
            yield PrivateStep(*(part.to(device) for part in (samples, taken, torch.stack(noise), expected)))


class PrivateDifferentiator:
    """Compute private steps of many clients, in a phase of a block.

    Args:
        sequential: the engine of one client.
        attributes: the module's attributes.
        privacy: how training is private.
        slots: the module's.
        block: the clients; its entries are read.
        trained: the parameters by name.
    """

    def __init__(
        self,
        sequential: Sequential,
        attributes: SharedAttributes,
        privacy: Mechanism,
        slots: Slots,
        block: Block,
        trained: dict[str, nn.Parameter],
    ) -> None:
        self.sequential = sequential
        self.attributes = attributes
        self.block = block
        self.trained = list(trained)
        module = sequential.module
        self.examples = ExampleGradients(module, slots, list(trained), privacy, sequential.forward_context)

    def gradients(self, step: PrivateStep, index: int) -> StateDict:
        """Return gradients of the trained entries, a row for each client; values of steps are kept in the block.

        Args:
            step: what is learnt from.
            index: the batch's number.
        """
        rows, widest = step.samples.shape
        sums: StateDict = {}
        # batches of nobody are noise alone
        if widest:
            sums, totals = self._sums(step, index)
            # means over the drawn samples, for the record; gradients are divided by the expected number
            counts = step.taken.sum(1)
            means = {name: total / counts.clamp(min=1) for name, total in totals.items()}
            self.block.record(slice(0, rows), counts.cpu().numpy().astype(np.int64), means)
        entries = {name: self.block.entries[name][:rows] for name in self.trained}
        return noised(sums, step.noise, entries, step.expected)

    def _sums(self, step: PrivateStep, index: int) -> tuple[StateDict, Values]:
        """Return sums of bounded gradients and of the values of ``training_step``, a row for each client."""
        entries = {name: stack[: len(step.samples)].detach() for name, stack in self.block.entries.items()}

        def one(entries: StateDict, batch: Batch, taken: Tensor) -> tuple[StateDict, Values]:
            return self.examples.sums(entries, batch, taken, index)

        module, batch = self.sequential.module, self.block.batch(step.samples)

        def at_once() -> tuple[StateDict, Values]:
            return vmap(one)(entries, batch, step.taken)

        def alone() -> None:
            with self.sequential.forward_context():
                step_values(module, tree_map(lambda stack: stack[0], batch), index)

        return vectorised(self.attributes, self.block.members[0], entries, at_once, alone)
