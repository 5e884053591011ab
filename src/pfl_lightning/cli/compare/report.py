"""Write the files of a comparison: tables as text, CSV, Markdown and LaTeX, curves, and an HTML page."""

from argparse import ArgumentTypeError
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from pfl_lightning.cli.compare.cost_to_target import cost_to_target, is_target
from pfl_lightning.cli.compare.page import page
from pfl_lightning.cli.compare.results import (
    NEW,
    OVER,
    PAPER,
    RANK,
    Result,
    all_columns,
    columns_of,
    comparison_table,
    differences,
    over_seeds,
    reasons,
    same_numbers,
)
from pfl_lightning.cli.compare.runs import Run
from pfl_lightning.cli.compare.significance import best_and_level, by_method, gains_over_local, ranks
from pfl_lightning.plots.runs import plot_mean_curves
from pfl_lightning.runs.report import Row, write_rows
from pfl_lightning.runs.tables import latex, latex_table, markdown_table, text_table
from pfl_lightning.tasks import Monitor

MEANINGS = {
    "best on validation": "of the round that validation selects",
    "last": "of the last round",
    "best on test": "of the round that is best on the test samples, so too optimistic",
    "mean of last five": "over the last five rounds",
    "ten best": "the mean of the ten best rounds on the test samples",
    "worst decile": "the {end} decile of clients in the last round",
    "worst tenth": "the mean over the {end} tenth of clients in the last round",
    "std over clients": "in the last round",
    "server": "the server's one model on the central test set",
    "MiB": "of all clients in a round",
    "GFLOP": "of all clients in a round",
}
"""Explanations of columns, by the beginning of their titles."""

OVER_LOCAL = """\
Over Local: a client's gain over training alone in the last round, as the plain mean over seeds and clients, and the
share of clients with a gain. Unlike this mean, "last" weighs clients by their test samples."""

RANKS = "Rank: the mean over seeds and clients of a method's rank in the last round; 1 is the best."

TARGETS = """\
To a target: the cost of all rounds up to the first whose validation reaches the target; MiB up and down, of all
clients."""

LEVEL_NOTE = """\
Best in the last round, or level with the best: {names}. All other methods differ from the best, by Wilcoxon's
signed-rank test over all pairs of seed and client (p < 0.05)."""

ALL_LEVEL = """\
No method differs from the best in the last round, by Wilcoxon's signed-rank test over all pairs of seed and client
(p < 0.05)."""


def write(
    out: Path,
    methods: Mapping[str, Sequence[Result]],
    failures: Mapping[Run, str],
    seeds: Sequence[int],
    tuning: Sequence[str],
    paper: Mapping[str, str],
    columns: Sequence[str] = (),
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
    """
    monitor = monitor_of(methods)
    clients = by_method(methods)
    gains, level = gains_over_local(clients, monitor), best_and_level(clients)
    more = {OVER: gains, RANK: ranks(clients), PAPER: paper}
    more |= {title: cost_to_target(title, methods) for title in columns if is_target(title)}
    cells = comparison_table(methods, failures, {title: column for title, column in more.items() if column}, columns)
    last = cells[0].index("last") if "last" in cells[0] else 0
    # only "last" is marked: the test is on clients' values of the last round
    marked = {(row, last) for row, of_one in enumerate(cells) if of_one[0] in level}
    caption = caption_of(cells[0], monitor, seeds)
    notes = [*(reason for method in methods for reason in reasons(method, failures)), *tuning]
    if OVER in cells[0]:
        notes.append(OVER_LOCAL)
    if any(is_target(title) for title in cells[0]):
        notes.append(TARGETS)
    if RANK in cells[0]:
        notes.append(RANKS)
    # naming every method as level with the best would read as if each had won
    if marked and len(level) == sum(map(bool, methods.values())):
        notes.append(ALL_LEVEL)
    elif marked:
        notes.append(LEVEL_NOTE.format(names=" and ".join([", ".join(level[:-1]), level[-1]]).removeprefix(" and ")))
    notes += same_numbers(methods)
    notes += differences(methods) or ["Same partition, cohorts and initial weights for all methods at each seed."]
    names = [column.name for column in all_columns(methods)]
    notes += [NEW] if any(name.startswith("new/") for name in names) else []
    write_rows(out / "runs.csv", [row_of(result, names, out) for results in methods.values() for result in results])
    write_rows(out / "comparison.csv", [row_of_method(name, methods[name], failures, names, out) for name in methods])
    (out / "comparison.md").write_text("\n\n".join([markdown_table(cells, marked), caption, *notes]) + "\n")
    # LaTeX and HTML break lines themselves
    whole = " ".join(caption.split())
    best = " Bold: the best, and all methods that don't differ from the best (p < 0.05)." if marked else ""
    # notes become comments of the LaTeX file, for whoever writes the text around the table
    comments = "\n".join(f"% {latex(line)}" for note in notes for line in note.splitlines())
    table = latex_table(cells, whole + best, f"tab:{out.name}", marked)
    (out / "comparison.tex").write_text(f"{comments}\n{table}\n")
    column = curve_of(methods)
    # runs without test or validation data have nothing to draw
    if column is not None:
        runs = {name: [result.rows for result in results] for name, results in methods.items() if results}
        plot_mean_curves(runs, column).savefig(out / "curves.png", dpi=150)
    shown = [" ".join(note.split()) for note in notes]
    report = page(out.name, cells, marked, whole + best, shown, methods, column, monitor)
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
    there = [name for name in MEANINGS if any(column.startswith((f"{name} ", f"{name}:")) for column in plain)]
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
    known = [column.title for column in columns_of(Monitor(), new=True)] + [OVER, RANK, PAPER]
    asked = [title.strip() for title in text.split(",")]
    for title in asked:
        # any "last NAME" passes: only the finished runs show which further metrics exist
        if title not in known and not title.startswith("last ") and not is_target(title):
            costs = "rounds to TARGET, MiB to TARGET, seconds to TARGET"
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
