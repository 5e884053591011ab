"""FedUV: regularisers on the spread of outputs and features, which is small where classes are missing.

Source: Son et al., 2024 (https://arxiv.org/abs/2402.18372). Symbols: K classes, p the softmax of the logits, h the
features; sums are over the samples of a batch.
"""

import math
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.nn import functional as F

from pfl_lightning.client import ClientSettings
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.settings import Unpack


def variance_loss(logits: Tensor) -> Tensor:
    r"""Return how much less the class probabilities vary over a batch than with all classes present.

    .. math:: L_V = \frac1K \sum_j \max\Bigl(0,\ \frac{1}{\sqrt K} - \mathrm{std}_i\, p_{ij}\Bigr)

    with the unbiased standard deviation, which is :math:`1/\sqrt K` for a batch with one sample of each class, all
    predicted with certainty. For one sample the loss is 0.

    >>> variance_loss(torch.tensor([[9.0, 0.0], [9.0, 0.0]])), variance_loss(torch.tensor([[1e3, 0.0], [0.0, 1e3]]))
    (tensor(0.7071), tensor(0.))

    Args:
        logits: ``[n, K]``.
    """
    if len(logits) < 2:
        return logits.new_zeros(())
    # PyTorch's standard deviation has the gradient 0 at 0, and not NaN
    spread = logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(1).std(0)
    return F.relu(1 / math.sqrt(logits.shape[1]) - spread).mean()


def uniformity_loss(features: Tensor) -> Tensor:
    r"""Return the clustering of features: a Gaussian potential of pairs, as wide as the median distance.

    .. math:: L_U = \mathrm{mean}_{a < b}\, e^{-\lVert h_a - h_b \rVert^2 / m}, \qquad
        m = \mathrm{median}\{\lVert h_a - h_b \rVert^2 > 0\}

    m is differentiated too, so that the loss doesn't depend on the scale of the features. If no two features differ, it
    is 0.

    >>> uniformity_loss(torch.tensor([[0.0, 0.0], [0.0, 2.0], [2.0, 0.0]]))  # squared distances 4, 4 and 8
    tensor(0.2904)

    Args:
        features: ``[n, d]``.
    """
    if len(features) < 2:
        return features.new_zeros(())
    h = features.to(torch.promote_types(features.dtype, torch.float32))
    pairs = torch.triu_indices(len(h), len(h), 1, device=h.device).unbind()
    # a matrix product would be faster, but loses small distances between long vectors to rounding
    distances = torch.cdist(h, h, compute_mode="donot_use_mm_for_euclid_dist")[pairs].square()
    apart = distances > 0
    # by `where` and not by `if`, so that many clients can run at once; NaN leaves equal features out of the median
    m = torch.where(apart.any(), torch.where(apart, distances, torch.nan).nanmedian(), 1)
    return torch.where(apart.any(), torch.exp(-distances / m).mean(), 0)


class FedUV(FedAvg):
    r"""Minimises :math:`\mathrm{CE} + \lambda_V L_V + \mu_U L_U` on the client: `variance_loss`, `uniformity_loss`.

    Both terms are noisy in small batches: with two of ten classes in a batch, most outputs vary less than
    :math:`1/\sqrt K`, and the first term moves probability to absent classes.
    Source: Son et al., 2024 (https://arxiv.org/abs/2402.18372); formulas and defaults are the official code's.

    Args:
        variance_lambda: weight of the outputs' term, at least 0.
        uniformity_mu: weight of the features' term, at least 0; with both 0 it is `FedAvg` bit for bit.
        **kwargs: the arguments of `FedAvg`.

    Raises:
        MisconfigurationException: if a weight is negative.
    """

    client_level = True

    requires = frozenset({"classes", "vector features"})

    def __init__(
        self, *args: Any, variance_lambda: float = 2.5, uniformity_mu: float = 0.5, **kwargs: Unpack[ClientSettings]
    ) -> None:
        super().__init__(*args, **kwargs)
        for name, weight in (("variance_lambda", variance_lambda), ("uniformity_mu", uniformity_mu)):
            if not weight >= 0:
                raise MisconfigurationException(f"model.{name}={weight} must be 0 (without the term) or more.")
        self.variance_lambda, self.uniformity_mu = variance_lambda, uniformity_mu

    def loss(self, features: Tensor, logits: Tensor, target: Tensor) -> Tensor:
        """Return cross-entropy plus the two terms."""
        loss = super().loss(features, logits, target)
        if self.variance_lambda:
            loss = loss + self.variance_lambda * variance_loss(logits)
        if self.uniformity_mu:
            loss = loss + self.uniformity_mu * uniformity_loss(features)
        return loss
