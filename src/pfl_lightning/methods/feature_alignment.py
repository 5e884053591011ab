"""Feature alignment: the loss draws features to class prototypes."""

from typing import Any, Literal

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.nn import functional as F

from pfl_lightning.client import ClientModule, ClientSettings
from pfl_lightning.client.at_once import at_once
from pfl_lightning.data import ClientData
from pfl_lightning.messages import Message
from pfl_lightning.methods.class_vectors import ClassVectors, class_means
from pfl_lightning.nets import feature_size
from pfl_lightning.server import Aggregator, AggregatorList, ClassMeans, WeightedAverage
from pfl_lightning.settings import Unpack


class AlignmentSettings(ClientSettings, total=False):
    """Settings of `FeatureAlignment`, for the ``**kwargs`` of subclasses."""

    align_lambda: float
    align: Literal["mse", "l2"]


class FeatureAlignment(ClientModule):
    r"""Draws features h to the global prototype of the sample's class.

    Minimises :math:`\mathrm{CE} + \lambda\,\mathrm{mean}_{i,j}\,(h_{ij} - g_{y_i j})^2`, where :math:`g_c` is the
    server's mean of the clients' prototypes of class c. A sample whose class has no prototype adds nothing to the term.
    After training, the client sends its own prototypes: class means of its training samples' features, in evaluation
    mode.

    It is the "+F" of FedReMa (https://arxiv.org/abs/2411.01825), for any server that sends a model, such as
    ``AggregatorList([CwFedAvg(), ClassMeans(weighted=False)])``.

    Args:
        align_lambda: weight of the alignment, at least 0; 0 is `FedAvg` bit for bit.
        align: ``mse`` as above, the mean over samples and units, as in the official code; ``l2`` takes the mean over
            samples of the norm :math:`\lVert h_i - g_{y_i} \rVert_2`, as FedReMa's text reads.
        **kwargs: the arguments of `FedAvg`.

    Raises:
        MisconfigurationException: if ``align_lambda`` is negative, or the net's features have no known width.
    """

    requires = frozenset({"classes", "vector features"})

    sends = ClientModule.sends | {"prototypes"}
    needs = ClientModule.needs | {"prototypes"}

    def __init__(
        self,
        *args: Any,
        align_lambda: float = 1.0,
        align: Literal["mse", "l2"] = "mse",
        **kwargs: Unpack[ClientSettings],
    ) -> None:
        super().__init__(*args, **kwargs)
        if not align_lambda >= 0:
            raise MisconfigurationException(
                f"model.align_lambda={align_lambda} must be 0 (which aligns nothing) or more, such as 1."
            )
        self.align_lambda = align_lambda
        self.align = align
        self.prototypes = ClassVectors(self.num_classes, feature_size(self.net))

    @at_once
    def on_download(self, payload: Message, data: ClientData | None) -> None:
        """Load the model and the global prototypes."""
        super().on_download(payload, data)
        self.prototypes.take(payload["prototypes"])

    def loss(self, features: Tensor, logits: Tensor, target: Tensor) -> Tensor:
        """Return the task's loss plus the alignment."""
        loss = super().loss(features, logits, target)
        if self.align_lambda == 0:
            return loss
        # without a prototype the aim is the feature itself, at distance 0
        aim = self.prototypes(target, default=features.detach())
        if self.align == "mse":
            return loss + self.align_lambda * F.mse_loss(features, aim)
        # PyTorch's norm has the gradient 0 at 0, and not NaN
        distances: Tensor = torch.linalg.vector_norm(features - aim, dim=1)
        return loss + self.align_lambda * distances.mean()

    @at_once
    def upload(self, data: ClientData) -> Message:
        """Return the model, and the client's own prototypes."""
        return super().upload(data) | {"prototypes": class_means(self.net.features, data, self.num_classes)}

    def configure_aggregator(self) -> Aggregator:
        """Return an average of models by samples, and an unweighted one of prototypes."""
        return AggregatorList([WeightedAverage(), ClassMeans(weighted=False)])
