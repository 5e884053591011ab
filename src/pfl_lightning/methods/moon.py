"""MOON: local features stay near the received model's, and away from the client's previous model's.

Source: Li, He and Song, 2021 (https://arxiv.org/abs/2103.16257). Symbols: z, z_glob and z_prev are an input's features
by the model in training, by the received model, and by the client's model after its previous local training.
"""

from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.nn import functional as F

from pfl_lightning.client import Batch, ClientSettings
from pfl_lightning.client.at_once import at_once
from pfl_lightning.client.common import common_parameters
from pfl_lightning.data import ClientData
from pfl_lightning.messages import Message
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.methods.frozen import FrozenModule, tensors_of
from pfl_lightning.settings import Unpack


def model_contrast(z: Tensor, z_glob: Tensor, z_prev: Tensor, tau: float) -> Tensor:
    r"""Return the model-contrastive loss, averaged over a batch.

    .. math::

        \ell_{con} = -\log\frac{e^{\cos(z, z_{glob})/\tau}}{e^{\cos(z, z_{glob})/\tau} + e^{\cos(z, z_{prev})/\tau}}
                   = \log\left(1 + e^{(\cos(z, z_{prev}) - \cos(z, z_{glob}))/\tau}\right)

    >>> model_contrast(torch.tensor([[1.0, 0.0]]), torch.tensor([[2.0, 0.0]]), torch.tensor([[0.0, 3.0]]), tau=0.5)
    tensor(0.1269)

    Args:
        z: features ``[n, d]`` of the model in training; the cosine of a zero vector is 0.
        z_glob: features ``[n, d]`` of the received model.
        z_prev: features ``[n, d]`` of the client's previous model.
        tau: temperature, above 0.
    """
    # the second form of the equation: softplus(x) = log(1 + e^x) doesn't overflow
    return F.softplus((F.cosine_similarity(z, z_prev) - F.cosine_similarity(z, z_glob)) / tau).mean()


class MOON(FedAvg):
    r"""Minimises :math:`\mathrm{CE} + \mu\,\ell_{con}(z; z_{glob}; z_{prev})` on the client.

    z is the classifier's input: a projection head is a part of the net's features. Until a client takes part, its
    previous model is the received one, so that the contrastive loss is log 2 with a gradient of 0. The previous feature
    extractor stays with its client, whose state is larger by its size.
    Source: Li, He and Song, 2021, Algorithm 1 (https://arxiv.org/abs/2103.16257); the official code contrasts a
    client's first model with random weights instead.

    Args:
        mu: weight of the contrastive loss, at least 0; 0 is `FedAvg` bit for bit.
        tau: temperature of the cosines, above 0.
        **kwargs: the arguments of `FedAvg`.

    Raises:
        MisconfigurationException: if ``mu`` is negative, or ``tau`` isn't positive.
    """

    logs = FedAvg.logs | {"contrast"}
    client_level = True
    example_level = True

    requires = frozenset({"vector features"})

    has_previous: Tensor

    def __init__(self, *args: Any, mu: float = 1.0, tau: float = 0.5, **kwargs: Unpack[ClientSettings]) -> None:
        super().__init__(*args, **kwargs)
        if mu < 0:
            raise MisconfigurationException(f"model.mu={mu} must be 0 (which is FedAvg) or more, such as 1.")
        if tau <= 0:
            raise MisconfigurationException(f"model.tau={tau} must be above 0, such as 0.5.")
        self.mu, self.tau = mu, tau
        # with mu=0 a client keeps no copies, and its state is as small as FedAvg's
        if mu > 0:
            common = common_parameters(self).values()
            self.received = FrozenModule(self.net.features, common=common)
            self.previous = FrozenModule(self.net.features, persistent=True, common=common)
            self.register_buffer("has_previous", torch.tensor(False))

    @at_once
    def on_download(self, payload: Message, data: ClientData | None) -> None:
        """Load the model, and copy the received feature extractor."""
        super().on_download(payload, data)
        if self.mu > 0:
            self.received.take_from(self.net.features)
            own, new = self.previous.tensors(), dict(tensors_of(self.net.features))
            # without an `if`, so that many clients can run at once
            self.previous.take((name, torch.where(self.has_previous, old, new[name])) for name, old in own.items())

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Return the task's loss plus the contrastive loss, which the record has apart too."""
        if self.mu == 0:
            return super().training_step(batch, batch_idx)
        x, target = batch
        z = self.net.features(x)
        contrast = model_contrast(z, self.received(x), self.previous(x), self.tau)
        return {"loss": self.loss(z, self.net.classifier(z), target) + self.mu * contrast, "contrast": contrast}

    @at_once
    def upload(self, data: ClientData) -> Message:
        """Return the update, and keep the trained feature extractor as the previous one."""
        if self.mu > 0:
            self.previous.take_from(self.net.features)
            self.has_previous.fill_(True)
        return super().upload(data)
