"""FedPHP: a running mean of the client's past models teaches the received model."""

from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from pfl_lightning.client import Batch, ClientSettings
from pfl_lightning.client.common import common_parameters
from pfl_lightning.data import ClientData
from pfl_lightning.messages import Message
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.methods.frozen import FrozenModule, tensors_of
from pfl_lightning.settings import Unpack


class FedPHP(FedAvg):
    r"""Learns from the history, a running mean of the client's past models, and adds the trained model to the history.

    .. math::

        L = (1 - \lambda)\,\mathrm{CE} - \lambda \sum_c \mathrm{softmax}(z_s / T)_c \log \mathrm{softmax}(z)_c, \qquad
        s_k \leftarrow \mu s_k + (1 - \mu) y_k, \qquad \mu = 0.9\,\frac{\text{rounds with k before}}{\text{expected}}

    :math:`y_k` is the model trained from the received one and sent; :math:`z_s` are the outputs of the history
    :math:`s_k`, which never leaves its client. Running statistics are averaged like parameters. A client is evaluated
    by :math:`s_k` once it has taken part; until then by the received model, which is also its first teacher. In the
    official code the first teacher is a net with random weights.

    The official code also has a variant that compares features by a multi-kernel MMD, which is left out; PFLlib has
    that variant alone, counts rounds of the federation, and evaluates the received model.
    Source: Li et al., 2021 (https://doi.org/10.1007/978-3-030-86486-6_36); the defaults are its official code's.

    Args:
        weight: :math:`\lambda`, in [0, 1]; 0 sends the same as `FedAvg`, bit for bit.
        temperature: T of the history's softmax, above 0.
        momentum: the largest share of the history, in [0, 1); 0 makes the history the last trained model.
        participation: the expected share of rounds in which a client takes part, above 0 and up to 1.
        **kwargs: the arguments of `FedAvg`.

    Raises:
        MisconfigurationException: if an argument is out of its range.
    """

    client_level = True

    requires = frozenset({"classes"})
    taken_part: Tensor

    def __init__(
        self,
        *args: Any,
        weight: float = 0.1,
        temperature: float = 4.0,
        momentum: float = 0.9,
        participation: float = 1.0,
        **kwargs: Unpack[ClientSettings],
    ) -> None:
        super().__init__(*args, **kwargs)
        for name, value, allowed, advice in (
            ("weight", weight, 0 <= weight <= 1, "from 0 to 1, such as 0.1"),
            ("temperature", temperature, temperature > 0, "above 0, such as 4"),
            ("momentum", momentum, 0 <= momentum < 1, "0 or more and below 1, such as 0.9"),
            ("participation", participation, 0 < participation <= 1, "above 0 and up to 1"),
        ):
            if not allowed:
                raise MisconfigurationException(f"model.{name}={value} must be {advice}.")
        self.weight, self.temperature = weight, temperature
        self.momentum, self.participation = momentum, participation
        self.history = FrozenModule(self.net, persistent=True, common=common_parameters(self).values())  # s_k
        self.register_buffer("taken_part", torch.tensor(0))

    def on_download(self, payload: Message, data: ClientData | None) -> None:
        """Load the model; before the first training the history is a copy of the received model."""
        super().on_download(payload, data)
        if not self.taken_part:
            self.history.take_from(self.net)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs of the history, or of the received model before the first training."""
        logits: Tensor = (self.history if self.taken_part else self.net)(x)
        return logits

    def predicting_module(self) -> nn.Module:
        """Return the history, or the received model before the first training."""
        return self.history if self.taken_part else self.net

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Return the mixture of cross-entropy and distillation from the history."""
        if self.weight == 0:
            return super().training_step(batch, batch_idx)
        x, target = batch
        features = self.net.features(x)
        logits = self.net.classifier(features)
        taught = (self.history(x) / self.temperature).softmax(1)
        # the temperature divides the teacher's logits alone, as in the official code
        inherited = -(taught * logits.log_softmax(1)).sum(1).mean()
        return {"loss": (1 - self.weight) * self.loss(features, logits, target) + self.weight * inherited}

    def upload(self, data: ClientData) -> Message:
        """Return the trained model, and update the history with the same model."""
        # a client without a batch has trained nothing to remember
        if self.steps_done:
            expected = self.participation * self.num_rounds
            kept = self.momentum * min(float(self.taken_part) / expected, 1.0)
            trained = dict(tensors_of(self.net))
            for name, entry in self.history.tensors().items():
                # counters can't be averaged, and take the newest value
                entry.copy_(torch.lerp(trained[name], entry, kept) if entry.is_floating_point() else trained[name])
            self.taken_part += 1
        return super().upload(data)
