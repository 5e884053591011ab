"""Compare methods with a reference, client by client and seed by seed.

At a seed all methods have the same clients, so that a difference has less spread than its two means. Clients of one
seed share a training run, and are no independent observations: intervals count each seed once. Intervals for other
clients than those at hand count each client once as well.
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

Population: TypeAlias = Literal["seeds", "clients"]
"""For what an interval holds: other ``seeds`` of the same clients, or other ``clients`` (and seeds) as well."""

LEVEL = 0.05
"""Family-wise error: probability that a table marks any difference although no method differs from the reference."""


@dataclass(frozen=True)
class Difference:
    """A method's difference to the reference: larger is better.

    Args:
        mean: the mean over seeds.
        half: half the width of the 95 % interval; NaN for a single seed, and if all seeds have the same difference.
        probability: two-sided p-value of Student's t; NaN where ``half`` is.
        better: share of pairs of seed and client in which the method is better.
    """

    mean: float
    half: float
    probability: float
    better: float


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
                found[result.run.seed, row.get("name") or row["client"]] = result.monitor.sign * value
    return found


def by_method(methods: Mapping[str, Sequence[Result]]) -> dict[str, Clients]:
    """Return the clients' values by method, for methods with at least one value.

    Args:
        methods: finished runs by method.
    """
    clients = {method: of_clients(results) for method, results in methods.items()}
    return {method: values for method, values in clients.items() if values}


def t_interval(differences: Sequence[float], overlap: float = 0.0) -> tuple[float, float, float]:
    """Return mean, half width of the 95 % interval, and two-sided p-value of Student's t.

    With few seeds a bootstrap over seeds would be too narrow: three seeds have ten resamples. The t interval holds its
    level for two seeds and more where seeds' differences are about normal.

    Where each seed draws the rows anew that are evaluated, seeds share rows, and their mean keeps a part of the chance
    by which these rows, and no others, are at hand. Of S seeds its variance is :math:`s^2 (1/S + o)` for the overlap o,
    and not :math:`s^2 / S`: with a fifth of the rows, ten seeds and five equal methods, the latter marks some method
    in 29 % of simulated tables, and the former in 2 %.

    >>> [round(number, 3) for number in t_interval([1.0, 2.0, 3.0])]
    [2.0, 2.484, 0.074]
    >>> [round(number, 3) for number in t_interval([1.0, 2.0, 3.0], overlap=0.25)]
    [2.0, 3.286, 0.12]

    Source: Nadeau and Bengio, Inference for the generalization error, Machine Learning 52, 2003.

    Args:
        differences: one per seed, at least one.
        overlap: evaluated rows for each row of the others from which they are drawn, at least 0; 0 for the same rows
            at all seeds.
    """
    mean, seeds = fmean(differences), len(differences)
    error = stdev(differences) * math.sqrt(1 / seeds + overlap) if seeds > 1 else 0.0
    # without any spread t would be infinite: the same difference at each seed is common with few test samples
    if error <= 1e-9 * max(map(abs, differences)):
        return mean, math.nan, math.nan
    return mean, *student(mean, error, seeds - 1)


def student(mean: float, error: float, freedom: int) -> tuple[float, float]:
    """Return the half width of the 95 % interval and the two-sided p-value of Student's t.

    Args:
        mean: the estimate.
        error: its standard error, above 0.
        freedom: degrees of freedom, at least 1.
    """
    from scipy.special import stdtr, stdtrit

    half = float(stdtrit(freedom, 1 - LEVEL / 2)) * error
    return half, 2 * float(stdtr(freedom, -abs(mean) / error))


def two_way_interval(pairs: Mapping[int, Mapping[str, float]]) -> tuple[float, float, float]:
    r"""Return mean, half width of the 95 % interval, and p-value, for other seeds and other clients.

    Differences of one seed are dependent, and differences of one client too. The variance of the mean is that of
    clusters by seed, plus that of clusters by client, minus that of single differences, and at least the larger one of
    the first two; degrees of freedom are the smaller number of clusters less one. Bootstraps are too narrow for so few
    clusters: with five seeds and four clients, resampled seeds, clients or both mark 64, 22 and 17 % of simulated null
    differences, and this interval 5 %.

    Source: Cameron, Gelbach and Miller, Robust inference with multiway clustering, Journal of Business & Economic
    Statistics 29, 2011.

    >>> [round(number, 3) for number in two_way_interval({0: {"a": 1.0, "b": 3.0}, 1: {"a": 2.0, "b": 6.0}})]
    [3.0, 19.059, 0.295]

    Args:
        pairs: differences by seed and client, at least one.
    """
    mean = fmean(fmean(own.values()) for own in pairs.values())
    by_seed: dict[int, float] = {}
    by_client: dict[str, float] = {}
    single = 0.0
    for seed, own in pairs.items():
        for client, pair in own.items():
            # a difference's part in the mean's error: clients count alike within a seed, and seeds count alike
            part = (pair - mean) / (len(own) * len(pairs))
            by_seed[seed] = by_seed.get(seed, 0.0) + part
            by_client[client] = by_client.get(client, 0.0) + part
            single += part**2
    freedom, count = min(len(by_seed), len(by_client)) - 1, sum(map(len, pairs.values()))
    if freedom < 1:
        return mean, math.nan, math.nan
    seeds, clients = (
        len(parts) / (len(parts) - 1) * sum(part**2 for part in parts)
        for parts in ([*by_seed.values()], [*by_client.values()])
    )
    error = math.sqrt(max(seeds, clients, seeds + clients - count / (count - 1) * single))
    if error <= 1e-9 * max(abs(pair) for own in pairs.values() for pair in own.values()):
        return mean, math.nan, math.nan
    return mean, *student(mean, error, freedom)


def difference(
    values: Clients, reference: Clients, population: Population = "seeds", overlap: float = 0.0
) -> Difference | None:
    """Return a method's difference to the reference, over clients that both have; None without such clients.

    Clients count alike within a seed, and seeds count alike.

    Args:
        values: the method's values.
        reference: the reference's values.
        population: for what the interval holds.
        overlap: as for `t_interval`, of ``seeds`` alone.
    """
    pairs: dict[int, dict[str, float]] = {}
    for (seed, client), value in values.items():
        if (seed, client) in reference:
            pairs.setdefault(seed, {})[client] = value - reference[seed, client]
    if not pairs:
        return None
    better = np.mean([pair > 0 for own in pairs.values() for pair in own.values()])
    if population == "clients":
        return Difference(*two_way_interval(pairs), float(better))
    return Difference(*t_interval([fmean(own.values()) for own in pairs.values()], overlap), float(better))


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


def differences_to(
    clients: Mapping[str, Clients], reference: str, population: Population = "seeds", overlap: float = 0.0
) -> dict[str, tuple[Difference, bool]]:
    """Return each other method's difference to the reference, and whether it holds among all of these comparisons.

    Args:
        clients: values by method.
        reference: the method to compare with, chosen before looking at results.
        population: for what intervals hold.
        overlap: as for `difference`.
    """
    others = {
        method: difference(values, clients[reference], population, overlap)
        for method, values in clients.items()
        if method != reference
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
