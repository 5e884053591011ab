"""Reconstruction: the target of a sample is its input, as for autoencoders."""

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import Metric, MetricCollection

from pfl_lightning.tasks.base import Ratio, Reduction, Task, check_shape, log_mean

Error = Literal["mse", "bce"]
"""Loss of a reconstruction: squared error, or binary cross-entropy."""


@dataclass(frozen=True)
class Reconstruction(Task):
    r"""The input of a sample as its target: squared error or cross-entropy, with ``mse``, which selects, and ``psnr``.

    Inputs are floating ``[n, channels, ...]``, such as images, and targets the same inputs as the net takes them,
    whatever targets the data load. With ``mse``, outputs o are the reconstruction :math:`\hat x`. With ``bce`` they are
    logits, :math:`\hat x = a + (b - a)\,\sigma(o)` for values from a to b, and the loss is the binary cross-entropy of
    :math:`(x - a) / (b - a)`. ``mse`` is the mean of :math:`(x - \hat x)^2` over all values of a client's samples, and
    ``psnr`` the peak signal-to-noise ratio :math:`10 \log_{10}((b - a)^2 / \text{mse})` in decibels.

    Args:
        channels: number of channels of an image, or of quantities of a vector.
        error: the loss, ``mse`` or ``bce``.
        values: smallest and largest value a and b of inputs: -1 and 1 of images from bytes.

    Raises:
        MisconfigurationException: if the loss is unknown, or the values aren't two rising numbers.
    """

    channels: int = 1
    error: Error = "mse"
    values: tuple[float, float] = (-1.0, 1.0)

    reconstructs = True
    monitor = "mse"
    mode = "min"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.error not in get_args(Error):
            raise MisconfigurationException(f"task.error={self.error!r} must be one of {', '.join(get_args(Error))}.")
        values = tuple(map(float, self.values))
        if len(values) != 2 or not -math.inf < values[0] < values[1] < math.inf:
            raise MisconfigurationException(
                f"task.values={list(values)} must be the smallest and the largest value of inputs, such as [-1, 1]."
            )
        # a tuple: a list would make the task unequal to itself read back from a checkpoint
        object.__setattr__(self, "values", values)

    @property
    def outputs(self) -> int:
        """Number of channels."""
        return self.channels

    def reconstructed(self, outputs: Tensor) -> Tensor:
        """Return reconstructions of the inputs ``[n, channels, ...]``.

        Args:
            outputs: the net's outputs.
        """
        if self.error == "mse":
            return outputs
        low, high = self.values
        return low + (high - low) * outputs.sigmoid()

    def loss(self, outputs: Tensor, target: Tensor, reduction: Reduction = "mean") -> Tensor:
        """Return the error, averaged over the values of a sample; see `Task.loss`."""
        target = target.to(outputs.dtype)
        if self.error == "mse":
            errors = F.mse_loss(outputs, target, reduction=reduction)
        else:
            low, high = self.values
            errors = F.binary_cross_entropy_with_logits(outputs, (target - low) / (high - low), reduction=reduction)
        # a sum over samples of means over values: `weight` counts samples, so that sum / weight is the mean
        return errors if reduction == "mean" else errors * (len(target) / target.numel())

    def combined(self, outputs: Tensor, shares: Tensor) -> Tensor:
        """Return the outputs of the mean reconstruction; see `Task.combined`."""
        if self.error == "mse":
            return super().combined(outputs, shares)
        return log_mean(F.logsigmoid(outputs), shares) - log_mean(F.logsigmoid(-outputs), shares)

    def configure_metrics(self) -> MetricCollection:
        """Return ``mse``, the mean squared error, and ``psnr``, the peak signal-to-noise ratio."""
        return MetricCollection({"mse": SquaredError(self), "psnr": PeakRatio(self)})

    def pooled(self) -> dict[str, Metric]:
        """Return ``psnr`` of all clients' samples, a logarithm, which no mean gives."""
        return {"psnr": PeakRatio(self)}

    def check(self, target: Any, owner: str) -> None:
        """Take any targets, which have no effect."""

    def check_outputs(self, outputs: Tensor, target: Any, net: str) -> None:
        """Refuse all outputs but one for each value of the inputs, and inputs that have no squared error."""
        if not isinstance(target, Tensor) or not target.is_floating_point():
            what = target.dtype if isinstance(target, Tensor) else f"type {type(target).__name__}"
            raise MisconfigurationException(
                f"task {self} reconstructs inputs that are one floating tensor, and the data's are of {what}; give "
                "images, volumes or quantities."
            )
        check_shape(outputs, list(target.shape), net, self)
        low, high = (float(bound) for bound in torch.aminmax(target))
        # beyond the range cross-entropy has no least value, so that training would diverge
        if self.error == "bce" and not self.values[0] <= low <= high <= self.values[1]:
            raise MisconfigurationException(
                f"task {self} takes inputs from {self.values[0]:g} to {self.values[1]:g}, and the data have values "
                f"from {low:g} to {high:g}; set task.values, or take task.error=mse."
            )

    def predictions(self, outputs: Tensor) -> dict[str, Tensor]:
        """Return the reconstructions as ``values``."""
        return {"values": self.reconstructed(outputs)}

    def row_errors(self, outputs: Tensor, x: Tensor) -> Tensor:
        """Return the mean squared error of each row's reconstruction ``[n]``.

        Args:
            outputs: the net's outputs.
            x: the inputs.
        """
        gaps = self.reconstructed(outputs) - x.to(outputs)
        return gaps.square().flatten(1).mean(1)


class SquaredError(Ratio):
    """Mean squared error of reconstructions over all values.

    Args:
        task: the task, for its reconstructions.
    """

    higher_is_better = False

    def __init__(self, task: Reconstruction) -> None:
        super().__init__(torch.float64)
        self.task = task

    def update(self, outputs: Tensor, target: Tensor) -> None:
        """Add samples.

        Args:
            outputs: the net's outputs ``[n, channels, ...]``.
            target: the inputs, of the same shape.
        """
        self.total += (self.task.reconstructed(outputs) - target).square().sum()
        self.count += target.numel()


class PeakRatio(SquaredError):
    """Peak signal-to-noise ratio of reconstructions in decibels; infinite without an error."""

    higher_is_better = True
    plot_lower_bound = None

    def compute(self) -> Tensor:
        """Return the ratio."""
        low, high = self.task.values
        return 10 * torch.log10((high - low) ** 2 / super().compute())
