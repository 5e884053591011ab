"""Write the files of a comparison: tables as text, CSV, Markdown and LaTeX, curves, and an HTML page."""

from argparse import ArgumentTypeError
from collections.abc import Mapping, Sequence
from math import isnan
from pathlib import Path
from textwrap import fill
from typing import Any

from pfl_lightning.cli.compare.by_client import OTHERS, by_client, clients_stay
from pfl_lightning.cli.compare.page import page
from pfl_lightning.cli.compare.results import (
    LAST,
    NEW,
    OVER,
    PAPER,
    PLAIN,
    RANK,
    Result,
    all_columns,
    best_cells,
    columns_of,
    comparison_table,
    cost_to_target,
    differences,
    is_target,
    over_seeds,
    reasons,
    same_numbers,
    unequal_work,
)
from pfl_lightning.cli.compare.runs import Run
from pfl_lightning.cli.compare.significance import Population, by_method, differences_to, ranks, shown
from pfl_lightning.plots.runs import plot_mean_curves
from pfl_lightning.runs.report import Row, write_rows
from pfl_lightning.runs.tables import latex, latex_table, markdown_table, text_table
from pfl_lightning.tasks import Monitor

MEANINGS = {
    "best on validation": "of the round that validation selects, weighted",
    "last": "of the last round",
    "weighted": "clients count by their test samples",
    "plain": "all clients count alike",
    "best on test": "of the round that is best on the test samples, so too optimistic",
    "mean of last five": "over the last five rounds",
    "ten best": "the mean of the ten best rounds on the test samples",
    "worst decile": "the {end} decile of clients in the last round",
    "worst tenth": "the mean over the {end} tenth of clients in the last round",
    "std over clients": "in the last round",
    "server": "the server's one model on the central test set",
    "MiB": "of all clients in a round",
    "local steps": "optimizer steps per client and round",
    "samples read": "per client and round, each time that they are in a batch",
    "GFLOP": "of all clients in a round",
}
"""Explanations of columns, by the beginning of their titles."""

ROUND = """\
Reported round: the last one, a rule fixed beforehand; it holds for bold means, differences, ranks and clients."""

BOLD = """\
Bold: the best mean of the column alone. It says nothing about significance."""

OVER_REFERENCE = """\
Over {reference}: a client's mean gain over {reference}, with all clients alike, as in "last (plain)"; [95 % interval by
Student's t {population}]; the share of clients with a gain."""

POPULATIONS: dict[Population, str] = {
    "seeds": "over seeds' mean differences",
    "clients": "over clusters by seed and by client, which holds for other clients of their kind as well",
}
"""Explanations of ``--interval``."""

STRANGERS = "--interval clients needs the same clients at all seeds, and these differ: intervals are over seeds."

STAR = """\
A star marks a difference with p < 0.05 after Holm's correction for {count}."""

ONE_SEED = "With one seed there are no intervals; give several --seeds."

RANKS = "Rank: the mean over seeds and clients of a method's rank; 1 is the best."

TARGETS = """\
To a target: the cost of all rounds up to the first whose validation reaches the target; MiB up and down, of all
clients."""


def write(
    out: Path,
    methods: Mapping[str, Sequence[Result]],
    failures: Mapping[Run, str],
    seeds: Sequence[int],
    tuning: Sequence[str],
    paper: Mapping[str, str],
    columns: Sequence[str] = (),
    reference: str | None = None,
    population: Population = "seeds",
) -> str:
    """Write all files of a comparison, and return the text for the terminal.

    Args:
        out: the folder.
        methods: finished runs by method; an empty list if none has finished.
        failures: reasons of failed runs.
        seeds: all seeds.
        tuning: sentences on tuned settings.
        paper: a paper's numbers, by method.
        columns: titles of the columns; empty for the usual ones.
        reference: the method that all others are compared with; None for no such comparison.
        population: for what intervals of gains hold.
    """
    monitor = monitor_of(methods)
    clients = by_method(methods)
    over = f"{OVER}{reference}"
    # a partition of its own for each seed varies clients, and seeds are all that there is to count
    kept: Population = population if clients_stay(methods) else "seeds"
    compared = differences_to(clients, reference, kept) if reference in clients else {}
    renamed = (over if title.startswith(OVER) else LAST if title == "last" else title for title in columns)
    columns = list(dict.fromkeys(renamed))
    gains = {method: shown(one, is_marked, monitor) for method, (one, is_marked) in compared.items()}
    more = {over: gains, RANK: ranks(clients), PAPER: paper}
    more |= {title: cost_to_target(title, methods) for title in columns if is_target(title)}
    cells = comparison_table(methods, failures, {title: column for title, column in more.items() if column}, columns)
    marked = best_cells(cells, methods, monitor)
    caption = caption_of(cells[0], monitor, seeds)
    notes = [*(reason for method in methods for reason in reasons(method, failures)), *tuning]
    if any(title in cells[0] for title in (LAST, PLAIN, RANK, over)):
        notes.append(ROUND)
    if over in cells[0]:
        notes.append(OVER_REFERENCE.format(reference=reference, population=POPULATIONS[kept]))
        notes += [STRANGERS] if kept != population else []
        known = sum(not isnan(one.half) for one, _ in compared.values())
        if known:
            notes.append(STAR.format(count=f"{known} comparisons" if known > 1 else "1 comparison"))
        elif len(seeds) == 1:
            notes.append(ONE_SEED)
    if any(is_target(title) for title in cells[0]):
        notes.append(TARGETS)
    if RANK in cells[0]:
        notes.append(RANKS)
    if marked:
        notes.append(BOLD)
    sites = by_client(methods, reference, monitor)
    if clients and sites is None:
        notes.append(OTHERS)
    notes += unequal_work(methods)
    notes += same_numbers(methods)
    notes += differences(methods) or ["Same partition, cohorts and initial weights for all methods at each seed."]
    names = [column.name for column in all_columns(methods)]
    notes += [NEW] if any(name.startswith("new/") for name in names) else []
    write_rows(out / "runs.csv", [row_of(result, names, out) for results in methods.values() for result in results])
    write_rows(out / "comparison.csv", [row_of_method(name, methods[name], failures, names, out) for name in methods])
    (out / "comparison.md").write_text("\n\n".join([markdown_table(cells, marked), caption, *notes]) + "\n")
    # LaTeX and HTML break lines themselves
    whole = " ".join(caption.split())
    best = f" {BOLD}" if marked else ""
    # notes become comments of the LaTeX file, for whoever writes the text around the table
    comments = "\n".join(f"% {latex(line)}" for note in notes for line in note.splitlines())
    table = latex_table(cells, whole + best, f"tab:{out.name}", marked)
    (out / "comparison.tex").write_text(f"{comments}\n{table}\n")
    column = curve_of(methods)
    # runs without test or validation data have nothing to draw
    if column is not None:
        runs = {name: [result.rows for result in results] for name, results in methods.items() if results}
        plot_mean_curves(runs, column).savefig(out / "curves.png", dpi=150)
    lines = [" ".join(note.split()) for note in notes]
    if sites is not None:
        sites.write(out)
    report = page(out.name, cells, marked, whole + best, lines, methods, column, monitor, sites)
    (out / "report.html").write_text(report)
    closing = f"report.html, tables, curves and one folder per run: {out}"
    return "\n".join(["", text_table(cells), "", caption, "", *notes, closing])


def caption_of(columns: Sequence[str], monitor: Monitor, seeds: Sequence[int]) -> str:
    """Return the caption: metric, seeds, and the meaning of each column.

    >>> print(caption_of(["method", "last", "MiB up", "MiB down"], Monitor(), [3]))
    Test accuracy in %, seed 3; last: of the last round; MiB: of all clients in a round.

    Args:
        columns: titles of the columns.
        monitor: the metric that selects.
        seeds: all seeds.
    """
    over = "mean ± sample standard deviation over seeds" if len(seeds) > 1 else "seed"
    metric = "accuracy in %" if monitor.metric == "acc" else monitor.metric
    end = "lowest" if monitor.mode == "max" else "highest"
    plain = [f"{column} " for column in columns if not is_target(column)]
    there = [
        name
        for name in MEANINGS
        if any(column.startswith((f"{name} ", f"{name}:")) or f"({name})" in column for column in plain)
    ]
    meanings = [f"{name}: {MEANINGS[name].format(end=end)}" for name in there]
    whole = "; ".join([f"Test {metric}, {over} {', '.join(map(str, seeds))}", *meanings])
    return fill(f"{whole}.", 120, break_on_hyphens=False)


def titles(text: str) -> list[str]:
    """Split ``--columns`` into titles.

    >>> titles("last, last r2, rank")
    ['last', 'last r2', 'rank']

    Args:
        text: titles separated by commas.

    Raises:
        ArgumentTypeError: if there is no such column.
    """
    # "last" is the weighted mean, by the title of earlier versions
    known = ["last", *(column.title for column in columns_of(Monitor(), new=True)), f"{OVER}METHOD", RANK, PAPER]
    asked = [title.strip() for title in text.split(",")]
    for title in asked:
        # any "last NAME" passes: only the finished runs show which further metrics exist
        if title not in known and not title.startswith(("last ", OVER)) and not is_target(title):
            costs = "rounds to TARGET, MiB to TARGET, seconds to TARGET, simulated seconds to TARGET"
            raise ArgumentTypeError(f"{title!r} is no column; choose from {', '.join(known)}, last METRIC, {costs}")
    return asked


def monitor_of(methods: Mapping[str, Sequence[Result]]) -> Monitor:
    """Return the metric that selects in the finished runs; accuracy if none has finished."""
    return next((result.monitor for results in methods.values() for result in results), Monitor())


def row_of(result: Result, columns: Sequence[str], out: Path) -> Row:
    """Return a run's row of ``runs.csv``."""
    return {
        "method": result.run.method,
        "seed": result.run.seed,
        **{name: result.values.get(name) for name in columns},
        "partition": result.common["partition"],
        "initial": result.common["initial"],
        # relative, so that the folder can be moved
        "config": str((result.folder / "config.yaml").relative_to(out)),
    }


def row_of_method(
    method: str, results: Sequence[Result], failures: Mapping[Run, str], columns: Sequence[str], out: Path
) -> Row:
    """Return a method's row of ``comparison.csv``."""
    row: dict[str, Any] = {"method": method, "seeds": " ".join(str(result.run.seed) for result in results)}
    summary = over_seeds(results)
    for name in columns:
        row[f"{name} mean"], row[f"{name} std"] = summary.get(name, (None, None))
    configs = " ".join(str((result.folder / "config.yaml").relative_to(out)) for result in results)
    return row | {"configs": configs, "failed": " ".join(reasons(method, failures))}


def curve_of(methods: Mapping[str, Sequence[Result]]) -> str | None:
    """Return the column of the records to draw: test, central test or validation; None if no run has any."""
    finished = [result.rows for results in methods.values() for result in results]
    known = {name for rows in finished for row in rows for name in row if row[name]}
    monitored = monitor_of(methods).metric
    names = (f"test/{monitored}", f"test/global_{monitored}", f"val/{monitored}")
    return next((name for name in names if name in known), None)
