r"""FedGen: the server's generator of features, trained against all clients' classifiers, teaches the clients.

Source: Zhu, Hong and Zhou, 2021 (https://arxiv.org/abs/2105.10056). Symbols: :math:`G(y, \epsilon)` is a feature for
class y and noise :math:`\epsilon`, :math:`\phi` the classifier, h the features of the client's own samples.
"""

from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.nn import functional as F

from pfl_lightning.aggregators import Aggregator
from pfl_lightning.choices import check_least
from pfl_lightning.client import Batch
from pfl_lightning.data import ClientData
from pfl_lightning.messages import Message
from pfl_lightning.methods.feature_generator import FeatureGenerator, Generating
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.methods.losses import divergence


class FedGen(Generating, FedAvg):
    r"""Trains on the client's own samples, and on generated features from the server.

    .. math::

        L = \mathrm{CE}(\phi(h), y) + \beta_t\,\mathrm{KL}\big(\phi(G(y, \epsilon)) \,\Vert\, \phi(h)\big)
        + \alpha_t\,\mathrm{CE}(\phi(G(\tilde y, \epsilon)), \tilde y), \qquad
        \alpha_t = \max(10^{-4}, 0.98^t \alpha)

    and :math:`\beta_t` likewise, in round t from 0. y are the labels of the batch; :math:`\tilde y` are as many labels
    drawn uniformly from the classes that some client has. The divergence has no gradient in its first argument, and G
    is fixed, in evaluation mode. Both terms begin in the second round, when G has been trained.

    With the defaults, gradients are up to 21 times as large as those of cross-entropy. A learning rate for FedAvg may
    be far too large, so that accuracy falls to chance in the second round; the official one is 0.01.

    The official code leaves out both terms after 20 local epochs, which are one batch each there. PFLlib and HtFLlib
    have :math:`\beta = 0`, no decay, and the last term from the first round on.
    Source: Zhu et al., 2021 (https://arxiv.org/abs/2105.10056), whose official code has the defaults (for EMNIST
    ``beta=1``); the paper's own weights could not be verified.

    Args:
        alpha: weight of the generated samples, at least 0.
        beta: weight of the divergence, at least 0; if both are 0, models are those of `FedAvg` bit for bit.
        decay: factor on both weights from round to round, above 0 and up to 1.
        **kwargs: the arguments of `Generating` and of `FedAvg`.

    Raises:
        MisconfigurationException: if an argument is out of its range, or the net's features have no known width.
    """

    logs = FedAvg.logs | {"generated"}
    requires = frozenset({"classes", "vector features"})
    needs = frozenset({"weights", "generator", "labels"})
    labels: Tensor

    def __init__(self, alpha: float = 10.0, beta: float = 10.0, decay: float = 0.98, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        check_least("model", alpha=(alpha, 0), beta=(beta, 0))
        if not 0 < decay <= 1:
            raise MisconfigurationException(f"model.decay={decay} must be above 0 and up to 1, such as 0.98.")
        self.alpha, self.beta, self.decay = alpha, beta, decay
        self.register_buffer("labels", torch.zeros(0, dtype=torch.int64), persistent=False)

    def on_download(self, payload: Message, data: ClientData | None) -> None:
        """Load the model, the generator, and the classes of the federation so far."""
        super().on_download(payload, data)
        self.generator.take(payload["generator"].items())
        # a new tensor, since the number of classes grows from round to round
        self.labels = payload["labels"].to(self.device)

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Return cross-entropy, plus the generator's two terms from the second round on."""
        if self.alpha == self.beta == 0:
            return super().training_step(batch, batch_idx)
        x, y = batch
        features = self.net.features(x)
        logits = self.net.classifier(features)
        loss = self.loss(features, logits, y)
        # drawn in the first round too: an engine that can't draw random numbers in a step then refuses at once
        noise = torch.rand(2, len(y), self.noise_size, dtype=features.dtype, device=y.device)
        if not len(self.labels):
            return {"loss": loss}
        drawn = self.labels[torch.randint(len(self.labels), (len(y),), device=y.device)]
        of_batch, generated = (
            self.net.classifier(self.generator(torch.cat([part, F.one_hot(c, self.num_classes)], 1)))
            for part, c in zip(noise, (y, drawn), strict=True)
        )
        # L's second and third term
        taught, known = divergence(of_batch, logits), F.cross_entropy(generated, drawn)
        return {"loss": loss + self.weight(self.beta) * taught + self.weight(self.alpha) * known, "generated": known}

    def weight(self, first: float) -> float:
        """Return the decayed weight of this round; 0 stays 0.

        Args:
            first: the weight in the first round.
        """
        return max(1e-4, first * self.decay**self.round) if first else 0.0

    def configure_aggregator(self) -> Aggregator:
        """Return a server with a generator of features."""
        return FeatureGenerator()
