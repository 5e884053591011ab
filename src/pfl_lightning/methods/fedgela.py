r"""FedGELA: a fixed simplex as the global classifier, scaled at each client by its shares of classes.

Source: Fan et al., 2023 (https://arxiv.org/abs/2405.18972). Symbols: h are a sample's features, C the number of
classes, M the fixed simplex of `fedetf.simplex`, n_kc client k's number of training samples of class c, and n_k their
sum.
"""

from typing import Any, Literal

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from pfl_lightning.client import ClientSettings
from pfl_lightning.client.at_once import at_once
from pfl_lightning.data import ClientData
from pfl_lightning.messages import Message
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.methods.fedetf import check_simplex, simplex
from pfl_lightning.nets import feature_size
from pfl_lightning.settings import Unpack, check_choices


class NormalizedSimplex(nn.Module):
    r"""Logits by the fixed class vectors, :math:`\mathrm{BN}(h)^T M / T`.

    Args:
        size: width d of the features.
        num_classes: C.
        temperature: T.
        batch_norm: whether features pass a BatchNorm layer.
    """

    def __init__(self, size: int, num_classes: int, temperature: float, batch_norm: bool) -> None:
        super().__init__()
        self.temperature = temperature
        self.norm = nn.BatchNorm1d(size) if batch_norm else nn.Identity()
        # a frozen parameter: one copy for all clients, which never travels
        self.simplex = nn.Parameter(simplex(size, num_classes), requires_grad=False)

    def forward(self, features: Tensor) -> Tensor:
        """Return logits ``[n, C]``.

        Args:
            features: ``[n, d]``.
        """
        logits: Tensor = self.norm(features) @ self.simplex / self.temperature
        return logits


class FedGELA(FedAvg):
    r"""Trains features under a fixed simplex, whose class vectors are scaled by the client's shares of classes.

    .. math:: L = \mathrm{CE}\bigl(\Phi_k \odot \mathrm{BN}(h)^T M / T,\, y\bigr), \qquad \Phi_{kc} = C n_{kc} / n_k

    The simplex replaces the net's classifier; with ``head: all_fc`` that is all fully connected layers. M is the same
    for all and doesn't travel, and the rest is averaged. The global model, ``test/global_acc``, and a client that has
    not taken part yet predict by M alone, other clients by their :math:`\Phi_k`, which is 1 with equal numbers of all
    classes. A class that the client lacks has the logit 0, and is predicted where all others are negative;
    ``absent="out"`` rules that out.

    The released code counts clients by batches, and has two more linear layers below the norm, which belong to the net
    here; it clips the gradient's norm at 20, which is ``trainer.gradient_clip_val``. Its README takes a temperature of
    1e-5, its code 0.2 by default.
    Source: Fan et al., 2023 (https://arxiv.org/abs/2405.18972); MediaBrain-SJTU/FedGELA@b5b20d5.

    Args:
        temperature: T, above 0.
        batch_norm: whether features pass a BatchNorm layer, as in the released code.
        absent: prediction of a class without training samples at the client: its logit is ``zero``, or it is ``out``,
            with minus infinity, so that a test sample of such a class has an infinite loss.
        **kwargs: the arguments of `FedAvg`.

    Raises:
        MisconfigurationException: if an argument is out of its range, or the net's features have no known width or
            fewer units than there are classes.
    """

    client_level = True

    requires = frozenset({"classes", "vector features"})

    shares: Tensor

    def __init__(
        self,
        *args: Any,
        temperature: float = 0.2,
        batch_norm: bool = True,
        absent: Literal["zero", "out"] = "zero",
        **kwargs: Unpack[ClientSettings],
    ) -> None:
        super().__init__(*args, **kwargs)
        if not temperature > 0:
            raise MisconfigurationException(f"model.temperature={temperature} must be above 0, such as 0.2.")
        check_choices("model", absent=(absent, ("zero", "out")))
        size = feature_size(self.net)
        # before the simplex is made, whose error would name no setting
        check_simplex(size, self.num_classes, f"model.net={type(self.net).__name__}")
        self.absent = absent
        self.net.classifier = NormalizedSimplex(size, self.num_classes, temperature, batch_norm)
        # the setting `buffers` is about the new layer's statistics too
        self._buffer_names |= {name for name, _ in self.named_buffers() if name.startswith("net.")}
        # kept with the client, whose predictions outside a federation need it
        self.register_buffer("shares", torch.ones(self.num_classes))  # Phi_k

    @at_once
    def on_download(self, payload: Message, data: ClientData | None) -> None:
        r"""Load the model, and compute :math:`\Phi_k` from the client's class counts."""
        super().on_download(payload, data)
        if data is not None and self.training_follows:
            counts = data.class_counts.to(self.shares)
            self.shares.copy_(self.num_classes * counts / counts.sum().clamp_min(1))

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits, scaled by the client's shares of classes."""
        logits = self.net(x) * self.shares
        return logits if self.absent == "zero" else torch.where(self.shares > 0, logits, -torch.inf)

    def loss(self, features: Tensor, logits: Tensor, target: Tensor) -> Tensor:
        """Return the cross-entropy of the scaled logits."""
        return super().loss(features, logits * self.shares, target)
