"""Segmentation: one class per pixel of an image, or per voxel of a volume."""

import math
from dataclasses import dataclass

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import Metric, MetricCollection

from pfl_lightning.tasks.base import Reduction, Task, check_range, check_shape, described, log_mean
from pfl_lightning.tasks.class_metrics import Confusion

SMOOTH = 1e-5
"""nnU-Net's number in numerator and denominator of a soft Dice, by which a class absent from both has 1."""


@dataclass(frozen=True)
class Segmentation(Task):
    r"""One of several classes per pixel: cross-entropy, or with Dice, with ``miou``, which selects, and ``pixel_acc``.

    Targets are class numbers ``[n, H, W]``, int64, or ``[n, D, H, W]`` of volumes; outputs are logits
    ``[n, num_classes, H, W]``, or ``[n, num_classes, D, H, W]``.

    With :math:`t_k` correct pixels of class k, :math:`a_k` pixels of it and :math:`p_k` predicted ones, ``miou`` is the
    mean of :math:`t_k / (a_k + p_k - t_k)` over the classes that occur or are predicted, and ``dice_K``, such as
    ``dice_1``, is :math:`2 t_k / (a_k + p_k)` of class K. ``dice`` is the mean of these from class 1 up, as class 0 is
    the background. ``pixel_acc`` is the share of correct pixels. All are counted over a client's pixels together; NaN
    where undefined.

    With ``dice_weight`` :math:`w`, the loss is the cross-entropy plus :math:`w (1 - D)`. In a sample with probabilities
    :math:`q_{ik}` and targets :math:`y_{ik}`, 1 at pixels i of class k and 0 elsewhere, D is the mean over the classes
    from 1 up of

    .. math:: \frac{2 \sum_i q_{ik} y_{ik} + \varepsilon}{\sum_i q_{ik} + \sum_i y_{ik} + \varepsilon},
        \quad \varepsilon = 10^{-5},

    over the counted pixels. A class absent from a sample pulls its probabilities there towards 0. Samples are weighted
    by their counted pixels, like in the cross-entropy. With 1 this is nnU-Net's loss without deep supervision and with
    ``batch_dice`` off, up to the constant 1.

    Source: Isensee et al., 2021 (https://doi.org/10.1038/s41592-020-01008-z).

    Args:
        num_classes: number of classes.
        ignore_index: target of pixels that don't count.
        metrics: names of an evaluation's metrics, at least one; the first selects the best round.
        dice_weight: :math:`w`, 0 (cross-entropy alone) or more, such as 1.

    Raises:
        MisconfigurationException: if a metric is unknown or named twice, or a weight is negative, or has no class but
            the background.
    """

    num_classes: int
    ignore_index: int = -100
    metrics: tuple[str, ...] = ("miou", "pixel_acc")
    dice_weight: float = 0.0

    mode = "max"

    def __post_init__(self) -> None:
        super().__post_init__()
        names = (self.metrics,) if isinstance(self.metrics, str) else tuple(self.metrics)
        # a tuple: a list would make the task unequal to itself read back from a checkpoint
        object.__setattr__(self, "metrics", names)
        known = ["miou", "pixel_acc", "dice", *(f"dice_{k}" for k in range(self.num_classes))]
        if not names or len(set(names)) < len(names) or not set(names) <= set(known):
            raise MisconfigurationException(
                f"task.metrics={list(names)} must be different names among {', '.join(known[:4])} and so on, up to "
                f"{known[-1]}."
            )
        if not 0 <= self.dice_weight < math.inf:
            raise MisconfigurationException(f"task.dice_weight={self.dice_weight} must be 0 or more, such as 1.")
        if self.dice_weight and self.num_classes < 2:
            raise MisconfigurationException(
                f"task.dice_weight={self.dice_weight} needs a class beside the background, 0: num_classes is "
                f"{self.num_classes}, and would have to be 2 or more."
            )

    @property
    def monitor(self) -> str:
        """The first of the metrics."""
        return self.metrics[0]

    @property
    def outputs(self) -> int:
        """Number of logits per pixel."""
        return self.num_classes

    def loss(self, outputs: Tensor, target: Tensor, reduction: Reduction = "mean") -> Tensor:
        """Return the cross-entropy of the counted pixels, with Dice's loss by its weight; see `Task.loss`."""
        errors = F.cross_entropy(outputs, target, ignore_index=self.ignore_index, reduction=reduction)
        if not self.dice_weight:
            return errors
        return errors + self.dice_weight * self._dice_loss(outputs, target, reduction)

    def _dice_loss(self, outputs: Tensor, target: Tensor, reduction: Reduction) -> Tensor:
        """Return one minus the samples' soft Dice, each weighted by the sample's counted pixels."""
        counted = (target != self.ignore_index).unsqueeze(1)
        # no one_hot, which looks at values: engines run many clients under vmap
        classes = torch.arange(1, self.num_classes, device=target.device).view(1, -1, *[1] * (target.dim() - 1))
        actual = (target.unsqueeze(1) == classes) & counted
        predicted = outputs.softmax(1)[:, 1:] * counted
        pixels = tuple(range(2, outputs.dim()))
        both = (predicted * actual).sum(pixels)
        shares = (2 * both + SMOOTH) / (predicted.sum(pixels) + actual.sum(pixels) + SMOOTH)
        weights = counted.flatten(1).sum(1)
        total = ((1 - shares.mean(1)) * weights).sum()
        return total if reduction == "sum" else total / weights.sum()

    def weight(self, target: Tensor) -> Tensor:
        """Return the number of counted pixels."""
        return (target != self.ignore_index).sum()

    def combined(self, outputs: Tensor, shares: Tensor) -> Tensor:
        """Return the logarithms of the mean probabilities; see `Task.combined`."""
        return log_mean(outputs.log_softmax(2), shares)

    def configure_metrics(self) -> MetricCollection:
        """Return the metrics by name."""
        made: dict[str, Metric | MetricCollection] = {name: self._metric(name) for name in self.metrics}
        return MetricCollection(made)

    def _metric(self, name: str) -> Metric:
        """Return a metric by its name."""
        settings = self.num_classes, self.ignore_index
        if name == "pixel_acc":
            return PixelAccuracy(*settings)
        if name == "miou":
            return MeanIoU(*settings)
        return Dice(*settings, classes=[int(name[5:])] if name[5:] else list(range(1, self.num_classes)))

    def pooled(self) -> dict[str, Metric]:
        """Return the metrics but ``pixel_acc`` of all clients' pixels."""
        return {name: self._metric(name) for name in self.metrics if name != "pixel_acc"}

    def check(self, target: Tensor, owner: str) -> None:
        """Refuse all targets but one class number in range per pixel."""
        if not isinstance(target, Tensor) or target.dim() not in (3, 4) or target.dtype != torch.int64:
            raise MisconfigurationException(
                f"{owner} has {described(target)}; task {self} takes int64 class numbers of shape [samples, height, "
                "width], or [samples, depth, height, width] of volumes"
            )
        check_range(target, self.num_classes, self.ignore_index, owner, self)

    def check_outputs(self, outputs: Tensor, target: Tensor, net: str) -> None:
        """Refuse all outputs but one logit per pixel and class."""
        # slices without a channel look like the channels of an image, which a net takes
        if isinstance(outputs, Tensor) and outputs.dim() == target.dim():
            raise MisconfigurationException(
                f"model.net: {net} gives outputs of shape {list(outputs.shape)} for targets of shape "
                f"{list(target.shape)}, with a dimension too few; give inputs a dimension of channels before those of "
                "the targets, such as [samples, 1, depth, height, width]."
            )
        check_shape(outputs, [len(target), self.num_classes, *target.shape[1:]], net, self)

    def predictions(self, outputs: Tensor) -> dict[str, Tensor]:
        """Return ``classes`` of pixels ``[n, ...]``, and ``probabilities`` ``[n, num_classes, ...]``."""
        return {"classes": outputs.argmax(1), "probabilities": outputs.softmax(1)}


class MeanIoU(Confusion):
    """Mean of intersection over union, over the classes that occur or are predicted; NaN without any pixel."""

    def compute(self) -> Tensor:
        """Return the mean."""
        both = self.counts.diagonal(dim1=-2, dim2=-1)
        union = self.counts.sum(-2) + self.counts.sum(-1) - both
        # a class that neither occurs nor is predicted has 0 / 0: a client with few classes isn't punished for the rest
        return (both / union).nanmean(-1)


class Dice(Confusion):
    """Mean of Dice's coefficient over those of some classes that occur or are predicted; NaN without such a class.

    Args:
        num_classes: number of classes.
        ignore_index: target of pixels that don't count.
        classes: numbers of the classes.
    """

    def __init__(self, num_classes: int, ignore_index: int | None, classes: list[int]) -> None:
        super().__init__(num_classes, ignore_index)
        self.classes = classes

    def compute(self) -> Tensor:
        """Return the mean."""
        both = self.counts.diagonal(dim1=-2, dim2=-1)
        shares = 2 * both / (self.counts.sum(-2) + self.counts.sum(-1))
        return shares[..., self.classes].nanmean(-1)


class PixelAccuracy(Confusion):
    """Share of pixels with the correct class; NaN without any."""

    def compute(self) -> Tensor:
        """Return the share."""
        return self.counts.diagonal(dim1=-2, dim2=-1).sum(-1) / self.counts.sum((-2, -1))
