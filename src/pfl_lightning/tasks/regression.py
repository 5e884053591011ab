"""Regression: one or several quantities per sample."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import Metric, MetricCollection

from pfl_lightning.tasks.base import Ratio, Reduction, Task, check_shape


@dataclass(frozen=True)
class Regression(Task):
    """Quantities of a sample: squared error, with ``mae``, which selects, and ``r2``.

    Targets are floating, ``[n]`` or ``[n, quantities]``; outputs are ``[n, quantities]``.

    Args:
        quantities: number of quantities per sample.
    """

    quantities: int = 1

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
        shape = list(target.shape[1:])
        fits = shape == [self.quantities] or (shape == [] and self.quantities == 1)
        if not target.is_floating_point() or not fits:
            raise MisconfigurationException(
                f"{owner} has {target.dtype} targets of shape {list(target.shape)}; task {self} takes "
                f"{self.quantities} floating number{'s' * (self.quantities > 1)} a sample"
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
