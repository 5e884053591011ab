"""FedDecorr: a penalty on the correlations between features keeps them from collapsing into few dimensions.

Source: Shi et al., 2023 (https://arxiv.org/abs/2210.00226). Symbols: h are the d features of a batch's N samples, K
their correlation matrix ``[d, d]``.
"""

import math
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from pfl_lightning.client import ClientSettings
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.settings import Unpack


def decorrelation(features: Tensor) -> Tensor:
    r"""Return the mean squared correlation between two features, as the official code scales it.

    .. math:: L = \frac{(N - 1)^2}{N}\, \mathrm{mean}_{i \neq j} K_{ij}^2, \qquad
        K = \frac{1}{N - 1} \hat h^T \hat h, \qquad \hat h = \frac{h - \mathrm{mean}}{\sqrt{\mathrm{var} + 10^{-8}}}

    with the unbiased variance. A constant feature has the correlation 0 with all others. For one sample, or one
    feature, the loss is 0.

    >>> decorrelation(torch.tensor([[0.0, 0.0], [1.0, 2.0], [2.0, 4.0]]))  # 4 / 3, with a correlation of 1
    tensor(1.3333)

    Args:
        features: h, ``[N, d]``.
    """
    n, size = features.shape
    if n < 2 or size < 2:
        return features.new_zeros(())
    h = features.to(torch.promote_types(features.dtype, torch.float32))
    h = h - h.mean(0)
    h = h / (h.square().sum(0) / (n - 1) + 1e-8).sqrt()
    squares = (h.T @ h).square()
    # the sum over the diagonal taken out: a mask would be a second matrix of this size
    return (squares.sum() - squares.diagonal().sum()) / (size * (size - 1) * n)


class FedDecorr(FedAvg):
    r"""Adds :math:`\beta` times `decorrelation` of the batch's features to the client's loss.

    The formula is the official code's (``loss.py``). Its factor is near the batch size N, so that
    :math:`\beta` belongs to the code's batches of 64, and the term is weaker in smaller ones. Features are all that the
    classifier receives: with a linear net they are constants, and the method is `FedAvg`. The term also joins another
    method's loss, by a class such as ``class Both(FedDecorr, FedProx)``.
    Source: Shi et al., 2023 (https://arxiv.org/abs/2210.00226); bytedance/FedDecorr@973e4af.

    Args:
        beta: :math:`\beta`, at least 0; 0 is `FedAvg` bit for bit. The official code takes 0.1, and 0.05 for CIFAR-100.
        **kwargs: the arguments of `FedAvg`.

    Raises:
        MisconfigurationException: if ``beta`` is negative.
    """

    client_level = True

    requires = frozenset({"vector features"})

    def __init__(self, *args: Any, beta: float = 0.1, **kwargs: Unpack[ClientSettings]) -> None:
        super().__init__(*args, **kwargs)
        if not 0 <= beta < math.inf:
            raise MisconfigurationException(f"model.beta={beta} must be 0 (which is FedAvg) or more, such as 0.1.")
        self.beta = beta

    def loss(self, features: Tensor, logits: Tensor, target: Tensor) -> Tensor:
        """Return the task's loss plus the penalty."""
        loss = super().loss(features, logits, target)
        # not 0 times the term: adding a zero could still change a bit, and takes time
        return loss + self.beta * decorrelation(features) if self.beta else loss
