"""Decide over all sites and for each site, by paired differences of validation rows."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from pfl_lightning.cli.compare.by_client import split
from pfl_lightning.cli.compare.results import Mean, Result
from pfl_lightning.cli.compare.significance import (
    LEVEL,
    Difference,
    Rows,
    holm,
    of_clients,
    paired,
    row_scores,
    sample_interval,
    t_interval,
)
from pfl_lightning.data import Split
from pfl_lightning.runs.sample_scores import Scores
from pfl_lightning.tasks import Monitor

MATTERS = 0.01
"""Smallest gain of interest: of an accuracy, or relative to the reference's metric."""

LEAST = 10
"""Fewest rows of a site that counts as a whole one: the AUROC of two rows is 0 or 1, and would weigh as much as that of
hundreds."""

NOBODY = 3.0
"""Rule of three: of n rows without a difference, at most 3/n of all rows have one, at 95 %."""


class Verdict(Enum):
    """What validation rows say about a gain over the reference."""

    BETTER = "better"
    NOT_BETTER = "not better"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Answer:
    """The answer over all sites, or at one.

    Args:
        verdict: whether a method is better than the reference.
        method: the method to take: the reference unless one is better.
        clear: all methods that are better, the taken one first, then by their gains.
        gains: each method's gain over the reference, larger is better.
        rows: number of validation rows.
    """

    verdict: Verdict
    method: str
    clear: tuple[str, ...]
    gains: Mapping[str, Difference]
    rows: int


@dataclass(frozen=True)
class Pick:
    """The method advised for a site.

    Args:
        site: name of the site.
        method: the method.
        verdict: whether it, or for the reference any other, is better than the reference.
        reason: why, in words.
        gain: the gain over the reference; None for the reference itself, and at a site without validation rows.
        level: methods that validation can't tell from this one at the site.
    """

    site: str
    method: str
    verdict: Verdict
    reason: str
    gain: Difference | None
    level: tuple[str, ...]


def scores_of(results: Sequence[Result], part: Split, folds: int, least: int = 0, at_once: bool = False) -> Rows:
    """Return the scores of a method's rows by (repeat, site), with the folds of a repeat one after another.

    Seeds from 1 on take the folds in turn. Test rows are the same at all seeds: each seed is a repeat of theirs. A
    repeat that isn't whole counts if it is the first. Without scores of rows, a run's mean at a site counts as one row.

    Args:
        results: the method's runs.
        part: the rows' split.
        folds: number of seeds that validate on different rows.
        least: fewest rows of a site; sites with fewer are left out.
        at_once: whether as many rows are needed in each fold, as for a metric that is no mean over rows.
    """
    scores = row_scores(results, part)
    if not scores:
        # a mean alone doesn't tell of how many rows it is
        scores, least = {key: Scores(np.array([value]), 1) for key, value in of_clients(results, part).items()}, 0
    if at_once or part == "test" or folds == 1:
        scores = {key: each for key, each in scores.items() if each.rows >= least}
    if part == "test" or folds == 1:
        return scores
    seeds = defaultdict(set)
    for result in results:
        seeds[(result.run.seed - 1) // folds].add(result.run.seed)
    repeats: Rows = {}
    for repeat, own in seeds.items():
        if len(own) < folds and repeat:
            continue
        for site in dict.fromkeys(site for _, site in scores):
            parts = [scores[seed, site] for seed in sorted(own) if (seed, site) in scores]
            if parts:
                values = np.concatenate([each.values for each in parts])
                repeats[repeat, site] = Scores(values, sum(each.rows for each in parts))
    return {key: each for key, each in repeats.items() if each.rows >= least}


def gain_of(rows: Rows, other: Rows, by: Mean = "client") -> Difference | None:
    """Return a method's gain over another on the rows of both; None without such rows.

    Where no site has several scores, the interval is of repeats alone.

    Args:
        rows: scores of the method's rows.
        other: scores of the other method's rows.
        by: how sites count.
    """
    differences, sizes = paired(rows, other)
    if not differences:
        return None
    better = float(np.concatenate([values.ravel() > 0 for values in differences.values()]).mean())
    if all(values.shape[1] == 1 for values in differences.values()):
        return Difference(*t_interval(np.mean([*differences.values()], axis=0).ravel().tolist()), better)
    return Difference(*sample_interval(differences, by, sizes), better)


def is_ahead(lead: Difference | None) -> bool:
    """Return True if a method's gain over another has a 95 % interval above 0."""
    return lead is not None and not math.isnan(lead.half) and lead.mean > lead.half


def upper_end(gain: Difference, rows: int, whole: float) -> float:
    """Return the upper end of a gain's 95 % interval.

    Args:
        gain: the gain.
        rows: number of rows, for a gain of 0 on each, which has no interval.
        whole: largest difference of a row.
    """
    return whole * NOBODY / rows if math.isnan(gain.half) and not gain.mean else gain.mean + gain.half


def answer(rows: Mapping[str, Rows], reference: str, monitor: Monitor, by: Mean = "client") -> Answer:
    """Return the answer over all sites with rows here.

    A gain may matter if its 95 % interval reaches the smallest gain of interest. A method is better if its gain may
    matter, and is above 0 with p < 0.05 after Holm's correction for all methods. If any is, the first method is taken
    that isn't clearly worse than the better one with the largest gain, and whose own interval, without correction, is
    above 0: a simple method needs no stronger evidence than others that it is level with the best. None is better if
    no gain may matter. Else the answer is unknown.

    Args:
        rows: scores of validation rows by method, simple methods first.
        reference: the method to compare with.
        monitor: the metric that selects.
        by: how sites count.
    """
    base = rows.get(reference, {})
    others = {method: gain_of(each, base, by) for method, each in rows.items() if method != reference}
    gains = {method: one for method, one in others.items() if one is not None}
    first = min((repeat for repeat, _ in base), default=0)
    count = sum(scores.rows for (repeat, _), scores in base.items() if repeat == first)
    adjusted = dict(zip(gains, holm([one.probability for one in gains.values()]), strict=True))
    whole = scale(base, monitor)
    ends = {method: upper_end(one, count, whole) for method, one in gains.items()}
    matters = [method for method in gains if ends[method] >= MATTERS * whole]
    clear = [method for method in matters if adjusted[method] < LEVEL and gains[method].mean > 0]
    if clear:
        best = max(clear, key=lambda method: gains[method].mean)
        level = [each for each in matters if each in clear or is_ahead(gains[each])]
        taken = next(each for each in level if each == best or not is_ahead(gain_of(rows[best], rows[each], by)))
        further = sorted((each for each in clear if each != taken), key=lambda each: -gains[each].mean)
        return Answer(Verdict.BETTER, taken, (taken, *further), gains, count)
    verdict = Verdict.NOT_BETTER if gains and not matters else Verdict.UNKNOWN
    return Answer(verdict, reference, (), gains, count)


def scale(rows: Rows, monitor: Monitor) -> float:
    """Return the size of a metric, of which a hundredth is the smallest gain of interest.

    Args:
        rows: the reference's scores.
        monitor: the metric; an accuracy's size is 1.
    """
    if monitor.metric == "acc" or not rows:
        return 1.0
    return abs(float(np.mean([scores.values.mean() for scores in rows.values()])))


def picks(
    rows: Mapping[str, Rows], reference: str, monitor: Monitor, sites: Sequence[str], by: Mean = "client"
) -> list[Pick]:
    """Return the advice for each site.

    A site takes the method that is better by its own rows; else the one that is better over all sites, unless it is
    clearly worse at the site; else the reference.

    Args:
        rows: scores of validation rows by method, simple methods first.
        reference: the method to compare with.
        monitor: the metric that selects.
        sites: names of the sites.
        by: how sites count over all of them.
    """
    overall, advice = answer(rows, reference, monitor, by), []
    by_site = {method: split(each) for method, each in rows.items()}
    for site in sites:
        at_site = {method: each.get(site, {}) for method, each in by_site.items()}
        here = answer(at_site, reference, monitor)
        kept = [m for m in overall.clear if m not in here.gains or not is_ahead(negative(here.gains[m]))]
        verdict = Verdict.NOT_BETTER
        if here.verdict is Verdict.BETTER:
            method, verdict, reason = here.method, here.verdict, "better at this site"
        elif kept:
            method, verdict, reason = kept[0], Verdict.BETTER, "better over all sites, and not worse here"
        elif overall.clear:
            method, reason = reference, f"{overall.method} is better over all sites, and worse here"
        elif here.verdict is Verdict.NOT_BETTER:
            method, reason = reference, "no method gains enough here"
        elif overall.verdict is Verdict.NOT_BETTER:
            method, reason = reference, "no method gains enough over all sites"
        else:
            method, verdict, reason = reference, Verdict.UNKNOWN, "too few rows"
        level = tuple(
            other
            for other, each in at_site.items()
            if other != method and each and not is_ahead(gain_of(at_site.get(method, {}), each))
        )
        advice.append(Pick(site, method, verdict, reason, here.gains.get(method), level))
    return advice


def negative(gain: Difference) -> Difference:
    """Return a loss as a gain of the other method."""
    return Difference(-gain.mean, gain.half, gain.probability, 1 - gain.better)


def smallest_shown(given: Answer) -> float:
    """Return the smallest gain that these rows would have shown, by the best method's interval; NaN without one.

    Args:
        given: the answer.
    """
    from scipy.special import ndtri

    known = [one for one in given.gains.values() if not math.isnan(one.half)]
    if not known:
        return math.nan
    best = max(known, key=lambda one: one.mean)
    # Holm's first step: the smallest of the p-values is held against the level over the number of methods
    return float(best.half * ndtri(1 - LEVEL / 2 / len(given.gains)) / ndtri(1 - LEVEL / 2))
