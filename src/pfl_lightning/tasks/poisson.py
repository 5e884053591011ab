"""Poisson regression: counts whose logarithm of the mean is predicted."""

from dataclasses import dataclass

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from pfl_lightning.tasks.base import Ratio, Reduction, log_mean
from pfl_lightning.tasks.regression import AbsoluteError, Regression


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
