"""FedSAM and FedASAM: local steps along the gradient at the worst point nearby."""

from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from pfl_lightning.client import Batch, ClientSettings
from pfl_lightning.messages import StateDict
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.methods.functional import gradient_at, loss_at, trainable
from pfl_lightning.settings import Unpack


class FedSAM(FedAvg):
    r"""Sharpness-aware minimisation on the client: each step takes the gradient at :math:`w + e` instead of w.

    .. math:: e = \rho\,\frac{T^2 g}{\lVert T g \rVert}, \qquad g = \nabla F_k(w)

    The norm is over all parameters together. T is 1 (SAM), or :math:`|w| + \eta_a` for parameters with "weight" in
    their name (ASAM). The optimizer steps from w, and its momentum and weight decay act there. Each batch takes two
    passes; the recorded loss is that of the second, at :math:`w + e`.

    BatchNorm's running statistics follow the second pass alone; in the official code they follow both. The official
    code's optional mean of late server models is left out.
    Source: Caldarola, Caputo and Ciccone, 2022 (https://arxiv.org/abs/2203.11834); SAM in federations is also by Qu et
    al., 2022. The defaults are those of the official code for CIFAR-10.

    Args:
        rho: distance to the worst point, at least 0; 0 is `FedAvg` bit for bit.
        adaptive: whether to use ASAM, which goes further along larger weights; its official code takes rho 0.7.
        eta: :math:`\eta_a`, at least 0.
        **kwargs: the arguments of `FedAvg`.

    Raises:
        MisconfigurationException: if ``rho`` or ``eta`` is negative.
    """

    client_level = True

    def __init__(
        self, *args: Any, rho: float = 0.1, adaptive: bool = False, eta: float = 0.2, **kwargs: Unpack[ClientSettings]
    ) -> None:
        super().__init__(*args, **kwargs)
        if not rho >= 0:
            raise MisconfigurationException(f"model.rho={rho} must be 0 (which is FedAvg) or more, such as 0.1.")
        if not eta >= 0:
            raise MisconfigurationException(f"model.eta={eta} must be 0 or more, such as 0.2.")
        self.rho, self.adaptive, self.eta = rho, adaptive, eta

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Return the loss at w + e, with e as a constant: the gradient in w is then the gradient at w + e."""
        if self.rho == 0:
            return super().training_step(batch, batch_idx)
        # one forward and backward pass for e, then the pass that the engine differentiates
        w = trainable(self.net)
        e = self.ascent(w, gradient_at(self, w, batch))
        return {"loss": loss_at(self, self.net, {name: w[name] + e[name] for name in w}, batch)}

    def ascent(self, w: StateDict, g: StateDict) -> StateDict:
        """Return e, the way to the worst point nearby; 0 where the gradient is 0.

        Args:
            w: parameters, by name.
            g: their gradients, by name.
        """
        # T is 1 where it isn't here: a product with ones would take time
        scales = {n: weight.detach().abs() + self.eta for n, weight in w.items() if self.adaptive and "weight" in n}
        scaled = {name: scales[name] * g[name] if name in scales else g[name] for name in w}
        lengths = [torch.linalg.vector_norm(each) for each in scaled.values()]
        # the official code's 1e-16 keeps a zero gradient from 0 / 0
        way = self.rho / (torch.linalg.vector_norm(torch.stack(lengths)) + 1e-16)
        return {name: way * (scales[name] * each if name in scales else each) for name, each in scaled.items()}
