"""One client's evaluation, and the summary over clients."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

import numpy as np
import torch
from torch.nn import functional as F
from torchmetrics import MetricCollection

from pfl_lightning.client import FedAvg
from pfl_lightning.data import Part

CHUNK = 1024
"""Samples that go through the net at once."""


@torch.no_grad()
def evaluate(
    module: FedAvg,
    part: Part,
    metrics: MetricCollection,
    forward_context: Callable[[], AbstractContextManager[None]],
) -> dict[str, float]:
    """Metrics of a client module on one part of a client's data.

    Args:
        module: the module in the state to look at; left in training mode or not as it was.
        part: the samples, on the module's device, at least one.
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
    for x, target in zip(torch.split(part.x, CHUNK), torch.split(part.y, CHUNK), strict=True):
        with forward_context():
            logits = module(x)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        metrics.update(logits, target)
        losses.append(F.cross_entropy(logits, target, reduction="sum"))
    if training:
        module.train()
    values = {name: float(value) for name, value in metrics.compute().items()}
    return values | {"loss": float(torch.stack(losses).sum()) / len(part)}


def summarise(results: Mapping[int, Mapping[str, float]], sizes: Mapping[int, int]) -> dict[str, float]:
    """Summary over clients: weighted mean, and for ``acc`` also plain mean, standard deviation and the worst.

    >>> summary = summarise({0: {"acc": 1.0}, 1: {"acc": 0.5}}, {0: 30, 1: 10})
    >>> summary["acc"], summary["acc_mean"], summary["acc_std"], summary["acc_worst"]
    (0.875, 0.75, 0.25, 0.5)

    Args:
        results: metrics by client.
        sizes: samples that they were computed on, by client.

    Returns:
        ``NAME``, the mean weighted by samples, for each metric; ``acc_mean``, ``acc_std`` (over clients, population),
        ``acc_worst`` and ``acc_p10``, the lowest decile.
    """
    clients = sorted(results)
    weights = np.array([sizes[client] for client in clients], dtype=np.float64)
    summary = {}
    for name in results[clients[0]] if clients else ():
        values = np.array([results[client][name] for client in clients])
        summary[name] = float((values * weights).sum() / weights.sum())
        if name == "acc":
            summary |= {"acc_mean": float(values.mean()), "acc_std": float(values.std())}
            summary |= {"acc_worst": float(values.min()), "acc_p10": float(np.quantile(values, 0.1))}
    return summary
