"""Quantile regression: several quantiles of each quantity."""

from dataclasses import dataclass
from itertools import pairwise

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from pfl_lightning.tasks.base import Ratio, Reduction, check_shape
from pfl_lightning.tasks.regression import AbsoluteError, Regression


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
        predicted = outputs.unflatten(1, (self.quantities, len(self.levels)))
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
        made: dict[str, Metric] = {"pinball": Pinball(self), "mae": AbsoluteError(self.middle)}
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
        predicted = outputs.unflatten(1, (self.task.quantities, len(self.task.levels)))
        y = target.reshape(len(outputs), self.task.quantities)
        inside = (predicted[..., 0] <= y) & (y <= predicted[..., -1])
        self.total += inside.sum()
        self.count += inside.numel()
