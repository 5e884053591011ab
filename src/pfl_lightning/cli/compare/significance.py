"""Compare methods with a reference, client by client and seed by seed.

At a seed all methods have the same clients, so that a difference has less spread than its two means. Clients of one
seed share a training run, and are no independent observations: intervals count each seed once.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Literal, TypeAlias

import numpy as np
from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.cli.compare.results import OVER, Result
from pfl_lightning.tasks import Monitor

Clients: TypeAlias = dict[tuple[int, str], float]
"""Monitored metric of the last round's models, signed so that larger is better, by (seed, client's name or id)."""

LEVEL = 0.05
"""Family-wise error: probability that a table marks any difference although no method differs from the reference."""


@dataclass(frozen=True)
class Difference:
    """A method's difference to the reference: larger is better.

    Args:
        mean: the mean over seeds.
        half: half the width of the 95 % interval; NaN for a single seed, and if all seeds have the same difference.
        probability: two-sided p-value of Student's t over seeds; NaN where ``half`` is.
        better: share of pairs of seed and client in which the method is better.
    """

    mean: float
    half: float
    probability: float
    better: float


def label_of(row: Mapping[str, str]) -> str:
    """Return a client's name, or the id of an unnamed client.

    Args:
        row: a row of ``clients.csv``.
    """
    return row.get("name") or row["client"]


def of_clients(results: Sequence[Result], split: Literal["test", "val"] = "test") -> Clients:
    """Return the values of a method's clients, except NaN.

    Args:
        results: the method's runs.
        split: the samples that the values are of; ``val`` needs runs with ``client_rounds``.
    """
    found: Clients = {}
    for result in results:
        column = f"{split}/{result.monitor.metric}"
        for row in result.clients if split == "test" else result.last_round:
            value = float(row.get(column) or "nan")
            # a client without such samples has no value
            if not math.isnan(value):
                found[result.run.seed, label_of(row)] = result.monitor.sign * value
    return found


def by_method(methods: Mapping[str, Sequence[Result]]) -> dict[str, Clients]:
    """Return the clients' values by method, for methods with at least one value.

    Args:
        methods: finished runs by method.
    """
    clients = {method: of_clients(results) for method, results in methods.items()}
    return {method: values for method, values in clients.items() if values}


def t_interval(differences: Sequence[float]) -> tuple[float, float, float]:
    """Return mean, half width of the 95 % interval, and two-sided p-value of Student's t.

    With few seeds a bootstrap over seeds would be too narrow: three seeds have ten resamples. The t interval holds its
    level for two seeds and more where seeds' differences are about normal.

    >>> [round(number, 3) for number in t_interval([1.0, 2.0, 3.0])]
    [2.0, 2.484, 0.074]

    Args:
        differences: one per seed, at least one.
    """
    from scipy.special import stdtr, stdtrit

    mean, seeds = fmean(differences), len(differences)
    error = stdev(differences) / math.sqrt(seeds) if seeds > 1 else 0.0
    # without any spread t would be infinite: the same difference at each seed is common with few test samples
    if error <= 1e-9 * max(map(abs, differences)):
        return mean, math.nan, math.nan
    half = float(stdtrit(seeds - 1, 1 - LEVEL / 2)) * error
    return mean, half, 2 * float(stdtr(seeds - 1, -abs(mean) / error))


def difference(values: Clients, reference: Clients) -> Difference | None:
    """Return a method's difference to the reference, over clients that both have; None without such clients.

    Clients count alike within a seed, and seeds count alike.

    Args:
        values: the method's values.
        reference: the reference's values.
    """
    pairs: dict[int, list[float]] = {}
    for (seed, client), value in values.items():
        if (seed, client) in reference:
            pairs.setdefault(seed, []).append(value - reference[seed, client])
    if not pairs:
        return None
    better = np.mean([pair > 0 for own in pairs.values() for pair in own])
    return Difference(*t_interval([fmean(own) for own in pairs.values()]), float(better))


def holm(probabilities: Sequence[float]) -> list[float]:
    """Return p-values adjusted for all comparisons of a table by Holm's procedure; NaN stays, and doesn't count.

    >>> [round(p, 3) for p in holm([0.01, 0.04, 0.03, 0.005, math.nan])]
    [0.03, 0.06, 0.06, 0.02, nan]

    Args:
        probabilities: p-values.

    Source:
        Holm, A simple sequentially rejective multiple test procedure, Scandinavian Journal of Statistics 6, 1979.
    """
    known = sorted((p, at) for at, p in enumerate(probabilities) if not math.isnan(p))
    adjusted, least = [math.nan] * len(probabilities), 0.0
    for rank, (p, at) in enumerate(known):
        # never below the adjusted value of a smaller p-value
        least = max(least, min(1.0, (len(known) - rank) * p))
        adjusted[at] = least
    return adjusted


def differences_to(clients: Mapping[str, Clients], reference: str) -> dict[str, tuple[Difference, bool]]:
    """Return each other method's difference to the reference, and whether it holds among all of these comparisons.

    Args:
        clients: values by method.
        reference: the method to compare with, chosen before looking at results.
    """
    others = {
        method: difference(values, clients[reference]) for method, values in clients.items() if method != reference
    }
    found = {method: one for method, one in others.items() if one is not None}
    adjusted = holm([one.probability for one in found.values()])
    return {method: (one, p < LEVEL) for (method, one), p in zip(found.items(), adjusted, strict=True)}


def reference_among(methods: Sequence[str], columns: Sequence[str] = (), given: str | None = None) -> str | None:
    """Return the method that all others are compared with, by a rule that looks at no result.

    It is the given one; else the one of an asked column "over METHOD"; else Local, FedAvg, or the first method. A name
    without ``+FILE`` stands for the first of its variants.

    >>> reference_among(["FedPer", "Local+sgd"]), reference_among(["Ditto", "FedPer"], ["over FedPer"])
    ('Local+sgd', 'FedPer')

    Args:
        methods: labels of the methods; with less than two of them there is no reference.
        columns: titles of the columns.
        given: the setting ``--reference``.

    Raises:
        MisconfigurationException: if the given method isn't compared.
    """
    bare = {label.partition("+")[0]: label for label in reversed(methods)} | {label: label for label in methods}
    if given is not None and given not in bare:
        raise MisconfigurationException(
            f"compare: --reference {given} is not among the methods compared; give one of {', '.join(methods)}."
        )
    if len(methods) < 2:
        return None
    asked = [title.removeprefix(OVER) for title in columns if title.startswith(OVER)]
    usual = (name for name in (given, *asked, "Local", "FedAvg", methods[0]) if name in bare)
    return bare[next(usual)]


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


def shown(one: Difference, is_marked: bool, monitor: Monitor) -> str:
    """Return a difference as a cell: mean, 95 % interval, a star if marked, and the share of clients with a gain.

    >>> shown(Difference(0.02, 0.01, 0.01, 0.75), True, Monitor())
    '+2.00 [+1.00, +3.00]* (75 %)'

    Args:
        one: the difference.
        is_marked: whether it holds among all comparisons of the table.
        monitor: the metric that selects.
    """
    return f"{interval(one, monitor)}{'*' if is_marked else ''} ({100 * one.better:.0f} %)"


def interval(one: Difference, monitor: Monitor) -> str:
    """Return mean and 95 % interval in the metric's own sign; the mean alone without an interval.

    Args:
        one: the difference.
        monitor: the metric that selects.
    """
    factor, form = (100, "+.2f") if monitor.metric == "acc" else (1, "+.4g")
    # a lower loss reads as negative, although it is a gain
    mean = monitor.sign * factor * one.mean
    if math.isnan(one.half):
        return format(mean, form)
    ends = (format(mean + sign * factor * one.half, form) for sign in (-1, 1))
    return f"{format(mean, form)} [{', '.join(ends)}]"
