"""WDR: the weight-distribution regulariser, cwFedAvg's client side.

Source: cwFedAvg, ICCV 2025 (https://arxiv.org/abs/2406.07800). Symbols: p_i the class distribution of client i's
samples, Theta_i its output layer, p~_i the estimate of p_i by the norms of Theta_i's rows.
"""

from typing import Any, cast

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from pfl_lightning.client import Batch, ClientModule, ClientSettings
from pfl_lightning.client.at_once import at_once
from pfl_lightning.data import ClientData
from pfl_lightning.messages import Message
from pfl_lightning.methods.cwfedavg import CwFedAvg, row_distribution
from pfl_lightning.nets import find_output_layer
from pfl_lightning.server import Aggregator
from pfl_lightning.settings import Unpack


class WDR(ClientModule):
    r"""Holds the norms of the output layer's rows to the client's class distribution during training.

    Minimises :math:`\mathrm{CE} + \kappa\lambda\,\lVert p_i - \tilde p(\Theta_i) \rVert_2`; the norm isn't squared, and
    :math:`p_i` counts the client's training samples. Its server side is `CwFedAvg`.

    Args:
        wdr_lambda: weight of the regulariser, at least 0; 0 is `FedAvg` bit for bit. The necessary weight grows with
            the number of classes: the paper takes 10 for 10 classes, 1000 for 100, and its results are most
            likely with half of that.
        wdr_scale: kappa: the official code trains with half of the given lambda (0.5), the paper prints 1.
        output_layer: name of the linear layer with a row a class, where the net's classifier has more than one.
        **kwargs: the arguments of `FedAvg`.

    Raises:
        MisconfigurationException: if ``wdr_lambda`` is negative, or there is no single output layer.
    """

    logs = ClientModule.logs | {"wdr"}
    client_level = True

    requires = frozenset({"classes"})

    distribution: Tensor
    received_distance: Tensor

    def __init__(
        self,
        *args: Any,
        wdr_lambda: float = 10.0,
        wdr_scale: float = 0.5,
        output_layer: str | None = None,
        **kwargs: Unpack[ClientSettings],
    ) -> None:
        super().__init__(*args, **kwargs)
        if wdr_lambda < 0 or wdr_scale < 0:
            raise MisconfigurationException(
                f"model.wdr_lambda={wdr_lambda} and model.wdr_scale={wdr_scale} must be 0 (which is FedAvg) or more."
            )
        # one factor: only kappa times lambda matters
        self.wdr_weight = wdr_scale * wdr_lambda
        self.output_layer = find_output_layer(self, self.num_classes, output_layer)
        self.register_buffer("distribution", torch.full((self.num_classes,), 1 / self.num_classes), persistent=False)
        self.register_buffer("received_distance", torch.zeros(()), persistent=False)

    def distance(self) -> Tensor:
        """Return the distance between the client's class distribution and the output layer's estimate."""
        rows = cast(Tensor, self.get_submodule(self.output_layer).weight)
        # PyTorch's norm has the gradient 0 at 0, also for a zero row
        distance: Tensor = torch.linalg.vector_norm(self.distribution - row_distribution(rows))
        return distance

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Return cross-entropy plus the regulariser, which is the same for all batches."""
        values = super().training_step(batch, batch_idx)
        if self.wdr_weight == 0:
            return values
        distance = self.distance()
        return values | {"loss": values["loss"] + self.wdr_weight * distance, "wdr": distance}

    @at_once
    def on_download(self, payload: Message, data: ClientData | None) -> None:
        """Load the model, and compute the client's class distribution."""
        super().on_download(payload, data)
        if data is not None and self.training_follows:
            counts = data.class_counts
            self.distribution.copy_(counts / counts.sum())
        self.received_distance.copy_(self.distance())

    @at_once
    def upload(self, data: ClientData) -> Message:
        """Return the model; warn if training clearly moved the rows' norms away from the class distribution."""
        if self.wdr_weight > 0:
            before, after = self.received_distance, self.distance()
            self.warn_if(
                after > (before + 0.05).clamp(min=0.2),
                lambda before, after: (
                    f"client {self.client_id}, round {self.round + 1}: the rows' distance to the class distribution "
                    f"grew from {before:.2f} to {after:.2f}: steps of model.wdr_lambda times the learning rate jump "
                    "over it; take a smaller one of the two."
                ),
                before,
                after,
            )
        return super().upload(data)

    def configure_aggregator(self) -> Aggregator:
        """Return class-wise averaging of the output layer."""
        return CwFedAvg()
