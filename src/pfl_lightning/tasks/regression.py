"""Regression: quantities by squared error, counts by Poisson's loss, and quantiles."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import Metric, MetricCollection

from pfl_lightning.tasks.base import Ratio, Reduction, Task, check_shape, described, log_mean


@dataclass(frozen=True)
class Regression(Task):
    """Quantities of a sample: squared error, with ``mae``, which selects, and ``r2``.

    Targets are floating, ``[n]`` or ``[n, quantities]``; outputs are ``[n, quantities]``.

    Args:
        quantities: number of quantities per sample.
    """

    quantities: int = 1

    has_scale = True
    monitor = "mae"
    mode = "min"

    @property
    def outputs(self) -> int:
        """Number of quantities per sample."""
        return self.quantities

    def loss(self, outputs: Tensor, target: Tensor, reduction: Reduction = "mean") -> Tensor:
        """Return the squared error, averaged over the quantities of a sample; see `Task.loss`."""
        # view_as: a target [n] against outputs [n, 1] would broadcast to [n, n], with a wrong loss and no error
        errors = F.mse_loss(outputs, target.view_as(outputs).to(outputs.dtype), reduction=reduction)
        return errors if reduction == "mean" else errors / self.quantities

    def configure_metrics(self) -> MetricCollection:
        """Return ``mae``, the mean absolute error, and ``r2``, the share of explained variance."""
        return MetricCollection({"mae": AbsoluteError(), "r2": R2(self.quantities)})

    def pooled(self) -> dict[str, Metric]:
        """Return ``r2`` of all clients' samples, where the variance between clients counts too."""
        return {"r2": R2(self.quantities)}

    def check(self, target: Tensor, owner: str) -> None:
        """Refuse all targets but finite floating quantities for each sample."""
        shape = list(target.shape[1:]) if isinstance(target, Tensor) else None
        fits = shape == [self.quantities] or (shape == [] and self.quantities == 1)
        if not fits or not target.is_floating_point():
            raise MisconfigurationException(
                f"{owner} has {described(target)}; task {self} takes {self.quantities} floating "
                f"number{'s' * (self.quantities > 1)} a sample"
            )
        # named here by number; in a loss, one NaN target would make all weights NaN
        if not target.isfinite().all():
            bad = int((~target.isfinite()).view(len(target), -1).any(1).sum())
            raise MisconfigurationException(f"{owner} has {bad} targets that are NaN or infinite; leave them out")

    def check_outputs(self, outputs: Tensor, target: Tensor, net: str) -> None:
        """Refuse all outputs but one value per sample and quantity."""
        check_shape(outputs, [len(target), self.quantities], net, self)


class AbsoluteError(Ratio):
    """Mean absolute error over samples and quantities.

    Args:
        predicted: returns the predictions ``[n, quantities]`` from a net's outputs; None takes the outputs themselves.
    """

    higher_is_better = False

    def __init__(self, predicted: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__(torch.float32)
        self.predicted = predicted

    def update(self, outputs: Tensor, target: Tensor) -> None:
        """Add samples.

        Args:
            outputs: the net's outputs.
            target: ``[n]`` or ``[n, quantities]``.
        """
        if self.predicted is not None:
            outputs = self.predicted(outputs)
        self.total += (outputs - target.view_as(outputs)).abs().sum()
        self.count += target.numel()


class R2(Metric):
    r"""Share of explained variance, :math:`1 - \sum (y - \hat y)^2 / \sum (y - \bar y)^2`, averaged over quantities.

    NaN for a single sample, and for equal targets.

    Args:
        quantities: number of quantities per sample.
    """

    full_state_update = False
    higher_is_better = True
    plot_upper_bound = 1.0
    errors: Tensor
    sums: Tensor
    squares: Tensor
    count: Tensor

    def __init__(self, quantities: int = 1) -> None:
        super().__init__()
        for name in ("errors", "sums", "squares"):
            # float64, since the variance is a difference of two large sums
            self.add_state(name, torch.zeros(quantities, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, outputs: Tensor, target: Tensor) -> None:
        """Add samples; see `AbsoluteError.update`."""
        y, predicted = target.view_as(outputs).double(), outputs.double()
        self.errors += (y - predicted).square().sum(0)
        self.sums += y.sum(0)
        self.squares += y.square().sum(0)
        self.count += len(y)

    def compute(self) -> Tensor:
        """Return the mean over quantities."""
        variance = self.squares - self.sums.square() / self.count
        # equal targets have a variance of 0, of which rounding may leave a little more
        defined = variance > 1e-12 * self.squares
        share = 1 - self.errors / variance
        return torch.where(defined, share, torch.nan).mean()


@dataclass(frozen=True)
class Poisson(Regression):
    r"""Counts of a sample, such as visits: Poisson's loss, with ``deviance``, which selects, and ``mae``.

    Targets are floating and from 0 up, ``[n]`` or ``[n, quantities]``; outputs are logarithms of the means o ``[n,
    quantities]``. The loss is :math:`e^o - y\,o`, and the deviance :math:`2 (y \log(y / e^o) - y + e^o)`, which is 0
    for a mean equal to the target.

    Args:
        quantities: number of counts per sample.
    """

    monitor = "deviance"

    def loss(self, outputs: Tensor, target: Tensor, reduction: Reduction = "mean") -> Tensor:
        """Return Poisson's loss, averaged over the quantities of a sample; see `Task.loss`."""
        y = target.view_as(outputs).to(outputs.dtype)
        errors = outputs.exp() - y * outputs
        return errors.mean() if reduction == "mean" else errors.sum() / self.quantities

    def combined(self, outputs: Tensor, shares: Tensor) -> Tensor:
        """Return the logarithms of the mean of the models' means; see `Task.combined`."""
        return log_mean(outputs, shares)

    def configure_metrics(self) -> MetricCollection:
        """Return ``deviance``, and ``mae``, the mean absolute error of the means."""
        return MetricCollection({"deviance": Deviance(), "mae": AbsoluteError(torch.exp)})

    def pooled(self) -> dict[str, Metric]:
        """Return nothing: both metrics are means over samples."""
        return {}

    def check(self, target: Tensor, owner: str) -> None:
        """Refuse all targets but finite floating counts from 0 up."""
        super().check(target, owner)
        if bad := int((target < 0).sum()):
            raise MisconfigurationException(f"{owner} has {bad} targets below 0; task {self} takes counts from 0 up")


class Deviance(Ratio):
    """Mean deviance of Poisson's distribution over samples and quantities."""

    higher_is_better = False

    def __init__(self) -> None:
        super().__init__(torch.float64)

    def update(self, outputs: Tensor, target: Tensor) -> None:
        """Add samples; see `AbsoluteError.update`."""
        o, y = outputs.double(), target.view_as(outputs).double()
        # xlogy is 0 for a count of 0
        self.total += 2 * (torch.xlogy(y, y) - y * o - y + o.exp()).sum()
        self.count += target.numel()


@dataclass(frozen=True)
class Quantile(Regression):
    r"""Quantiles of a sample's quantities: the pinball loss, ``pinball``, which selects, ``mae`` and ``coverage``.

    Targets are floating, ``[n]`` or ``[n, quantities]``; outputs are ``[n, quantities * levels]``, the levels of one
    quantity side by side. The loss of a level :math:`\tau` is :math:`\max(\tau (y - \hat y), (\tau - 1)(y - \hat y))`,
    averaged over quantities and levels. ``mae`` is of the level nearest to 0.5, and ``coverage`` the share of targets
    between the outermost levels, which is their distance if the quantiles are right.
    Source: Koenker and Bassett, 1978 (https://doi.org/10.2307/1913643).

    Args:
        quantities: number of quantities per sample.
        levels: rising levels between 0 and 1.

    Raises:
        MisconfigurationException: if levels aren't rising numbers between 0 and 1.
    """

    levels: tuple[float, ...] = (0.1, 0.5, 0.9)

    has_scale = True
    monitor = "pinball"

    def __post_init__(self) -> None:
        levels = tuple(map(float, self.levels))
        if not levels or not all(low < high for low, high in pairwise((0.0, *levels, 1.0))):
            raise MisconfigurationException(
                f"task.levels={list(levels)} must be rising numbers between 0 and 1, such as [0.1, 0.5, 0.9]."
            )
        object.__setattr__(self, "levels", levels)
        super().__post_init__()

    @property
    def outputs(self) -> int:
        """Number of quantities times levels."""
        return self.quantities * len(self.levels)

    def errors(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Return the pinball losses ``[n, quantities, levels]``.

        Args:
            outputs: the net's outputs ``[n, quantities * levels]``.
            target: ``[n]`` or ``[n, quantities]``.
        """
        predicted = outputs.reshape(-1, self.quantities, len(self.levels))
        gap = target.reshape(len(outputs), self.quantities, 1).to(outputs.dtype) - predicted
        levels = gap.new_tensor(self.levels)
        return torch.maximum(levels * gap, (levels - 1) * gap)

    def loss(self, outputs: Tensor, target: Tensor, reduction: Reduction = "mean") -> Tensor:
        """Return the pinball loss; see `Task.loss`."""
        errors = self.errors(outputs, target)
        return errors.mean() if reduction == "mean" else errors.sum() / self.outputs

    def middle(self, outputs: Tensor) -> Tensor:
        """Return the outputs of the level nearest to 0.5 ``[n, quantities]``."""
        nearest = min(range(len(self.levels)), key=lambda k: abs(self.levels[k] - 0.5))
        return outputs[:, nearest :: len(self.levels)]

    def configure_metrics(self) -> MetricCollection:
        """Return ``pinball``, the mean loss, ``mae`` of the middle level, and ``coverage`` with two levels or more."""
        made: dict[str, Metric | MetricCollection] = {"pinball": Pinball(self), "mae": AbsoluteError(self.middle)}
        return MetricCollection(made | ({"coverage": Coverage(self)} if len(self.levels) > 1 else {}))

    def pooled(self) -> dict[str, Metric]:
        """Return nothing: all metrics are means over samples."""
        return {}

    def check_outputs(self, outputs: Tensor, target: Tensor, net: str) -> None:
        """Refuse all outputs but one value per sample, quantity and level."""
        check_shape(outputs, [len(target), self.outputs], net, self)


class Pinball(Ratio):
    """Mean pinball loss over samples, quantities and levels.

    Args:
        task: the task, for its levels.
    """

    higher_is_better = False

    def __init__(self, task: Quantile) -> None:
        super().__init__(torch.float32)
        self.task = task

    def update(self, outputs: Tensor, target: Tensor) -> None:
        """Add samples; see `AbsoluteError.update`."""
        errors = self.task.errors(outputs, target)
        self.total += errors.sum()
        self.count += errors.numel()


class Coverage(Ratio):
    """Share of targets between the outermost levels.

    Args:
        task: the task, for its levels.
    """

    # too much is as wrong as too little, so that no direction is better
    higher_is_better = None

    def __init__(self, task: Quantile) -> None:
        super().__init__(torch.float32)
        self.task = task

    def update(self, outputs: Tensor, target: Tensor) -> None:
        """Add samples; see `AbsoluteError.update`."""
        predicted = outputs.reshape(-1, self.task.quantities, len(self.task.levels))
        y = target.reshape(len(outputs), self.task.quantities)
        inside = (predicted[..., 0] <= y) & (y <= predicted[..., -1])
        self.total += inside.sum()
        self.count += inside.numel()
