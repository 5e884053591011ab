"""Metrics of samples with one class each, whose states of clients add up, and which are NaN where undefined."""

import math
from typing import Literal

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from pfl_lightning.tasks.base import Ratio

ECE_BINS = 15
"""Number of bins of the expected calibration error."""
AREA_BINS = 4000
"""Number of bins of logits in `Area`, of equal width in the inverse hyperbolic sine: 0.005 wide for logits near 0, and
0.5 % of a large one."""
LARGEST_LOGIT = 1e4
"""Size of a logit in the outermost bins of `Area`."""


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
        self.counts += self._counted(outputs, target, torch.zeros(len(target), dtype=torch.int64), 1)[0]

    def states_of_clients(self, outputs: Tensor, target: Tensor, owners: Tensor, clients: int) -> dict[str, Tensor]:
        """Return the states of several clients after an update with their samples, ``[clients, ...]``.

        Args:
            outputs: as for `update`, of all clients.
            target: as for `update`.
            owners: the number of each sample's client ``[n]``.
            clients: number of clients.
        """
        return {"counts": self._counted(outputs, target, owners, clients)}

    def _counted(self, outputs: Tensor, target: Tensor, owners: Tensor, clients: int) -> Tensor:
        """Return the counts of several clients ``[clients, true, predicted]``; arguments as for `states_of_clients`."""
        predicted = outputs.argmax(1)
        owners = owners.to(target.device).view(-1, *[1] * (target.dim() - 1)).expand_as(target)
        if self.ignore_index is not None:
            counted = target != self.ignore_index
            target, predicted, owners = target[counted], predicted[counted], owners[counted]
        # client, true and predicted class as one number, so that one bincount fills the matrices
        pairs = (owners * self.num_classes + target).flatten() * self.num_classes + predicted.flatten()
        shape = clients, self.num_classes, self.num_classes
        return torch.bincount(pairs, minlength=math.prod(shape)).view(shape)


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
        # dimensions from the end, as counts may have a dimension of clients in front
        counts = self.counts.double()
        right, actual, predicted = counts.diagonal(dim1=-2, dim2=-1), counts.sum(-1), counts.sum(-2)
        total = actual.sum(-1, keepdim=True)
        binary = self.num_classes == 2 and self.kind != "balanced_acc"
        shares = {
            "f1": lambda: 2 * right / (actual + predicted),
            "precision": lambda: right / (predicted if binary else predicted.clamp(min=1)),
            "specificity": lambda: (total - actual - predicted + right) / (total - actual),
        }.get(self.kind, lambda: right / actual)()
        return shares[..., 1] if binary else shares.masked_fill(actual == 0, torch.nan).nanmean(-1)


class Area(Metric):
    r"""Area under a curve of logits: of class 1 with two classes, else the plain mean over classes or labels.

    A sample's score for a class is the logit of its probability, :math:`\log p_k - \log (1 - p_k)`: the order of
    probabilities, without the rounding to 1 that makes sure predictions equal. ``auroc`` is the share of pairs of a
    sample of the class and a sample of another class in which the first has the larger score; equal ones count half. It
    needs a sample of both. ``average_precision`` is :math:`\sum_i (R_i - R_{i-1}) P_i` over falling thresholds i with
    precision P and recall R, and needs a sample of the class. Classes without these are left out; NaN without any
    other.

    Args:
        num_classes: number of classes or labels.
        kind: the name of the area.
        labels: whether samples have any number of labels: outputs are then the logits themselves.
        counting: keep counts of scores in `AREA_BINS` bins, a sum that doesn't grow with the samples; False keeps the
            outputs, and compares the scores themselves.
    """

    full_state_update = False
    higher_is_better = True
    plot_lower_bound, plot_upper_bound = 0.0, 1.0
    outputs: list[Tensor]
    target: list[Tensor]
    counts: Tensor

    def __init__(
        self,
        num_classes: int,
        kind: Literal["auroc", "average_precision"],
        labels: bool = False,
        counting: bool = False,
    ) -> None:
        super().__init__()
        self.num_classes, self.kind, self.labels, self.counting = num_classes, kind, labels, counting
        self.classes = [1] if num_classes == 2 and not labels else list(range(num_classes))
        if counting:
            empty = torch.zeros(len(self.classes), 2, AREA_BINS, dtype=torch.int64)
            self.add_state("counts", empty, dist_reduce_fx="sum")
        else:
            self.add_state("outputs", [], dist_reduce_fx="cat")
            self.add_state("target", [], dist_reduce_fx="cat")

    def by_counts(self) -> "Area":
        """Return the metric with counts as its state, for clients that send no outputs."""
        return Area(self.num_classes, self.kind, self.labels, counting=True)

    def update(self, outputs: Tensor, target: Tensor) -> None:
        """Add samples.

        Args:
            outputs: logits ``[n, num_classes]``.
            target: class numbers ``[n]``; with labels, zeros and ones ``[n, num_classes]``.
        """
        if not self.counting:
            self.outputs.append(outputs)
            self.target.append(target)
            return
        half = (AREA_BINS - 1) / 2
        places = self._scores(outputs).asinh() * (half / math.asinh(LARGEST_LOGIT))
        places = (places.round() + half).clamp(0, AREA_BINS - 1).long() + self._having(target) * AREA_BINS
        for counts, column in zip(self.counts, places.unbind(1), strict=True):
            counts += torch.bincount(column, minlength=2 * AREA_BINS).view_as(counts)

    def compute(self) -> Tensor:
        """Return the area."""
        if self.counting:
            owners = self.counts.new_zeros(AREA_BINS)
            return torch.stack([self._areas(own[0], own[1], owners, 1) for own in self.counts]).nanmean()
        outputs, target = dim_zero_cat(self.outputs), dim_zero_cat(self.target)
        owners = torch.zeros(len(target), dtype=torch.int64, device=target.device)
        return self.values_of_clients(outputs, target, owners, 1)[0]

    def error(self) -> Tensor:
        r"""Return the largest possible distance of `compute` from the area by the scores themselves; 0 without counts.

        The order of samples within a bin is unknown. Half of the pairs of one bin may be missing in ``auroc``, or be
        too many. ``average_precision`` lies between those of the worst and of the best order: of p samples of the class
        and n others in a bin, with t and a samples of the class and in all above it, the best order has the sum of
        precisions :math:`\sum_{j=1}^p \frac{t+j}{a+j}`, and the worst one :math:`\sum_{j=1}^p \frac{t+j}{a+n+j}`.
        """
        if not self.counting:
            return torch.zeros(())
        without, having = self.counts.double().unbind(1)
        if self.kind == "auroc":
            return ((without * having).sum(1) / without.sum(1) / having.sum(1) / 2).nanmean()

        def precisions(passed: Tensor) -> Tensor:
            # as (t + j) / (b + j) = 1 + (t - b) / (b + j), whose sum over j is a difference of digammas
            return having + (right - passed) * (torch.digamma(passed + having + 1) - torch.digamma(passed + 1))

        right, others = (counts.sum(1, keepdim=True) - counts.cumsum(1) for counts in (having, without))
        best, worst = precisions(right + others), precisions(right + others + without)
        known = having * (right + having) / (right + others + having + without).clamp(min=1)
        return (torch.stack([best - known, known - worst]).sum(2) / having.sum(1)).amax(0).nanmean()

    def values_of_clients(self, outputs: Tensor, target: Tensor, owners: Tensor, clients: int) -> Tensor:
        """Return the areas of several clients' samples ``[clients]``.

        Args:
            outputs: as for `update`, of all clients.
            target: as for `update`.
            owners: the number of each sample's client ``[n]``.
            clients: number of clients.
        """
        scores, having, owners = self._scores(outputs), self._having(target), owners.to(target.device)
        return torch.stack(
            [self._of_scores(*column, owners, clients) for column in zip(scores.T, having.T, strict=True)]
        ).nanmean(0)

    def _scores(self, outputs: Tensor) -> Tensor:
        """Return the logit of each class that counts ``[n, classes]``, in double precision."""
        outputs = outputs.double()
        if self.labels:
            return outputs
        logs, first = outputs.log_softmax(1), outputs.argmax(1, keepdim=True)
        # of the likeliest class 1 - p may be rounding, so the others' probabilities are added up
        others = logs.scatter(1, first, -math.inf).logsumexp(1, keepdim=True)
        scores = (logs - (-logs.expm1()).log()).scatter(1, first, logs.gather(1, first) - others)
        return scores[:, self.classes]

    def _having(self, target: Tensor) -> Tensor:
        """Return which samples have each class that counts ``[n, classes]``, bool."""
        return target > 0 if self.labels else target[:, None] == torch.tensor(self.classes, device=target.device)

    def _of_scores(self, scores: Tensor, having: Tensor, owners: Tensor, clients: int) -> Tensor:
        """Return each client's area of one class by the scores themselves ``[clients]``; arguments ``[n]``."""
        different, places = torch.unique(scores, return_inverse=True)
        # each client's different scores, client after client and rising
        own, places = torch.unique(owners * len(different) + places, return_inverse=True)
        right = torch.bincount(places[having], minlength=len(own))
        without = torch.bincount(places, minlength=len(own)) - right
        return self._areas(without, right, own // max(len(different), 1), clients)

    def _areas(self, without: Tensor, having: Tensor, owners: Tensor, clients: int) -> Tensor:
        """Return the areas of one class ``[clients]``; NaN where undefined.

        Args:
            without: numbers of samples without the class at each score of each client, rising.
            having: numbers of samples with the class.
            owners: the client of each score, rising.
            clients: number of clients.
        """
        others, own = without.double(), having.double()

        def sums(values: Tensor) -> Tensor:
            return values.new_zeros(clients).index_add_(0, owners, values)

        def before(values: Tensor) -> Tensor:
            """Return the sums of each client's values at lower scores; of whole numbers, so that they are exact."""
            return values.cumsum(0) - values - (sums(values).cumsum(0) - sums(values))[owners]

        if self.kind == "auroc":
            return sums(own * (before(others) + others / 2)) / (sums(own) * sums(others))
        # at each threshold, all samples from it upwards are taken for the class
        taken, right = (sums(counts)[owners] - before(counts) for counts in (own + others, own))
        return sums(own * right / taken.clamp(min=1)) / sums(own)


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
        error: Tensor = (right - probability).abs().sum() / count.sum()
        return error


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
