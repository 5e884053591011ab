r"""FedETF: a fixed classifier whose class vectors are at the largest possible equal angles.

Source: Li et al., 2023 (https://arxiv.org/abs/2303.10058). Symbols: h are a sample's features of width d, C the number
of classes, M the fixed simplex :math:`[p, C]` with a class vector in each column, and n_kc client k's number of
training samples of class c.
"""

import math
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn import functional as F

from pfl_lightning.client import ClientSettings
from pfl_lightning.client.at_once import at_once
from pfl_lightning.data import ClientData
from pfl_lightning.messages import Message
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.nets import feature_size
from pfl_lightning.settings import Unpack


def simplex(size: int, num_classes: int) -> Tensor:
    r"""Return the simplex equiangular tight frame :math:`M = \sqrt{C / (C - 1)}\, U (I - \tfrac1C 1 1^T)`, ``[p, C]``.

    U has orthonormal columns. The columns of M are unit vectors with cosines of :math:`-1 / (C - 1)`. It is the same in
    each call, and so at all clients and sites, without being sent.

    >>> M = simplex(4, 3)
    >>> torch.allclose(M.T @ M, 1.5 * torch.eye(3) - 0.5, atol=1e-6)
    True

    Args:
        size: length p of a vector, at least C.
        num_classes: C, at least 2.
    """
    entries = torch.rand(size, num_classes, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    u, r = torch.linalg.qr(entries)
    # libraries differ in the signs of U's columns
    u = u * r.diagonal().sign()
    frame: Tensor = math.sqrt(num_classes / (num_classes - 1)) * (u - u.mean(1, keepdim=True))
    return frame.float()


def check_simplex(size: int, num_classes: int, name: str) -> None:
    """Refuse vectors that are too short for a simplex.

    Args:
        size: length of a vector.
        num_classes: number of classes.
        name: the setting that decides about the length.

    Raises:
        MisconfigurationException: if ``size`` is less than the number of classes, or that is less than 2.
    """
    if not 2 <= num_classes <= size:
        raise MisconfigurationException(
            f"{name} gives vectors of length {size}, and a simplex of {num_classes} classes needs at least as many "
            "dimensions as classes, of which there are two or more."
        )


class SimplexClassifier(nn.Module):
    r"""Logits by the angle of projected features to the fixed class vectors, :math:`s\,(Ph / \lVert Ph \rVert)^T M`.

    Args:
        size: width d of the features.
        num_classes: C.
        width: p, the length of a projected feature.
        scale: s at the start.
    """

    def __init__(self, size: int, num_classes: int, width: int, scale: float) -> None:
        super().__init__()
        self.projection = nn.Linear(size, width)  # P, with a bias
        self.scale = nn.Parameter(torch.tensor(float(scale)))
        # a frozen parameter: one copy for all clients, which never travels
        self.simplex = nn.Parameter(simplex(width, num_classes), requires_grad=False)

    def forward(self, features: Tensor) -> Tensor:
        """Return logits ``[n, C]``.

        Args:
            features: ``[n, d]``.
        """
        return self.scale * (F.normalize(self.projection(features)) @ self.simplex)


class FedETF(FedAvg):
    r"""Trains features, a projection and a scale under a `SimplexClassifier`, which replaces the net's classifier.

    .. math:: L = \mathrm{CE}\bigl(s\,f^T M + \ln n_k, y\bigr), \qquad f = \frac{Ph}{\lVert Ph \rVert}

    This is the balanced softmax, in which a class without samples counts as one. Predictions are without
    :math:`\ln n_k`. Features, projection P and scale s are averaged; M is the same for all and doesn't travel. With
    ``head: all_fc`` the classifier that is replaced is all fully connected layers. The loss has a lower bound: with
    s = 1 it is 1.377 for 10 classes of equal numbers.

    The paper's personalisation is left out: one round of training, and 20 times three epochs of M and three of P, for
    each client's evaluation.
    Source: Li et al., 2023 (https://arxiv.org/abs/2303.10058); ZexiLee/ICCV-2023-FedETF@092ace3, with whose widths the
    projection has as many units as there are classes, or 64.

    Args:
        scale: s at the start, above 0; trained. The official code takes 1 or 10, depending on the net.
        width: length of projected features, at least the number of classes; None takes the number of classes.
        **kwargs: the arguments of `FedAvg`.

    Raises:
        MisconfigurationException: if an argument is out of its range, or the net's features have no known width.
    """

    client_level = True

    requires = frozenset({"classes", "vector features"})

    log_counts: Tensor

    def __init__(
        self, *args: Any, scale: float = 1.0, width: int | None = None, **kwargs: Unpack[ClientSettings]
    ) -> None:
        super().__init__(*args, **kwargs)
        if not scale > 0:
            raise MisconfigurationException(f"model.scale={scale} must be above 0, such as 1 or 10.")
        width = self.num_classes if width is None else width
        check_simplex(width, self.num_classes, f"model.width={width}")
        self.net.classifier = SimplexClassifier(feature_size(self.net), self.num_classes, width, scale)
        self.register_buffer("log_counts", torch.zeros(self.num_classes), persistent=False)

    @at_once
    def on_download(self, payload: Message, data: ClientData | None) -> None:
        """Load the model, and count the client's classes."""
        super().on_download(payload, data)
        if data is not None and self.training_follows:
            # clamped as in the official code: a class without samples has a margin of 0, and not an infinite one
            self.log_counts.copy_(data.class_counts.clamp_min(1).to(self.log_counts).log())

    def loss(self, features: Tensor, logits: Tensor, target: Tensor) -> Tensor:
        """Return the balanced softmax loss."""
        # in training alone: `forward`, by which clients are evaluated, has no counts
        return super().loss(features, logits + self.log_counts, target)
