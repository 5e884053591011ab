"""Check a site's metrics: names known from the task and the method, values within each metric's range."""

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
from pfl_lightning.messages import StateDict, tensors
from pfl_lightning.tasks import NextToken, Preference, Segmentation

LARGEST = 1e100
"""Largest size of a number: above sums of squares in single precision, and small enough for sums over clients."""
COUNTED = 1 << 48
"""Largest integer in the state of a pooled metric: 2^31 samples with 2^17 positions each."""
TOLERANCE = 1e-6
"""Largest distance of a value from the metric's range, for rounding."""
NAMED = 3
"""Number of metrics named in a warning; further ones are counted."""

Range = tuple[float, float]
ANY: Range = (-LARGEST, LARGEST)


class Measured:
    """Names, ranges and states of the metrics of a method's clients.

    Args:
        module: the client module, with the metrics in ``configure_metrics``, the task and `ClientModule.logs`.
    """

    def __init__(self, module: ClientModule) -> None:
        self.module = module
        self.metrics = metrics_of(module)
        self.like: dict[str, StateDict] = {
            str(name): state_of(metric) for name, metric in self.metrics.items() if str(name).endswith(POOLED)
        }
        self.ranges = self._ranges() | {"loss": ANY}
        """Smallest and largest value of each metric of an evaluation, by name, in the order of the record."""

    @torch.no_grad()
    def _ranges(self) -> dict[str, Range]:
        """Return the range of each metric by name, found by computing the metrics of a few made-up outputs."""
        # a metric with several values, such as one per class, names the values only when computed
        task = self.module.task
        # the smallest inputs of each kind: two tokens, or 2 x 2 pixels
        channels = task.outputs if task.reconstructs else 1
        shape = {NextToken: (2,), Preference: (2, 2)}.get(type(task), (channels, 2, 2))
        target = Sketch(task, shape).parts([0], "val")[0].take(slice(2)).y
        by_position = isinstance(task, (NextToken, Preference))
        first = next(tensors(target))
        sizes = first.shape if by_position else first.shape[:1]
        places = first.shape[-2:] if isinstance(task, Segmentation) or task.reconstructs else ()
        ranges: dict[str, Range] = {}
        try:
            with warnings.catch_warnings():
                # torchmetrics warns of classes without samples, and two samples can't have all classes
                warnings.simplefilter("ignore")
                self.metrics.update(torch.zeros(*sizes, task.outputs, *places), target)
                for name in computed(self.metrics):
                    ranges[name] = self._range_of(name)
        # a user's own task may have other targets than the sketch; the record then lacks metrics with several values
        except Exception:
            ranges = {str(name): range_of(metric) for name, metric in self.metrics.items()}
        self.metrics.reset()
        return ranges

    def _range_of(self, name: str) -> Range:
        for key, metric in self.metrics.items(copy_state=False):
            inner = metric.metric if isinstance(metric, ClasswiseWrapper) else metric
            # a wrapper has no range; the wrapped metric has one for all classes
            if name == key or (inner is not metric and name in metric.compute()):
                return range_of(inner)
        return ANY

    def trained(self, numbers: Mapping[str, float]) -> tuple[dict[str, float], list[str]]:
        """Return the acceptable means of a client's training for the record, NaN for impossible values.

        Args:
            numbers: the site's numbers, by name.

        Returns:
            The means, and descriptions of refused numbers.
        """
        allowed = type(self.module).logs | (self.module.requested & self.module.tells)
        wrong = unknown(numbers, allowed, f"that {type(self.module).__name__} doesn't name in its `logs`")
        # an unknown name could stand for another column of the record, such as the loss
        metrics = {name: bounded(name, value, ANY, wrong) for name, value in numbers.items() if name in allowed}
        return {name: math.nan if value is None else value for name, value in metrics.items()}, wrong

    def evaluated(
        self, answer: Any, splits: Collection[str], where: str
    ) -> tuple[dict[str, dict[str, float]], list[str]]:
        """Return the acceptable metrics of a client's evaluation for the record, NaN for impossible values.

        Args:
            answer: the site's metrics by split, not checked yet.
            splits: the requested splits with samples of the client.
            where: the record's name, for error texts.

        Returns:
            Metrics by split, in the order of a local evaluation, and descriptions of refused metrics.

        Raises:
            Refused: if ``answer`` isn't metrics by split, or a metric is neither a float nor a state of the right
                shape.
        """
        check_type(answer, dict, where)
        # a method that adapts before an evaluation is also measured as received
        adapted = overrides(self.module, "evaluation_phases")
        wanted = [*splits, *(f"{split}_received" for split in splits if adapted)]
        wrong = unknown(answer, wanted, "that nobody has asked for")
        metrics = {}
        for split in wanted:
            if split in answer:
                metrics[split] = self._of_split(answer[split], split, f"{where}.{split!r}", wrong)
        return metrics, wrong

    def _of_split(self, values: Any, split: str, where: str, wrong: list[str]) -> dict[str, Any]:
        check_type(values, dict, where)
        wrong += unknown(values, self.ranges, "that the task doesn't have")
        metrics: dict[str, Any] = {}
        for name, span in self.ranges.items():
            if name not in values:
                wrong.append(f"{split}/{name}, which is missing")
            # pooled metrics travel as states; a mean of clients' values would be another number
            if name in self.like:
                if name in values and self._adds(name, values[name], split, where, wrong):
                    metrics[name] = values[name]
                continue
            value = None
            if name in values:
                check_type(values[name], float, f"{where}.{name}")
                value = bounded(f"{split}/{name}", values[name], span, wrong, or_nan=True)
            metrics[name] = math.nan if value is None else value
        return metrics

    def _adds(self, name: str, state: StateDict, split: str, where: str, wrong: list[str]) -> bool:
        """Return True for an acceptable state of a pooled metric, with sums and a value within their ranges."""
        check(state, self.like[name], where=f"{where}.{name}")
        if not all(map(is_addend, state.values())):
            wrong.append(f"{split}/{name}, which has sums that can't be")
            return False
        value, _ = pooled_value(self.metrics[name], [state])
        return bounded(f"{split}/{name}", value, self.ranges[name], wrong, or_nan=True) is not None


def is_addend(tensor: Tensor) -> bool:
    """Return True for a possible addend to a metric's state: counts from 0 to `COUNTED`, sums up to `LARGEST`."""
    if tensor.is_floating_point():
        return bool((tensor.abs() <= LARGEST).all())
    return bool(((tensor >= 0) & (tensor <= COUNTED)).all())


def bounded(name: str, value: float, span: Range, wrong: list[str], or_nan: bool = False) -> float | None:
    """Return a value within a range; None for a value outside.

    Args:
        name: the metric's name.
        value: the metric's value.
        span: smallest and largest value, widened by `TOLERANCE` for rounding.
        wrong: list of descriptions; a value outside adds one.
        or_nan: True to accept NaN, the value of an undefined metric.
    """
    low, high = span
    if low - TOLERANCE <= value <= high + TOLERANCE or (or_nan and math.isnan(value)):
        return value
    wrong.append(f"{name}={value:.3g}, which is none of {low:g} to {high:g}")
    return None


def unknown(given: Iterable[Any], allowed: Collection[str], why: str) -> list[str]:
    """Return one description of all unknown names in a list; an empty list without unknown names."""
    names = [name for name in given if name not in allowed]
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return [f"{shown(names[0])}{more} {why}"] if names else []


def range_of(metric: Metric) -> Range:
    """Return the smallest and the largest value of a metric.

    The bounds of plots in torchmetrics are no ranges: a hinge loss has an upper bound of 1. Classification metrics of
    torchmetrics have shares from 0 to 1 where more is better, and measures of agreement beyond chance go from -1 to 1.
    A user's own class gives the range by ``plot_lower_bound`` and ``plot_upper_bound``.

    Args:
        metric: the metric.
    """
    if isinstance(metric, AGREEMENTS):
        return -1.0, 1.0
    # the class with the bound decides, as a subclass of a user's own may have set it
    owner = next((kind for kind in type(metric).__mro__ if vars(kind).get("plot_lower_bound") is not None), object)
    shares = owner.__module__.startswith("torchmetrics.classification.") and metric.higher_is_better
    if owner.__module__.startswith("torchmetrics.") and not shares:
        return ANY
    low, high = metric.plot_lower_bound, metric.plot_upper_bound
    return -LARGEST if low is None else low, LARGEST if high is None else high
