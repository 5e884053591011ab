"""Fed-RoD: a generic predictor unbiased by class frequencies, and a personal predictor on top."""

from typing import Any, Literal

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from pfl_lightning.client import ClientSettings, Forward
from pfl_lightning.client.at_once import at_once
from pfl_lightning.data import ClientData
from pfl_lightning.messages import Message
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.methods.personal_net import PersonalNet
from pfl_lightning.settings import Unpack


class FedRoD(PersonalNet, FedAvg):
    r"""Trains a generic head by balanced softmax, and a personal head on the generic head's errors.

    Minimises, over batches and with both terms at once,

    .. math::

        -\log\frac{N_y^\gamma\, e^{h^G_y(z)}}{\sum_c N_c^\gamma\, e^{h^G_c(z)}}
        \;+\; \mathrm{CE}\big(\overline{h^G(z)} + h^P(\overline z),\, y\big)

    with the features z, the generic head :math:`h^G`, the personal head :math:`h^P`, and the client's number
    :math:`N_c` of training samples of class c. A bar stops the gradient: features and generic head learn from the first
    term alone, the personal head from the second. A class without samples has no part in the client's first term.
    Features and generic head are averaged; the personal head stays, and begins as a copy of the initial classifier.

    The server's model (``test/global_acc``), and a client that hasn't taken part yet, predict by :math:`h^G(z)`, the
    generic model; other clients by :math:`h^G(z) + h^P(z)`. This is the paper's linear variant; its other one makes
    personal heads by a hypernetwork from class frequencies. The official repository has no code. PFLlib counts classes
    without the samples of a smaller last batch, so that a class can have an infinite loss.

    Source: Chen and Chao, 2022 (https://arxiv.org/abs/2107.00778); balanced softmax is by Ren et al., 2020
    (https://arxiv.org/abs/2007.10740).

    Args:
        gamma: exponent of the class frequencies, at least 0. With 0 the generic model is that of `FedAvg` bit for bit.
        predict: the evaluated predictor, ``personal`` or ``generic``.
        **kwargs: the arguments of `FedAvg`.

    Raises:
        MisconfigurationException: if ``gamma`` is negative.
    """

    client_level = True

    requires = frozenset({"classes"})

    log_prior: Tensor

    def __init__(
        self,
        *args: Any,
        gamma: float = 1.0,
        predict: Literal["personal", "generic"] = "personal",
        **kwargs: Unpack[ClientSettings],
    ) -> None:
        super().__init__(*args, **kwargs)
        if not gamma >= 0:
            raise MisconfigurationException(
                f"model.gamma={gamma} must be 0 (which trains the generic model as FedAvg does) or more, such as 1."
            )
        self.gamma = gamma
        self.predict = predict
        self.make_personal(self.net.classifier)  # h^P
        self.register_buffer("log_prior", torch.zeros(self.num_classes), persistent=False)

    @at_once
    def on_download(self, payload: Message, data: ClientData | None) -> None:
        """Load the model, and count the client's classes."""
        super().on_download(payload, data)
        if data is not None and self.training_follows:
            # the power before the logarithm: with gamma = 0 an absent class counts 0^0 = 1, and not 0 times -infinity
            self.log_prior.copy_(data.class_counts.to(self.log_prior.dtype).pow(self.gamma).log())

    def loss(self, features: Tensor, logits: Tensor, target: Tensor) -> Tensor:
        """Return the balanced softmax loss of the generic head plus the cross-entropy of both heads together."""
        generic = super().loss(features, logits + self.log_prior, target)
        # both bars of the equation are `detach`
        return generic + self.task_loss(logits.detach() + self.personal(features.detach()), target)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs of both heads together, or of the generic head."""
        logits: Tensor = self.by_both(x) if self.predict == "personal" and self.has_personal else self.net(x)
        return logits

    def by_both(self, x: Tensor) -> Tensor:
        """Return the outputs of both heads together.

        Args:
            x: inputs ``[n, *input_shape]``.
        """
        features = self.net.features(x)
        logits: Tensor = self.net.classifier(features) + self.personal(features)
        return logits

    def predicting_module(self) -> nn.Module:
        """Return both heads on the features, or the generic model."""
        return Forward(self, self.by_both) if self.predict == "personal" and self.has_personal else self.net
