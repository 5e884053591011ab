"""The summary over clients of what was measured of each."""

import math
from collections.abc import Mapping

import numpy as np


def over_clients(results: Mapping[int, Mapping[str, float]], sizes: Mapping[int, int]) -> dict[str, float]:
    """Summary over clients: weighted mean, and for ``acc`` also plain mean, standard deviation and the worst.

    A client without a value, or with NaN, as of a metric that isn't defined for what it holds, is left out of it.

    >>> summary = over_clients({0: {"acc": 1.0, "f1": math.nan}, 1: {"acc": 0.5, "f1": 0.25}}, {0: 30, 1: 10})
    >>> summary["acc"], summary["acc_mean"], summary["acc_std"], summary["acc_worst"]
    (0.875, 0.75, 0.25, 0.5)
    >>> summary["f1"], summary["f1_clients"]
    (0.25, 1)

    Args:
        results: metrics by client.
        sizes: samples that they were computed on, by client.

    Returns:
        ``NAME``, the mean weighted by samples, for each metric; ``acc_mean``, ``acc_std`` (over clients, population),
        ``acc_worst`` and ``acc_p10``, the lowest decile; ``NAME_clients``, where some have no value, how many have one.
        NaN where none has.
    """
    clients = sorted(results)
    weights = np.array([sizes[client] for client in clients], dtype=np.float64)
    summary: dict[str, float] = {}
    for name in dict.fromkeys(name for client in clients for name in results[client]):
        values = np.array([results[client].get(name, math.nan) for client in clients])
        known = ~np.isnan(values)
        # where nobody has a value, what is made of NaN is NaN
        taken = known if known.any() else ~known
        values, shares = values[taken], weights[taken]
        summary[name] = float((values * shares).sum() / shares.sum())
        if name == "acc":
            summary |= {"acc_mean": float(values.mean()), "acc_std": float(values.std())}
            summary |= {"acc_worst": float(values.min()), "acc_p10": float(np.quantile(values, 0.1))}
        if not known.all():
            summary[f"{name}_clients"] = int(known.sum())
    return summary
