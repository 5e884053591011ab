"""Summarise clients' metrics."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from torchmetrics import Metric

from pfl_lightning.engines.evaluation import POOLED, pooled_value
from pfl_lightning.tasks import Monitor


def over_clients(
    results: Mapping[int, Mapping[str, Any]],
    sizes: Mapping[int, int],
    monitor: Monitor = Monitor(),  # noqa: B008 - immutable
    pooled: Mapping[str, Metric] | None = None,
) -> dict[str, float]:
    """Return the weighted mean of each metric over clients, and the spread of the monitored metric.

    Clients without a value, or with NaN (a metric undefined for the client's samples), are left out of the metric.

    >>> summary = over_clients({0: {"acc": 1.0, "f1": math.nan}, 1: {"acc": 0.5, "f1": 0.25}}, {0: 30, 1: 10})
    >>> summary["acc"], summary["acc_mean"], summary["acc_std"], summary["acc_worst"]
    (0.875, 0.75, 0.25, 0.5)
    >>> summary["f1"], summary["f1_clients"]
    (0.25, 1)

    Args:
        results: metrics by client; entries ``NAME_pooled`` are a client's state of a metric over all samples.
        sizes: numbers of evaluated samples, by client.
        monitor: the metric with a spread, and its direction.
        pooled: the metrics over all samples, by name.

    Returns:
        For each metric ``NAME``, the mean weighted by samples; for the monitored metric also `Monitor.spread`;
            ``NAME_clients``, the number of clients with a value, if some have none; ``NAME_pooled``. A metric is NaN if
            no client has a value.
    """
    clients = sorted(results)
    weights = np.array([sizes[client] for client in clients], dtype=np.float64)
    summary: dict[str, float] = {}
    for name in dict.fromkeys(name for client in clients for name in results[client]):
        if name.endswith(POOLED):
            states = [results[client][name] for client in clients if name in results[client]]
            summary[name] = pooled_value((pooled or {})[name.removesuffix(POOLED)], states)
            continue
        values = np.array([results[client].get(name, math.nan) for client in clients])
        known = ~np.isnan(values)
        # Without any value keep the NaNs, so that the mean is NaN and not an error.
        taken = known if known.any() else ~known
        values, shares = values[taken], weights[taken]
        summary[name] = float((values * shares).sum() / shares.sum())
        if name == monitor.metric:
            summary |= monitor.spread(values)
        if not known.all():
            summary[f"{name}_clients"] = int(known.sum())
    return summary
