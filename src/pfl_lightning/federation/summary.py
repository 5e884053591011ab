"""Summarise clients' metrics."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torchmetrics import Metric

from pfl_lightning.engines.evaluation import POOLED, pooled_value
from pfl_lightning.tasks import Monitor

NORMAL = 1.96
"""Quantile of the normal distribution for an interval of 95 %."""


def margin(values: Sequence[float], weights: Sequence[float], num_clients: float) -> float:
    r"""Return half the width of the 95 % interval of a weighted mean over all clients, estimated from a sample of them.

    With clients' values :math:`y_i`, weights :math:`w_i` and their mean :math:`\bar y = \sum_i w_i y_i / \sum_i w_i`,

    .. math:: 1.96 \sqrt{\Bigl(1 - \frac nN\Bigr) \frac{n}{n - 1} \sum_i w_i^2 (y_i - \bar y)^2} \Big/ \sum_i w_i

    for a sample of n of N clients: 0 where all are in the sample, and NaN for a sample of one. It is too small for
    samples of a few clients.
    Source: Cochran, 1977, Sampling Techniques, section 6.4 (the ratio of two means).

    >>> round(margin([0.5, 0.7, 0.9, 0.7], [1, 1, 1, 1], 100), 4), margin([0.5, 0.7], [1, 3], 2)
    (0.1568, 0.0)

    Args:
        values: the metric of each client of the sample.
        weights: the clients' weights in the mean.
        num_clients: N, the number of clients that the sample is drawn from.
    """
    y, w = np.asarray(values, dtype=np.float64), np.asarray(weights, dtype=np.float64)
    if len(y) >= num_clients:
        return 0.0
    if len(y) < 2:
        return math.nan
    squares = np.square(w * (y - (w * y).sum() / w.sum())).sum() * len(y) / (len(y) - 1)
    return float(NORMAL * math.sqrt((1 - len(y) / num_clients) * squares) / w.sum())


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
