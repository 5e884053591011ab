"""Evaluate a client, or the outputs of many clients at once."""

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from typing import Any, cast

import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.func import vmap
from torch.nn import functional as F
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
from pfl_lightning.contract.pairing import two_samples
from pfl_lightning.data import CHUNK, FederatedDataModule, Samples
from pfl_lightning.data.target_scale import TargetScale, undone_of_clients
from pfl_lightning.data.trees import Tree, joined, rows_in, shortened, take
from pfl_lightning.engines.client_metrics import Columns
from pfl_lightning.internals.of_torchmetrics import count_updates
from pfl_lightning.messages import StateDict, tensors, tree_map
from pfl_lightning.nets.lightning_net import Measurement, deferring
from pfl_lightning.nets.modes import kept_modes
from pfl_lightning.tasks import Classification, Task
from pfl_lightning.tasks.class_metrics import Area, Confusion
from pfl_lightning.tasks.own_loss import OwnLoss

POOLED = "_pooled"
"""Suffix in the name of a metric over all clients' samples, to which each client adds a share."""
ROWS = f"rows{POOLED}"
"""Name of each client's outputs and targets of single rows, where evaluations keep them."""
OUTPUTS = 2**20
"""Output values that a net may compute at once in an evaluation on a CPU: 4 MiB in single precision, of which metrics
make several copies."""
ON_GPU = 16
"""The same on a GPU, by this factor: few launches count more than memory there."""
COUNTS = 2**24
"""Numbers of confusions that metrics of several clients may hold at once."""

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


class Rows(Metric):
    """Keep outputs and targets of all rows, from which the score of each row follows."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("outputs", [], dist_reduce_fx="cat")
        self.add_state("target", [], dist_reduce_fx="cat")

    def update(self, outputs: Tensor, target: Tree) -> None:
        """Add some rows.

        Args:
            outputs: a net's outputs ``[n, ...]``.
            target: the rows' targets, ``[n, ...]`` or a tree.
        """
        # Targets in dicts or lists have no rows to score.
        if isinstance(target, Tensor):
            cast(list[Tensor], self.outputs).append(outputs)
            cast(list[Tensor], self.target).append(target)

    def compute(self) -> Tensor:
        """Return the number of rows."""
        return torch.tensor(sum(map(len, cast(list[Tensor], self.target))))


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
    if pooled := pooled_of(module):
        made.add_metrics({name + POOLED: metric for name, metric in pooled.items()})
    if module.keeps_rows:
        made.add_metrics({ROWS: Rows()})
    return made.to(module.device)


def pooled_of(module: ClientModule) -> dict[str, Metric]:
    """Return the metrics of all clients' samples by name; see `Task.pooled` and `ClientModule.sends_counts`.

    Args:
        module: the client module.
    """
    pooled = module.task.pooled()
    if not module.sends_counts:
        return pooled
    return {name: metric.by_counts() if isinstance(metric, Area) else metric for name, metric in pooled.items()}


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
    occurring = counts[:, 1] > 0 if isinstance(metric, PRECISIONS) else (counts > 0).all(1)
    if occurring.all():
        return value
    if value.numel() == len(occurring):
        return value.masked_fill(~occurring.view_as(value), torch.nan)
    if not isinstance(metric, MEANS):
        return nan
    # Recompute without the mean to get each class's value.
    metric.average = None
    # The class's method, since the object's caches its result.
    of_classes = cast(Any, type(metric)).compute(metric)[occurring]
    metric.average = average
    weights = counts[occurring, 1] if average == "weighted" else torch.ones_like(of_classes)
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


def measured_names(metrics: MetricCollection, pooled: bool = False) -> list[str]:
    """Return the names of metrics with a value per client.

    Args:
        metrics: the result of `metrics_of`.
        pooled: whether to return those of all clients' samples too, except where these have the name of the former.
    """
    return [
        str(name)
        for name, metric in metrics.items(copy_state=False)
        if not str(name).endswith(POOLED) or (pooled and not is_of_all(metric))
    ]


def is_of_all(metric: Metric | MetricCollection) -> bool:
    """Return True for a metric that is recorded of all clients' samples in place of a mean; see `Task.pooled`."""
    return bool(getattr(metric, "of_all", False))


def own_values(values: Mapping[str, Any]) -> dict[str, float]:
    """Return a client's own values, without states of pooled metrics.

    >>> own_values({"mae": 0.5, "r2_pooled": {"count": torch.tensor(3)}})
    {'mae': 0.5}
    """
    return {name: value for name, value in values.items() if not name.endswith(POOLED)}


def state_of(metric: Metric) -> StateDict:
    """Return the accumulated state of a metric, on the CPU."""
    states = {name: getattr(metric, name) for name in metric.metric_state}
    whole = {
        name: (torch.cat(state) if state else torch.empty(0)) if isinstance(state, list) else state
        for name, state in states.items()
    }
    return {name: state.detach().cpu() for name, state in whole.items()}


def pooled_value(metric: Metric, states: Iterable[Mapping[str, Tensor]]) -> tuple[float, float]:
    """Return a metric's value over all samples of several accumulated states, and its largest possible error.

    Args:
        metric: one of `pooled_of`; reset afterwards.
        states: the clients' states, as returned by `evaluate`.
    """
    states = list(states)
    metric.reset()
    for name, state in metric.metric_state.items():
        own = [each[name].to(metric.device) for each in states]
        setattr(metric, name, own if isinstance(state, list) else torch.stack(own).sum(0))
    count_updates(metric, len(states))
    value, error = float(metric.compute()), float(metric.error()) if isinstance(metric, Area) else 0.0
    metric.reset()
    return value, error


@torch.no_grad()
def evaluate(
    module: ClientModule,
    samples: Samples,
    metrics: MetricCollection,
    forward_context: Callable[[], AbstractContextManager[None]],
    split: str = "test",
    scale: TargetScale | None = None,
) -> dict[str, float]:
    """Return a client module's metrics on a client's samples, in the target's unit.

    Args:
        module: the module in its current state; the training mode is restored afterwards.
        samples: at least one sample, on the module's device.
        metrics: the metrics of outputs and targets, besides the task's mean ``loss``.
        forward_context: returns the context for a forward pass.
        split: the samples' split, for a LightningModule that measures itself, on standardised targets.
        scale: the scale of standardised targets; None where targets are as loaded.

    Returns:
        Values by name; under ``NAME_pooled`` the state of a metric over all clients' samples.
    """
    task = module.task
    own = own_values_of(module, samples, forward_context, split) if module.measures_itself else {}
    if isinstance(task, OwnLoss):
        return own
    metrics.reset()
    losses: list[Tensor] = []
    together: list[Tensor] = []
    with kept_modes(module) if module.training else nullcontext():
        # Engines have set evaluation mode already; eval() takes as long as a small net's forward pass.
        if module.training:
            module.eval()
        for piece in samples.chunks(rows_at_once(task, samples.y)):
            x, target = shortened(*piece, task.length(piece[1]))
            with forward_context():
                outputs = module(x)
            outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
            if scale is not None:
                outputs, target = scale.undone(outputs), scale.undone(target)
            metrics.update(outputs, target)
            if task.samples_meet:
                together.append(outputs)
            else:
                losses.append(task.loss(outputs, target, "sum"))
    if together:
        whole = samples.y if scale is None else scale.undone(samples.y)
        losses = [task.loss(torch.cat(together), whole, "sum")]
    return computed(metrics) | {"loss": mean_of(torch.stack(losses).sum(), task.weight(samples.y))} | own


def own_values_of(
    module: ClientModule, samples: Samples, forward_context: Callable[[], AbstractContextManager[None]], split: str
) -> dict[str, float]:
    """Return the values logged by a LightningModule in an evaluation of a client's samples, and the loss.

    Args:
        module: the client module, whose net is the LightningModule.
        samples: at least one sample.
        forward_context: returns the context for a forward pass.
        split: the samples' split.
    """
    place = module.place("validate" if split.startswith("val") else "test")
    measurement = Measurement(split, place)
    with kept_modes(module), deferring(module, place):
        module.eval()
        for index, (x, target) in enumerate(samples.chunks(CHUNK)):
            with forward_context():
                measurement.add(module(x), target, rows_in(target), index)
    return measurement.values()


def names_logged(module: ClientModule, data: FederatedDataModule) -> list[str]:
    """Return the names of the values logged by a LightningModule in a validation, by a trial on some samples.

    Args:
        module: the client module, whose net is the LightningModule; it stays as it is.
        data: the clients' data; one at sites gives no names.
    """
    if data.at_sites or not len(samples := two_samples(module, data)):
        return []
    # a copy, as the module's own code may count its steps
    with isolate_rng():
        return list(own_values_of(copy.deepcopy(module), samples, nullcontext, "val"))


def rows_at_once(task: Task, target: Tree) -> int:
    """Return the number of samples per forward pass: `CHUNK`, or fewer for samples with many positions and outputs.

    >>> from pfl_lightning.tasks import Classification, NextToken
    >>> rows_at_once(Classification(10), torch.zeros(5)), rows_at_once(NextToken(32_000), torch.zeros(5, 512))
    (1024, 1)
    """
    return min(CHUNK, rows_of_outputs(task, target))


def rows_of_outputs(task: Task, target: Tree) -> int:
    """Return the number of samples whose metrics may be computed at once, from outputs of several passes.

    >>> from pfl_lightning.tasks import Classification
    >>> [rows_of_outputs(Classification(classes), torch.zeros(5)) for classes in (10, 100, 5000)]
    [104857, 1677, 209]
    """
    some = next(tensors(target))
    limit = OUTPUTS if some.device.type == "cpu" else ON_GPU * OUTPUTS
    # targets of no numbers stand for none
    rows = limit // (task.outputs * max(1, some[:1].numel()))
    # a client has a sample at least, and confusions of its own
    return max(1, min(rows, max(CHUNK, COUNTS // task.outputs**2)))


def mean_of(total: Tensor, weight: int | Tensor) -> float:
    """Return a sum divided by a weight; NaN for a weight of 0."""
    return float(total) / float(weight) if weight else math.nan


@torch.no_grad()
def evaluate_outputs(
    outputs: Tensor,
    target: Tree,
    sizes: Sequence[int],
    metrics: MetricCollection,
    task: Task,
    scales: Sequence[TargetScale | None] = (),
) -> Columns:
    """Return the results of `evaluate` for several clients, from their outputs.

    Loss and metrics are sums over samples where possible, computed for all clients at once: in float64, so that they
    equal those of `evaluate` up to the rounding of single precision. Others are computed client by client.

    Args:
        outputs: outputs of all clients' samples, client after client, ``[n, ...]``.
        target: the samples' targets.
        sizes: number of samples of each client, at least one, of sum n.
        metrics: the metrics of outputs and targets, besides the task's mean ``loss``.
        task: the prediction task.
        scales: the scale of each client's targets; empty where all targets are as loaded.

    Returns:
        A column of the clients' values for each name.
    """
    outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
    if isinstance(target, Tensor):
        outputs, target = (undone_of_clients(each, scales, sizes) for each in (outputs, target))
    # by NumPy, which reads thousands of numbers several times as fast
    lengths = torch.from_numpy(np.array(sizes)).to(outputs.device)
    owners = torch.arange(len(sizes), device=outputs.device).repeat_interleave(lengths, output_size=len(outputs))
    columns: dict[str, list[Any]] = {}
    alone: dict[str, Metric | MetricCollection] = {}
    for name, metric in metrics.items(copy_state=False):
        if (values := values_at_once(str(name), metric, outputs, target, owners, lengths)) is None:
            alone[str(name)] = metric
        else:
            columns[str(name)] = values
    losses = losses_at_once(task, outputs, target, lengths)
    if alone or losses is None:
        of_clients = list(zip(split_by(outputs, sizes), split_by(target, sizes), strict=True))
        if alone:
            few = MetricCollection(alone)
            own = [computed_on(few, *of_one) for of_one in of_clients]
            columns |= {name: [values[name] for values in own] for name in own[0]}
        if losses is None:
            losses = [mean_of(task.loss(*of_one, "sum"), task.weight(of_one[1])) for of_one in of_clients]
    # The order of `computed`: states of pooled metrics last.
    places = {str(name): place for place, name in enumerate(metrics)}
    order = sorted(columns, key=lambda name: (name.endswith(POOLED), places.get(name, len(places))))
    return {name: columns[name] for name in order} | {"loss": losses}


def split_by(tree: Tree, sizes: Sequence[int]) -> list[Tree]:
    """Return the rows of each client, client after client.

    Args:
        tree: rows of all clients.
        sizes: number of rows of each client.
    """
    ends = list(accumulate(sizes))
    return [take(tree, slice(end - size, end)) for size, end in zip(sizes, ends, strict=True)]


def sums_of(values: Tensor, lengths: Tensor) -> Tensor:
    """Return the sums over each client's rows ``[clients, ...]``, in the type of the values.

    Args:
        values: a row for each sample, client after client.
        lengths: number of rows of each client.
    """
    # Apple's devices have no float64.
    wide = values if values.device.type == "mps" else values.double()
    # Not index_add, whose sums depend on the order of threads on a GPU.
    total = torch.segment_reduce(wide.flatten(1) if wide.dim() > 1 else wide, "sum", lengths=lengths, unsafe=True)
    return total.view(len(lengths), *values.shape[1:]).to(values.dtype)


def losses_at_once(task: Task, outputs: Tensor, target: Tree, lengths: Tensor) -> list[float] | None:
    """Return each client's mean loss; None if it isn't a sum over samples, or can't be computed at once.

    Args:
        task: the prediction task.
        outputs: outputs of all clients' samples.
        target: their targets.
        lengths: number of samples of each client.
    """
    if type(task) is Classification:
        errors, weights = F.cross_entropy(outputs, target, reduction="none"), lengths
    elif task.samples_meet:
        return None
    else:
        try:
            errors, each = vmap(lambda o, t: of_one_sample(task, o, t))(outputs, target)
        # Such as a loss that picks samples by their values; it is computed for each client.
        except RuntimeError:
            return None
        weights = sums_of(each, lengths)
    sums = sums_of(errors if errors.device.type == "mps" else errors.double(), lengths)
    total, weight = (np.array(each.tolist(), dtype=np.float64) for each in (sums, weights))
    # NaN for a weight of 0, as by `mean_of`
    return cast(list[float], np.divide(total, weight, out=np.full_like(total, np.nan), where=weight != 0).tolist())


def of_one_sample(task: Task, outputs: Tensor, target: Tree) -> tuple[Tensor, Tensor]:
    """Return the loss and the weight of one sample; arguments without the dimension of samples."""
    target = tree_map(lambda leaf: leaf[None], target)
    loss = task.loss(outputs[None], target, "sum")
    return loss, torch.as_tensor(task.weight(target), device=loss.device)


def values_at_once(
    name: str, metric: Metric | MetricCollection, outputs: Tensor, target: Tree, owners: Tensor, lengths: Tensor
) -> list[Any] | None:
    """Return a metric's value for each client, or its states if it is pooled; None if each client must be alone.

    Args:
        name: the metric's name.
        metric: the metric.
        outputs: outputs of all clients' samples.
        target: their targets.
        owners: the number of each sample's client.
        lengths: number of samples of each client.
    """
    clients, pooled = len(lengths), name.endswith(POOLED)
    kept = isinstance(metric, Rows) or (pooled and isinstance(metric, Area) and not metric.counting)
    if kept and isinstance(target, Tensor):
        sizes, both = lengths.tolist(), (outputs.detach().cpu(), target.detach().cpu())
        pairs = zip(*(torch.split(tensor, sizes) for tensor in both), strict=True)
        return [{"outputs": each.clone(), "target": its.clone()} for each, its in pairs]
    if is_accuracy(metric):
        right = sums_of((outputs.argmax(1) == target).long(), lengths)
        return cast(list[float], (right.float() / lengths).tolist())
    # Only this package's metrics are known to be sums over samples, or to compute clients at once.
    if not type(metric).__module__.startswith("pfl_lightning.") or not isinstance(metric, Metric):
        return None
    if isinstance(metric, Area):
        # Counts of a client are large, whatever its samples.
        return None if pooled else metric.values_of_clients(outputs, target, owners, clients).tolist()
    if isinstance(metric, Confusion):
        if clients * metric.num_classes**2 > COUNTS:
            return None
        states = metric.states_of_clients(outputs, target, owners, clients)
    elif (added := states_of_samples(metric, outputs, target)) is not None:
        states = {key: sums_of(state, lengths) for key, state in added.items()}
    else:
        return None
    if pooled:
        there = [state.detach().cpu().unbind() for state in states.values()]
        return [dict(zip(states, row, strict=True)) for row in zip(*there, strict=True)]
    try:
        return cast(list[float], vmap(lambda own: computed_from(metric, own))(states).tolist())
    except RuntimeError:
        return None


def states_of_samples(metric: Metric, outputs: Tensor, target: Tree) -> StateDict | None:
    """Return a metric's states after an update with each sample alone, ``[n, ...]``; None if they aren't sums.

    Args:
        metric: the metric; reset afterwards.
        outputs: outputs of the samples.
        target: their targets.
    """
    metric.reset()
    zeros = {name: getattr(metric, name) for name in metric.metric_state}
    if not all(isinstance(zero, Tensor) for zero in zeros.values()):
        return None

    def updated(states: StateDict, own: Tensor, its: Tree) -> StateDict:
        for name, state in states.items():
            setattr(metric, name, state)
        # The class's method, since the object's counts its calls.
        type(metric).update(metric, own[None], tree_map(lambda leaf: leaf[None], its))
        return {name: getattr(metric, name) for name in states}

    try:
        rows = {name: zero.expand(len(outputs), *zero.shape).clone() for name, zero in zeros.items()}
        return vmap(updated)(rows, outputs, target)
    except RuntimeError:
        return None
    finally:
        metric.reset()


def computed_from(metric: Metric, states: StateDict) -> Tensor:
    """Return a metric's value from a client's states."""
    for name, state in states.items():
        setattr(metric, name, state)
    value: Tensor = cast(Any, type(metric)).compute(metric)
    metric.reset()
    return value


@torch.no_grad()
def evaluate_padded(
    outputs: Tensor,
    targets: Sequence[Tree],
    metrics: MetricCollection,
    task: Task,
    scales: Sequence[TargetScale | None] = (),
) -> Columns:
    """Return the results of `evaluate_outputs` for outputs padded to the same number of samples.

    Args:
        outputs: outputs ``[clients, n, ...]``.
        targets: each client's targets, at least one.
        metrics: as for `evaluate_outputs`.
        task: the prediction task.
        scales: as for `evaluate_outputs`.
    """
    sizes = [rows_in(target) for target in targets]
    real = torch.arange(outputs.shape[1]) < torch.tensor(sizes)[:, None]
    (target,) = joined([(target,) for target in targets])
    return evaluate_outputs(outputs[real.to(outputs.device)], target, sizes, metrics, task, scales)


def is_accuracy(metric: Any) -> bool:
    """Return True for plain accuracy, which can be counted for many clients at once."""
    if type(metric) is not MulticlassAccuracy:
        return False
    plain = metric.average == "micro" and metric.multidim_average == "global" and metric.ignore_index is None
    return plain and metric.top_k == 1


def computed_on(metrics: MetricCollection, outputs: Tensor, targets: Tree) -> dict[str, float]:
    """Return metrics on the samples of one client."""
    metrics.reset()
    metrics.update(outputs, targets)
    return computed(metrics)
