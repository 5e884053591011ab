"""Per-FedAvg: a global model made for adaptation by one gradient step on a client's data.

Source: Fallah, Mokhtari and Ozdaglar, 2020 (https://arxiv.org/abs/2002.07948). Symbols: L(w; b) is the loss of the
weights w on the batch b, alpha the learning rate of the adaptation, beta that of the local updates.
"""

from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any, Literal

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from pfl_lightning.client import Batch, ClientSettings, Phase
from pfl_lightning.data.trees import take
from pfl_lightning.messages import StateDict
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.methods.functional import gradient_at, loss_at, trainable
from pfl_lightning.nets.batch_norm import smallest_batch
from pfl_lightning.settings import Unpack


class PerFedAvg(FedAvg):
    r"""Trains the model for the loss after one step of adaptation, and adapts the model before each evaluation.

    A local step splits its batch and makes

    .. math::

        w' = w - \alpha \nabla L(w; b_1), \qquad g = \nabla L(w'; b_2), \qquad
        w \leftarrow w - \beta \left(g - \alpha\,\frac{\nabla L(w + \delta g; b_3) - \nabla L(w - \delta g; b_3)}
        {2\delta}\right)

    (HF, Hessian-free), or leaves out the fraction (FO, first-order). The optimizer makes the last step; its learning
    rate is beta. A step reads ``data.batch_size`` samples in all: set it to two (HF: three) times the size of a part. A
    batch too small for parts of one sample (of two with BatchNorm) is trained on without adaptation.

    BatchNorm's running statistics follow the forward pass on :math:`b_2` alone, as the adapted model is the one in use.
    Both sides of the fraction drop the same units.
    Source: Fallah et al., 2020, Algorithm 1 (https://arxiv.org/abs/2002.07948).

    Args:
        alpha: learning rate of the adaptation, at least 0; 0 learns from the second part of each batch and doesn't
            adapt.
        variant: ``FO`` ignores second derivatives, ``HF`` estimates their product with g.
        delta: half the width of HF's difference quotient, above 0.
        **kwargs: the arguments of `FedAvg`.

    Raises:
        MisconfigurationException: if ``alpha`` is negative, or ``delta`` isn't positive.
    """

    client_level = True

    def __init__(
        self,
        *args: Any,
        alpha: float = 0.01,
        variant: Literal["FO", "HF"] = "FO",
        delta: float = 1e-3,
        **kwargs: Unpack[ClientSettings],
    ) -> None:
        super().__init__(*args, **kwargs)
        if alpha < 0:
            raise MisconfigurationException(f"model.alpha={alpha} must be 0 (no adaptation) or more, such as 0.01.")
        if delta <= 0:
            raise MisconfigurationException(f"model.delta={delta} must be above 0, such as 0.001.")
        self.alpha, self.variant, self.delta = alpha, variant, delta
        # in training, BatchNorm refuses a batch of one sample
        self.smallest_part = smallest_batch(self.net)

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Return the adapted model's loss, with the direction of the outer step as the gradient."""
        x, target = batch
        n, parts = len(target), 2 if self.variant == "FO" else 3
        if self.phase.name == "adapt" or n < parts * self.smallest_part:
            return super().training_step(batch, batch_idx)
        cuts = [part * n // parts for part in range(parts + 1)]
        b1, b2, *rest = (take((x, target), slice(*ends)) for ends in pairwise(cuts))
        w = trainable(self.net)
        # the inner gradient is a constant, so the gradient in w' is also the gradient in w
        adapted = step(w, -self.alpha, gradient_at(self, w, b1))
        if self.variant == "FO":
            return {"loss": loss_at(self, self.net, adapted, b2)}
        with self.replayed_draws():
            g = gradient_at(self, adapted, b2)
        loss = loss_at(self, self.net, adapted, b2)
        # a term of value 0 whose gradient is alpha times the fraction
        product = torch.stack([(h * w[name]).sum() for name, h in self.curvature(w, g, rest[0]).items()]).sum()
        return {"loss": loss - self.alpha * (product - product.detach())}

    def curvature(self, weights: StateDict, direction: StateDict, batch: Batch) -> StateDict:
        """Return the Hessian of L times a direction, by a central difference.

        Args:
            weights: the weights, by name.
            direction: the direction g, by name.
            batch: :math:`b_3`.
        """
        with self.replayed_draws():
            above = gradient_at(self, step(weights, self.delta, direction), batch)
        below = gradient_at(self, step(weights, -self.delta, direction), batch)
        return {name: (above[name] - below[name]) / (2 * self.delta) for name in weights}

    def replayed_draws(self) -> AbstractContextManager[None]:
        """Return a context for repeated random numbers: the next forward pass drops the same units."""
        return torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else [])

    def evaluation_phases(self) -> list[Phase]:
        """Adapt by one step on one batch of the client's training data."""
        return [Phase("adapt", steps=1, scheduled=False)] if self.alpha > 0 else []

    def joining_phases(self) -> list[Phase]:
        """Adapt as before an evaluation: the model is trained for this step."""
        return self.evaluation_phases()

    def local_optimizer(self, phase: Phase, parameters: list[nn.Parameter]) -> Optimizer:
        """Return the configured optimizer, or plain SGD with learning rate alpha for the adaptation."""
        return SGD(parameters, lr=self.alpha) if phase.name == "adapt" else super().local_optimizer(phase, parameters)


def step(weights: StateDict, size: float, direction: StateDict) -> StateDict:
    """Return weights moved along a direction.

    Args:
        weights: the weights, by name.
        size: factor on the direction.
        direction: the direction, by name.
    """
    return {name: weight + size * direction[name] for name, weight in weights.items()}
