"""Segmentation: one class per pixel."""

from dataclasses import dataclass

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import Metric, MetricCollection

from pfl_lightning.tasks.base import Reduction, Task, check_range, check_shape, described, log_mean
from pfl_lightning.tasks.class_metrics import Confusion


@dataclass(frozen=True)
class Segmentation(Task):
    """One of several classes per pixel: cross-entropy, with ``miou``, which selects, and ``pixel_acc``.

    Targets are class numbers ``[n, H, W]``, int64; outputs are logits ``[n, num_classes, H, W]``.

    Args:
        num_classes: number of classes K.
        ignore_index: target of pixels that don't count.
    """

    num_classes: int
    ignore_index: int = -100

    monitor = "miou"
    mode = "max"

    @property
    def outputs(self) -> int:
        """Number of logits per pixel."""
        return self.num_classes

    def loss(self, outputs: Tensor, target: Tensor, reduction: Reduction = "mean") -> Tensor:
        """Return the cross-entropy of the counted pixels; see `Task.loss`."""
        return F.cross_entropy(outputs, target, ignore_index=self.ignore_index, reduction=reduction)

    def weight(self, target: Tensor) -> Tensor:
        """Return the number of counted pixels."""
        return (target != self.ignore_index).sum()

    def combined(self, outputs: Tensor, shares: Tensor) -> Tensor:
        """Return the logarithms of the mean probabilities; see `Task.combined`."""
        return log_mean(outputs.log_softmax(2), shares)

    def configure_metrics(self) -> MetricCollection:
        """Return ``miou``, the mean intersection over union of the occurring classes, and ``pixel_acc``."""
        settings = self.num_classes, self.ignore_index
        return MetricCollection({"miou": MeanIoU(*settings), "pixel_acc": PixelAccuracy(*settings)})

    def pooled(self) -> dict[str, Metric]:
        """Return ``miou`` of all clients' pixels."""
        return {"miou": MeanIoU(self.num_classes, self.ignore_index)}

    def check(self, target: Tensor, owner: str) -> None:
        """Refuse all targets but one class number in range per pixel."""
        if not isinstance(target, Tensor) or target.dim() != 3 or target.dtype != torch.int64:
            raise MisconfigurationException(
                f"{owner} has {described(target)}; task {self} takes int64 class numbers of shape [samples, height, "
                "width]"
            )
        check_range(target, self.num_classes, self.ignore_index, owner, self)

    def check_outputs(self, outputs: Tensor, target: Tensor, net: str) -> None:
        """Refuse all outputs but one logit per pixel and class."""
        check_shape(outputs, [len(target), self.num_classes, *target.shape[1:]], net, self)

    def predictions(self, outputs: Tensor) -> dict[str, Tensor]:
        """Return ``classes`` of pixels ``[n, H, W]``, and ``probabilities`` ``[n, num_classes, H, W]``."""
        return {"classes": outputs.argmax(1), "probabilities": outputs.softmax(1)}


class MeanIoU(Confusion):
    """Mean of intersection over union, over the classes that occur or are predicted; NaN without any pixel."""

    def compute(self) -> Tensor:
        """Return the mean."""
        both = self.counts.diagonal(dim1=-2, dim2=-1)
        union = self.counts.sum(-2) + self.counts.sum(-1) - both
        # a class that neither occurs nor is predicted has 0 / 0: a client with few classes isn't punished for the rest
        return (both / union).nanmean(-1)


class PixelAccuracy(Confusion):
    """Share of pixels with the correct class; NaN without any."""

    def compute(self) -> Tensor:
        """Return the share."""
        return self.counts.diagonal(dim1=-2, dim2=-1).sum(-1) / self.counts.sum((-2, -1))
