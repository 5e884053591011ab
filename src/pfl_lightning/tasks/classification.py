"""Classification: one class per sample."""

from dataclasses import dataclass

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy

from pfl_lightning.tasks.base import Reduction, Task, check_range, check_shape, described


@dataclass(frozen=True)
class Classification(Task):
    """One of several classes per sample: cross-entropy as loss, the share of correct predictions as ``acc``.

    Targets are class numbers ``[n]``, int64; outputs are logits ``[n, num_classes]``.

    Args:
        num_classes: number of classes K.
    """

    num_classes: int

    monitor = "acc"
    mode = "max"
    has_classes = True

    @property
    def outputs(self) -> int:
        """Number of logits per sample."""
        return self.num_classes

    def loss(self, outputs: Tensor, target: Tensor, reduction: Reduction = "mean") -> Tensor:
        """Return the cross-entropy; see `Task.loss`."""
        return F.cross_entropy(outputs, target, reduction=reduction)

    def metrics(self) -> MetricCollection:
        """Return ``acc``, the share of correct predictions."""
        # average="micro": torchmetrics' default is the mean over classes. validate_args=False: its check of targets
        # waits for the GPU in each batch.
        return MetricCollection({"acc": MulticlassAccuracy(self.num_classes, average="micro", validate_args=False)})

    def check(self, target: Tensor, owner: str) -> None:
        """Refuse all targets but one class number in range per sample."""
        if not isinstance(target, Tensor) or target.dim() != 1 or target.dtype != torch.int64:
            raise MisconfigurationException(
                f"{owner} has {described(target)}; task {self} takes one int64 class number a sample"
            )
        check_range(target, self.num_classes, None, owner, self)

    def check_outputs(self, outputs: Tensor, target: Tensor, net: str) -> None:
        """Refuse all outputs but one logit per sample and class."""
        check_shape(outputs, [len(target), self.num_classes], net, self)

    def classes(self, target: Tensor) -> Tensor:
        """Return the targets, which are the classes."""
        return target
