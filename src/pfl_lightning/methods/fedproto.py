"""FedProto: clients share prototypes of classes, and no weights."""

from typing import Any, Literal

import torch
from torch import Tensor

from pfl_lightning.aggregators import Aggregator, ClassMeans
from pfl_lightning.data import ClientData
from pfl_lightning.messages import Message
from pfl_lightning.methods.feature_alignment import FeatureAlignment
from pfl_lightning.methods.local import Local


class FedProto(FeatureAlignment, Local):
    r"""Every client keeps its model; features are drawn to global prototypes, and classified by the nearest one.

    Minimises :math:`\mathrm{CE} + \lambda\,\mathrm{mean}_{i,j}\,(h_{ij} - g_{y_i j})^2` as `FeatureAlignment` does. The
    server's :math:`g_c` weights clients by their samples of the class, as the paper; the official code and PFLlib
    don't: ``ClassMeans(weighted=False)``. That can matter much: 93 % against 71 to 76 % where many clients hold few
    samples of a class (docs/results.md, "Defaults"). Clients send the class means of their trained model in evaluation
    mode; the official code collects them while it trains. ``align_lambda=0`` trains as `Local` does, bit for bit.
    Source: Tan et al., 2022 (https://arxiv.org/abs/2105.00243).

    Args:
        predict: ``proto`` gives :math:`-\lVert h - g_c \rVert^2` as logits, minus infinity for a class without a
            prototype, so that the loss of its samples is infinite; the classifier's logits while there is no prototype
            at all. ``head`` always gives the classifier's.
        **kwargs: the arguments of `FeatureAlignment`.
    """

    sends = needs = frozenset({"prototypes"})
    offers = frozenset({"class_counts"})

    def __init__(self, predict: Literal["proto", "head"] = "proto", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.predict = predict

    def forward(self, x: Tensor) -> Tensor:
        """Logits by prototypes or by the classifier."""
        features: Tensor = self.net.features(x)
        logits: Tensor = self.net.classifier(features)
        if self.predict == "head":
            return logits
        known, vectors = self.prototypes.known, self.prototypes.vectors
        wide = torch.promote_types(vectors.dtype, torch.float32)
        # a matrix product would be faster, and loses small distances between long vectors
        distances = torch.cdist(features.to(wide), vectors.to(wide), compute_mode="donot_use_mm_for_euclid_dist")
        return torch.where(known.any(), torch.where(known, -distances.square(), -torch.inf), logits)

    def upload(self, data: ClientData) -> Message:
        """The client's prototypes, and its class counts where they are asked for."""
        return super().upload(data) | ({"class_counts": data.class_counts} if "class_counts" in self.requested else {})

    def configure_aggregator(self) -> Aggregator:
        """Averages prototypes by samples."""
        return ClassMeans()
