"""FedLC: logits that are calibrated by how many samples of each class a client has."""

from typing import Any, Literal

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from pfl_lightning.choices import check_choices
from pfl_lightning.data import ClientData
from pfl_lightning.messages import Message
from pfl_lightning.methods.fedavg import FedAvg


class FedLC(FedAvg):
    r"""Train by the cross-entropy of calibrated logits, whose margins are wider for rarer classes.

    .. math:: z_c - \tau\, n_{k,c}^{-1/4}

    with :math:`n_{k,c}` the client's own training samples of class c. A class of which the client has none counts as
    one sample, so that its margin is :math:`\tau`, the widest there is (``absent=one``): the formula itself gives it an
    infinite one. That takes the class out of the client's softmax (``absent=out``), and its row of the classifier gets
    no gradient: where clients lack most classes, the global model then learns to tell these apart more slowly than
    `FedAvg`'s, where the paper has it learn faster. Predictions are by the logits as they are.

    In the paper the sum of the softmax leaves the true class out, and the loss has no lower bound; here it is the
    ordinary one. The paper's :math:`\tau` could not be verified. PFLlib counts the samples of all clients together.
    Source: Zhang et al., 2022 (https://arxiv.org/abs/2209.00189).

    Args:
        tau: how wide the margins are, at least 0; 0 is `FedAvg` bit for bit, or with ``absent=out`` a softmax over the
            client's own classes.
        absent: margin of a class that the client has no training sample of: :math:`\tau`, as of ``one`` sample, or an
            infinite one, which takes the class ``out`` of its softmax.
        **kwargs: the arguments of `FedAvg`.

    Raises:
        MisconfigurationException: if ``tau`` is negative, or ``absent`` none of its choices.
    """

    client_level = True

    requires = frozenset({"classes"})

    margins: Tensor

    def __init__(self, tau: float = 1.0, *, absent: Literal["one", "out"] = "one", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if not tau >= 0:
            raise MisconfigurationException(f"model.tau={tau} must be 0 or more, such as 1.")
        check_choices("model", absent=(absent, ("one", "out")))
        self.tau, self.absent = tau, absent
        self.register_buffer("margins", torch.zeros(self.num_classes), persistent=False)

    def on_download(self, payload: Message, data: ClientData | None) -> None:
        """Compute the margins by the client's class counts."""
        super().on_download(payload, data)
        if data is not None:
            counts = data.class_counts.to(self.margins)
            margins = self.tau * counts.clamp_min(1) ** -0.25
            self.margins.copy_(margins if self.absent == "one" else margins.masked_fill(counts == 0, torch.inf))

    def loss(self, features: Tensor, logits: Tensor, target: Tensor) -> Tensor:
        """Return the cross-entropy of calibrated logits."""
        return super().loss(features, logits - self.margins, target)
