"""Quantities."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import Metric, MetricCollection

from pfl_lightning.tasks.base import Reduction, Task, check_shape
from pfl_lightning.tasks.ratio import Ratio


@dataclass(frozen=True)
class Regression(Task):
    """Quantities of a sample: squared error, with ``mae``, which selects, and ``r2``.

    Targets are floating, ``[n]`` or ``[n, quantities]``; outputs are ``[n, quantities]``.

    Args:
        quantities: how many a sample has.
    """

    quantities: int = 1

    monitor = "mae"
    mode = "min"

    @property
    def outputs(self) -> int:
        """Quantities of a sample."""
        return self.quantities

    def loss(self, outputs: Tensor, target: Tensor, reduction: Reduction = "mean") -> Tensor:
        """Squared error, the mean over the quantities of a sample."""
        errors = F.mse_loss(outputs, target.view_as(outputs).to(outputs.dtype), reduction=reduction)
        return errors if reduction == "mean" else errors / self.quantities

    def metrics(self) -> MetricCollection:
        """``mae``, the mean absolute error, and ``r2``, the share of the variance that is explained."""
        return MetricCollection({"mae": AbsoluteError(), "r2": R2(self.quantities)})

    def pooled(self) -> dict[str, Metric]:
        """``r2`` of all clients' samples, whose variance is also that between clients."""
        return {"r2": R2(self.quantities)}

    def check(self, target: Tensor, owner: str) -> None:
        """Refuses all but finite floating quantities for each sample."""
        shape = list(target.shape[1:])
        fits = shape == [self.quantities] or (shape == [] and self.quantities == 1)
        if not target.is_floating_point() or not fits:
            raise MisconfigurationException(
                f"{owner} has {target.dtype} targets of shape {list(target.shape)}; task {self} takes "
                f"{self.quantities} floating number{'s' * (self.quantities > 1)} a sample"
            )
        if not target.isfinite().all():
            bad = int((~target.isfinite()).view(len(target), -1).any(1).sum())
            raise MisconfigurationException(f"{owner} has {bad} targets that are NaN or infinite; leave them out")

    def check_outputs(self, outputs: Tensor, target: Tensor, net: str) -> None:
        """Refuses all but each quantity of each sample."""
        check_shape(outputs, [len(target), self.quantities], net, self)


class AbsoluteError(Ratio):
    """Mean absolute error, over samples and their quantities."""

    higher_is_better = False

    def __init__(self) -> None:
        super().__init__(torch.float32)

    def update(self, outputs: Tensor, target: Tensor) -> None:
        """Adds samples.

        Args:
            outputs: of the net, ``[n, quantities]``.
            target: ``[n]`` or ``[n, quantities]``.
        """
        self.total += (outputs - target.view_as(outputs)).abs().sum()
        self.count += target.numel()


class R2(Metric):
    r"""Share of explained variance, :math:`1 - \sum (y - \hat y)^2 / \sum (y - \bar y)^2`, the mean over quantities.

    NaN for a single sample, and where all targets are equal.

    Args:
        quantities: how many a sample has.
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
            # in float64: the variance is a difference of two sums
            self.add_state(name, torch.zeros(quantities, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, outputs: Tensor, target: Tensor) -> None:
        """Adds samples; see `AbsoluteError.update`."""
        y, predicted = target.view_as(outputs).double(), outputs.double()
        self.errors += (y - predicted).square().sum(0)
        self.sums += y.sum(0)
        self.squares += y.square().sum(0)
        self.count += len(y)

    def compute(self) -> Tensor:
        """The mean over quantities."""
        variance = self.squares - self.sums.square() / self.count
        # what rounding leaves of a variance of nothing
        defined = variance > 1e-12 * self.squares
        share = 1 - self.errors / variance
        return torch.where(defined, share, torch.nan).mean()
