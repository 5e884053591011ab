"""Evaluation of clients: of one, and of the outputs of many at once."""

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
from pfl_lightning.messages import StateDict, tensors
from pfl_lightning.nets.modes import kept_modes
from pfl_lightning.tasks import Classification, Task

PADDING = -100
"""Target of what is no sample; cross-entropy leaves it out."""
POOLED = "_pooled"
"""Ends the name of a metric of all clients' samples, of which a client has a share."""
OUTPUTS = 2**24
"""Numbers that a net may put out at once in an evaluation: 64 MiB in single precision."""

CURVES = (BinaryPrecisionRecallCurve, MulticlassPrecisionRecallCurve, MultilabelPrecisionRecallCurve)
"""What AUROC, average precision and other areas under curves of torchmetrics derive from."""
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
"""Agreement beyond chance, of which targets of a single class tell nothing."""


def metrics_of(module: ClientModule) -> MetricCollection:
    """The metrics of a client module, on its device, with those that are pooled.

    A single metric is named after its class, as `MetricCollection` does, and an accuracy ``acc``.

    Args:
        module: the client module.

    Raises:
        MisconfigurationException: if its ``configure_metrics`` gives something else.
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
    if pooled := module.task.pooled():
        made.add_metrics({name + POOLED: metric for name, metric in pooled.items()})
    return made.to(module.device)


def computed(metrics: MetricCollection) -> dict[str, Any]:
    """Return the values of metrics by name, and the states of pooled ones.

    A value is of the classes for which it is defined; see `defined`.

    Raises:
        MisconfigurationException: if one isn't a number.
    """
    values = dict(metrics.compute())
    for name, metric in metrics.items(copy_state=False):
        if name in values:
            values[name] = defined(metric, values[name])
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
    """Return the value of a metric over those classes for which samples define it; NaN where there is none.

    torchmetrics gives 0 for a class that no sample has, or that all have, and takes it into the mean over classes. Here
    an average precision needs a sample of its class, and any other area under a curve, such as AUROC, one of another
    class as well; a mean is over the classes that have what is needed. Cohen's kappa and Matthews' correlation need
    samples of two classes. Other metrics, and those with a ``compute`` of their own, are left as they are.

    Args:
        metric: a metric to which samples have been added.
        value: its value, or its values of all classes ``[classes]``.
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
    metric.average = None
    # the class's own, as the object's remembers its result
    of_classes = cast(Any, type(metric)).compute(metric)[known]
    metric.average = average
    weights = counts[known, 1] if average == "weighted" else torch.ones_like(of_classes)
    return (of_classes * weights).sum() / weights.sum()


def occurrences(metric: Metric) -> Tensor:
    """Return how many samples don't have each class, and how many do, ``[classes, 2]``.

    Args:
        metric: one of `CURVES`; where it is of two classes, there is one row.
    """
    if metric.thresholds is not None:
        counts: Tensor = metric.confmat[0].sum(-1)  # type: ignore[index]
        return counts.view(-1, 2)
    target = dim_zero_cat(metric.target)
    if isinstance(metric, MulticlassPrecisionRecallCurve):
        having = torch.bincount(target, minlength=metric.num_classes)
        return torch.stack([len(target) - having, having], 1)
    target = target.reshape(len(target), -1)
    return torch.stack([(target == 0).sum(0), (target == 1).sum(0)], 1)


def measured_names(metrics: MetricCollection) -> list[str]:
    """Names of the metrics that each client has a value of, without those that are pooled."""
    return [str(name) for name in metrics if not str(name).endswith(POOLED)]


def own_values(values: Mapping[str, Any]) -> dict[str, float]:
    """A client's values, without what it adds to metrics of all samples.

    >>> own_values({"mae": 0.5, "r2_pooled": {"count": torch.tensor(3)}})
    {'mae': 0.5}
    """
    return {name: value for name, value in values.items() if not name.endswith(POOLED)}


def state_of(metric: Metric) -> StateDict:
    """What samples have added to a metric, on the CPU."""
    return {name: getattr(metric, name).detach().cpu() for name in metric._defaults}


def pooled_value(metric: Metric, states: Iterable[Mapping[str, Tensor]]) -> float:
    """A metric of all the samples that have been added to some.

    Args:
        metric: one of a task's `Task.pooled`; left as new.
        states: what clients' samples add to it, as `evaluate` gives it.
    """
    states = list(states)
    metric.reset()
    for name in metric._defaults:
        setattr(metric, name, torch.stack([state[name] for state in states]).sum(0).to(metric.device))
    # without it torchmetrics warns that nothing was added
    metric._update_count = len(states)
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
    """Metrics of a client module on samples of a client.

    Args:
        module: the module in the state to look at; left in training mode or not as it was.
        samples: on the module's device, at least one.
        metrics: what to compute on outputs and targets, besides the task's mean ``loss``.
        forward_context: gives the context for a forward pass.

    Returns:
        Values by name; under ``NAME_pooled`` what the samples add to a metric of all clients' samples.
    """
    task = module.task
    metrics.reset()
    losses = []
    with kept_modes(module) if module.training else nullcontext():
        # engines have done so, and it would take as long as a small net's outputs
        if module.training:
            module.eval()
        for x, target in samples.chunks(rows_at_once(task, samples.y)):
            with forward_context():
                outputs = module(x)
            outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
            metrics.update(outputs, target)
            losses.append(task.loss(outputs, target, "sum"))
    return computed(metrics) | {"loss": mean_of(torch.stack(losses).sum(), task.weight(samples.y))}


def rows_at_once(task: Task, target: Tree) -> int:
    """Samples whose outputs may be in memory at once: `CHUNK`, or fewer where each has many positions and outputs.

    >>> from pfl_lightning.tasks import Classification, NextToken
    >>> rows_at_once(Classification(10), torch.zeros(5)), rows_at_once(NextToken(32_000), torch.zeros(5, 512))
    (1024, 1)
    """
    positions = next(tensors(target))[:1].numel()
    return max(1, min(CHUNK, OUTPUTS // (task.outputs * positions)))


def mean_of(total: Tensor, weight: int | Tensor) -> float:
    """A sum of errors over their number; NaN where there is none."""
    return float(total) / float(weight) if weight else math.nan


@torch.no_grad()
def evaluate_padded(
    outputs: Tensor, targets: Sequence[Tree], metrics: MetricCollection, task: Task
) -> list[dict[str, float]]:
    """What `evaluate` says of several clients, from their outputs.

    Args:
        outputs: ``[clients, n, ...]``.
        targets: of each client's samples, of which there is at least one.
        metrics: what to compute on outputs and targets, besides the task's mean ``loss``.
        task: what is predicted.

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
    # what it takes for many clients at once is known here
    y = pad_sequence(list(targets), batch_first=True, padding_value=PADDING)
    flat = F.cross_entropy(outputs.flatten(0, 1), y.flatten(), ignore_index=PADDING, reduction="none")
    losses = [loss / size for loss, size in zip(flat.view_as(y).sum(1).tolist(), sizes, strict=True)]
    values: Iterable[dict[str, float]]
    if is_accuracy(metrics):
        right = (outputs.argmax(-1) == y).sum(1).float() / torch.tensor(sizes, device=y.device)
        values = [{"acc": accuracy} for accuracy in right.tolist()]
    else:
        values = (computed_on(metrics, *of_one) for of_one in of_clients)
    return [value | {"loss": loss} for value, loss in zip(values, losses, strict=True)]


def is_accuracy(metrics: MetricCollection) -> bool:
    """Whether metrics are the share of right ones and no more, which can be counted for many clients at once."""
    if list(metrics) != ["acc"] or type(metric := metrics["acc"]) is not MulticlassAccuracy:
        return False
    plain = metric.average == "micro" and metric.multidim_average == "global" and metric.ignore_index is None
    return plain and metric.top_k == 1


def computed_on(metrics: MetricCollection, outputs: Tensor, targets: Tree) -> dict[str, float]:
    """What metrics come to on the samples of one client."""
    metrics.reset()
    metrics.update(outputs, targets)
    return computed(metrics)
