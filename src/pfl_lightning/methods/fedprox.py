"""FedProx: local training that is held near the received model."""

from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from pfl_lightning.data import ClientData
from pfl_lightning.messages import Message
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.methods.losses import proximal


class FedProx(FedAvg):
    r"""Minimises :math:`F_k(w) + \frac{\mu}{2} \lVert w - w^t \rVert^2` on the client; :math:`w^t` is as received.

    Source: Li et al., 2020, equation 2 (https://arxiv.org/abs/1812.06127).

    Args:
        mu: weight of the proximal term, at least 0; 0 is `FedAvg` bit for bit.
        **kwargs: the arguments of `FedAvg`.

    Raises:
        MisconfigurationException: if ``mu`` is negative.
    """

    def __init__(self, mu: float = 0.001, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if mu < 0:
            raise MisconfigurationException(f"model.mu={mu} must be 0 (which is FedAvg) or more, such as 0.01.")
        self.mu = mu
        # w^t: not persistent, because every download brings it anew
        self.received = nn.Module()
        for name, parameter in self.net.named_parameters():
            self.received.register_buffer(name.replace(".", "/"), parameter.detach().clone(), persistent=False)

    def on_download(self, payload: Message, data: ClientData | None) -> None:
        """Remembers the received model."""
        super().on_download(payload, data)
        for anchor, parameter in zip(self.received.buffers(), self.net.parameters(), strict=True):
            anchor.copy_(parameter)

    def loss(self, features: Tensor, logits: Tensor, target: Tensor) -> Tensor:
        """Cross-entropy and the proximal term."""
        loss = super().loss(features, logits, target)
        if self.mu == 0:
            return loss
        return loss + self.mu * proximal(self.net.parameters(), self.received.buffers())
