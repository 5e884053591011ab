"""Evaluate a client, or the outputs of many clients at once."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torchmetrics import ClasswiseWrapper, Metric, MetricCollection
from torchmetrics.classification import (
    BinaryAccuracy,
    BinaryAveragePrecision,
    BinaryCohenKappa,
    BinaryMatthewsCorrCoef,
    BinaryPrecisionRecallCurve,
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassAveragePrecision,
    MulticlassCohenKappa,
    MulticlassMatthewsCorrCoef,
    MulticlassPrecisionRecallCurve,
    MultilabelAccuracy,
    MultilabelAUROC,
    MultilabelAveragePrecision,
    MultilabelMatthewsCorrCoef,
    MultilabelPrecisionRecallCurve,
)
from torchmetrics.utilities import dim_zero_cat

from pfl_lightning.client import ClientModule
from pfl_lightning.data import CHUNK, Samples
from pfl_lightning.data.trees import Tree, rows_in
from pfl_lightning.internals.of_torchmetrics import count_updates
from pfl_lightning.messages import StateDict, tensors
from pfl_lightning.nets.modes import kept_modes
from pfl_lightning.tasks import Classification, Task

PADDING = -100
"""Target of padding, which cross-entropy ignores."""
POOLED = "_pooled"
"""Suffix in the name of a metric over all clients' samples, to which each client adds a share."""
OUTPUTS = 2**24
"""Output values that a net may compute at once in an evaluation: 64 MiB in single precision."""

CURVES = (BinaryPrecisionRecallCurve, MulticlassPrecisionRecallCurve, MultilabelPrecisionRecallCurve)
"""Base classes of AUROC, average precision and other areas under curves in torchmetrics."""
PRECISIONS = (BinaryAveragePrecision, MulticlassAveragePrecision, MultilabelAveragePrecision)
MEANS = (MulticlassAUROC, MultilabelAUROC, MulticlassAveragePrecision, MultilabelAveragePrecision)
"""Means over classes of areas under curves."""
AGREEMENTS = (
    BinaryCohenKappa,
    BinaryMatthewsCorrCoef,
    MulticlassCohenKappa,
    MulticlassMatthewsCorrCoef,
    MultilabelMatthewsCorrCoef,
)
"""Agreement beyond chance, undefined for targets of a single class."""


def metrics_of(module: ClientModule) -> MetricCollection:
    """Return a client module's metrics, including pooled ones, on the module's device.

    A single metric is named after its class, as `MetricCollection` does, and an accuracy ``acc``.

    Args:
        module: the client module.

    Raises:
        MisconfigurationException: if ``configure_metrics`` returns anything but metrics.
    """
    made: object = module.configure_metrics()
    if isinstance(made, (BinaryAccuracy, MulticlassAccuracy, MultilabelAccuracy)):
        made = MetricCollection({"acc": made})
    elif isinstance(made, Metric):
        made = MetricCollection(made)
    if not isinstance(made, MetricCollection):
        raise MisconfigurationException(
            f"{type(module).__name__}.configure_metrics gives a {type(made).__name__}; "
            "return a torchmetrics.MetricCollection, or a single metric."
        )
    # Such as R², which isn't a mean of clients' values.
    if pooled := module.task.pooled():
        made.add_metrics({name + POOLED: metric for name, metric in pooled.items()})
    return made.to(module.device)


def computed(metrics: MetricCollection) -> dict[str, Any]:
    """Return the values of metrics by name, and the states of pooled ones.

    A mean over classes covers only classes with a defined value; see `defined`.

    Raises:
        MisconfigurationException: if a value isn't a number.
    """
    values = dict(metrics.compute())
    for name, metric in metrics.items(copy_state=False):
        if name in values:
            values[name] = defined(metric, values[name])
        # The wrapper names each class's value itself, so look its names up to correct the values.
        elif isinstance(metric, ClasswiseWrapper):
            names = [key if key in values else f"{name}_{key}" for key in metric.compute()]
            of_classes = defined(metric.metric, torch.stack([values[key] for key in names]))
            values |= zip(names, of_classes, strict=True)
    states = {name: state_of(metric) for name, metric in metrics.items() if name.endswith(POOLED)}
    values = own_values(values)
    for name, value in values.items():
        if not isinstance(value, Tensor) or value.numel() != 1:
            found = f"values of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise MisconfigurationException(
                f"configure_metrics: {name} gives {found} and not a number; take its average, or wrap it in "
                "torchmetrics.ClasswiseWrapper, which names the value of each class."
            )
    return {name: float(value) for name, value in values.items()} | states


def defined(metric: Metric, value: Any) -> Any:
    """Return a metric's value over the classes with enough samples, or NaN without such a class.

    torchmetrics gives 0 for a class that no sample has, or all samples have, and includes the 0 in the mean over
    classes. Here an average precision needs a sample of the class; any other area under a curve, such as AUROC, also
    needs a sample of another class; a mean covers the classes that fulfil this. Cohen's kappa and Matthews' correlation
    need samples of two classes. Other metrics, and metrics with a ``compute`` of their own, are unchanged.

    Args:
        metric: a metric updated with samples.
        value: the metric's value, or the values of all classes ``[classes]``.
    """
    if not isinstance(value, Tensor) or not type(metric).compute.__module__.startswith("torchmetrics."):
        return value
    nan = torch.full(value.shape, torch.nan)
    if isinstance(metric, AGREEMENTS):
        confusion = metric.confmat.flatten(0, -3).sum(0) if metric.confmat.dim() > 2 else metric.confmat
        return value if (confusion.sum(1) > 0).sum() > 1 else nan
    if not isinstance(metric, CURVES):
        return value
    counts = occurrences(metric)
    average = getattr(metric, "average", None)
    if average == "micro":
        counts = counts.sum(0, keepdim=True)
    known = counts[:, 1] > 0 if isinstance(metric, PRECISIONS) else (counts > 0).all(1)
    if known.all():
        return value
    if value.numel() == len(known):
        return value.masked_fill(~known.view_as(value), torch.nan)
    if not isinstance(metric, MEANS):
        return nan
    # Recompute without the mean to get each class's value.
    metric.average = None
    # The class's method, since the object's caches its result.
    of_classes = cast(Any, type(metric)).compute(metric)[known]
    metric.average = average
    weights = counts[known, 1] if average == "weighted" else torch.ones_like(of_classes)
    return (of_classes * weights).sum() / weights.sum()


def occurrences(metric: Metric) -> Tensor:
    """Return the number of samples without and with each class, ``[classes, 2]``.

    Args:
        metric: one of `CURVES`; a binary metric gives a single row.
    """
    if metric.thresholds is not None:
        # Summed over predictions, the confusion matrix at any threshold gives the samples without and with each class.
        counts: Tensor = metric.confmat[0].sum(-1)  # type: ignore[index]
        return counts.view(-1, 2)
    target = dim_zero_cat(metric.target)
    if isinstance(metric, MulticlassPrecisionRecallCurve):
        having = torch.bincount(target, minlength=metric.num_classes)
        return torch.stack([len(target) - having, having], 1)
    target = target.reshape(len(target), -1)
    return torch.stack([(target == 0).sum(0), (target == 1).sum(0)], 1)


def measured_names(metrics: MetricCollection) -> list[str]:
    """Return the names of metrics with a value per client, without pooled metrics."""
    return [str(name) for name in metrics if not str(name).endswith(POOLED)]


def own_values(values: Mapping[str, Any]) -> dict[str, float]:
    """Return a client's own values, without states of pooled metrics.

    >>> own_values({"mae": 0.5, "r2_pooled": {"count": torch.tensor(3)}})
    {'mae': 0.5}
    """
    return {name: value for name, value in values.items() if not name.endswith(POOLED)}


def state_of(metric: Metric) -> StateDict:
    """Return the accumulated state of a metric, on the CPU."""
    return {name: getattr(metric, name).detach().cpu() for name in metric.metric_state}


def pooled_value(metric: Metric, states: Iterable[Mapping[str, Tensor]]) -> float:
    """Return a metric's value over all samples of several accumulated states.

    Args:
        metric: one of `Task.pooled`; reset afterwards.
        states: the clients' states, as returned by `evaluate`.
    """
    states = list(states)
    metric.reset()
    for name in metric.metric_state:
        setattr(metric, name, torch.stack([state[name] for state in states]).sum(0).to(metric.device))
    count_updates(metric, len(states))
    value = float(metric.compute())
    metric.reset()
    return value


@torch.no_grad()
def evaluate(
    module: ClientModule,
    samples: Samples,
    metrics: MetricCollection,
    forward_context: Callable[[], AbstractContextManager[None]],
) -> dict[str, float]:
    """Return a client module's metrics on a client's samples.

    Args:
        module: the module in its current state; the training mode is restored afterwards.
        samples: at least one sample, on the module's device.
        metrics: the metrics of outputs and targets, besides the task's mean ``loss``.
        forward_context: returns the context for a forward pass.

    Returns:
        Values by name; under ``NAME_pooled`` the state of a metric over all clients' samples.
    """
    task = module.task
    metrics.reset()
    losses: list[Tensor] = []
    together: list[Tensor] = []
    with kept_modes(module) if module.training else nullcontext():
        # Engines have set evaluation mode already; eval() takes as long as a small net's forward pass.
        if module.training:
            module.eval()
        for x, target in samples.chunks(rows_at_once(task, samples.y)):
            with forward_context():
                outputs = module(x)
            outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
            metrics.update(outputs, target)
            if task.samples_meet:
                together.append(outputs)
            else:
                losses.append(task.loss(outputs, target, "sum"))
    if together:
        losses = [task.loss(torch.cat(together), samples.y, "sum")]
    return computed(metrics) | {"loss": mean_of(torch.stack(losses).sum(), task.weight(samples.y))}


def rows_at_once(task: Task, target: Tree) -> int:
    """Return the number of samples per forward pass: `CHUNK`, or fewer for samples with many positions and outputs.

    >>> from pfl_lightning.tasks import Classification, NextToken
    >>> rows_at_once(Classification(10), torch.zeros(5)), rows_at_once(NextToken(32_000), torch.zeros(5, 512))
    (1024, 1)
    """
    positions = next(tensors(target))[:1].numel()
    return max(1, min(CHUNK, OUTPUTS // (task.outputs * positions)))


def mean_of(total: Tensor, weight: int | Tensor) -> float:
    """Return a sum divided by a weight; NaN for a weight of 0."""
    return float(total) / float(weight) if weight else math.nan


@torch.no_grad()
def evaluate_padded(
    outputs: Tensor, targets: Sequence[Tree], metrics: MetricCollection, task: Task
) -> list[dict[str, float]]:
    """Return the results of `evaluate` for several clients, from their outputs.

    Args:
        outputs: outputs padded to the same number of samples, ``[clients, n, ...]``.
        targets: each client's targets, at least one.
        metrics: the metrics of outputs and targets, besides the task's mean ``loss``.
        task: the prediction task.

    Returns:
        Values by name, for each client.
    """
    outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
    sizes = [rows_in(target) for target in targets]
    of_clients = [(some[:size], target) for some, size, target in zip(outputs, sizes, targets, strict=True)]
    if type(task) is not Classification:
        sums = [(task.loss(*of_one, "sum"), task.weight(of_one[1])) for of_one in of_clients]
        losses = [mean_of(*of_one) for of_one in sums]
        return [computed_on(metrics, *of_one) | {"loss": loss} for of_one, loss in zip(of_clients, losses, strict=True)]
    # For classification, loss and accuracy of all clients take a few operations instead of several per client.
    y = pad_sequence(list(targets), batch_first=True, padding_value=PADDING)
    flat = F.cross_entropy(outputs.flatten(0, 1), y.flatten(), ignore_index=PADDING, reduction="none")
    losses = [loss / size for loss, size in zip(flat.view_as(y).sum(1).tolist(), sizes, strict=True)]
    values: Iterable[dict[str, float]]
    # torchmetrics would take many operations per client for the same number.
    if is_accuracy(metrics):
        right = (outputs.argmax(-1) == y).sum(1).float() / torch.tensor(sizes, device=y.device)
        values = [{"acc": accuracy} for accuracy in right.tolist()]
    else:
        values = (computed_on(metrics, *of_one) for of_one in of_clients)
    return [value | {"loss": loss} for value, loss in zip(values, losses, strict=True)]


def is_accuracy(metrics: MetricCollection) -> bool:
    """Return True if the only metric is plain accuracy, which can be counted for many clients at once."""
    if list(metrics) != ["acc"] or type(metric := metrics["acc"]) is not MulticlassAccuracy:
        return False
    plain = metric.average == "micro" and metric.multidim_average == "global" and metric.ignore_index is None
    return plain and metric.top_k == 1


def computed_on(metrics: MetricCollection, outputs: Tensor, targets: Tree) -> dict[str, float]:
    """Return metrics on the samples of one client."""
    metrics.reset()
    metrics.update(outputs, targets)
    return computed(metrics)
