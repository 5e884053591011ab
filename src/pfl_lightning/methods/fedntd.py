"""FedNTD: distillation of the received model's predictions over all classes but the true one."""

from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from pfl_lightning.client import Batch, ClientSettings
from pfl_lightning.client.at_once import at_once
from pfl_lightning.client.common import common_parameters
from pfl_lightning.data import ClientData
from pfl_lightning.messages import Message
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.methods.frozen import FrozenModule
from pfl_lightning.methods.losses import divergence
from pfl_lightning.settings import Unpack


def not_true_distillation(logits: Tensor, teacher: Tensor, target: Tensor, temperature: float = 1.0) -> Tensor:
    r"""Return the divergence of softmaxes over all classes but the true one, :math:`T^2\,\mathrm{KL}(p^g \Vert p)`.

    It is a mean over samples. The logit of the true class gets no gradient; with two classes it is 0.

    >>> z, teacher = torch.tensor([[5.0, 0.0, 1.0]]), torch.tensor([[-2.0, 1.0, 0.0]])
    >>> not_true_distillation(z, teacher, torch.tensor([0]))
    tensor(0.4621)

    Args:
        logits: ``[n, C]`` of the model in training.
        teacher: ``[n, C]`` of the received model.
        target: class numbers ``[n]``.
        temperature: T, above 0.
    """
    classes = logits.shape[1]
    # each sample's C - 1 other classes, in an order that starts after its own
    others = (target[:, None] + torch.arange(1, classes, device=target.device)) % classes
    known, student = (z.gather(1, others) / temperature for z in (teacher, logits))
    return temperature**2 * divergence(known, student)


class FedNTD(FedAvg):
    r"""Minimises cross-entropy plus :math:`\beta` times the not-true distillation from the received model.

    The received model teaches in evaluation mode, which costs its forward pass on each batch.
    Source: Lee et al., 2022 (https://arxiv.org/abs/2106.03097); the defaults are its official code's for CIFAR-10.

    Args:
        beta: weight of the distillation, at least 0; 0 is `FedAvg` bit for bit.
        temperature: T of the softmaxes, above 0.
        **kwargs: the arguments of `FedAvg`.

    Raises:
        MisconfigurationException: if ``beta`` is negative, or ``temperature`` isn't positive.
    """

    logs = FedAvg.logs | {"distillation"}
    client_level = True
    example_level = True

    requires = frozenset({"classes"})

    def __init__(
        self, *args: Any, beta: float = 1.0, temperature: float = 1.0, **kwargs: Unpack[ClientSettings]
    ) -> None:
        super().__init__(*args, **kwargs)
        if not beta >= 0:
            raise MisconfigurationException(f"model.beta={beta} must be 0 (which is FedAvg) or more, such as 1.")
        if not temperature > 0:
            raise MisconfigurationException(f"model.temperature={temperature} must be above 0, such as 1.")
        self.beta, self.temperature = beta, temperature
        if beta > 0:
            # only with beta > 0: else the copy would cost memory for nothing
            self.received = FrozenModule(self.net, common=common_parameters(self).values())

    @at_once
    def on_download(self, payload: Message, data: ClientData | None) -> None:
        """Load the model, with a copy as the teacher."""
        super().on_download(payload, data)
        if self.beta > 0:
            self.received.take_from(self.net)

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Return cross-entropy plus the distillation, which the record has apart too."""
        if self.beta == 0:
            return super().training_step(batch, batch_idx)
        x, target = batch
        features = self.net.features(x)
        logits = self.net.classifier(features)
        kept = not_true_distillation(logits, self.received(x), target, self.temperature)
        return {"loss": self.loss(features, logits, target) + self.beta * kept, "distillation": kept}
