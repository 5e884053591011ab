"""FLoRA: the stack of all clients' adapters is merged into the frozen weights, and adapters begin anew."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pfl_lightning.messages import StateDict, Updates
from pfl_lightning.methods.fedex_lora import FedExLoRA, ResidualAverage
from pfl_lightning.methods.flexlora import refuse_living_on
from pfl_lightning.methods.hetlora import HetLoRA
from pfl_lightning.seeds import derive_seed
from pfl_lightning.server import Aggregator, Server, Weighting
from pfl_lightning.server.adapters import summed


class FLoRA(FedExLoRA, HetLoRA):
    r"""Trains adapters that begin anew in each round, on frozen weights with all earlier rounds' adapters in them.

    The server stacks the factors, :math:`[p_1 B_1 \ldots p_K B_K][A_1; \ldots; A_K] = \sum_k p_k B_k A_k`, which is the
    mean product exactly, also of different ranks (as for `HetLoRA`); the server side is `StackedAverage`. Here it adds
    the product to the residual R of `FedExLoRA`, which comes down as a matrix of the layer's size, and so reaches
    clients that missed rounds; the paper's server sends the stack, which a client merges. All adapters have the net's
    scale s: the official code changes it with the number of clients, and is right only if all take part.

    Source: Wang et al., 2024 (https://arxiv.org/abs/2409.05976); ATP-1010/FederatedLLM@7bea158, whose baseline FedIT
    averages nothing.

    Takes the arguments of `HetLoRA`.
    """

    def configure_aggregator(self) -> Aggregator:
        """Return the server that merges the stack."""
        return StackedAverage()


class StackedAverage(ResidualAverage):
    r"""Adds the mean product to the residuals, and begins adapters anew: A random, B = 0.

    .. math:: R \leftarrow R + s \sum_k p_k B_k A_k

    A is drawn with the federation's seed and the round, for all clients alike, as ``peft`` draws it. All else that
    clients send is averaged. There is no ``product_error``, as no factor is averaged. Source: as for `FLoRA`.

    Args:
        weighting: client weights :math:`p_k`: ``samples`` or ``uniform``.

    Raises:
        MisconfigurationException: at setup, if optimizers are to live on.
    """

    def __init__(self, weighting: Weighting = "samples") -> None:
        super().__init__(weighting=weighting)

    def setup(self, server: Server) -> None:
        """Start from the common initial model, and keep the seed."""
        refuse_living_on(self, server)
        super().setup(server)
        self.seed, self.measures = server.seed, False

    def aggregate(self, updates: Updates, round: int) -> dict[str, Any]:
        """Merge the stack, and draw new adapters."""
        logs = super().aggregate(updates, round)
        if updates:
            # a function of the seed and the round, so that a resumed run draws the same
            generator = torch.Generator().manual_seed(derive_seed(self.seed, "flora", round))
            fresh: StateDict = {}
            for pair in self.scales:
                a, b = (self.state["weights"][name] for name in (pair.a, pair.b))
                # Kaiming's uniform distribution with a = sqrt(5)
                bound = 1 / math.sqrt(a[0].numel())
                drawn = bound * (2 * torch.rand(a.shape, generator=generator) - 1)
                fresh |= {pair.a: drawn.to(a.dtype), pair.b: torch.zeros_like(b)}
            self.state["weights"] = self.state["weights"] | fresh
        return logs

    def missed(self, a: Sequence[Tensor], b: Sequence[Tensor], shares: Sequence[float]) -> tuple[Tensor, Tensor]:
        """Return the stack, whose product is the mean product."""
        return summed(list(zip(b, a, strict=True)), shares)
