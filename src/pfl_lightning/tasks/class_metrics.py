"""Metrics of samples with one class each, whose states of clients add up, and which are NaN where undefined."""

from typing import Literal

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from pfl_lightning.tasks.base import Ratio

ECE_BINS = 15
"""Number of bins of the expected calibration error."""


class Confusion(Metric):
    """Counts of samples by true and predicted class, ``[true, predicted]``; subclasses compute metrics from the counts.

    Args:
        num_classes: number of classes.
        ignore_index: target of samples that don't count; None counts all.
    """

    full_state_update = False
    higher_is_better = True
    plot_lower_bound, plot_upper_bound = 0.0, 1.0
    counts: Tensor

    def __init__(self, num_classes: int, ignore_index: int | None = None) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.ignore_index = ignore_index
        self.add_state("counts", torch.zeros(num_classes, num_classes, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, outputs: Tensor, target: Tensor) -> None:
        """Add samples.

        Args:
            outputs: logits ``[n, num_classes, ...]``.
            target: class numbers ``[n, ...]``.
        """
        predicted = outputs.argmax(1)
        if self.ignore_index is not None:
            counted = target != self.ignore_index
            target, predicted = target[counted], predicted[counted]
        # true and predicted class as one number, so that one bincount fills the matrix
        pairs = target.flatten() * self.num_classes + predicted.flatten()
        self.counts += torch.bincount(pairs, minlength=self.num_classes**2).view_as(self.counts)


class Share(Confusion):
    r"""A share of samples by class: of class 1 with two classes, else the plain mean over the classes that occur.

    With :math:`t_k` correct predictions of class k, :math:`a_k` samples of it and :math:`p_k` predictions of it among
    n samples: ``recall`` is :math:`t_k / a_k`, ``precision`` :math:`t_k / p_k`, ``f1`` :math:`2 t_k / (a_k + p_k)`, and
    ``specificity`` :math:`(n - a_k - p_k + t_k) / (n - a_k)`. ``balanced_acc`` is the mean recall, with two classes
    too. With more than two classes, the precision of a class that occurs and is never predicted is 0.

    Args:
        num_classes: number of classes.
        kind: the name of the share.
    """

    def __init__(
        self, num_classes: int, kind: Literal["balanced_acc", "f1", "precision", "recall", "specificity"]
    ) -> None:
        super().__init__(num_classes)
        self.kind = kind

    def compute(self) -> Tensor:
        """Return the share; NaN for 0 / 0."""
        counts = self.counts.double()
        right, actual, predicted = counts.diag(), counts.sum(1), counts.sum(0)
        total = actual.sum()
        binary = self.num_classes == 2 and self.kind != "balanced_acc"
        shares = {
            "f1": lambda: 2 * right / (actual + predicted),
            "precision": lambda: right / (predicted if binary else predicted.clamp(min=1)),
            "specificity": lambda: (total - actual - predicted + right) / (total - actual),
        }.get(self.kind, lambda: right / actual)()
        return shares[1] if binary else shares[actual > 0].nanmean()


class Area(Metric):
    r"""Area under a curve of the probabilities: of class 1 with two classes, else the plain mean over classes.

    ``auroc`` is the share of pairs of a sample of the class and a sample of another class in which the first has the
    larger probability; equal ones count half. It needs a sample of both. ``average_precision`` is :math:`\sum_i (R_i -
    R_{i-1}) P_i` over falling thresholds i with precision P and recall R, and needs a sample of the class. Classes
    without these are left out; NaN without any other.

    Args:
        num_classes: number of classes.
        kind: the name of the area.
        bins: number of equal bins into which probabilities are sorted, so that the state is a sum and doesn't grow with
            the samples; None compares the probabilities themselves.
    """

    full_state_update = False
    higher_is_better = True
    plot_lower_bound, plot_upper_bound = 0.0, 1.0
    scores: list[Tensor]
    target: list[Tensor]
    counts: Tensor

    def __init__(self, num_classes: int, kind: Literal["auroc", "average_precision"], bins: int | None = None) -> None:
        super().__init__()
        self.num_classes, self.kind, self.bins = num_classes, kind, bins
        if bins is None:
            self.add_state("scores", [], dist_reduce_fx="cat")
            self.add_state("target", [], dist_reduce_fx="cat")
        else:
            self.add_state("counts", torch.zeros(num_classes, 2, bins, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, outputs: Tensor, target: Tensor) -> None:
        """Add samples.

        Args:
            outputs: logits ``[n, num_classes]``.
            target: class numbers ``[n]``.
        """
        # in float64, where fewer certain predictions become equal
        scores = outputs.double().softmax(1)
        if self.bins is None:
            self.scores.append(scores)
            self.target.append(target)
            return
        places = (scores * self.bins).long().clamp(max=self.bins - 1)
        for k, counts in enumerate(self.counts):
            having = (target == k).long()
            counts += torch.bincount(having * self.bins + places[:, k], minlength=2 * self.bins).view_as(counts)

    def compute(self) -> Tensor:
        """Return the area."""
        classes = [1] if self.num_classes == 2 else range(self.num_classes)
        if self.bins is None:
            scores, target = dim_zero_cat(self.scores), dim_zero_cat(self.target)
            areas = [self._area(*self._counted(scores[:, k], target == k)) for k in classes]
        else:
            areas = [self._area(*self.counts[k]) for k in classes]
        return torch.stack(areas).nanmean()

    def _counted(self, scores: Tensor, having: Tensor) -> tuple[Tensor, Tensor]:
        """Return the numbers of samples without and with a class at each different score, rising.

        Args:
            scores: the probabilities of the class ``[n]``.
            having: whether a sample has the class ``[n]``.
        """
        different, places = scores.unique(return_inverse=True)
        with_it = torch.bincount(places[having], minlength=len(different))
        return torch.bincount(places, minlength=len(different)) - with_it, with_it

    def _area(self, without: Tensor, having: Tensor) -> Tensor:
        """Return the area of one class from `_counted`; NaN where it is undefined."""
        others, own = without.double(), having.double()
        if self.kind == "auroc":
            lower = others.cumsum(0) - others / 2
            return (own * lower).sum() / (own.sum() * others.sum())
        # at each threshold, all samples from it upwards are taken for the class
        taken, right = (counts.flip(0).cumsum(0) for counts in (own + others, own))
        return (own.flip(0) * right / taken.clamp(min=1)).sum() / own.sum()


class CalibrationError(Metric):
    """Expected calibration error: mean distance of the share of correct predictions from the predicted probability.

    Predictions are sorted by their probability into `ECE_BINS` bins of equal width; distances of bins are weighted by
    their samples. NaN without any sample.
    """

    full_state_update = False
    higher_is_better = False
    plot_lower_bound, plot_upper_bound = 0.0, 1.0
    sums: Tensor

    def __init__(self) -> None:
        super().__init__()
        # samples, correct predictions, and the sum of probabilities, by bin
        self.add_state("sums", torch.zeros(3, ECE_BINS, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, outputs: Tensor, target: Tensor) -> None:
        """Add samples; see `Area.update`."""
        probability, predicted = outputs.double().softmax(1).max(1)
        places = (probability * ECE_BINS).long().clamp(max=ECE_BINS - 1)
        rows = torch.stack([torch.ones_like(probability), (predicted == target).double(), probability])
        self.sums.index_add_(1, places, rows)

    def compute(self) -> Tensor:
        """Return the error."""
        count, right, probability = self.sums
        return (right - probability).abs().sum() / count.sum()


class Brier(Ratio):
    """Squared error of the probabilities, summed over classes and averaged over samples."""

    higher_is_better = False
    plot_upper_bound = 2.0

    def __init__(self) -> None:
        super().__init__(torch.float64)

    def update(self, outputs: Tensor, target: Tensor) -> None:
        """Add samples; see `Area.update`."""
        scores = outputs.double().softmax(1)
        scores[torch.arange(len(target), device=target.device), target] -= 1
        self.total += scores.square().sum()
        self.count += len(target)
