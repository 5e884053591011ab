"""Multi-label classification: any of several labels per sample."""

from dataclasses import dataclass

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import MultilabelAveragePrecision, MultilabelF1Score

from pfl_lightning.tasks.base import Reduction, Task, check_shape, described, log_mean


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
        return MetricCollection({"map": MeanPrecision(self.num_labels), "f1": F1(self.num_labels)})

    def pooled(self) -> dict[str, Metric]:
        """Return both metrics of all clients' samples; ``map`` by 200 thresholds."""
        # the exact average precision keeps every sample's outputs, which don't add up over clients
        return {"map": MeanPrecision(self.num_labels, thresholds=200), "f1": F1(self.num_labels)}

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


class MeanPrecision(MultilabelAveragePrecision):
    """Mean over labels of the average precision, over the labels of at least one sample; NaN without any.

    Args:
        num_labels: number of labels.
        thresholds: compute by this number of thresholds, so that the state doesn't grow with the samples; None is
            exact.
    """

    higher_is_better = True
    positives: Tensor

    def __init__(self, num_labels: int, thresholds: int | None = None) -> None:
        super().__init__(num_labels, average="none", thresholds=thresholds, validate_args=False)
        # torchmetrics gives a label without positives a precision of 0; counted here, such labels are left out
        self.add_state("positives", torch.zeros(num_labels, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add samples.

        Args:
            preds: logits ``[n, num_labels]``.
            target: zeros and ones ``[n, num_labels]``.
        """
        self.positives += (target > 0).sum(0)
        # torchmetrics would take logits between 0 and 1 for probabilities
        super().update(preds.sigmoid(), target.long())

    def compute(self) -> Tensor:  # type: ignore[override]
        """Return the mean."""
        of_labels = super().compute()
        return of_labels[self.positives > 0].mean()
