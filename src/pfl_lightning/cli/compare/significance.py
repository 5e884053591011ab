"""Compare methods client by client: at a seed all methods have the same clients.

Paired differences are sharper than means: much of the spread between clients is the same under every method.
"""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np

from pfl_lightning.cli.compare.results import Result
from pfl_lightning.tasks import Monitor

Clients: TypeAlias = dict[tuple[int, str], float]
"""Monitored metric of the last round's models, signed so that larger is better, by (seed, client)."""

LEVEL = 0.05
"""Level of significance: methods differ if the test's p-value is below."""


def of_clients(results: Sequence[Result]) -> Clients:
    """Return the values of a method's clients, except NaN.

    Args:
        results: the method's runs.
    """
    found: Clients = {}
    for result in results:
        column = f"test/{result.monitor.metric}"
        for row in result.clients:
            value = float(row.get(column) or "nan")
            # NaN, unequal to itself: a client without test samples has no value
            if value == value:
                found[result.run.seed, row["client"]] = result.monitor.sign * value
    return found


def differences_of(one: Clients, other: Clients) -> list[float]:
    """Return value minus other value, for each client in both."""
    return [value - other[key] for key, value in one.items() if key in other]


def probability(differences: Sequence[float]) -> float:
    """Return the two-sided p-value of Wilcoxon's signed-rank test.

    >>> probability([0.0, 0.0]), round(probability([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]), 4)
    (1.0, 0.0156)

    Args:
        differences: one per pair; zeros are left out, as in Wilcoxon's own procedure.
    """
    from scipy.stats import wilcoxon

    moved = [difference for difference in differences if difference != 0]
    # scipy raises an error for no differences at all
    return float(wilcoxon(moved).pvalue) if moved else 1.0


def by_method(methods: Mapping[str, Sequence[Result]]) -> dict[str, Clients]:
    """Return the clients' values by method, for methods with at least one value.

    Args:
        methods: finished runs by method.
    """
    clients = {method: of_clients(results) for method, results in methods.items()}
    return {method: values for method, values in clients.items() if values}


def best_and_level(clients: Mapping[str, Clients]) -> list[str]:
    """Return the method with the best mean over seeds and clients, and all methods level with the best by the test.

    Args:
        clients: values by method; for fewer than two methods the list is empty.
    """
    if len(clients) < 2:
        return []
    # by the plain mean, as the test counts each pair once
    best = max(clients, key=lambda method: float(np.mean(list(clients[method].values()))))
    others = {method: differences_of(clients[best], values) for method, values in clients.items() if method != best}
    return [best, *(method for method, pairs in others.items() if pairs and probability(pairs) >= LEVEL)]


def ranks(clients: Mapping[str, Clients]) -> dict[str, str]:
    """Return each method's mean rank over seeds and clients common to all; 1 is the best, ties share their mean rank.

    >>> ranks({"FedPer": {(0, "0"): 0.9, (0, "1"): 0.5}, "Local": {(0, "0"): 0.8, (0, "1"): 0.5}})
    {'FedPer': '1.25', 'Local': '1.75'}

    Args:
        clients: values by method.
    """
    from scipy.stats import rankdata

    # a rank among fewer methods would be better for nothing
    pairs = set.intersection(*map(set, clients.values())) if clients else set()
    if not pairs:
        return {}
    places = rankdata([[-values[pair] for pair in sorted(pairs)] for values in clients.values()], axis=0)
    return {method: f"{place.mean():.2f}" for method, place in zip(clients, places, strict=True)}


def is_local(method: str) -> bool:
    """Return True if a label belongs to the method Local, clients training alone.

    >>> is_local("Local+sgd_0.05"), is_local("FedAvg")
    (True, False)
    """
    return method.partition("+")[0] == "Local"


def gains_over_local(clients: Mapping[str, Clients], monitor: Monitor) -> dict[str, str]:
    """Return each method's mean gain over Local, and the share of clients with a gain, as a cell.

    Args:
        clients: values by method.
        monitor: the metric that selects.
    """
    local = next((values for method, values in clients.items() if is_local(method)), {})
    cells = {}
    for method, values in clients.items():
        pairs = [] if is_local(method) else differences_of(values, local)
        if pairs:
            factor, form = (100, "+.2f") if monitor.metric == "acc" else (1, "+.4g")
            more = np.mean([pair > 0 for pair in pairs])
            # the sign is undone for the mean, so that a lower loss reads as negative; the share counts improvements
            cells[method] = f"{format(monitor.sign * factor * float(np.mean(pairs)), form)} ({100 * more:.0f} %)"
    return cells
