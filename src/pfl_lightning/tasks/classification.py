"""Classification: one class per sample, or any number of labels."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MultilabelF1Score

from pfl_lightning.tasks.base import Reduction, Task, check_range, check_shape, described, log_mean
from pfl_lightning.tasks.class_metrics import Area, Brier, CalibrationError, Share

ClassMetric = Literal[
    "acc",
    "balanced_acc",
    "auroc",
    "average_precision",
    "f1",
    "precision",
    "recall",
    "specificity",
    "ece",
    "brier",
]
"""Names of the metrics of `Classification`."""


@dataclass(frozen=True)
class Classification(Task):
    r"""One of several classes per sample: cross-entropy as loss, the share of correct predictions as ``acc``.

    Targets are class numbers ``[n]``, int64; outputs are logits ``[n, num_classes]``.

    With two classes, ``average_precision``, ``f1``, ``precision``, ``recall`` (sensitivity) and ``specificity`` are of
    class 1. With more, these and ``auroc`` are plain means over classes, each against all others. ``balanced_acc`` is
    the mean over classes of the share of correct predictions, ``ece`` the expected calibration error of the predicted
    class, and ``brier`` the squared error of the probabilities, summed over classes. Means leave out the classes that
    a client's samples lack. A metric undefined for a client is NaN, such as the AUROC of samples of one class.

    Args:
        num_classes: number of classes K.
        metrics: names of an evaluation's metrics, at least one; the first selects the best round.
        class_weights: factors of the samples' losses in local training, by class: K finite numbers from 0 up, or
            ``balanced``, :math:`n / (K' n_k)` for a client with n training samples of :math:`K'` classes,
            :math:`n_k` of them of class k. A batch's loss is the plain mean of its weighted losses, so that a batch of
            one class keeps its weight. The loss of an evaluation has no weights. None weighs all samples alike.

    Raises:
        MisconfigurationException: if a metric is unknown or named twice, or the weights aren't K numbers from 0 up.
    """

    num_classes: int
    metrics: tuple[ClassMetric, ...] = ("acc",)
    class_weights: Literal["balanced"] | tuple[float, ...] | None = None

    has_classes = True

    def __post_init__(self) -> None:
        super().__post_init__()
        names, weights = self.metrics, self.class_weights
        # tuples: a list would make the task unequal to itself read back from a checkpoint
        object.__setattr__(self, "metrics", (names,) if isinstance(names, str) else tuple(names))
        known = get_args(ClassMetric)
        if not self.metrics or len(set(self.metrics)) < len(self.metrics) or not set(self.metrics) <= set(known):
            raise MisconfigurationException(
                f"task.metrics={list(self.metrics)} must be different names among {', '.join(known)}."
            )
        if weights is None or weights == "balanced":
            return
        fits = isinstance(weights, Sequence) and not isinstance(weights, str) and len(weights) == self.num_classes
        if not fits or not all(isinstance(w, (int, float)) and 0 <= w < math.inf for w in weights) or not any(weights):
            raise MisconfigurationException(
                f"task.class_weights={weights!r} must be 'balanced', or {self.num_classes} finite numbers from 0 up, "
                "not all 0."
            )
        object.__setattr__(self, "class_weights", tuple(map(float, weights)))

    @property
    def monitor(self) -> str:
        """The first of the metrics."""
        return self.metrics[0]

    @property
    def mode(self) -> Literal["max", "min"]:
        """``min`` for errors, else ``max``."""
        return "min" if self.monitor in ("ece", "brier") else "max"

    @property
    def outputs(self) -> int:
        """Number of logits per sample."""
        return self.num_classes

    def loss(
        self, outputs: Tensor, target: Tensor, reduction: Reduction = "mean", weights: Tensor | None = None
    ) -> Tensor:
        """Return the cross-entropy; see `Task.loss`.

        Args:
            outputs: logits ``[n, num_classes]``.
            target: class numbers ``[n]``.
            reduction: mean over samples, or sum.
            weights: a factor of the loss by class ``[num_classes]``; None is 1.
        """
        if weights is None:
            return F.cross_entropy(outputs, target, reduction=reduction)
        errors = F.cross_entropy(outputs, target, reduction="none") * weights[target]
        # divided by samples and not, as torch does, by the sum of weights, in which a batch of one class loses its own
        return errors.mean() if reduction == "mean" else errors.sum()

    def weights(self, counts: Tensor) -> Tensor:
        """Return the factor of each class's loss for one client ``[num_classes]``; 0 for classes that it lacks.

        >>> Classification(3, class_weights="balanced").weights(torch.tensor([6, 2, 0]))
        tensor([0.6667, 2.0000, 0.0000])

        Args:
            counts: the client's training samples by class.
        """
        if self.class_weights != "balanced":
            return torch.tensor(self.class_weights or [1.0] * self.num_classes)
        balanced = counts.sum() / ((counts > 0).sum() * counts)
        return torch.where(counts > 0, balanced, 0.0)

    def combined(self, outputs: Tensor, shares: Tensor) -> Tensor:
        """Return the logarithms of the mean probabilities; see `Task.combined`."""
        return log_mean(outputs.log_softmax(2), shares)

    def configure_metrics(self) -> MetricCollection:
        """Return the metrics by name."""
        made: dict[str, Metric | MetricCollection] = {name: self._metric(name) for name in self.metrics}
        return MetricCollection(made)

    def _metric(self, name: ClassMetric) -> Metric:
        """Return a metric by its name."""
        if name == "acc":
            # average="micro": torchmetrics' default is the mean over classes. validate_args=False: its check of
            # targets waits for the GPU in each batch.
            return MulticlassAccuracy(self.num_classes, average="micro", validate_args=False)
        if name == "auroc" or name == "average_precision":
            return Area(self.num_classes, name)
        if name == "ece":
            return CalibrationError()
        return Brier() if name == "brier" else Share(self.num_classes, name)

    def pooled(self) -> dict[str, Metric]:
        """Return the metrics of all clients' samples that are no mean over clients."""
        return {name: self._metric(name) for name in self.metrics if name not in ("acc", "brier")}

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


@dataclass(frozen=True)
class MultiLabel(Task):
    """Any of several labels per sample: binary cross-entropy, with ``map``, which selects, and ``f1``.

    Targets are zeros and ones ``[n, num_labels]``; outputs are logits ``[n, num_labels]``.

    Args:
        num_labels: number of labels L.
    """

    num_labels: int

    monitor = "map"
    mode = "max"

    @property
    def outputs(self) -> int:
        """Number of logits per sample."""
        return self.num_labels

    def loss(self, outputs: Tensor, target: Tensor, reduction: Reduction = "mean") -> Tensor:
        """Return the binary cross-entropy, averaged over the labels of a sample; see `Task.loss`."""
        errors = F.binary_cross_entropy_with_logits(outputs, target.to(outputs.dtype), reduction=reduction)
        # a sum over samples of means over labels: `weight` counts samples, so that sum / weight is the mean
        return errors if reduction == "mean" else errors / self.num_labels

    def combined(self, outputs: Tensor, shares: Tensor) -> Tensor:
        """Return the logits of the mean probabilities; see `Task.combined`."""
        # the logarithms of both sides, as 1 minus a rounded probability would have no logarithm
        return log_mean(F.logsigmoid(outputs), shares) - log_mean(F.logsigmoid(-outputs), shares)

    def configure_metrics(self) -> MetricCollection:
        """Return ``map``, the mean over labels of the average precision, and ``f1`` of all labels together."""
        return MetricCollection({**self.pooled()})

    def pooled(self) -> dict[str, Metric]:
        """Return both metrics of all clients' samples."""
        return {"map": Area(self.num_labels, "average_precision", labels=True), "f1": F1(self.num_labels)}

    def check(self, target: Tensor, owner: str) -> None:
        """Refuse all targets but zeros and ones for each sample and label."""
        fits = isinstance(target, Tensor) and target.dim() == 2 and target.shape[1] == self.num_labels
        if not fits or bool(((target != 0) & (target != 1)).any()):
            values = f", with values from {target.min():g} to {target.max():g}" if fits else ""
            raise MisconfigurationException(
                f"{owner} has {described(target)}{values}; task {self} takes {self.num_labels} zeros and ones a sample"
            )

    def check_outputs(self, outputs: Tensor, target: Tensor, net: str) -> None:
        """Refuse all outputs but one logit per sample and label."""
        check_shape(outputs, [len(target), self.num_labels], net, self)

    def predictions(self, outputs: Tensor) -> dict[str, Tensor]:
        """Return ``classes``, the labels more probable than not ``[n, labels]``, bool, and ``probabilities``."""
        return {"classes": outputs > 0, "probabilities": outputs.sigmoid()}


class F1(MultilabelF1Score):
    """F1 of all labels together; NaN without any true or predicted label."""

    def __init__(self, num_labels: int) -> None:
        super().__init__(num_labels, average="micro", validate_args=False, zero_division=float("nan"))

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add samples; targets may be of any type."""
        super().update(preds, target.long())
