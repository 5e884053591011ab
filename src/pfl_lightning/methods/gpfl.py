r"""GPFL: global and personal features, separated by a conditional layer and class vectors.

Source: Zhang et al., 2023 (https://arxiv.org/abs/2308.10279). Symbols: h are features of d units, :math:`G_c` the
trained vector of class c, :math:`\hat G_c` the received one, :math:`\pi_c` the client's share of class c.
"""

from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn import functional as F

from pfl_lightning.client import Batch, ClientSettings, in_classifier
from pfl_lightning.client.at_once import at_once
from pfl_lightning.data import ClientData
from pfl_lightning.messages import Message
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.nets import feature_size
from pfl_lightning.settings import Unpack


class ConditionalLayer(nn.Module):
    r"""Scales and shifts features by a condition u: :math:`\mathrm{ReLU}(h \odot (\gamma(u) + 1) + \beta(u))`.

    Both :math:`\gamma` and :math:`\beta` are a linear layer, a ReLU and a LayerNorm.

    Args:
        size: width d of features and conditions.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.gamma = nn.Sequential(nn.Linear(size, size), nn.ReLU(), nn.LayerNorm(size))
        self.beta = nn.Sequential(nn.Linear(size, size), nn.ReLU(), nn.LayerNorm(size))

    def forward(self, h: Tensor, u: Tensor) -> Tensor:
        """Return conditioned features ``[n, d]``.

        Args:
            h: features ``[n, d]``.
            u: condition ``[d]``.
        """
        return F.relu(h * (self.gamma(u) + 1) + self.beta(u))


class GPFL(FedAvg):
    r"""Trains personal features for the client's own classifier, and global features towards the class vectors.

    .. math::

        L = \mathrm{CE}(\phi(f_P)) + \mathrm{CE}(\cos(f_G, G)) + \lambda \lVert F_G - \hat G_y \rVert
        + \frac\mu2 \lVert \Theta \rVert^2, \qquad
        f_P = \mathrm{CoV}(h; \sum_c \pi_c \hat G_c), \quad f_G = \mathrm{CoV}(h; \mathrm{mean}_c \hat G_c)

    CoV is the conditional layer, :math:`\Theta` its parameters and the class vectors. The norm is of the whole batch's
    matrix, so that its gradient isn't smaller for larger batches. Feature extractor, CoV and class vectors are
    averaged, and the classifier stays. Predictions are :math:`\phi(f_P)`.

    In the official code conditions are of the client's own vectors before it receives new ones, and are 0 in its first
    round; here they are of the received vectors; conditions of own vectors, and a norm averaged over samples, are left
    out. The official code's :math:`\mu` is a weight decay, and it shuffles no samples. Which vectors the paper's tables
    took for the conditions could not be verified.
    Source: Zhang et al., 2023 (https://arxiv.org/abs/2308.10279), whose official code has the defaults for a CNN. Its
    poster gives the learning rates: 0.005 for the CNN and the MLP, 0.1 for ResNet-18 and fastText, 0.01 for HAR.

    Args:
        magnitude: :math:`\lambda`, at least 0.
        decay: :math:`\mu`, at least 0.
        **kwargs: the arguments of `FedAvg`.

    Raises:
        MisconfigurationException: if an argument is negative, or the net's features have no known width.
    """

    logs = FedAvg.logs | {"guide"}
    client_level = True

    requires = frozenset({"classes", "vector features"})
    received: Tensor
    shares: Tensor

    def __init__(
        self, *args: Any, magnitude: float = 0.01, decay: float = 0.1, **kwargs: Unpack[ClientSettings]
    ) -> None:
        super().__init__(*args, **kwargs)
        for name, value in (("magnitude", magnitude), ("decay", decay)):
            if not value >= 0:
                raise MisconfigurationException(f"model.{name}={value} must be 0 or more, such as 0.01.")
        self.magnitude, self.decay = magnitude, decay
        size = feature_size(self.net)
        self.conditional = ConditionalLayer(size)
        self.vectors = nn.Parameter(torch.randn(self.num_classes, size))  # G
        self.register_buffer("received", self.vectors.detach().clone(), persistent=False)
        # an entry of the state, for predictions without data
        self.register_buffer("shares", torch.zeros(self.num_classes))

    def is_shared(self, name: str) -> bool:
        """Share the feature extractor, the conditional layer and the class vectors."""
        return (super().is_shared(name) and not in_classifier(name)) or name.startswith(("conditional.", "vectors"))

    @at_once
    def on_download(self, payload: Message, data: ClientData | None) -> None:
        """Load the model, copy the received class vectors, and compute the shares of the client's classes."""
        super().on_download(payload, data)
        self.received.copy_(self.vectors)
        if data is not None:
            counts = data.class_counts.to(self.shares)
            self.shares.copy_(counts / counts.sum().clamp_min(1))

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Return the sum of the four terms."""
        x, target = batch
        h = self.net.features(x)
        personal, common = self.personal_features(h), self.conditional(h, self.received.mean(0))
        loss = self.loss(personal, self.net.classifier(personal), target)
        cosines = F.normalize(common, dim=1) @ F.normalize(self.vectors, dim=1).T
        guide = F.cross_entropy(cosines, target)
        # PyTorch's norm has the gradient 0 at 0, and not NaN
        distance = torch.linalg.vector_norm(common - self.received[target])
        squares = [p.square().sum() for p in (self.vectors, *self.conditional.parameters())]
        decay = 0.5 * self.decay * torch.stack(squares).sum()
        # the decay acts by its gradient alone: in the official code it is a weight decay and no part of the recorded
        # loss
        return {"loss": loss + guide + self.magnitude * distance + decay - decay.detach(), "guide": guide}

    def personal_features(self, h: Tensor) -> Tensor:
        """Return features conditioned on the client's own classes.

        Args:
            h: features ``[n, d]``.
        """
        features: Tensor = self.conditional(h, self.shares @ self.received)
        return features

    def forward(self, x: Tensor) -> Tensor:
        """Return outputs of the personal features."""
        logits: Tensor = self.net.classifier(self.personal_features(self.net.features(x)))
        return logits
