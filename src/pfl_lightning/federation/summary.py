"""The summary over clients of what was measured of each."""

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
    """Summary over clients: weighted mean, and of the monitored metric also plain mean, deviation and the worst.

    A client without a value, or with NaN, as of a metric that isn't defined for what it holds, is left out of it.

    >>> summary = over_clients({0: {"acc": 1.0, "f1": math.nan}, 1: {"acc": 0.5, "f1": 0.25}}, {0: 30, 1: 10})
    >>> summary["acc"], summary["acc_mean"], summary["acc_std"], summary["acc_worst"]
    (0.875, 0.75, 0.25, 0.5)
    >>> summary["f1"], summary["f1_clients"]
    (0.25, 1)

    Args:
        results: metrics by client; under ``NAME_pooled`` what each adds to a metric of all samples.
        sizes: samples that they were computed on, by client.
        monitor: which metric has a spread, and which end of it is the worst.
        pooled: the metrics of all samples, by name.

    Returns:
        ``NAME``, the mean weighted by samples, for each metric; `Monitor.spread` of the monitored one;
        ``NAME_clients``, where some have no value, how many have one; ``NAME_pooled``. NaN where none has.
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
        # where nobody has a value, what is made of NaN is NaN
        taken = known if known.any() else ~known
        values, shares = values[taken], weights[taken]
        summary[name] = float((values * shares).sum() / shares.sum())
        if name == monitor.metric:
            summary |= monitor.spread(values)
        if not known.all():
            summary[f"{name}_clients"] = int(known.sum())
    return summary
