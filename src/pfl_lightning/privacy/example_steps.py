"""Bounded gradients of single samples, their sums, and noise, for steps of differentially private training."""

import math
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.func import grad, vmap

from pfl_lightning.client.module import Batch, ClientModule
from pfl_lightning.client.phases import Phase
from pfl_lightning.data.trees import split
from pfl_lightning.engines.base import LocalWork
from pfl_lightning.engines.slots import Slots
from pfl_lightning.engines.steps import step_values
from pfl_lightning.messages import StateDict, tree_map
from pfl_lightning.privacy.noise import towards_zero

Values = dict[str, Tensor]


class Mechanism(Protocol):
    """Bound, noise and sampling of private steps, as `DPSGD` describes them."""

    @property
    def clip(self) -> float:
        """The largest norm of one sample's gradient."""

    @property
    def grid(self) -> float | None:
        """The step of the grid for bounded gradients and their noise."""

    @property
    def samples_at_once(self) -> int | None:
        """Gradients of single samples that are held at a time."""

    def drawn(self, samples: int, rate: float, generator: torch.Generator) -> Tensor:
        """Return the rows of a client's batch."""

    def drawn_noise(self, entries: Collection[Tensor], generator: torch.Generator) -> Tensor:
        """Return the noise of a step."""


class Draws(NamedTuple):
    """The number and the size of a client's batches in a phase.

    Args:
        steps: how many there are.
        rate: the probability of each sample to be in one.
        expected: samples that one has on average, by which sums are divided.
    """

    steps: int
    rate: float
    expected: float

    @classmethod
    def of(cls, work: LocalWork, phase: Phase, samples: int) -> "Draws":
        """Return the draws of a client in a phase, as many as plain training has batches.

        Args:
            work: how much each client trains.
            phase: the phase.
            samples: how many the client has.
        """
        # the last, smaller batch of an epoch has no part in it: each batch is drawn anew
        size, _, epochs, steps, _ = work.extent(phase)
        if not samples:
            return cls(0, 1.0, 1.0)
        count = steps if steps is not None else int(epochs or 0) * math.ceil(samples / size)
        rate = min(1.0, size / samples)
        return cls(count, rate, rate * samples)

    @property
    def samples(self) -> int:
        """The expected number of samples in all batches."""
        return round(self.steps * self.expected)


class ExampleGradients:
    """Sums of the bounded gradients of single samples of one client.

    Args:
        module: the client module.
        slots: the module's.
        trained: names of the entries that gradients are taken to.
        privacy: the bound of a sample's gradient over all trained entries together, how many are held at a time, and
            the grid to which each is rounded, towards zero.
        forward_context: gives the context for a forward pass, such as autocast; nothing else is computed in it.
    """

    def __init__(
        self,
        module: ClientModule,
        slots: Slots,
        trained: list[str],
        privacy: Mechanism,
        forward_context: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.module = module
        self.slots = slots
        self.trained = trained
        self.privacy = privacy
        self.grid = privacy.grid
        self.forward_context = forward_context

    def sums(self, entries: StateDict, batch: Batch, taken: Tensor, index: int) -> tuple[StateDict, Values]:
        """Return sums over a batch in float64: of bounded gradients, and of the values of ``training_step``.

        Args:
            entries: the client's parameters and buffers by name.
            batch: inputs and targets of m samples, at least one.
            taken: 1 for the samples that count, 0 for the others ``[m]``.
            index: the batch's number.
        """
        # frozen entries need no gradient of each sample
        leaves = {name: entries[name] for name in self.trained}
        others = {name: entry for name, entry in entries.items() if name not in leaves}

        def loss(leaves: StateDict, sample: Batch) -> tuple[Tensor, Values]:
            one = tree_map(lambda t: t.unsqueeze(0), sample)
            with self.forward_context():
                values = self.slots.call(step_values, {**others, **leaves}, self.module, one, index)
            return values["loss"], {name: value.detach() for name, value in values.items()}

        gradients_of = vmap(grad(loss, has_aux=True), in_dims=(None, 0), randomness="different")
        sums: StateDict = {}
        totals: Values = {}
        for *part, own in split((*batch, taken), self.privacy.samples_at_once or len(taken)):
            gradients, values = gradients_of(leaves, tuple(part))
            sums = added(sums, self._bounded(gradients, own))
            # a sample that only fills up may be one that isn't finite
            own_values = {name: torch.where(own > 0, exact(value), 0).sum() for name, value in values.items()}
            totals = added(totals, own_values)
        return sums, totals

    def _bounded(self, gradients: StateDict, taken: Tensor) -> StateDict:
        """Return the sum of the samples' bounded gradients; one with NaN or infinity counts as zero."""
        # in float64, as a float32 sum of 4,096 samples moves by up to 1.0004 times the bound, squares of 1e20 overflow,
        # and products of float32 may be made in TF32
        parts = [torch.linalg.vector_norm(exact(gradient.flatten(1)), dim=1) for gradient in gradients.values()]
        norms = torch.linalg.vector_norm(torch.stack(parts), dim=0)
        finite = norms.isfinite()
        factors = torch.where(finite, taken * (self.privacy.clip / norms).clamp(max=1), 0)
        wholes = {name: exact(whole(gradient, finite)) for name, gradient in gradients.items()}
        if self.grid is None:
            return {name: torch.tensordot(factors, gradient, 1) for name, gradient in wholes.items()}
        # one by one: the rounding is of each sample's own gradient, or the sum would have as many grids as samples
        return {
            name: towards_zero(factors.view(-1, *[1] * (gradient.dim() - 1)) * gradient, self.grid).sum(0)
            for name, gradient in wholes.items()
        }


def exact(tensor: Tensor) -> Tensor:
    """Return the tensor in float64, or in float32 on Apple's GPUs, which have no more."""
    return tensor.to(torch.float32 if tensor.device.type == "mps" else torch.float64)


def added(one: StateDict, other: StateDict) -> StateDict:
    """Return sums by name, where one side may have none yet."""
    return {name: one[name] + tensor if name in one else tensor for name, tensor in other.items()}


def whole(gradients: Tensor, finite: Tensor) -> Tensor:
    """Return gradients of samples ``[m, ...]``, with zeros for samples with NaN or infinity."""
    return torch.where(finite.view(-1, *[1] * (gradients.dim() - 1)), gradients, 0)


def noised(sums: StateDict, noise: Tensor, entries: Mapping[str, Tensor], expected: float | Tensor) -> StateDict:
    """Return a step's gradients, of one client or a row for each of many, rounded to the entries' type after the noise.

    Args:
        sums: of bounded gradients, by name; empty where no sample was drawn.
        noise: of all entries in their order, flat ``[..., numbers]``.
        entries: what the gradients are of, by name.
        expected: samples that a batch has on average, of all or ``[clients]``.
    """
    rows = noise.shape[:-1]
    # one draw for all entries, so that engines draw alike
    drawn = torch.split(noise, [entry[0].numel() if rows else entry.numel() for entry in entries.values()], dim=-1)
    gradients = {}
    for (name, entry), own in zip(entries.items(), drawn, strict=True):
        total = exact(own.reshape(entry.shape).to(entry.device))
        if name in sums:
            total = total + sums[name]
        each = expected.to(total).view(*rows, *[1] * (entry.dim() - 1)) if isinstance(expected, Tensor) else expected
        gradients[name] = (total / each).to(entry)
    return gradients


def without_examples(module: ClientModule, reason: str) -> MisconfigurationException:
    """Return the error for a step without gradients of single samples."""
    return MisconfigurationException(
        f"trainer.example_privacy needs the gradient of each sample, which {type(module).__name__}.training_step "
        f"doesn't allow: {reason}; leave it out, or keep samples independent of each other in the step."
    )
