"""FedRS: a softmax in which the logits of a client's missing classes are scaled down."""

from typing import Any, Literal

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from pfl_lightning.client import ClientSettings
from pfl_lightning.client.at_once import at_once
from pfl_lightning.data import ClientData
from pfl_lightning.messages import Message
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.settings import Unpack, check_choices


class FedRS(FedAvg):
    r"""Trains by the restricted softmax, which updates the classifier's rows of missing classes less.

    .. math:: p_c = \frac{e^{\alpha_{k,c} z_c}}{\sum_j e^{\alpha_{k,j} z_j}}, \qquad
        \alpha_{k,c} = \begin{cases} 1 & n_{k,c} > 0 \\ \alpha & n_{k,c} = 0 \end{cases}

    z are the logits, and :math:`n_{k,c}` is the client's number of training samples of class c. A client without
    samples of a class only pushes the class's row away from its features; the factor :math:`\alpha` makes these
    gradients smaller, and 0 leaves the row as it is. Predictions use the logits as they are.

    The official code has :math:`\alpha + (1 - \alpha)\, n_{k,c} / \max_j n_{k,j}` as factors (``factor=counts``), which
    are the paper's where a client has equally many samples of each of its classes, and no biases. Here the factor
    multiplies the whole logit, with its bias.
    Source: Li and Zhan, 2021 (https://doi.org/10.1145/3447548.3467254); lxcnju/FedRepo@18eeb6d.

    Args:
        alpha: :math:`\alpha`, from 0 to 1; 1 is `FedAvg` bit for bit.
        factor: the factors of the classes: ``missing`` is the paper's, ``counts`` the official code's.
        **kwargs: the arguments of `FedAvg`.

    Raises:
        MisconfigurationException: if ``alpha`` is out of range, or ``factor`` none of its choices.
    """

    client_level = True

    requires = frozenset({"classes"})

    factors: Tensor

    def __init__(
        self,
        *args: Any,
        alpha: float = 0.5,
        factor: Literal["missing", "counts"] = "missing",
        **kwargs: Unpack[ClientSettings],
    ) -> None:
        super().__init__(*args, **kwargs)
        if not 0 <= alpha <= 1:
            raise MisconfigurationException(f"model.alpha={alpha} must be from 0 to 1 (which is FedAvg), such as 0.5.")
        check_choices("model", factor=(factor, ("missing", "counts")))
        self.alpha, self.factor = alpha, factor
        self.register_buffer("factors", torch.ones(self.num_classes), persistent=False)

    @at_once
    def on_download(self, payload: Message, data: ClientData | None) -> None:
        """Load the model, and compute the factors from the client's class counts."""
        super().on_download(payload, data)
        if data is not None and self.training_follows:
            counts = data.class_counts.to(self.factors)
            # the clamp is for a client without samples, whose shares would be 0 / 0
            shares = (counts > 0).to(counts) if self.factor == "missing" else counts / counts.max().clamp_min(1)
            self.factors.copy_(self.alpha + (1 - self.alpha) * shares)

    def loss(self, features: Tensor, logits: Tensor, target: Tensor) -> Tensor:
        """Return the cross-entropy of the scaled logits."""
        # in training alone: `forward`, by which clients are evaluated, has no factors
        return super().loss(features, logits * self.factors, target)
