r"""FedCP: a policy divides each sample's features between a personal classifier and the global one.

Source: Zhang et al., 2023 (https://arxiv.org/abs/2307.01217). Symbols: h are features of d units, :math:`\theta_g` and
:math:`\phi_g` the received feature extractor and classifier, fixed in a round, :math:`\phi` the client's own
classifier.
"""

from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from pfl_lightning.client import CLASSIFIER, Batch, ClientSettings, in_classifier
from pfl_lightning.client.at_once import at_once
from pfl_lightning.client.common import common_parameters
from pfl_lightning.data import ClientData
from pfl_lightning.messages import Message
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.methods.frozen import Frozen, FrozenModule, tensors_of
from pfl_lightning.nets import feature_size
from pfl_lightning.settings import Unpack

WIDTHS = (10, 15, 20, 50)
"""Squared widths of the kernels of the feature discrepancy."""


def discrepancy(one: Tensor, other: Tensor) -> Tensor:
    r"""Return the squared maximum mean discrepancy of two sets of features, biased, with a sum of Gaussian kernels.

    .. math:: \mathrm{mean}_{ij}\,(K(x_i, x_j) + K(y_i, y_j) - 2 K(x_i, y_j)), \qquad
        K(a, b) = \sum_w e^{-\lVert a - b \rVert^2 / (2 w)}

    >>> discrepancy(torch.eye(2), torch.eye(2)), discrepancy(torch.zeros(1, 2), torch.full((1, 2), 99.0))
    (tensor(0.), tensor(8.))

    Args:
        one: ``[n, d]``.
        other: ``[n, d]``.
    """

    def kernels(a: Tensor, b: Tensor) -> Tensor:
        squares = a.square().sum(1)[:, None] + b.square().sum(1) - 2 * a @ b.T
        return torch.stack([torch.exp(-squares / (2 * width)) for width in WIDTHS]).sum(0)

    return (kernels(one, one) + kernels(other, other) - 2 * kernels(one, other)).mean()


class FedCP(FedAvg):
    r"""Classifies a share of each feature by the personal classifier, and the rest by the received one.

    .. math::

        \phi(r \odot h) + \phi_g(s \odot h), \qquad
        (r, s) = \mathrm{softmax}(\mathrm{CPN}(h \odot v)), \qquad
        L = \mathrm{CE} + \lambda\,\mathrm{MMD}^2(h, \theta_g(x))

    CPN is a linear layer to 2d units, LayerNorm and ReLU; in training its softmax has Gumbel noise of temperature 1. v
    is the sum of the rows of :math:`\phi` at the start of the round (of the product of its layers), normalised to
    length 1. Feature extractor and CPN are averaged, and so are the classifiers' :math:`(\phi + \phi_g)/2`, which
    become the next :math:`\phi_g`, while :math:`\phi` stays. The discrepancy has little effect where features are wide
    and far apart.

    The official code draws noise for predictions too, so that two tests differ, and sends classifier and CPN only to
    the clients of the round; here predictions are without noise and every client receives everything.
    Source: Zhang et al., 2023 (https://arxiv.org/abs/2307.01217).

    Args:
        mmd: :math:`\lambda`, at least 0. The default was chosen on two data sets (docs/results.md, "Defaults"). The
            official code has 5, in its only script, for MNIST and one CNN, which costs 4 points on the digits and 19 on
            3,000 images of MNIST; values for other data could not be verified.
        **kwargs: the arguments of `FedAvg`.

    Raises:
        MisconfigurationException: if ``mmd`` is negative, or the net's features have no known width.
    """

    logs = FedAvg.logs | {"discrepancy"}
    client_level = True

    requires = frozenset({"vector features"})
    context: Tensor

    def __init__(self, *args: Any, mmd: float = 0.1, **kwargs: Unpack[ClientSettings]) -> None:
        super().__init__(*args, **kwargs)
        if not mmd >= 0:
            raise MisconfigurationException(f"model.mmd={mmd} must be 0 (no discrepancy) or more, such as 0.1.")
        self.mmd = mmd
        size = feature_size(self.net)
        self.policy = nn.Sequential(nn.Linear(size, 2 * size), nn.LayerNorm(2 * size), nn.ReLU())
        self.body = FrozenModule(self.net.features, common=common_parameters(self).values())  # theta_g
        self.head = Frozen(tensors_of(self.net.classifier))  # phi_g
        self.register_buffer("context", torch.zeros(size), persistent=False)  # v

    def is_shared(self, name: str) -> bool:
        """Share the net and the policy."""
        return super().is_shared(name) or name.startswith("policy.")

    def is_personal(self, name: str) -> bool:
        """Keep the classifier, which also travels."""
        return super().is_personal(name) or (in_classifier(name) and name not in self.common_names)

    @at_once
    def on_download(self, payload: Message, data: ClientData | None) -> None:
        """Load everything but the classifier; keep the received classifier beside the client's own."""
        weights = payload["weights"]
        self.assign({name: entry for name, entry in weights.items() if not in_classifier(name)})
        received = {name.removeprefix(CLASSIFIER): entry for name, entry in weights.items() if in_classifier(name)}
        # entries that don't travel, such as frozen ones, are the net's own
        self.head.take((dict(tensors_of(self.net.classifier)) | received).items())
        self.body.take_from(self.net.features)
        rows: Tensor | None = None
        # v: the row sum of the product of all linear layers of the classifier, from the output down
        for layer in reversed([part for part in self.net.classifier.modules() if isinstance(part, nn.Linear)]):
            rows = layer.weight.sum(0) if rows is None else rows @ layer.weight
        if rows is not None:
            self.context.copy_(F.normalize(rows, dim=0))

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Return the loss of both classifiers together, plus the discrepancy."""
        x, target = batch
        h = self.net.features(x)
        apart = discrepancy(h, self.body(x))
        return {"loss": self.loss(h, self.classify(h), target) + self.mmd * apart, "discrepancy": apart}

    def classify(self, h: Tensor) -> Tensor:
        """Return outputs ``[n, C]``.

        Args:
            h: features ``[n, d]``.
        """
        scores = self.policy(h * self.context).unflatten(-1, (2, -1))
        # r and s sum to 1 for each unit of the features
        r, s = (F.gumbel_softmax(scores, dim=-2) if self.training else scores.softmax(-2)).unbind(-2)
        outputs: Tensor = self.net.classifier(r * h) + functional_call(
            self.net.classifier, self.head.tensors(), (s * h,)
        )
        return outputs

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs of both classifiers together, without noise."""
        return self.classify(self.net.features(x))

    @at_once
    def upload(self, data: ClientData) -> Message:
        """Return feature extractor, policy, and the mean of both classifiers."""
        update = super().upload(data)
        for name, received in self.head.tensors().items():
            if (entry := update["weights"].get(f"{CLASSIFIER}{name}")) is not None and entry.is_floating_point():
                # (phi + phi_g) / 2 travels, and phi stays
                update["weights"][f"{CLASSIFIER}{name}"] = torch.lerp(entry, received, 0.5)
        return update
