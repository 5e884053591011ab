"""Read finished runs: values by run, summaries over seeds, costs of targets, and checks for an equal start."""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from pfl_lightning.cli.compare.runs import Run
from pfl_lightning.data import Split
from pfl_lightning.runs.report import further
from pfl_lightning.runs.run_status import SIMULATED, measured_seconds, read_rows
from pfl_lightning.runs.sample_scores import Scores, read_scores
from pfl_lightning.tasks import Monitor


class Column(NamedTuple):
    """A column of the table."""

    name: str
    """Name in records and summaries."""
    title: str
    """Title in tables."""
    factor: float
    """Factor from the stored value to the printed one, such as 100 for per cent."""
    form: str
    """Format of the printed number."""
    spread: bool = False
    """True if tables print the standard deviation over seeds."""
    asked: bool = False
    """True if tables show the column only on request, by ``--columns``."""


FEW, MANY = 5, 10
"""Number of rounds averaged in "mean of last five" and in "ten best"."""

OVER, RANK, PAPER = "over ", "rank", "paper"
"""Titles of the columns on ranks and on a paper's numbers, and the beginning of the one on gains over a reference."""

LAST, PLAIN = "last (by sample)", "last (by client)"
"""Titles of the reported round's means over clients: weighted by test samples, and with all clients alike."""

Mean: TypeAlias = Literal["client", "sample"]
"""How clients count in a mean: each alike, or each by its number of test rows."""

BY: dict[Mean, str] = {"client": "(by client)", "sample": "(by sample)"}
"""Endings of titles, by how clients count in the mean."""

STEPS, SAMPLES = "local/steps", "local/samples"
"""Names of the columns on the work of local training, of all clients and rounds."""

EQUAL = 1.05
"""Factor up to which two methods' work counts as the same."""

NEW = "New clients took no part: each is tested with the model received after the last round, and again after joining."

COMMON = {"partition": "partitions", "cohorts": "cohorts", "initial": "initial weights"}
"""Entries of the summary that all methods share at a seed, with words for sentences."""


def columns_of(monitor: Monitor, further: Iterable[str] = (), new: bool = False) -> tuple[Column, ...]:
    """Return all possible columns of a kind of run; a run may lack some.

    Args:
        monitor: the metric that selects.
        further: names of further metrics of the last round.
        new: True if the runs have new clients.
    """
    test, server = f"test/{monitor.metric}", f"test/global_{monitor.metric}"
    # new clients have columns only where some joined
    joining = ("received", "joined") if new else ()
    factor, form = (100, ".2f") if monitor.metric == "acc" else (1, ".4g")
    return (
        Column(f"selected/{test}", "best on validation", factor, form, True),
        Column(f"final/{test}", LAST, factor, form, True),
        Column(f"plain/{test}", PLAIN, factor, form, True),
        Column(f"best_on_test/{test}", "best on test", factor, form, True),
        Column(f"final/{test}_{monitor.decile}", "worst decile", factor, form, True),
        Column(f"final/{test}_worst10", "worst tenth", factor, form, True, asked=True),
        *(Column(f"final/test/{name}", f"last {name}", 1, ".4g", True) for name in further),
        Column(f"selected/{server}", "server: best on validation", factor, form, True),
        Column(f"final/{server}", "server: last", factor, form, True),
        Column(f"best_global/{server}", "server: best on test", factor, form, True),
        Column(f"std/{test}", "std over clients", factor, form, True, asked=True),
        *(
            Column(f"{part}/{name}", f"{before}{words}", factor, form, True, asked=True)
            for name, before in ((test, ""), (server, "server: "))
            for part, words in (("last_five", "mean of last five"), ("ten_best", "ten best"))
        ),
        *(Column(f"new/{when}/{monitor.metric}", f"new: {when}", factor, form, True) for when in joining),
        Column("privacy/epsilon", "epsilon", 1, ".3g"),
        Column("bytes/up", "MiB up", 2**-20, ".2f"),
        Column("bytes/down", "MiB down", 2**-20, ".2f"),
        Column(STEPS, "local steps", 1, ".0f", asked=True),
        Column(SAMPLES, "samples read", 1, ".0f", asked=True),
        Column("flops", "GFLOP", 1e-9, ".3g"),
        Column("seconds", "seconds", 1, ".1f"),
    )


@dataclass(frozen=True)
class Result:
    """A finished run.

    Args:
        run: the run.
        folder: the folder with its record.
    """

    run: Run
    folder: Path

    @cached_property
    def rows(self) -> list[dict[str, str]]:
        """Rows of ``rounds.csv``."""
        return read_rows(self.folder / "rounds.csv")

    @cached_property
    def clients(self) -> list[dict[str, str]]:
        """Rows of ``clients.csv``."""
        return read_rows(self.folder / "clients.csv")

    @cached_property
    def scores(self) -> dict[Split, list[Scores]]:
        """The scores of single rows by split, of each client in the order of `clients`; empty if the run kept none."""
        return {split: read_scores(self.folder, split) for split in ("val", "test")}

    @cached_property
    def last_round(self) -> list[dict[str, str]]:
        """Rows of ``client_rounds.csv`` for the last round; empty without the setting ``client_rounds``."""
        path = self.folder / "client_rounds.csv"
        rows = read_rows(path) if path.exists() else []
        return [row for row in rows if row["round"] == rows[-1]["round"]]

    @cached_property
    def summary(self) -> dict[str, Any]:
        """Content of ``summary.json``."""
        summary: dict[str, Any] = json.loads((self.folder / "summary.json").read_text(encoding="utf-8"))
        return summary

    @cached_property
    def monitor(self) -> Monitor:
        """The metric that selects."""
        return Monitor(**self.summary["monitor"])

    @cached_property
    def columns(self) -> tuple[Column, ...]:
        """All possible columns of this kind of run."""
        return columns_of(self.monitor, dict(further(self.summary["final"], self.monitor)), "new" in self.summary)

    @cached_property
    def values(self) -> dict[str, float]:
        """Values of the columns, for all columns with a value."""
        values = {f"bytes/{way}": fmean(float(row[f"bytes/{way}"]) for row in self.rows) for way in ("up", "down")}
        for part in ("selected", "final", "best_on_test", "best_global", "new", "privacy"):
            values |= {f"{part}/{name}": value for name, value in self.summary.get(part, {}).items()}
        test = f"test/{self.monitor.metric}"
        tested = [float(row[test]) for row in self.clients if row.get(test)]
        if not np.isnan(tested).all():
            # the worst decile is the lowest of accuracies, but the highest of losses
            share = 0.1 if self.monitor.mode == "max" else 0.9
            values[f"final/{test}_{self.monitor.decile}"] = float(np.nanquantile(tested, share))
            known = [value for value in tested if not math.isnan(value)]
            values[f"final/{test}_worst10"] = self.monitor.worst_tenth(known)
            values[f"plain/{test}"] = fmean(known)
            values[f"std/{test}"] = float(np.nanstd(tested))
        # a run of four rounds has no "mean of last five": a mean of four under this title would mislead
        for name in (test, f"test/global_{self.monitor.metric}"):
            rounds = [float(row[name]) for row in self.rows if row.get(name)]
            if len(rounds) >= FEW:
                values[f"last_five/{name}"] = fmean(rounds[-FEW:])
            if len(rounds) >= MANY:
                values[f"ten_best/{name}"] = fmean(sorted(rounds, key=lambda value: -self.monitor.sign * value)[:MANY])
        if counted := [float(row["flops"]) for row in self.rows if row.get("flops")]:
            values["flops"] = fmean(counted)
        # totals, as runs of other numbers of rounds, or with one client for all, can do the same work
        for name in (STEPS, SAMPLES):
            if any(row.get(name) for row in self.rows):
                values[name] = sum(float(row.get(name) or 0) for row in self.rows)
        values["seconds"] = self.summary["seconds"]
        return {column.name: values[column.name] for column in self.columns if values.get(column.name) is not None}

    @property
    def measured(self) -> list[Any]:
        """Return every measured value: metric and losses of each round, and the metric's columns."""
        kinds = (self.monitor.metric, "/loss")
        rounds = [value for row in self.rows for name, value in row.items() if name.endswith(kinds) and value]
        # means of losses alone could agree by chance in four digits; here every digit of every round must agree
        spread = [column.name for column in self.columns if column.spread]
        return rounds + [self.values[name] for name in spread if name in self.values]

    @cached_property
    def common(self) -> dict[str, Any]:
        """Return the summary and the cohorts of each round, to compare runs with the same seed."""
        return {**self.summary, "cohorts": [row["cohort"] for row in self.rows]}


def over_seeds(results: Sequence[Result]) -> dict[str, tuple[float, float | None]]:
    """Return (mean, sample standard deviation) over seeds by column; the deviation is None for a single seed.

    Args:
        results: a method's finished runs.
    """
    names = dict.fromkeys(name for result in results for name in result.values)
    known = {name: [r.values[name] for r in results if name in r.values] for name in names}
    return {
        name: (fmean(values), stdev(values) if len(values) > 1 else None) for name, values in known.items() if values
    }


def comparison_table(
    methods: Mapping[str, Sequence[Result]],
    failures: Mapping[Run, str],
    more: Mapping[str, Mapping[str, str]],
    titles: Sequence[str] = (),
) -> list[list[str]]:
    """Return the table's cells, the header first, without columns empty for every method.

    Args:
        methods: finished runs by method.
        failures: reasons of failed runs.
        more: further columns: cells by method, by title.
        titles: titles of the columns; empty for all columns that are shown without request.
    """
    summaries = {method: over_seeds(results) for method, results in methods.items()}
    columns = [column for column in all_columns(methods) if any(column.name in got for got in summaries.values())]
    cells: dict[str, Mapping[str, str]] = {
        column.title: {method: cell(column, got.get(column.name)) for method, got in summaries.items()}
        for column in columns
    }
    # ranks only make sense with many methods, so they are shown on request
    usual = [c.title for c in columns if not c.asked or (c.name in (STEPS, SAMPLES) and factors(summaries, c.name))]
    shown = titles or [*usual, *(t for t in more if t != RANK)]
    cells.update(more)
    rows = [["method", *(title for title in shown if title in cells)]]
    rows += [[method, *(cells[title].get(method, "-") for title in rows[0][1:])] for method in methods]
    if failures:
        rows[0].append("failed")
        for row in rows[1:]:
            seeds = [str(run.seed) for run in failures if run.method == row[0]]
            row.append(f"seed {', '.join(seeds)}" if seeds else "")
    return rows


def best_cells(
    cells: Sequence[Sequence[str]], methods: Mapping[str, Sequence[Result]], monitor: Monitor
) -> set[tuple[int, int]]:
    """Return (row, column) of the best mean in each column on the reported round; equal means share the place.

    Args:
        cells: the table, the header first.
        methods: finished runs by method; with less than two finished methods no cell is the best.
        monitor: the metric that selects.
    """
    summaries = {method: over_seeds(results) for method, results in methods.items() if results}
    places = set()
    for title, name in ((LAST, f"final/test/{monitor.metric}"), (PLAIN, f"plain/test/{monitor.metric}")):
        known = {method: summary[name][0] for method, summary in summaries.items() if name in summary}
        means = {method: monitor.sign * mean for method, mean in known.items() if not math.isnan(mean)}
        if title in cells[0] and len(means) > 1:
            best = max(means.values())
            places |= {(row, cells[0].index(title)) for row, of_one in enumerate(cells) if means.get(of_one[0]) == best}
    return places


def all_columns(methods: Mapping[str, Sequence[Result]]) -> list[Column]:
    """Return the columns of all runs without duplicates; the columns of accuracy if no run has finished.

    Args:
        methods: finished runs by method.
    """
    found = [column for results in methods.values() for result in results for column in result.columns]
    return list(dict.fromkeys(found or columns_of(Monitor())))


def cell(column: Column, value: tuple[float, float | None] | None) -> str:
    """Return a value as a cell.

    >>> columns = columns_of(Monitor())
    >>> cell(columns[0], (0.98765, 0.0012)), cell(columns[-1], (7.0, 0.1)), cell(columns[0], None)
    ('98.77 ± 0.12', '7.0', '-')
    """
    if value is None:
        return "-"
    mean, std = (None if number is None else format(column.factor * number, column.form) for number in value)
    return f"{mean} ± {std}" if column.spread and std is not None else str(mean)


def factors(summaries: Mapping[str, Mapping[str, tuple[float, float | None]]], name: str) -> dict[str, float]:
    """Return the work of each method that differs from the usual one, as a multiple of it; empty if none does.

    The usual work is the one that most methods do up to `EQUAL`; of equally frequent ones the least. A method without
    any local training is left out.

    Args:
        summaries: the result of `over_seeds` by method.
        name: `STEPS` or `SAMPLES`.
    """
    work = {method: summary[name][0] for method, summary in summaries.items() if name in summary and summary[name][0]}
    if not work:
        return {}
    alike = {value: sum(value / EQUAL <= other <= EQUAL * value for other in work.values()) for value in work.values()}
    exactly = Counter(work.values())
    usual = max(sorted(alike), key=lambda value: (alike[value], exactly[value]))
    return {m: value / usual for m, value in work.items() if not usual / EQUAL <= value <= EQUAL * usual}


def unequal_work(methods: Mapping[str, Sequence[Result]]) -> list[str]:
    """Return a sentence for methods with more or fewer local steps than most, and one for the samples they read.

    Args:
        methods: finished runs by method.
    """
    summaries = {method: over_seeds(results) for method, results in methods.items() if results}
    notes, previous = [], dict[str, float]()
    for name, words in ((STEPS, "makes {} times the local steps of"), (SAMPLES, "reads {} times the samples of")):
        ratios = factors(summaries, name)
        usual = next((m for m, got in summaries.items() if m not in ratios and got.get(name, (0.0,))[0]), "")
        # samples are worth a sentence where they aren't in proportion to steps
        new = {m: k for m, k in ratios.items() if not previous.get(m, 1) / EQUAL <= k <= EQUAL * previous.get(m, 1)}
        if new:
            (first, most), *others = sorted(new.items(), key=lambda pair: -pair[1])
            more = "".join(f", {method} {times:.3g} times" for method, times in others)
            notes.append(f"Unequal work: {first} {words.format(f'{most:.3g}')} {usual}{more}.")
        previous = ratios
    return notes


def reasons(method: str, failures: Mapping[Run, str]) -> list[str]:
    """Return one sentence per reason for which runs of a method failed.

    Args:
        method: the method.
        failures: reasons of failed runs, of all methods.
    """
    # a wrong setting fails at all seeds alike, and needs one sentence only
    seeds: dict[str, list[str]] = {}
    for run, why in failures.items():
        if run.method == method:
            seeds.setdefault(why, []).append(str(run.seed))
    return [f"{method} failed with seed {', '.join(each)}: {why}" for why, each in seeds.items()]


def unequal(methods: Mapping[str, Sequence[Result]], monitor: Monitor) -> bool:
    """Return True if the two means over clients, by client and by sample, differ in any run's reported round.

    Args:
        methods: finished runs by method.
        monitor: the metric that selects.
    """
    names = (f"plain/test/{monitor.metric}", f"final/test/{monitor.metric}")
    pairs = [[result.values.get(name, math.nan) for name in names] for each in methods.values() for result in each]
    return any(abs(plain - weighted) > 1e-6 * abs(plain) for plain, weighted in pairs)


def disagreement(methods: Mapping[str, Sequence[Result]], monitor: Monitor, reference: str | None) -> list[str]:
    """Return a sentence on pairs of methods whose order differs between both means over clients; empty if none does.

    Args:
        methods: finished runs by method.
        monitor: the metric that selects.
        reference: the method whose pairs are named one by one.
    """
    names = (f"plain/test/{monitor.metric}", f"final/test/{monitor.metric}")
    means = {}
    for method, summary in ((method, over_seeds(results)) for method, results in methods.items()):
        if all(name in summary for name in names):
            means[method] = [monitor.sign * summary[name][0] for name in names]
    turned = [
        (one, other)
        for one, other in combinations(means, 2)
        if (means[one][0] - means[other][0]) * (means[one][1] - means[other][1]) < 0
    ]
    if not turned:
        return []
    # the table is about pairs with the reference
    one = reference if any(reference in pair for pair in turned) else turned[0][0]
    others = [other for pair in turned if one in pair for other in pair if other != one]
    words = []
    for by_client, by_sample, sign in (("better", "worse", 1), ("worse", "better", -1)):
        if own := [other for other in others if sign * (means[str(one)][0] - means[other][0]) > 0]:
            words.append(f"{one} is {by_client} than {', '.join(own)} by client, and {by_sample} by sample")
    more = f"; so it is for {len(turned) - len(others)} other pairs" if len(turned) > len(others) else ""
    return [f"The two means disagree: {'; '.join(words)}{more}."]


def differences(methods: Mapping[str, Sequence[Result]]) -> list[str]:
    """Return a sentence for each pair of methods with unequal partition, cohorts or initial weights, with the seeds.

    Args:
        methods: finished runs by method.
    """
    # compared with the first method of the same seed
    first: dict[int, Result] = {}
    sentences: dict[str, list[str]] = {}
    for result in (result for results in methods.values() for result in results):
        other = first.setdefault(result.run.seed, result)
        unlike = [words for name, words in COMMON.items() if differ(result.common[name], other.common[name])]
        if unlike:
            said = f"{result.run.method} and {other.run.method} had different {' and '.join(unlike)}."
            sentences.setdefault(said, []).append(str(result.run.seed))
    return [f"{'seeds' if len(own) > 1 else 'seed'} {', '.join(own)}: {said}" for said, own in sentences.items()]


def same_numbers(methods: Mapping[str, Sequence[Result]]) -> list[str]:
    """Return a sentence for each set of methods with identical measurements at all seeds.

    Such a set is usually a mistake in the settings: a term with weight 0, or one that the net can't have.

    Args:
        methods: finished runs by method.
    """
    alike: dict[str, list[str]] = {}
    for method, results in methods.items():
        measured = {result.run.seed: result.measured for result in results}
        if any(measured.values()):
            alike.setdefault(repr(measured), []).append(method)
    return [
        f"{', '.join(names[:-1])} and {names[-1]} gave the same numbers to the last digit: the difference between them "
        "has no effect here, such as a term with too small a weight."
        for names in alike.values()
        if len(names) > 1
    ]


def differ(one: str | list[str], other: str | list[str]) -> bool:
    """Return True if two fingerprints differ, or two runs' cohorts differ in a common round."""
    # not strict: an early stop may end one run sooner, which is no unequal start
    return any(a != b for a, b in zip(one, other, strict=False))


TARGET = re.compile(r"(rounds|MiB|seconds|simulated seconds) to (\d+(?:\.\d+)?)")
"""Title of a column with the cost of a target: rounds, bytes or seconds up to the first validation as good."""
COSTS: dict[str, Callable[[Mapping[str, str]], float]] = {
    "rounds": lambda row: 1.0,
    "MiB": lambda row: sum(float(row.get(f"bytes/{way}") or 0) for way in ("up", "down")) / 2**20,
    "seconds": measured_seconds,
    "simulated seconds": lambda row: float(row[SIMULATED] or 0),
}
"""Cost of one round, from its row of ``rounds.csv``."""
FORMS = {"rounds": ".0f", "MiB": ".2f", "seconds": ".1f", "simulated seconds": ".1f"}


def is_target(title: str) -> bool:
    """Return True if a column's title asks for the cost of a target.

    >>> is_target("rounds to 90"), is_target("MiB to 0.5"), is_target("last")
    (True, True, False)
    """
    return TARGET.fullmatch(title) is not None


def cost_to_target(title: str, methods: Mapping[str, Sequence[Result]]) -> dict[str, str]:
    """Return the cost of a target by method: mean and standard deviation over seeds, as a cell.

    Args:
        title: such as ``MiB to 90``; the target is a validation accuracy in per cent, or a value of another metric.
        methods: finished runs by method.
    """
    what, _, target = title.partition(" to ")
    if what == "simulated seconds":
        # a run without a clock costs an unknown time, and not none
        methods = {name: [each for each in own if SIMULATED in each.rows[0]] for name, own in methods.items()}
    return {
        method: cost_cell([cost(result, what, float(target)) for result in results], FORMS[what])
        for method, results in methods.items()
        if results
    }


def cost(result: Result, what: str, target: float) -> float | None:
    """Return a run's cost up to the first round at the target; None if no round gets so far.

    Args:
        result: the run.
        what: ``rounds``, ``MiB``, ``seconds`` or ``simulated seconds``.
        target: value of the metric that selects, in per cent for accuracy.
    """
    monitor, total = result.monitor, 0.0
    wanted = target / 100 if monitor.metric == "acc" else target
    for row in result.rows:
        # added before the comparison: the round that reaches the target is paid for as well
        total += COSTS[what](row)
        value = row.get(f"val/{monitor.metric}")
        if value and monitor.sign * float(value) >= monitor.sign * wanted:
            return total
    return None


def cost_cell(costs: Sequence[float | None], form: str) -> str:
    """Return costs by seed as a cell; with a count of seeds if some never reached the target.

    >>> cost_cell([3.0, 5.0], ".0f"), cost_cell([3.0, None], ".0f"), cost_cell([None], ".0f"), cost_cell([7.25], ".1f")
    ('4 ± 1', '3 (1 of 2 seeds)', 'never', '7.2')

    Args:
        costs: one per seed; None if the seed never reached the target.
        form: format of the numbers.
    """
    # "never" is no number: a mean over seeds could only be of those that got there
    reached = [each for each in costs if each is not None]
    if not reached:
        return "never"
    if len(reached) < len(costs):
        # a mean over some seeds alone looks too good, so the cell says how many
        return f"{fmean(reached):{form}} ({len(reached)} of {len(costs)} seeds)"
    return f"{fmean(reached):{form}}" + (f" ± {stdev(reached):{form}}" if len(reached) > 1 else "")
