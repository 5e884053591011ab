"""Methods compared client by client: at a seed all of them have the same clients."""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np

from pfl_lightning.cli.compare.results import Result
from pfl_lightning.tasks import Monitor

Clients: TypeAlias = dict[tuple[int, str], float]
"""The monitored metric of the last round's models, times the sign that makes more better, by seed and client."""

LEVEL = 0.05
"""Below this probability of what is seen, were there no difference, methods are said to differ."""


def of_clients(results: Sequence[Result]) -> Clients:
    """The values of a method's clients, without those that have none.

    Args:
        results: its runs.
    """
    found: Clients = {}
    for result in results:
        column = f"test/{result.monitor.metric}"
        for row in result.clients:
            value = float(row.get(column) or "nan")
            if value == value:
                found[result.run.seed, row["client"]] = result.monitor.sign * value
    return found


def differences_of(one: Clients, other: Clients) -> list[float]:
    """How much better the first is, for each client that both have."""
    return [value - other[key] for key, value in one.items() if key in other]


def probability(differences: Sequence[float]) -> float:
    """Probability of differences at least as one-sided, were there none: Wilcoxon's signed-rank test, two-sided.

    >>> probability([0.0, 0.0]), round(probability([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]), 4)
    (1.0, 0.0156)

    Args:
        differences: a pair each; those of nothing are left out, as Wilcoxon does.
    """
    from scipy.stats import wilcoxon

    moved = [difference for difference in differences if difference != 0]
    return float(wilcoxon(moved).pvalue) if moved else 1.0


def by_method(methods: Mapping[str, Sequence[Result]]) -> dict[str, Clients]:
    """The values of the clients of each method that has some.

    Args:
        methods: finished runs by method.
    """
    clients = {method: of_clients(results) for method, results in methods.items()}
    return {method: values for method, values in clients.items() if values}


def best_and_level(clients: Mapping[str, Clients]) -> list[str]:
    """The method with the best mean over seeds and clients, and those that don't differ from it; none of a single one.

    Args:
        clients: values by method.
    """
    if len(clients) < 2:
        return []
    best = max(clients, key=lambda method: float(np.mean(list(clients[method].values()))))
    others = {method: differences_of(clients[best], values) for method, values in clients.items() if method != best}
    return [best, *(method for method, pairs in others.items() if pairs and probability(pairs) >= LEVEL)]


def ranks(clients: Mapping[str, Clients]) -> dict[str, str]:
    """The mean rank of each method over seeds and clients that all have, 1 the best; equal values share theirs.

    >>> ranks({"FedPer": {(0, "0"): 0.9, (0, "1"): 0.5}, "Local": {(0, "0"): 0.8, (0, "1"): 0.5}})
    {'FedPer': '1.25', 'Local': '1.75'}

    Args:
        clients: values by method.
    """
    from scipy.stats import rankdata

    pairs = set.intersection(*map(set, clients.values())) if clients else set()
    if not pairs:
        return {}
    places = rankdata([[-values[pair] for pair in sorted(pairs)] for values in clients.values()], axis=0)
    return {method: f"{place.mean():.2f}" for method, place in zip(clients, places, strict=True)}


def is_local(method: str) -> bool:
    """Whether a method's label is of clients that train alone.

    >>> is_local("Local+sgd_0.05"), is_local("FedAvg")
    (True, False)
    """
    return method.partition("+")[0] == "Local"


def gains_over_local(clients: Mapping[str, Clients], monitor: Monitor) -> dict[str, str]:
    """How much more a client has by a method than alone, on average, and how many clients have more; a cell a method.

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
            cells[method] = f"{format(monitor.sign * factor * float(np.mean(pairs)), form)} ({100 * more:.0f} %)"
    return cells
