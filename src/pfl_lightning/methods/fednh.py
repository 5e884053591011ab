"""FedNH: a fixed classifier of class prototypes, uniformly spread at first, which slowly take on class semantics.

Source: Dai et al., 2023 (https://arxiv.org/abs/2212.02758). Symbols: V_c is the prototype of class c, a unit vector; h
the features of a sample, s the scale of the logits, rho the smoothing of the prototypes.
"""

from functools import reduce
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn import functional as F

from pfl_lightning.client import ClientModule, ClientSettings
from pfl_lightning.client.at_once import at_once
from pfl_lightning.data import ClientData
from pfl_lightning.messages import Message, Updates
from pfl_lightning.methods.class_vectors import class_means
from pfl_lightning.nets import feature_size
from pfl_lightning.server import Aggregator, WeightedAverage
from pfl_lightning.settings import Unpack

__all__ = ["CosineClassifier", "FedNH", "NormalizedHead"]

PROTOTYPES = "net.classifier.prototypes"
"""The entry of V in a client's ``state_dict``."""


class CosineClassifier(nn.Module):
    r"""Logits by the angle to prototypes: :math:`z_c = s \langle h / \lVert h \rVert, V_c \rangle`.

    The prototypes are a buffer: no gradient moves them. At first they are orthonormal, or random unit vectors if there
    are more classes than units. An all-zero feature has all-zero logits.

    Args:
        size: width d of the features.
        num_classes: number of classes K.
        scale: s.
        learn_scale: whether s is trained.
    """

    prototypes: Tensor

    def __init__(self, size: int, num_classes: int, scale: float, learn_scale: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(float(scale)), requires_grad=learn_scale)
        # orthogonal_ gives orthonormal rows if they fit, else rows to be normalised
        self.register_buffer("prototypes", F.normalize(nn.init.orthogonal_(torch.empty(num_classes, size))))

    def forward(self, features: Tensor) -> Tensor:
        """Return logits ``[n, K]``.

        Args:
            features: ``[n, d]``.
        """
        return self.scale * F.linear(F.normalize(features), self.prototypes)


class NormalizedHead(ClientModule):
    r"""Trains features and scale under a `CosineClassifier`, which replaces the net's classifier.

    With ``head: all_fc`` these are all fully connected layers. After training, the client sends its class counts and,
    for each of its classes, the direction of its features,

    .. math:: \mu_c = \frac{\bar h_c}{\lVert \bar h_c \rVert}, \qquad
        \bar h_c = \frac{1}{n_c} \sum_{i: y_i = c} \frac{h_i}{\lVert h_i \rVert},

    over its training samples in evaluation mode. The server side is `FedNH`; under another one, such as
    `WeightedAverage`, the prototypes never move. The official code clips the norm of gradients at 10, which is
    ``trainer.gradient_clip_val`` here.

    Args:
        scale: s at the start, above 0. The official code takes 1 for its small network and 20 for ResNet.
        learn_scale: whether s is trained and averaged; the official code fixes it at 30 otherwise.
        **kwargs: the arguments of `FedAvg`.

    Raises:
        MisconfigurationException: if ``scale`` isn't positive, or the net's features have no known width.
    """

    requires = frozenset({"classes", "vector features"})

    offers = ClientModule.offers | {"directions"}

    def __init__(
        self, *args: Any, scale: float = 1.0, learn_scale: bool = True, **kwargs: Unpack[ClientSettings]
    ) -> None:
        super().__init__(*args, **kwargs)
        if not scale > 0:
            raise MisconfigurationException(f"model.scale={scale} must be above 0, such as 1 or 20.")
        self.net.classifier = CosineClassifier(feature_size(self.net), self.num_classes, scale, learn_scale)

    @at_once
    def upload(self, data: ClientData) -> Message:
        """Return the model, and on request the direction of each class, by class number."""
        update = super().upload(data)
        if "directions" not in self.requested:
            return update
        # the server has the prototypes, and moves them itself; no need to send them
        del update["weights"][PROTOTYPES]
        means = class_means(lambda x: F.normalize(self.net.features(x)), data, self.num_classes)
        return update | {"directions": {c: F.normalize(mean, dim=0) for c, mean in means.items()}}

    def configure_aggregator(self) -> Aggregator:
        """Return FedNH's server."""
        return FedNH()


class FedNH(WeightedAverage):
    r"""Averages models with equal weights, and moves each prototype towards the mean direction of the class.

    .. math:: V_c \leftarrow \mathrm{normalise}\bigl(\rho V_c + (1 - \rho)\,
        \mathrm{normalise}(\sum_{i \in S} n_{ic}\, \mu_{ic})\bigr)

    over the clients S of the round. A class without samples in the round keeps its prototype. On scikit-learn's digits
    it has 86 % after 15 rounds and 93 % after 50, `FedAvg` 73 % and 88 %. On MNIST with 50 samples a client, 69 % after
    50 rounds where `FedAvg` has 82 %: with ``scale=1`` logits start within 1 of 0, and few steps learn little; with 20
    it has 81 % (docs/results.md, "Defaults").
    Source: Dai et al., 2023 (https://arxiv.org/abs/2212.02758).

    Args:
        rho: share of the old prototype in the new one, in [0, 1]; with 1 prototypes never move.

    Raises:
        MisconfigurationException: if ``rho`` is out of its range.
    """

    requires = frozenset({"classes"})

    needs = frozenset({"weights", "directions", "class_counts"})

    def __init__(self, rho: float = 0.9) -> None:
        super().__init__(weighting="uniform")
        if not 0 <= rho <= 1:
            raise MisconfigurationException(f"aggregator.rho={rho} must be from 0 to 1, such as 0.9.")
        self.rho = rho

    def aggregate(self, updates: Updates, round: int) -> dict[str, float]:
        """Average models and move prototypes; log the mean cosine of class directions with old prototypes."""
        if not updates:
            return {}
        old = self.state["weights"][PROTOTYPES]
        super().aggregate(updates, round)
        sums = torch.zeros_like(old, dtype=torch.float64)
        for update in updates.values():
            for c, direction in update["directions"].items():
                # n_ic mu_ic
                sums[c] += update["class_counts"][c] * direction.double()
        mu = F.normalize(sums)
        new = F.normalize(self.rho * old + (1 - self.rho) * mu)
        # a class without samples has mu = 0 and keeps its prototype as it is: normalising again would move last bits
        moves = mu.any(1) & new.any(1) & (self.rho < 1)
        # by the uploads too: with precision=64-true the initial prototypes are float32
        sent = (direction.dtype for update in updates.values() for direction in update["directions"].values())
        wide = reduce(torch.promote_types, sent, old.dtype)
        self.state["weights"][PROTOTYPES] = torch.where(moves[:, None], new.to(wide), old.to(wide))
        return {"cosine": float((mu * old).sum(1)[mu.any(1)].mean())} if mu.any() else {}
