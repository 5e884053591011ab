"""MOON: local features that stay near the received model's and move away from those of the client's last model.

Source: Li, He and Song, 2021 (https://arxiv.org/abs/2103.16257). Symbols: z, z_glob and z_prev are the features of one
input by the model under training, the received one and the one that the client had after its last local training.
"""

import copy
from itertools import chain
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from pfl_lightning.client.module import Batch
from pfl_lightning.data import ClientData
from pfl_lightning.messages import Message
from pfl_lightning.methods.fedavg import FedAvg


def model_contrast(z: Tensor, z_glob: Tensor, z_prev: Tensor, tau: float) -> Tensor:
    r"""The model-contrastive loss, as its mean over a batch.

    .. math::

        \ell_{con} = -\log\frac{e^{\cos(z, z_{glob})/\tau}}{e^{\cos(z, z_{glob})/\tau} + e^{\cos(z, z_{prev})/\tau}}
                   = \log\left(1 + e^{(\cos(z, z_{prev}) - \cos(z, z_{glob}))/\tau}\right)

    >>> model_contrast(torch.tensor([[1.0, 0.0]]), torch.tensor([[2.0, 0.0]]), torch.tensor([[0.0, 3.0]]), tau=0.5)
    tensor(0.1269)

    Args:
        z: features ``[n, d]`` of the model under training; a feature that is all zero has the cosine 0 to any.
        z_glob: features ``[n, d]`` of the received model.
        z_prev: features ``[n, d]`` of the client's previous model.
        tau: temperature, above 0.
    """
    return F.softplus((F.cosine_similarity(z, z_prev) - F.cosine_similarity(z, z_glob)) / tau).mean()


class Frozen(nn.Module):
    """A copy of a module that nothing trains and that stays in evaluation mode, whatever its owner's mode is.

    Its tensors are buffers: no optimizer and no gradient sees them.

    Args:
        module: the module.
        persistent: whether the copy is part of the ``state_dict``.
    """

    def __init__(self, module: nn.Module, persistent: bool) -> None:
        super().__init__()
        # in a tuple it is no submodule, so that nobody sets its mode; "meta" tensors have shapes and no memory
        self._architecture = (copy.deepcopy(module).to("meta").eval(),)
        for name, tensor in chain(module.named_parameters(), module.named_buffers()):
            self.register_buffer(name.replace(".", "/"), tensor.detach().clone(), persistent=persistent)

    @torch.no_grad()
    def take(self, module: nn.Module) -> None:
        """Copies the tensors of a module like the first one."""
        for mine, other in zip(self.buffers(), chain(module.parameters(), module.buffers()), strict=True):
            mine.copy_(other)

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        """The module's output, without gradient."""
        tensors = {name.replace("/", "."): tensor for name, tensor in self.named_buffers()}
        output: Tensor = functional_call(self._architecture[0], tensors, (x,))
        return output


class MOON(FedAvg):
    r"""Minimises :math:`\mathrm{CE} + \mu\,\ell_{con}(z; z_{glob}; z_{prev})` on the client.

    z is what the net's classifier takes: a projection head is a part of the net's features. Until a client has taken
    part, its previous model is the received one, which makes the contrastive loss log 2 and its gradient 0. The
    previous feature extractor stays with its client, so that a client's state is that much larger.
    Source: Li, He and Song, 2021, Algorithm 1 (https://arxiv.org/abs/2103.16257); the official code
    contrasts a client's first model with random weights instead.

    Args:
        mu: weight of the contrastive loss, at least 0; 0 is `FedAvg` bit for bit.
        tau: temperature of the cosines, above 0.
        **kwargs: the arguments of `FedAvg`.

    Raises:
        MisconfigurationException: if ``mu`` is negative, or ``tau`` isn't positive.
    """

    has_previous: Tensor

    def __init__(self, mu: float = 1.0, tau: float = 0.5, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if mu < 0:
            raise MisconfigurationException(f"model.mu={mu} must be 0 (which is FedAvg) or more, such as 1.")
        if tau <= 0:
            raise MisconfigurationException(f"model.tau={tau} must be above 0, such as 0.5.")
        self.mu, self.tau = mu, tau
        if mu > 0:
            self.received = Frozen(self.net.features, persistent=False)
            self.previous = Frozen(self.net.features, persistent=True)
            self.register_buffer("has_previous", torch.tensor(False))

    def on_download(self, payload: Message, data: ClientData | None) -> None:
        """Remembers the received feature extractor."""
        super().on_download(payload, data)
        if self.mu > 0:
            self.received.take(self.net.features)
            if not self.has_previous:
                self.previous.take(self.net.features)

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Cross-entropy and the contrastive loss."""
        if self.mu == 0:
            return super().training_step(batch, batch_idx)
        x, target = batch
        z = self.net.features(x)
        contrast = model_contrast(z, self.received(x), self.previous(x), self.tau)
        return {"loss": self.loss(z, self.net.classifier(z), target) + self.mu * contrast, "contrast": contrast}

    def upload(self, data: ClientData) -> Message:
        """The model, which is the previous one from now on."""
        if self.mu > 0:
            self.previous.take(self.net.features)
            self.has_previous.fill_(True)
        return super().upload(data)
