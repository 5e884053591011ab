"""kNN-Per: the global model's predictions, mixed with the labels of a client's nearest training samples."""

from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.nn import functional as F

from pfl_lightning.client import ClientSettings
from pfl_lightning.data import ClientData
from pfl_lightning.data.trees import joined
from pfl_lightning.messages import Message
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.settings import Unpack


class KNNPer(FedAvg):
    r"""Trains as `FedAvg`, and predicts by a mixture with the labels of the nearest training samples.

    .. math::

        p_c = \lambda\,p^{knn}_c + (1 - \lambda)\,\mathrm{softmax}(z)_c, \qquad
        p^{knn}_c \propto \sum_{i \in kNN(h):\, y_i = c} e^{-\lVert h - h_i \rVert^2 / (d s)}

    h are a sample's d features by the received model, and :math:`h_i` those of the client's training samples, computed
    on each download before an evaluation. Outputs are :math:`\log p`. Without data or training samples, predictions are
    the model's.

    The paper chooses :math:`\lambda` for each client on validation samples; here all clients have the same.
    Source: Marfoq et al., 2022 (https://arxiv.org/abs/2111.09360), whose official code's example has 7 neighbours.

    Args:
        share: :math:`\lambda`, in [0, 1]; 0 is `FedAvg` bit for bit.
        neighbours: number of nearest samples that count, at least 1; a client with fewer samples takes all.
        scale: s, above 0; an infinite one counts all neighbours alike.
        **kwargs: the arguments of `FedAvg`.

    Raises:
        MisconfigurationException: if an argument is out of its range.
    """

    client_level = True

    requires = frozenset({"classes", "vector features"})
    caches = frozenset({"known"})

    def __init__(
        self, *args: Any, share: float = 0.5, neighbours: int = 7, scale: float = 1.0, **kwargs: Unpack[ClientSettings]
    ) -> None:
        super().__init__(*args, **kwargs)
        for name, value, allowed, advice in (
            ("share", share, 0 <= share <= 1, "from 0 (which is FedAvg) to 1, such as 0.5"),
            ("neighbours", neighbours, neighbours >= 1, "1 or more, such as 7"),
            ("scale", scale, scale > 0, "above 0, such as 1"),
        ):
            if not allowed:
                raise MisconfigurationException(f"model.{name}={value} must be {advice}.")
        self.share, self.neighbours, self.scale = share, neighbours, scale
        self.known: tuple[Tensor, Tensor] | None = None

    def on_download(self, payload: Message, data: ClientData | None) -> None:
        """Load the model, and before an evaluation compute the features of the client's training samples."""
        super().on_download(payload, data)
        self.known = None
        if self.share > 0 and data is not None and self.evaluation_follows and len(data.train):
            self.known = joined([self.net.features(x) for x, _ in data.train.chunks()]), data.train.y

    def forward(self, x: Tensor) -> Tensor:
        """Return logarithms of the mixed probabilities, or logits without training samples."""
        features = self.net.features(x)
        logits: Tensor = self.net.classifier(features)
        if self.known is None:
            return logits
        near = neighbour_shares(features, *self.known, self.num_classes, self.neighbours, self.scale)
        mixed = self.share * near + (1 - self.share) * logits.softmax(1)
        # log of 0 is -infinity, which would make losses infinite
        return mixed.clamp_min(torch.finfo(mixed.dtype).tiny).log()


def neighbour_shares(h: Tensor, known: Tensor, labels: Tensor, classes: int, count: int, scale: float) -> Tensor:
    """Return the shares ``[n, C]`` of the classes among the nearest neighbours, weighted by distance.

    >>> known, labels = torch.tensor([[0.0], [1.0], [9.0]]), torch.tensor([0, 1, 1])
    >>> neighbour_shares(torch.tensor([[0.0]]), known, labels, classes=2, count=2, scale=1.0)
    tensor([[0.7311, 0.2689]])

    Args:
        h: features ``[n, d]``.
        known: features of training samples ``[m, d]``.
        labels: classes of training samples ``[m]``.
        classes: C.
        count: number of neighbours.
        scale: s.
    """
    # the faster mode by a matrix product loses small distances to rounding
    squares = torch.cdist(h, known, compute_mode="donot_use_mm_for_euclid_dist").square()
    nearest, rows = squares.topk(min(count, len(known)), dim=1, largest=False)
    # softmax subtracts the least distance, before all exponentials could vanish
    weights = (-nearest / (h.shape[1] * scale)).softmax(1)
    return (weights[:, :, None] * F.one_hot(labels[rows], classes)).sum(1)
