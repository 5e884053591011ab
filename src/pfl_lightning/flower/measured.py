"""Which metrics a site may tell: those that the task and the method have, as numbers that they can be."""

import math
import warnings
from collections.abc import Collection, Iterable, Mapping
from reprlib import repr as shown
from typing import Any

import torch
from torch import Tensor
from torchmetrics import ClasswiseWrapper, Metric

from pfl_lightning.client import ClientModule
from pfl_lightning.client.hooks import overrides
from pfl_lightning.engines.evaluation import AGREEMENTS, POOLED, computed, metrics_of, pooled_value, state_of
from pfl_lightning.flower.sketch import Sketch
from pfl_lightning.flower.template import check, check_type
from pfl_lightning.messages import StateDict
from pfl_lightning.tasks import NextToken, Segmentation

LARGEST = 1e100
"""What a number is at most; sums of squares of single precision stay below it, and sums over clients stay finite."""
COUNTED = 1 << 48
"""What an integer of a pooled metric's state is at most: 2^31 samples, of 2^17 positions each."""
TOLERANCE = 1e-6
"""How far rounding may take a metric out of its range."""
NAMED = 3
"""Metrics that a sentence about others is told of."""

Range = tuple[float, float]
ANY: Range = (-LARGEST, LARGEST)


class Measured:
    """The metrics that clients of a method should have.

    Args:
        module: the client module, whose ``configure_metrics``, task and `ClientModule.logs` say which.
    """

    def __init__(self, module: ClientModule) -> None:
        self.module = module
        self.metrics = metrics_of(module)
        self.like: dict[str, StateDict] = {
            str(name): state_of(metric) for name, metric in self.metrics.items() if str(name).endswith(POOLED)
        }
        self.ranges = self._ranges() | {"loss": ANY}
        """The smallest and the largest value of each metric of an evaluation, by name, in the order of the record."""

    @torch.no_grad()
    def _ranges(self) -> dict[str, Range]:
        """By what metrics say of a few outputs: only so it is known what a metric with several values calls them."""
        task = self.module.task
        shape = (2,) if isinstance(task, NextToken) else (1, 2, 2)
        target = Sketch(task, shape).parts([0], "val")[0].y[:2]
        sizes = target.shape if isinstance(task, NextToken) else target.shape[:1]
        places = target.shape[1:] if isinstance(task, Segmentation) else ()
        ranges: dict[str, Range] = {}
        try:
            with warnings.catch_warnings():
                # that two samples have not all classes
                warnings.simplefilter("ignore")
                self.metrics.update(torch.zeros(*sizes, task.outputs, *places), target)
                for name in computed(self.metrics):
                    ranges[name] = self._range_of(name)
        # a task of a user's own may have targets of any kind
        except Exception:
            ranges = {str(name): range_of(metric) for name, metric in self.metrics.items()}
        self.metrics.reset()
        return ranges

    def _range_of(self, name: str) -> Range:
        for key, metric in self.metrics.items(copy_state=False):
            inner = metric.metric if isinstance(metric, ClasswiseWrapper) else metric
            if name == key or (inner is not metric and name in metric.compute()):
                return range_of(inner)
        return ANY

    def trained(self, found: Mapping[str, float]) -> tuple[dict[str, float], list[str]]:
        """Means of a client's training that may stand in the record, NaN in the place of impossible ones.

        Args:
            found: what its site told, numbers by name.

        Returns:
            The means, and what is wrong with others.
        """
        known = type(self.module).logs | (self.module.requested & self.module.tells)
        wrong = unknown(found, known, f"that {type(self.module).__name__} doesn't name in its `logs`")
        metrics = {name: bounded(name, value, ANY, wrong) for name, value in found.items() if name in known}
        return {name: math.nan if value is None else value for name, value in metrics.items()}, wrong

    def evaluated(
        self, found: Any, splits: Collection[str], where: str
    ) -> tuple[dict[str, dict[str, float]], list[str]]:
        """Metrics of a client's evaluation that may stand in the record, NaN in the place of impossible ones.

        Args:
            found: what its site told.
            splits: those that were asked for and of which the client has samples.
            where: the record's name, for the sentence.

        Returns:
            Metrics by split, in the order in which they are computed, and what is wrong with others.

        Raises:
            Refused: if it isn't metrics by split, or a metric isn't of its type.
        """
        check_type(found, dict, where)
        adapted = overrides(self.module, "evaluation_phases")
        wanted = [*splits, *(f"{split}_received" for split in splits if adapted)]
        wrong = unknown(found, wanted, "that nobody has asked for")
        metrics = {}
        for split in wanted:
            if split in found:
                metrics[split] = self._of_split(found[split], split, f"{where}.{split!r}", wrong)
        return metrics, wrong

    def _of_split(self, found: Any, split: str, where: str, wrong: list[str]) -> dict[str, Any]:
        check_type(found, dict, where)
        wrong += unknown(found, self.ranges, "that the task doesn't have")
        metrics: dict[str, Any] = {}
        for name, span in self.ranges.items():
            if name not in found:
                wrong.append(f"{split}/{name}, which is missing")
            if name in self.like:
                if name in found and self._adds(name, found[name], split, where, wrong):
                    metrics[name] = found[name]
                continue
            value = None
            if name in found:
                check_type(found[name], float, f"{where}.{name}")
                value = bounded(f"{split}/{name}", found[name], span, wrong, or_nan=True)
            metrics[name] = math.nan if value is None else value
        return metrics

    def _adds(self, name: str, state: StateDict, split: str, where: str, wrong: list[str]) -> bool:
        """Whether a client's samples can add a state to a metric of all clients' samples."""
        check(state, self.like[name], where=f"{where}.{name}")
        if not all(map(is_addend, state.values())):
            wrong.append(f"{split}/{name}, which has sums that can't be")
            return False
        value = pooled_value(self.metrics[name], [state])
        return bounded(f"{split}/{name}", value, self.ranges[name], wrong, or_nan=True) is not None


def is_addend(tensor: Tensor) -> bool:
    """Whether a tensor can be what samples add to a metric: counts of 0 to `COUNTED`, or sums of up to `LARGEST`."""
    if tensor.is_floating_point():
        return bool((tensor.abs() <= LARGEST).all())
    return bool(((tensor >= 0) & (tensor <= COUNTED)).all())


def bounded(name: str, value: float, span: Range, wrong: list[str], or_nan: bool = False) -> float | None:
    """A value that is in its range.

    Args:
        name: the metric's.
        value: its value.
        span: the range.
        wrong: gets a few words of one that isn't.
        or_nan: whether NaN, which says that a metric isn't defined, is in any range.

    Returns:
        The value; None if it is out of range.
    """
    low, high = span
    if low - TOLERANCE <= value <= high + TOLERANCE or (or_nan and math.isnan(value)):
        return value
    wrong.append(f"{name}={value:.3g}, which is none of {low:g} to {high:g}")
    return None


def unknown(found: Iterable[Any], known: Collection[str], why: str) -> list[str]:
    """A few words of names that aren't known, or none."""
    names = [name for name in found if name not in known]
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return [f"{shown(names[0])}{more} {why}"] if names else []


def range_of(metric: Metric) -> Range:
    """The smallest and the largest value of a metric.

    torchmetrics' bounds of plots are no ranges: those of a hinge loss end at 1. Of its classification metrics those of
    which more is better are shares, and agreement beyond chance is from -1 on; other classes say it by
    ``plot_lower_bound`` and ``plot_upper_bound``.

    Args:
        metric: the metric.
    """
    if isinstance(metric, AGREEMENTS):
        return -1.0, 1.0
    owner = next((kind for kind in type(metric).__mro__ if vars(kind).get("plot_lower_bound") is not None), object)
    shares = owner.__module__.startswith("torchmetrics.classification.") and metric.higher_is_better
    if owner.__module__.startswith("torchmetrics.") and not shares:
        return ANY
    low, high = metric.plot_lower_bound, metric.plot_upper_bound
    return -LARGEST if low is None else low, LARGEST if high is None else high
