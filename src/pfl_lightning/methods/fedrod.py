"""Fed-RoD: a generic predictor that class frequencies don't bias, and a personal one on top of it that they do."""

from typing import Any, Literal

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.nn import functional as F

from pfl_lightning.data import ClientData
from pfl_lightning.messages import Message
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.methods.personal_net import PersonalNet


class FedRoD(PersonalNet, FedAvg):
    r"""Trains a generic head by balanced softmax, and a personal one by what is left to explain.

    Minimises, over batches and with both terms at once,

    .. math::

        -\log\frac{N_y^\gamma\, e^{h^G_y(z)}}{\sum_c N_c^\gamma\, e^{h^G_c(z)}}
        \;+\; \mathrm{CE}\big(\overline{h^G(z)} + h^P(\overline z),\, y\big)

    where z are the features, :math:`h^G` and :math:`h^P` the generic and the personal head, and :math:`N_c` the
    client's training samples of class c. A bar stops the gradient: the features and the generic head learn from the
    first term alone, and the personal head from the second. A class that a client doesn't hold has no part in its first
    term. Features and generic head are averaged; the personal head stays, and begins as a copy of the initial
    classifier.

    The server's model, which is what ``test/global_acc`` is of, and a client that hasn't taken part yet predict by
    :math:`h^G(z)`, the generic model; other clients by :math:`h^G(z) + h^P(z)`. This is the linear variant of the
    paper, whose other one makes personal heads by a hypernetwork from class frequencies. The official repository has no
    code. PFLlib counts classes without the samples of a last, smaller batch, so that a class can have an infinite loss.

    Source: Chen and Chao, 2022 (https://arxiv.org/abs/2107.00778); balanced softmax is by Ren et al., 2020
    (https://arxiv.org/abs/2007.10740).

    Args:
        gamma: exponent of the class frequencies, at least 0. With 0 the generic model is that of `FedAvg` bit for bit.
        predict: what clients are evaluated by, the ``personal`` predictor or the ``generic`` one.
        **kwargs: the arguments of `FedAvg`.

    Raises:
        MisconfigurationException: if ``gamma`` is negative.
    """

    client_level = True

    requires = frozenset({"classes"})

    log_prior: Tensor

    def __init__(self, gamma: float = 1.0, predict: Literal["personal", "generic"] = "personal", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if not gamma >= 0:
            raise MisconfigurationException(
                f"model.gamma={gamma} must be 0 (which trains the generic model as FedAvg does) or more, such as 1."
            )
        self.gamma = gamma
        self.predict = predict
        self.make_personal(self.net.classifier)  # h^P
        self.register_buffer("log_prior", torch.zeros(self.num_classes), persistent=False)

    def on_download(self, payload: Message, data: ClientData | None) -> None:
        """Counts the client's classes."""
        super().on_download(payload, data)
        if data is not None:
            # a power before the logarithm: 0 to the power of 0 is 1
            self.log_prior.copy_(data.class_counts.to(self.log_prior.dtype).pow(self.gamma).log())

    def loss(self, features: Tensor, logits: Tensor, target: Tensor) -> Tensor:
        """Balanced softmax of the generic head, and the cross-entropy of both heads together."""
        generic = super().loss(features, logits + self.log_prior, target)
        return generic + F.cross_entropy(logits.detach() + self.personal(features.detach()), target)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of both heads together, or of the generic one."""
        features = self.net.features(x)
        logits: Tensor = self.net.classifier(features)
        if self.predict == "personal" and self.has_personal:
            logits = logits + self.personal(features)
        return logits
