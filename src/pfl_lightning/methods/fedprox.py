"""FedProx: a proximal term keeps local training near the received model."""

from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from pfl_lightning.client import ClientSettings
from pfl_lightning.client.at_once import at_once
from pfl_lightning.client.common import trained_parameters
from pfl_lightning.data import ClientData
from pfl_lightning.messages import Message
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.methods.frozen import Frozen
from pfl_lightning.methods.losses import proximal
from pfl_lightning.settings import Unpack


class FedProx(FedAvg):
    r"""Adds :math:`\frac{\mu}{2} \lVert w - w^t \rVert^2` to the client's loss; :math:`w^t` is the received model.

    Source: Li et al., 2020, equation 2 (https://arxiv.org/abs/1812.06127).

    Args:
        mu: weight of the proximal term, at least 0; 0 is `FedAvg` bit for bit.
        **kwargs: the arguments of `FedAvg`.

    Raises:
        MisconfigurationException: if ``mu`` is negative.
    """

    client_level = True
    example_level = True

    def __init__(self, *args: Any, mu: float = 0.001, **kwargs: Unpack[ClientSettings]) -> None:
        super().__init__(*args, **kwargs)
        if mu < 0:
            raise MisconfigurationException(f"model.mu={mu} must be 0 (which is FedAvg) or more, such as 0.01.")
        self.mu = mu
        self.received = Frozen(trained_parameters(self, "net").items())  # w^t

    @at_once
    def on_download(self, payload: Message, data: ClientData | None) -> None:
        """Load the model, with a copy of the parameters as :math:`w^t`."""
        super().on_download(payload, data)
        self.received.take(trained_parameters(self, "net").items())

    def loss(self, features: Tensor, logits: Tensor, target: Tensor) -> Tensor:
        """Return the task's loss plus the proximal term."""
        loss = super().loss(features, logits, target)
        # not 0 times the term: adding a zero could still change a bit, and takes time
        if self.mu == 0:
            return loss
        return loss + self.mu * proximal(trained_parameters(self, "net").values(), self.received.buffers())
