"""Write the files of a comparison: tables as text, CSV, Markdown and LaTeX, curves, and an HTML page."""

from argparse import ArgumentTypeError
from collections.abc import Iterator, Mapping, Sequence
from math import isnan, nan
from pathlib import Path
from statistics import fmean
from textwrap import fill
from typing import Any

from pfl_lightning.cli.compare.by_client import OTHERS, by_client, ends
from pfl_lightning.cli.compare.page import page
from pfl_lightning.cli.compare.results import (
    BY,
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
    disagreement,
    is_target,
    over_seeds,
    reasons,
    same_numbers,
    unequal,
    unequal_work,
)
from pfl_lightning.cli.compare.runs import Run
from pfl_lightning.cli.compare.significance import (
    Difference,
    Population,
    by_method,
    counted,
    gains_of,
    interval,
    population_of,
    ranks,
    shown,
    unscored,
)
from pfl_lightning.plots.runs import plot_mean_curves
from pfl_lightning.runs.report import Row, write_rows
from pfl_lightning.runs.tables import latex, latex_table, markdown_table, text_table
from pfl_lightning.tasks import Monitor

MEANINGS = {
    "best on validation": "of the round that validation selects, by sample",
    "last": "of the last round",
    "by sample": "clients count by their test samples",
    "by client": "all clients count alike",
    "best on test": "of the round that is best on the test samples, so too optimistic",
    "mean of last five": "over the last five rounds",
    "ten best": "the mean of the ten best rounds on the test samples",
    "worst decile": "the {end} decile of clients in the last round",
    "worst tenth": "the mean over the {end} tenth of clients in the last round",
    "std over clients": "in the last round",
    "server": "the server's one model on the central test set",
    "MiB": "of all clients in a round",
    "local steps": "optimizer steps of all clients in the run",
    "samples read": "by all clients in the run, each time that they are in a batch",
    "GFLOP": "of all clients in a round",
}
"""Explanations of columns, by the beginning of their titles."""

ROUND = """\
Reported round: the last one, a rule fixed beforehand; it holds for bold means, differences, ranks and clients."""

BOLD = """\
Bold: the best mean of the column alone. It says nothing about significance."""

OVER_REFERENCE = """\
Over {reference}: the mean gain over {reference} [95 % interval {population}]; the share of clients with a gain."""

POPULATIONS: dict[Population, str] = {
    "samples": "for other test rows of these clients and other seeds",
    "seeds": "by Student's t over seeds, for these test rows alone",
    "clients": "by Student's t over clusters by seed and by client, for other clients of their kind as well",
}
"""Explanations of ``--interval``."""

OTHER_CLIENTS = "by Student's t over seeds, each with other clients and rows"
"""Explanation of intervals over seeds that don't share their clients."""

FALLEN_BACK: dict[Population, str] = {
    "samples": "--interval samples needs scores of the same test rows at all seeds, and these runs have none (the "
    "reason is in their output.txt): intervals are over seeds.",
    "clients": "--interval clients needs the same clients at all seeds, and these differ: intervals are over seeds.",
}
"""Why intervals are others than those asked for."""

WITHOUT_SCORES = """\
Gains over {reference} are of the other clients than {clients}, whose metric is undefined without some row."""

CHOSEN = """\
Chosen on validation rows from {count} methods: {method}. On test rows, which had no part in this choice, its gain over
{reference} is {gains}; this one comparison needs no correction."""

CHOSEN_REFERENCE = "Validation rows choose {method}, the reference, from {count} methods."

CHOSEN_ON_TEST = """\
No row validates: whoever reports the best of these {count} methods has chosen it by the test rows that report it, and
its gain looks too good."""

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
    population: Population | None = None,
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
        population: for what intervals of gains hold; None for test rows and seeds where all seeds share the rows, else
            for seeds.
    """
    monitor = monitor_of(methods)
    clients = by_method(methods)
    kept, both = population_of(methods, population), unequal(methods, monitor)
    sites = by_client(methods, reference, monitor, population=kept)
    drawn_anew = bool(clients) and sites is None
    columns = list(dict.fromkeys(whole_titles(columns, reference, both)))
    compared = {
        f"{OVER}{reference} {ending}": gains_of(methods, reference, kept, by)
        for by, ending in BY.items()
        if reference in clients and (by == "client" or kept != "clients")
    }
    more: dict[str, Mapping[str, str]] = {
        title: {method: shown(one, is_marked, monitor) for method, (one, is_marked) in own.items()}
        for title, own in compared.items()
        # by default one column of gains, where both means are the same
        if columns or title.endswith(BY["client"]) or both
    }
    more |= {RANK: ranks(clients), PAPER: paper}
    more |= {title: cost_to_target(title, methods) for title in columns if is_target(title)}
    cells = comparison_table(methods, failures, {title: column for title, column in more.items() if column}, columns)
    marked = best_cells(cells, methods, monitor)
    caption = caption_of(cells[0], monitor, seeds)
    notes = [*(reason for method in methods for reason in reasons(method, failures)), *tuning]
    over = [title for title in compared if title in cells[0]]
    if over or any(title in cells[0] for title in (LAST, PLAIN, RANK)):
        notes.append(ROUND)
    notes += [count] if (count := counted(methods)) else []
    notes += disagreement(methods, monitor, reference)
    if over:
        held = OTHER_CLIENTS if drawn_anew and kept == "seeds" else POPULATIONS[kept]
        notes.append(OVER_REFERENCE.format(reference=reference, population=held))
        notes += [FALLEN_BACK[population]] if population not in (None, kept) else []
        if kept == "samples" and (lacking := unscored(methods)):
            notes.append(WITHOUT_SCORES.format(reference=reference, clients=", ".join(lacking)))
        known = max(sum(not isnan(one.half) for one, _ in compared[title].values()) for title in over)
        if known:
            notes.append(STAR.format(count=f"{known} comparisons" if known > 1 else "1 comparison"))
        elif len(seeds) == 1 and kept != "samples":
            notes.append(ONE_SEED)
        notes += best_of(methods, str(reference), compared, monitor)
    if any(is_target(title) for title in cells[0]):
        notes.append(TARGETS)
    if RANK in cells[0]:
        notes.append(RANKS)
    if marked:
        notes.append(BOLD)
    if drawn_anew:
        notes.append(OTHERS)
    notes += unequal_work(methods)
    notes += same_numbers(methods)
    notes += differences(methods) or ["Same partition, cohorts and initial weights for all methods at each seed."]
    names = [column.name for column in all_columns(methods)]
    notes += [NEW] if any(name.startswith("new/") for name in names) else []
    write_rows(out / "runs.csv", [row_of(result, names, out) for results in methods.values() for result in results])
    write_rows(
        out / "comparison.csv",
        [
            row_of_method(name, methods[name], failures, names, out)
            | {key: value for title, own in compared.items() for key, value in gain_row(title, own.get(name), monitor)}
            for name in methods
        ],
    )
    (out / "comparison.md").write_text(
        "\n\n".join([markdown_table(cells, marked), caption, *notes]) + "\n", encoding="utf-8"
    )
    # LaTeX and HTML break lines themselves
    whole = " ".join(caption.split())
    best = f" {BOLD}" if marked else ""
    # notes become comments of the LaTeX file, for whoever writes the text around the table
    comments = "\n".join(f"% {latex(line)}" for note in notes for line in note.splitlines())
    table = latex_table(cells, whole + best, f"tab:{out.name}", marked)
    (out / "comparison.tex").write_text(f"{comments}\n{table}\n", encoding="utf-8")
    column = curve_of(methods)
    # runs without test or validation data have nothing to draw
    if column is not None:
        runs = {name: [result.rows for result in results] for name, results in methods.items() if results}
        plot_mean_curves(runs, column).savefig(out / "curves.png", dpi=150)
    lines = [" ".join(note.split()) for note in notes]
    if sites is not None:
        sites.write(out)
    report = page(out.name, cells, marked, whole + best, lines, methods, column, monitor, sites)
    (out / "report.html").write_text(report, encoding="utf-8")
    closing = f"report.html, tables, curves and one folder per run: {out}"
    return "\n".join(["", text_table(cells), "", caption, "", *notes, closing])


def whole_titles(columns: Sequence[str], reference: str | None, both: bool) -> Iterator[str]:
    """Yield the whole titles of columns, of which ``last`` and ``over METHOD`` are short.

    >>> list(whole_titles(["last", "over Local", "over Local (by sample)"], "FedAvg", True))
    ['last (by sample)', 'over FedAvg (by client)', 'over FedAvg (by sample)', 'over FedAvg (by sample)']

    Args:
        columns: titles.
        reference: the method that all others are compared with.
        both: True if the two means over clients differ; ``over METHOD`` then stands for both.
    """
    for title in columns:
        if title == "last":
            yield LAST
        elif title.startswith(OVER):
            endings = [ending for ending in BY.values() if title.endswith(ending)]
            yield from (f"{OVER}{reference} {ending}" for ending in endings or [*BY.values()][: 1 + both])
        else:
            yield title


def best_of(
    methods: Mapping[str, Sequence[Result]],
    reference: str,
    compared: Mapping[str, Mapping[str, tuple[Difference, bool]]],
    monitor: Monitor,
) -> list[str]:
    """Return a sentence on the method that validation rows choose, and its gain on test rows.

    The method is chosen by its mean over clients and seeds in the last round. Empty for fewer than three methods, of
    which none is chosen.

    Args:
        methods: finished runs by method.
        reference: the method that gains are measured from.
        compared: gains by method, by title of the column.
        monitor: the metric that selects.
    """
    finished = {method: results for method, results in methods.items() if results}
    if len(finished) < 3:
        return []
    validated = {
        method: fmean(float(result.rows[-1].get(f"val/{monitor.metric}_mean") or "nan") for result in results)
        for method, results in finished.items()
    }
    if any(isnan(mean) for mean in validated.values()):
        return [CHOSEN_ON_TEST.format(count=len(finished))]
    # of equally good methods the reference holds
    best = max(validated, key=lambda method: (monitor.sign * validated[method], method == reference))
    if best == reference:
        return [CHOSEN_REFERENCE.format(method=best, count=len(finished))]
    gains = {title: own[best][0] for title, own in compared.items() if best in own}
    words = [f"{interval(one, monitor)} {title.removeprefix(f'{OVER}{reference} ')}" for title, one in gains.items()]
    if not words:
        return []
    return [CHOSEN.format(count=len(finished), method=best, reference=reference, gains=" and ".join(words))]


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
    # no mean over clients, see `NextToken`
    known = MEANINGS | ({"by sample": "of all test tokens together"} if monitor.metric == "perplexity" else {})
    meanings = [f"{name}: {known[name].format(end=end)}" for name in there]
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
    # "last" alone is the weighted mean
    columns = ["last", *(column.title for column in columns_of(Monitor(), new=True)), f"{OVER}METHOD", RANK, PAPER]
    asked = [title.strip() for title in text.split(",")]
    for title in asked:
        # any "last NAME" passes: only the finished runs show which further metrics exist
        if title not in columns and not title.startswith(("last ", OVER)) and not is_target(title):
            costs = "rounds to TARGET, MiB to TARGET, seconds to TARGET, simulated seconds to TARGET"
            raise ArgumentTypeError(f"{title!r} is no column; choose from {', '.join(columns)}, last METRIC, {costs}")
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


def gain_row(
    title: str, gain: tuple[Difference, bool] | None, monitor: Monitor
) -> Iterator[tuple[str, float | bool | None]]:
    """Yield the entries of ``comparison.csv`` on a gain: mean, ends of the interval, and the star; all digits.

    Args:
        title: title of the table's column, such as ``over Local (by client)``.
        gain: the gain, and whether it holds among all comparisons; None for the reference.
        monitor: the metric that selects.
    """
    numbers = (nan,) * 3 if gain is None else ends(gain[0], monitor)
    for name, number in zip(("mean", "low", "high"), numbers, strict=True):
        yield f"{title} {name}", None if isnan(number) else number
    yield f"{title} star", None if gain is None else gain[1]


def curve_of(methods: Mapping[str, Sequence[Result]]) -> str | None:
    """Return the column of the records to draw: test, central test or validation; None if no run has any."""
    finished = [result.rows for results in methods.values() for result in results]
    known = {name for rows in finished for row in rows for name in row if row[name]}
    monitored = monitor_of(methods).metric
    names = (f"test/{monitored}", f"test/global_{monitored}", f"val/{monitored}")
    return next((name for name in names if name in known), None)
