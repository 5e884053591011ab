"""FedLC: logits that are calibrated by how many samples of each class a client has."""

from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from pfl_lightning.data import ClientData
from pfl_lightning.messages import Message
from pfl_lightning.methods.fedavg import FedAvg


class FedLC(FedAvg):
    r"""Trains by the cross-entropy of calibrated logits, whose margins are wider for rarer classes.

    .. math:: z_c - \tau\, n_{k,c}^{-1/4}

    with :math:`n_{k,c}` the client's own training samples of class c. A class of which it has none is out of its
    softmax, so that its row of the classifier gets no gradient: where clients lack most classes, the global model
    learns to tell them apart more slowly than `FedAvg`'s. Predictions are by the logits as they are.

    In the paper the sum of the softmax leaves the true class out, and the loss has no lower bound; here it is the
    ordinary one. The paper's :math:`\tau` could not be verified. PFLlib counts the samples of all clients together.
    Source: Zhang et al., 2022 (https://arxiv.org/abs/2209.00189).

    Args:
        tau: how wide the margins are, at least 0; 0 only leaves absent classes out.
        **kwargs: the arguments of `FedAvg`.

    Raises:
        MisconfigurationException: if ``tau`` is negative.
    """

    client_level = True

    requires = frozenset({"classes"})

    margins: Tensor

    def __init__(self, tau: float = 1.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if not tau >= 0:
            raise MisconfigurationException(f"model.tau={tau} must be 0 or more, such as 1.")
        self.tau = tau
        self.register_buffer("margins", torch.zeros(self.num_classes), persistent=False)

    def on_download(self, payload: Message, data: ClientData | None) -> None:
        """Counts the client's classes."""
        super().on_download(payload, data)
        if data is not None:
            counts = data.class_counts.to(self.margins)
            self.margins.copy_(torch.where(counts > 0, self.tau * counts.clamp_min(1) ** -0.25, torch.inf))

    def loss(self, features: Tensor, logits: Tensor, target: Tensor) -> Tensor:
        """Cross-entropy of calibrated logits."""
        return super().loss(features, logits - self.margins, target)
