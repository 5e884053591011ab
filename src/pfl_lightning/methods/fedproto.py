"""FedProto: clients share class prototypes, and no weights."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from pfl_lightning.client import Forward
from pfl_lightning.client.at_once import at_once
from pfl_lightning.data import ClientData
from pfl_lightning.messages import Message
from pfl_lightning.methods.feature_alignment import AlignmentSettings, FeatureAlignment
from pfl_lightning.methods.functional import exact_squares, quick_squares
from pfl_lightning.methods.local import Local
from pfl_lightning.server import Aggregator, ClassMeans
from pfl_lightning.settings import Unpack


class FedProto(FeatureAlignment, Local):
    r"""Keeps every client's model, draws features to global prototypes, and predicts by the nearest prototype.

    Minimises :math:`\mathrm{CE} + \lambda\,\mathrm{mean}_{i,j}\,(h_{ij} - g_{y_i j})^2` as `FeatureAlignment` does. The
    server's :math:`g_c` weights clients by their samples of the class, as the paper does; the official code and PFLlib
    weight them equally: ``ClassMeans(weighted=False)``. The choice can matter much: 93 % against 71 to 76 % where many
    clients hold few samples of a class (docs/results.md, "Defaults"). Clients send the class means of their trained
    model in evaluation mode; the official code collects them during training. ``align_lambda=0`` trains as `Local`
    does, bit for bit.
    Source: Tan et al., 2022 (https://arxiv.org/abs/2105.00243).

    Args:
        predict: ``proto`` gives the logits :math:`-\lVert h - g_c \rVert^2`, minus infinity for a class without a
            prototype, whose samples then have an infinite loss; without any prototype, the classifier's logits.
            ``head`` always gives the classifier's logits.
        **kwargs: the arguments of `FeatureAlignment`.
    """

    sends = needs = frozenset({"prototypes"})
    offers = frozenset({"class_counts"})

    def __init__(
        self, *args: Any, predict: Literal["proto", "head"] = "proto", **kwargs: Unpack[AlignmentSettings]
    ) -> None:
        super().__init__(*args, **kwargs)
        self.predict = predict

    def forward(self, x: Tensor) -> Tensor:
        """Return logits by prototypes or by the classifier."""
        return self.logits(x, exact_squares)

    def logits(self, x: Tensor, squares: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Return logits by prototypes or by the classifier.

        Args:
            x: inputs ``[n, *input_shape]``.
            squares: squared distances of features and prototypes.
        """
        features: Tensor = self.net.features(x)
        logits: Tensor = self.net.classifier(features)
        if self.predict == "head":
            return logits
        known, vectors = self.prototypes.known, self.prototypes.vectors
        wide = torch.promote_types(vectors.dtype, torch.float32)
        distances = squares(features.to(wide), vectors.to(wide))
        # by `where` and not by `if`, so that many clients can run at once
        return torch.where(known.any(), torch.where(known, -distances, -torch.inf), logits)

    def predicting_module(self) -> nn.Module:
        """Return the logits with distances that other programs compute too."""
        return Forward(self, partial(self.logits, squares=quick_squares))

    @at_once
    def upload(self, data: ClientData) -> Message:
        """Return the client's prototypes, and class counts on request."""
        return super().upload(data) | ({"class_counts": data.class_counts} if "class_counts" in self.requested else {})

    def configure_aggregator(self) -> Aggregator:
        """Return an average of prototypes by samples."""
        return ClassMeans()
