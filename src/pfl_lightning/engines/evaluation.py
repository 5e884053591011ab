"""Evaluation of clients: of one, and of the logits of many at once."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import BinaryAccuracy, MulticlassAccuracy, MultilabelAccuracy

from pfl_lightning.client import ClientModule
from pfl_lightning.data import Samples

PADDING = -100
"""Target of what is no sample; cross-entropy leaves it out."""


def metrics_of(module: ClientModule) -> MetricCollection:
    """The metrics of a client module, on its device.

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
    return made.to(module.device)


def computed(metrics: MetricCollection) -> dict[str, float]:
    """What metrics have come to, by name.

    Raises:
        MisconfigurationException: if one isn't a number.
    """
    values = metrics.compute()
    for name, value in values.items():
        if not isinstance(value, Tensor) or value.numel() != 1:
            found = f"values of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise MisconfigurationException(
                f"configure_metrics: {name} gives {found} and not a number; take its average, or wrap it in "
                "torchmetrics.ClasswiseWrapper, which names the value of each class."
            )
    return {name: float(value) for name, value in values.items()}


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
        metrics: what to compute on logits and targets, besides the mean cross-entropy ``loss``.
        forward_context: gives the context for a forward pass.

    Returns:
        Values by name.
    """
    training = module.training
    if training:
        module.eval()
    metrics.reset()
    losses = []
    for x, target in samples.chunks():
        with forward_context():
            logits = module(x)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        metrics.update(logits, target)
        losses.append(F.cross_entropy(logits, target, reduction="sum"))
    if training:
        module.train()
    return computed(metrics) | {"loss": float(torch.stack(losses).sum()) / len(samples)}


@torch.no_grad()
def evaluate_padded(logits: Tensor, targets: Tensor, metrics: MetricCollection) -> list[dict[str, float]]:
    """What `evaluate` says of several clients, from their logits.

    Args:
        logits: ``[clients, n, classes]``.
        targets: ``[clients, n]``; behind each client's samples, of which there is at least one, they are `PADDING`.
        metrics: what to compute on logits and targets, besides the mean cross-entropy ``loss``.

    Returns:
        Values by name, for each client.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    sizes = (targets != PADDING).sum(1)
    flat = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=PADDING, reduction="none")
    sums = flat.view_as(targets).sum(1)
    losses = [loss / size for loss, size in zip(sums.tolist(), sizes.tolist(), strict=True)]
    values: Iterable[dict[str, float]]
    if is_accuracy(metrics):
        right = (logits.argmax(-1) == targets).sum(1).float() / sizes.float()
        values = [{"acc": accuracy} for accuracy in right.tolist()]
    else:
        values = (
            computed_on(metrics, of_one[:size], target[:size])
            for of_one, target, size in zip(logits, targets, sizes.tolist(), strict=True)
        )
    return [value | {"loss": loss} for value, loss in zip(values, losses, strict=True)]


def is_accuracy(metrics: MetricCollection) -> bool:
    """Whether metrics are the share of right ones and no more, which can be counted for many clients at once."""
    if list(metrics) != ["acc"] or type(metric := metrics["acc"]) is not MulticlassAccuracy:
        return False
    plain = metric.average == "micro" and metric.multidim_average == "global" and metric.ignore_index is None
    return plain and metric.top_k == 1


def computed_on(metrics: MetricCollection, logits: Tensor, targets: Tensor) -> dict[str, float]:
    """What metrics come to on the samples of one client."""
    metrics.reset()
    metrics.update(logits, targets)
    return computed(metrics)
