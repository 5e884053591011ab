"""What finished runs say: values by run, their summary over seeds, and whether they had the same start."""

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import numpy as np

from pfl_lightning.cli.compare.runs import Run


class Column(NamedTuple):
    """A number that a run has."""

    name: str
    """Its name, as in records and summaries."""
    title: str
    """Its title in tables."""
    factor: float
    """What tables multiply it by."""
    form: str
    """How tables write it."""
    spread: bool = False
    """Whether tables have its standard deviation."""


COLUMNS = (
    Column("selected/test/acc", "best on validation", 100, ".2f", True),
    Column("final/test/acc", "last", 100, ".2f", True),
    Column("best_on_test/test/acc", "best on test", 100, ".2f", True),
    Column("final/test/acc_p10", "worst decile", 100, ".2f", True),
    Column("selected/test/global_acc", "server: best on validation", 100, ".2f", True),
    Column("final/test/global_acc", "server: last", 100, ".2f", True),
    Column("best_global/test/global_acc", "server: best on test", 100, ".2f", True),
    Column("bytes/up", "MiB up", 2**-20, ".2f"),
    Column("bytes/down", "MiB down", 2**-20, ".2f"),
    Column("seconds", "seconds", 1, ".1f"),
)

CAPTION = """\
Test accuracy in %, {over}: of the round that validation selects, of the last round,
and of the round that is best on the test samples, which is no fair choice; worst decile: the lowest decile of clients
in the last round; server: its one model on the central test set; MiB: of all clients in a round."""

COMMON = {"partition": "partitions", "cohorts": "cohorts", "initial": "initial weights"}
"""What methods share at a seed."""


@dataclass(frozen=True)
class Result:
    """A finished run.

    Args:
        run: the run.
        folder: the folder of its record.
    """

    run: Run
    folder: Path

    @cached_property
    def rows(self) -> list[dict[str, str]]:
        """The record's rounds."""
        return read(self.folder / "rounds.csv")

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The record's summary."""
        summary: dict[str, Any] = json.loads((self.folder / "summary.json").read_text())
        return summary

    @cached_property
    def values(self) -> dict[str, float]:
        """The columns that the run has."""
        values = {f"bytes/{way}": fmean(float(row[f"bytes/{way}"]) for row in self.rows) for way in ("up", "down")}
        for part in ("selected", "final", "best_on_test", "best_global"):
            values |= {f"{part}/{name}": value for name, value in self.summary.get(part, {}).items()}
        tested = [float(row["test/acc"]) for row in read(self.folder / "clients.csv") if row.get("test/acc")]
        if not np.isnan(tested).all():
            values["final/test/acc_p10"] = float(np.nanquantile(tested, 0.1))
        values["seconds"] = self.summary["seconds"]
        return {column.name: values[column.name] for column in COLUMNS if values.get(column.name) is not None}

    @property
    def accuracies(self) -> list[Any]:
        """All accuracies of the run: of each round, and those of its columns."""
        rounds = [value for row in self.rows for name, value in row.items() if name.endswith("acc") and value]
        return rounds + [self.values[column.name] for column in COLUMNS if column.spread and column.name in self.values]

    @cached_property
    def common(self) -> dict[str, Any]:
        """What methods share at a seed, among other things."""
        return {**self.summary, "cohorts": [row["cohort"] for row in self.rows]}


def read(path: Path) -> list[dict[str, str]]:
    """Rows of a CSV file."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def over_seeds(results: Sequence[Result]) -> dict[str, tuple[float, float | None]]:
    """Mean and sample standard deviation over seeds by column; the latter None for a single seed.

    Args:
        results: a method's.
    """
    known = {column.name: [r.values[column.name] for r in results if column.name in r.values] for column in COLUMNS}
    return {
        name: (fmean(values), stdev(values) if len(values) > 1 else None) for name, values in known.items() if values
    }


def comparison_table(methods: Mapping[str, Sequence[Result]], failures: Mapping[Run, str]) -> list[list[str]]:
    """The table's cells, the header first, without columns that no method has.

    Args:
        methods: finished runs by method.
        failures: why others failed.
    """
    summaries = {method: over_seeds(results) for method, results in methods.items()}
    columns = [column for column in COLUMNS if any(column.name in summary for summary in summaries.values())]
    rows = [["method", *(column.title for column in columns)]]
    rows += [[method, *(cell(column, got.get(column.name)) for column in columns)] for method, got in summaries.items()]
    if failures:
        rows[0].append("failed")
        for row in rows[1:]:
            seeds = [str(run.seed) for run in failures if run.method == row[0]]
            row.append(f"seed {', '.join(seeds)}" if seeds else "")
    return rows


def cell(column: Column, value: tuple[float, float | None] | None) -> str:
    """A value as tables write it.

    >>> cell(COLUMNS[0], (0.98765, 0.0012)), cell(COLUMNS[-1], (7.0, 0.1)), cell(COLUMNS[0], None)
    ('98.77 ± 0.12', '7.0', '-')
    """
    if value is None:
        return "-"
    mean, std = (None if number is None else format(column.factor * number, column.form) for number in value)
    return f"{mean} ± {std}" if column.spread and std is not None else str(mean)


def reasons(method: str, failures: Mapping[Run, str]) -> list[str]:
    """Why runs of a method failed, each reason once.

    Args:
        method: the method.
        failures: why runs failed, of all methods.
    """
    seeds: dict[str, list[str]] = {}
    for run, why in failures.items():
        if run.method == method:
            seeds.setdefault(why, []).append(str(run.seed))
    return [f"{method} failed with seed {', '.join(each)}: {why}" for why, each in seeds.items()]


def differences(methods: Mapping[str, Sequence[Result]]) -> list[str]:
    """What isn't the same for all methods at a seed, a sentence for each pair of methods; empty if all is.

    Args:
        methods: finished runs by method.
    """
    first: dict[int, Result] = {}
    found = []
    for result in (result for results in methods.values() for result in results):
        other = first.setdefault(result.run.seed, result)
        unlike = [words for name, words in COMMON.items() if differ(result.common[name], other.common[name])]
        if unlike:
            found.append(
                f"seed {result.run.seed}: {result.run.method} and {other.run.method} had different "
                f"{' and '.join(unlike)}."
            )
    return found


def same_numbers(methods: Mapping[str, Sequence[Result]]) -> list[str]:
    """A sentence for the methods whose accuracies are the same to the last digit at all seeds, for each set of them.

    Args:
        methods: finished runs by method.
    """
    alike: dict[str, list[str]] = {}
    for method, results in methods.items():
        accuracies = {result.run.seed: result.accuracies for result in results}
        if any(accuracies.values()):
            alike.setdefault(repr(accuracies), []).append(method)
    return [
        f"{', '.join(names[:-1])} and {names[-1]} gave the same numbers to the last digit: what sets them apart has no "
        "effect here, such as a term whose weight is too small."
        for names in alike.values()
        if len(names) > 1
    ]


def differ(one: str | list[str], other: str | list[str]) -> bool:
    """Whether two fingerprints, or two runs' cohorts in the rounds that both had, aren't the same."""
    return any(a != b for a, b in zip(one, other, strict=False))
