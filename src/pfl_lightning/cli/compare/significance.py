"""Compare methods with a reference, client by client and seed by seed.

At a seed all methods have the same clients, so that a difference has less spread than its two means. Clients of one
seed share a training run, and are no independent observations: intervals over seeds count each seed once. All seeds may
share the test rows: intervals over samples count each row once as well. Intervals for other clients than those at hand
count each client once.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Literal, TypeAlias

import numpy as np
from lightning.fabric.utilities.exceptions import MisconfigurationException
from numpy.typing import NDArray

from pfl_lightning.cli.compare.results import OVER, Mean, Result
from pfl_lightning.data import Split
from pfl_lightning.runs.sample_scores import Scores
from pfl_lightning.tasks import Monitor
from pfl_lightning.tasks.base import UNDEFINED

Clients: TypeAlias = dict[tuple[int, str], float]
"""Monitored metric of the last round's models, signed so that larger is better, by (seed, client's name or id)."""

Rows: TypeAlias = dict[tuple[int, str], Scores]
"""Scores of the rows of each client, signed so that larger is better, by (seed, client's name or id)."""

Population: TypeAlias = Literal["samples", "seeds", "clients"]
"""For what an interval holds: other ``seeds`` on the same rows, other ``samples`` of the same clients (and seeds), or
other ``clients`` (and seeds)."""

LISTED = 10
"""Largest number of clients without a value that a sentence names."""

LEVEL = 0.05
"""Family-wise error: probability that a table marks any difference although no method differs from the reference."""


@dataclass(frozen=True)
class Difference:
    """A method's difference to the reference: larger is better.

    Args:
        mean: the mean over seeds.
        half: half the width of the 95 % interval; NaN without an interval, as from a single seed, and for no difference
            at any seed.
        probability: two-sided p-value of Student's t; NaN where ``half`` is.
        better: share of pairs of seed and client in which the method is better.
    """

    mean: float
    half: float
    probability: float
    better: float


def of_clients(results: Sequence[Result], split: Split = "test") -> Clients:
    """Return the values of a method's clients, except NaN.

    Args:
        results: the method's runs.
        split: the samples that the values are of; ``val`` needs runs with ``client_rounds``.
    """
    values: Clients = {}
    for result in results:
        column = f"{split}/{result.monitor.metric}"
        for row in result.clients if split == "test" else result.last_round:
            value = float(row.get(column) or "nan")
            # a client without such samples has no value
            if not math.isnan(value):
                values[result.run.seed, row.get("name") or row["client"]] = result.monitor.sign * value
    return values


def without_value(results: Sequence[Result], split: Split = "test") -> dict[tuple[int, str], str]:
    """Return why clients have no value, by (seed, client's name or id), for all clients without one.

    Args:
        results: the method's runs.
        split: as for `of_clients`.
    """
    valued, whys = of_clients(results, split), {}
    for result in results:
        rows = result.clients if split == "test" else result.last_round
        evaluated = {row.get("name") or row["client"] for row in rows if row.get(f"{split}/loss")}
        metric = result.monitor.metric
        # a metric of all clients' samples has no values of clients
        for row in [] if metric.endswith("_pooled") else result.clients:
            client = row.get("name") or row["client"]
            if (result.run.seed, client) not in valued:
                why = UNDEFINED.get(metric, f"{metric} is undefined on its rows")
                whys[result.run.seed, client] = why if client in evaluated else "it has no rows"
    return whys


def counted(methods: Mapping[str, Sequence[Result]], split: Split = "test") -> str:
    """Return a sentence on how many clients have a value, and on the others; empty if all have one.

    Args:
        methods: finished runs by method.
        split: as for `of_clients`.
    """
    lacking = [each for results in methods.values() for each in without_value(results, split).items()]
    if not lacking:
        return ""
    results = [result for each in methods.values() for result in each]
    metric = f"{'validation' if split == 'val' else split} {results[0].monitor.metric}"
    if not clients_stay(methods):
        whole = sum(len(result.clients) for result in results)
        return f"{whole - len(lacking)} of {whole} values of {metric} exist, by method, seed and client, and count."
    clients = {row.get("name") or row["client"] for result in results for row in result.clients}
    reasons: dict[str, list[str]] = {}
    for (_, client), why in lacking:
        reasons.setdefault(client, []).append(why)
    listing = [
        f"{client} ({whys[0]}{'' if len(whys) == len(results) else f', in {len(whys)} of {len(results)} runs'})"
        for client, whys in reasons.items()
    ]
    more = f", and {len(listing) - LISTED} more" if len(listing) > LISTED else ""
    return (
        f"{len(clients) - len(listing)} of {len(clients)} clients have a {metric} in all runs, and count in its means; "
        f"without one: {', '.join(listing[:LISTED])}{more}."
    )


def row_scores(results: Sequence[Result], split: Split = "test") -> Rows:
    """Return the scores of the rows of a method's clients, of clients with any.

    Args:
        results: the method's runs.
        split: the rows' split.
    """
    scores: Rows = {}
    for result in results:
        for row, own in zip(result.clients, result.scores[split], strict=False):
            if len(own.values):
                values = result.monitor.sign * own.values
                scores[result.run.seed, row.get("name") or row["client"]] = own._replace(values=values)
    return scores


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
    mean, seeds = fmean(differences), len(differences)
    if seeds < 2 or not any(differences):
        return mean, math.nan, math.nan
    spread = stdev(differences)
    # without any spread t would be infinite: the same difference at each seed is common with few test samples
    spread = spread if spread > 1e-9 * max(map(abs, differences)) else rounding(mean)
    return mean, *student(mean, spread / math.sqrt(seeds), seeds - 1)


def rounding(mean: float) -> float:
    r"""Return a standard deviation for differences that are all the same: :math:`|\text{mean}| / \sqrt{12}`.

    Few rows round a metric: equal differences are differences within one step of it, whose uniform rounding error has
    the variance of the step squared over 12 (Sheppard's correction), and a step is no larger than the difference. So
    the same gain at two seeds is no evidence (p = 0.13), and at five it is (p = 0.002).

    Args:
        mean: the difference.
    """
    return abs(mean) / math.sqrt(12)


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
    mean = fmean(fmean(of_seed.values()) for of_seed in pairs.values())
    by_seed: dict[int, float] = {}
    by_client: dict[str, float] = {}
    single = 0.0
    for seed, of_seed in pairs.items():
        for client, pair in of_seed.items():
            # a difference's part in the mean's error: clients count alike within a seed, and seeds count alike
            part = (pair - mean) / (len(of_seed) * len(pairs))
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
    if not any(pair for of_seed in pairs.values() for pair in of_seed.values()):
        return mean, math.nan, math.nan
    error = math.sqrt(max(seeds, clients, seeds + clients - count / (count - 1) * single))
    if error <= 1e-9 * max(abs(pair) for of_seed in pairs.values() for pair in of_seed.values()):
        error = rounding(mean) / math.sqrt(freedom + 1)
    return mean, *student(mean, error, freedom)


def sample_interval(
    differences: Mapping[str, NDArray[np.float64]], by: Mean = "client", rows: Mapping[str, int] | None = None
) -> tuple[float, float, float]:
    r"""Return mean, half width of the 95 % interval, and p-value, for other rows of these clients and other seeds.

    The rows of a client are a sample of all that the client may have, and every seed is tested on the same ones. With
    the difference :math:`d_{sci}` of row i of client c at seed s, the weights :math:`a_c` of the clients and the mean
    :math:`\bar d`, its variance is

    .. math:: \sum_c \frac{a_c^2}{n_c} \operatorname{var}_i \bar d_{\cdot ci} + \frac1S \operatorname{var}_s \bar
        d_{s\cdot\cdot} - \sum_c \frac{a_c^2}{n_c S} v_c,

    where :math:`v_c` is the mean square that is left of a client's differences without means of rows and of seeds: the
    first two terms both have it. The variance is at least the larger one of these two. Its degrees of freedom are
    Satterthwaite's. This is what a bootstrap of rows within clients, crossed with seeds, estimates, without its excess
    (the last term is added three times there, and not taken away), without its loss for few seeds, and with p-values
    that are fine enough for Holm's correction of many comparisons.

    >>> [round(number, 3) for number in sample_interval({"a": np.array([[0.0, 1.0, 0.0, 1.0], [0.0, 1.0, 1.0, 1.0]])})]
    [0.625, 0.666, 0.06]

    Source: Owen, The pigeonhole bootstrap, Annals of Applied Statistics 1, 2007; Satterthwaite, Biometrics Bulletin 2,
    1946.

    Args:
        differences: of each client, one per seed and row, ``[seeds, rows]``; all clients with the same seeds. A single
            seed gives an interval for other rows of that training run alone.
        by: how clients count.
        rows: numbers of rows by client, for ``by="sample"`` where a score is of several rows; None counts scores.
    """
    sizes = {client: (rows or {}).get(client, values.shape[1]) for client, values in differences.items()}
    whole = sum(sizes.values())
    share = {client: sizes[client] / whole if by == "sample" else 1 / len(sizes) for client in sizes}
    of_seeds = sum(share[client] * values.mean(1) for client, values in differences.items())
    mean, seeds = float(np.mean(of_seeds)), len(np.atleast_1d(of_seeds))
    if not any(values.any() for values in differences.values()):
        return mean, math.nan, math.nan
    spreads = {c: float(values.mean(0).var(ddof=1)) for c, values in differences.items() if values.shape[1] > 1}
    if not spreads:
        return mean, math.nan, math.nan
    # a client with one row has no spread of its own
    usual = fmean(spreads.values())
    of_rows = {c: share[c] ** 2 * spreads.get(c, usual) / values.shape[1] for c, values in differences.items()}
    over_rows, both, over_seeds = sum(of_rows.values()), 0.0, 0.0
    if seeds > 1:
        over_seeds = float(np.var(of_seeds, ddof=1)) / seeds
        for client, values in differences.items():
            if (count := values.shape[1]) > 1:
                left = values - values.mean(0) - values.mean(1, keepdims=True) + values.mean()
                both += share[client] ** 2 * float(np.square(left).sum()) / (seeds - 1) / (count - 1) / count / seeds
    variance = max(over_rows, over_seeds, over_rows + over_seeds - both)
    # of the variance's parts, each with its own degrees of freedom
    parts = [(of_rows[c], max(1, values.shape[1] - 1)) for c, values in differences.items()]
    parts += [(over_seeds, seeds - 1)] if over_seeds else []
    if variance <= 1e-18 * max(float(np.square(values).max()) for values in differences.values()):
        error = rounding(mean) / math.sqrt(sum(values.shape[1] for values in differences.values()))
        return mean, *student(mean, error, sum(freedom for _, freedom in parts))
    freedom = sum(part for part, _ in parts) ** 2 / sum(part**2 / freedom for part, freedom in parts)
    return mean, *student(mean, math.sqrt(variance), freedom)


def paired(values: Rows, reference: Rows) -> tuple[dict[str, NDArray[np.float64]], dict[str, int]]:
    """Return the differences of rows by client, ``[seeds, rows]``, and the numbers of rows, for `sample_interval`.

    Clients count that have scores of the same number of rows at each seed at which the reference has a run.

    Args:
        values: the method's scores.
        reference: the reference's scores.
    """
    seeds = sorted({seed for seed, _ in values} & {seed for seed, _ in reference})
    differences, rows = {}, {}
    for client in dict.fromkeys(client for _, client in reference):
        keys = [(seed, client) for seed in seeds]
        scores = [each[key] for each in (values, reference) for key in keys if key in each]
        if seeds and len(scores) == 2 * len(seeds) and len({(len(each.values), each.rows) for each in scores}) == 1:
            # in double precision, so that equal scores of many rows leave no rounding
            both = [np.stack([each[key].values for key in keys]).astype(np.float64) for each in (values, reference)]
            differences[client] = both[0] - both[1]
            rows[client] = scores[0].rows
    return differences, rows


def difference(values: Clients, reference: Clients, population: Population = "seeds") -> Difference | None:
    """Return a method's difference to the reference, over clients that both have; None without such clients.

    Clients count alike within a seed, and seeds count alike.

    Args:
        values: the method's values.
        reference: the reference's values.
        population: for what the interval holds.
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
    return Difference(*t_interval([fmean(own.values()) for own in pairs.values()]), float(better))


def population_of(methods: Mapping[str, Sequence[Result]], asked: Population | None = None) -> Population:
    """Return for what a table's intervals can hold.

    Args:
        methods: finished runs by method.
        asked: the setting ``--interval``; None takes ``samples`` if all runs have scores of the same test rows, else
            ``seeds``.
    """
    results = [result for results in methods.values() for result in results]
    same = len({str(result.common["partition"]) for result in results}) == 1
    if asked in (None, "samples"):
        return "samples" if same and all(row_scores([result]) for result in results) else "seeds"
    # a partition of its own for each seed varies clients, and seeds are all that there is to count
    return "clients" if asked == "clients" and clients_stay(methods) else "seeds"


def clients_stay(methods: Mapping[str, Sequence[Result]]) -> bool:
    """Return True if a client is the same one at each seed: by its name, or as the partition is the same.

    Args:
        methods: finished runs by method.
    """
    results = [result for results in methods.values() for result in results]
    named = all(row.get("name") for result in results for row in result.clients)
    return named or len({str(result.common["partition"]) for result in results}) <= 1


def gains_of(
    methods: Mapping[str, Sequence[Result]], reference: str, population: Population, by: Mean = "client"
) -> dict[str, tuple[Difference, bool]]:
    """Return each other method's gain over the reference, and whether it holds among all comparisons of the table.

    Args:
        methods: finished runs by method.
        reference: the method to compare with, chosen before looking at results.
        population: for what intervals hold; ``clients`` only by client.
        by: how clients count.
    """
    clients = by_method(methods)
    if reference not in clients:
        return {}
    if population != "samples" and by == "client":
        return differences_to(clients, reference, population)
    gains: dict[str, Difference] = {}
    base = row_scores(methods[reference])
    for method in clients:
        if method == reference:
            continue
        pair = difference(clients[method], clients[reference])
        if population == "samples":
            rows, sizes = paired(row_scores(methods[method]), base)
            estimate = sample_interval(rows, by, sizes) if rows else None
        else:
            values = weighted_gains(methods[method], methods[reference])
            estimate = t_interval(values) if values else None
        if estimate is not None and pair is not None:
            gains[method] = Difference(*estimate, pair.better)
    return marked(gains)


def marked(differences: Mapping[str, Difference]) -> dict[str, tuple[Difference, bool]]:
    """Return each difference, and whether it holds among all of them.

    Args:
        differences: the differences to the reference by method.
    """
    adjusted = holm([one.probability for one in differences.values()])
    return {method: (one, p < LEVEL) for (method, one), p in zip(differences.items(), adjusted, strict=True)}


def weighted_gains(results: Sequence[Result], reference: Sequence[Result]) -> list[float]:
    """Return the gain by sample at each common seed, signed so that larger is better.

    Args:
        results: a method's runs.
        reference: the reference's runs.
    """
    values = [
        {
            result.run.seed: result.monitor.sign * result.values[name]
            for result in each
            if (name := f"final/test/{result.monitor.metric}") in result.values
        }
        for each in (results, reference)
    ]
    return [value - values[1][seed] for seed, value in values[0].items() if seed in values[1]]


def unscored(methods: Mapping[str, Sequence[Result]]) -> list[str]:
    """Return the clients with a test value and without scores of their rows in any run.

    Args:
        methods: finished runs by method.
    """
    valued = {client for results in methods.values() for _, client in of_clients(results)}
    lacking = valued - {client for results in methods.values() for _, client in row_scores(results)}
    return sorted(lacking)


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
    clients: Mapping[str, Clients], reference: str, population: Population = "seeds"
) -> dict[str, tuple[Difference, bool]]:
    """Return each other method's difference to the reference, and whether it holds among all of these comparisons.

    Args:
        clients: values by method.
        reference: the method to compare with, chosen before looking at results.
        population: for what intervals hold.
    """
    others = {
        method: difference(values, clients[reference], population)
        for method, values in clients.items()
        if method != reference
    }
    return marked({method: one for method, one in others.items() if one is not None})


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
    asked = [title.removeprefix(OVER).partition(" (by ")[0] for title in columns if title.startswith(OVER)]
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
