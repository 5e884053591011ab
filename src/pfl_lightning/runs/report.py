"""Files and tables of a run: CSV, JSON, and text for the terminal."""

import csv
import gzip
import json
import math
import os
import platform
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeAlias

import torch

from pfl_lightning.data.columns import is_number
from pfl_lightning.runs.run_status import SIMULATED
from pfl_lightning.runs.tables import labelled
from pfl_lightning.runs.whole_files import replacing
from pfl_lightning.tasks import Monitor

FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")
"""Beginnings of texts that spreadsheets take for formulas."""

INTERVAL = re.compile(r"[-+][\d.]+ \[[-+\d., ]+\]")
"""A figure with its interval in brackets, which spreadsheets leave as it is."""

Row: TypeAlias = dict[str, Any]
"""A row of a table, values by column."""


def numbers(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numeric entries of a row, for loggers.

    >>> numbers({"round": 3, "cohort": "0 4", "lr": 0.1})
    {'round': 3, 'lr': 0.1}

    Args:
        row: values by column.
    """
    return {name: value for name, value in row.items() if isinstance(value, (int, float))}


def columns_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return all column names of the rows, in the order of first appearance."""
    return list(dict.fromkeys(name for row in rows for name in row))


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write a CSV file in one step: readers see either the old or the new file.

    Args:
        path: the file.
        rows: values by column; columns may differ from row to row.
    """
    columns = columns_of(rows)
    with replacing(path) as partial, partial.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(map(harmless, columns))
        writer.writerows([harmless(row.get(name, "")) for name in columns] for row in rows)


def append_row(path: Path, *rows: Mapping[str, Any]) -> None:
    """Append a row, or several, to a CSV file with the file's columns.

    Args:
        path: the file, with a header.
        *rows: values by column.
    """
    with path.open("r+", newline="", encoding="utf-8") as file:
        # read from the file and not from the row, whose order may differ
        columns = next(csv.reader(file))
        file.seek(0, os.SEEK_END)
        cells = [{harmless(name): harmless(cell) for name, cell in row.items()} for row in rows]
        csv.DictWriter(file, columns).writerows(cells)


def harmless(cell: Any) -> Any:
    """Return a cell of a CSV file, with an apostrophe before a text that a spreadsheet would compute as a formula.

    >>> harmless("=1+1"), harmless("-0.5"), harmless("Ulm"), harmless(-0.5)
    ("'=1+1", '-0.5', 'Ulm', -0.5)

    Args:
        cell: a text, which may come from a table's cells, or anything else, which stays.
    """
    is_formula = (
        isinstance(cell, str) and cell.startswith(FORMULA) and not (is_number(cell) or INTERVAL.fullmatch(cell))
    )
    return f"'{cell}" if is_formula else cell


class PackedRows:
    """Rows of a record in checkpoint form: each row is packed once, without loss.

    Rows become JSON lines, of which every `SIZE` characters are compressed for good. Saving a checkpoint then takes
    about 0.3 microseconds per row, compared to 15 for a list of dicts.

    >>> rows = [{"round": 1, "cohort": "0 2", "lr": 0.1}, {"round": 2, "cohort": "", "lr": math.inf}]
    >>> PackedRows.unpacked(PackedRows().state(rows)) == rows
    True
    """

    SIZE = 1 << 16

    def __init__(self) -> None:
        self._count, self._lines, self._packed = 0, "", torch.empty(0, dtype=torch.uint8)

    def state(self, rows: Sequence[Row]) -> dict[str, Any]:
        """Return the rows in checkpoint form.

        Args:
            rows: all rows; the rows of earlier calls must be unchanged.
        """
        for row in rows[self._count :]:
            self._lines += json.dumps(row) + "\n"
            if len(self._lines) >= self.SIZE:
                # concatenated gzip files are a gzip file, so finished parts are never compressed again; mtime=0 makes
                # equal rows equal bytes
                part = bytearray(gzip.compress(self._lines.encode(), mtime=0))
                self._packed = torch.cat([self._packed, torch.frombuffer(part, dtype=torch.uint8)])
                self._lines = ""
        self._count = len(rows)
        return {"packed": self._packed, "lines": self._lines}

    @staticmethod
    def unpacked(state: Mapping[str, Any]) -> list[Row]:
        """Return the rows packed by `state`.

        Args:
            state: the result of `state`.
        """
        text = gzip.decompress(state["packed"].numpy().tobytes()).decode() + state["lines"]
        return [json.loads(line) for line in text.splitlines()]


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file in one step."""
    with replacing(path) as partial:
        partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


# cached: a search through all installed packages takes as long as a small round
@cache
def installed(package: str) -> str:
    """Return the version of an installed package; ``not installed`` for a source folder on the path."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def environment(device: torch.device) -> dict[str, Any]:
    """Return the versions and the hardware behind a run's numbers.

    Args:
        device: device of the training.
    """
    packages = ("pfl-lightning", "torch", "lightning", "torchmetrics", "numpy")
    cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else f"{device.type} ({platform.machine()})",
        "threads": torch.get_num_threads(),
        "versions": {"python": platform.python_version(), **{name: installed(name) for name in packages}},
    }


def summary_table(summary: Mapping[str, Any], rows: Sequence[Row], clients: Sequence[Row], folder: Path) -> str:
    """Return the final table of a run as text.

    Args:
        summary: as in ``summary.json``.
        rows: as in ``rounds.csv``.
        clients: as in ``clients.csv``.
        folder: the run's folder, shown in the last line.
    """
    monitor = Monitor(**summary["monitor"])
    test, server, shown = f"test/{monitor.metric}", f"test/global_{monitor.metric}", monitor.written
    # a client without test samples has no place in the order from worst to best
    tested = [row for row in clients if not math.isnan(row.get(test, math.nan))]
    ranked = sorted(tested, key=lambda row: monitor.sign * row[test])
    selected, central = summary["selected"], summary.get("best_global")
    extremes = [f"{shown(row[test])}{who(row)}" for row in (ranked[:1] + ranked[len(ranked) // 2 :][:1])]
    pooled = monitor.metric.endswith("_pooled")
    lacking = len(clients) - len(tested) if tested else 0
    counting = f" ({len(tested)} of {len(clients)} clients; the others have no value)" if lacking else ""
    of = "" if monitor.metric == "acc" else f", {monitor.words}"
    chosen = "best on validation" if selected["round"] is None else f"round {selected['round']} (best on validation)"
    lines = [
        ("method", f"{summary['name']} (client {summary['method']}, aggregator {summary['aggregator']})"),
        ("rounds, clients", f"{summary['final']['round']}, {len(clients)}"),
    ]
    # with a central test set, clients may have no test samples of their own
    if ranked or pooled or not central:
        lines += [
            (f"test {monitor.words}, last round", shown(summary["final"][test]) + counting),
            # a metric of all clients' samples has no values of clients
            *([] if pooled else [("  worst and median client", ", ".join(extremes) or shown(None))]),
            (f"test {monitor.words}, {chosen}", shown(selected[test])),
            *((f"test {name}, last round", f"{value:.4g}") for name, value in further(summary["final"], monitor)),
        ]
    if central:
        lines += [
            (f"server's model on the central test set{of}", shown(summary["final"][server])),
            (f"  best, round {central['round']}", shown(central[server])),
        ]
    if new := summary.get("new"):
        both = (f"{name} {shown(new[f'{name}/{monitor.metric}'])}" for name in ("received", "joined"))
        lines.append(("test of new clients" + of, ", ".join(both)))
    if privacy := summary.get("privacy"):
        # noise drawn from the run's seed protects nobody: the table says that such a guarantee is simulated
        simulated = "simulated " if "simulation" in privacy.get("noise", "") else ""
        spent = f"{simulated}epsilon {privacy['epsilon']:.4g}, delta {privacy['delta']:.2g}, {privacy['sampling']}"
        lines.append((f"differential privacy of a {privacy['unit']}", spent))
    if audit := summary.get("audit"):
        bounds = f"epsilon at least {audit['audited_epsilon']:.4g} by guesses on {audit['canaries']} canaries"
        if "audited_epsilon_gaussian" in audit:
            bounds += f", {audit['audited_epsilon_gaussian']:.4g} by Gaussian noise"
        lines.append((f"audit of a {audit['unit']}, which changes the model", bounds))
    clock = sum(float(row.get(SIMULATED) or 0) for row in rows)
    lines += [
        ("sent up and down a round", " and ".join(size(rows[-1][f"bytes/{way}"]) for way in ("up", "down"))),
        ("seconds", f"{summary['seconds']:.1f}"),
        *([("simulated seconds", f"{clock:.1f}")] if clock else []),
        ("files", str(folder)),
    ]
    return "\n" + labelled(lines)


def who(row: Row) -> str:
    """Return a client's name in parentheses, or the id of an unnamed client.

    >>> who({"client": 3, "name": "Ward B"}), who({"client": 3})
    (' (Ward B)', ' (client 3)')

    Args:
        row: a row of ``clients.csv``.
    """
    return f" ({row.get('name') or 'client ' + str(row['client'])})"


def further(final: Mapping[str, Any], monitor: Monitor) -> list[tuple[str, float]]:
    """Return the test metrics besides the monitored one, by name: means over clients or metrics of all samples.

    >>> further({"round": 3, "test/mae": 1.0, "test/mae_std": 0.5, "test/r2": 0.25, "test/loss": 2.0}, Monitor("mae"))
    [('r2', 0.25)]

    Args:
        final: as in ``summary.json``.
        monitor: the metric that selects.
    """
    left_out = {
        "loss",
        monitor.metric,
        *(f"{monitor.metric}_{part}" for part in ("mean", "std", "worst", "p10", "p90", "worst10")),
    }
    named = {name.removeprefix("test/"): value for name, value in final.items() if name.startswith("test/")}
    return [
        (name, value)
        for name, value in named.items()
        if name not in left_out and not name.startswith("global_") and not name.endswith("_clients")
    ]


def size(count: float) -> str:
    """Return a number of bytes for people.

    >>> size(20), size(22_373), size(46_000_000)
    ('20 B', '21.8 KiB', '43.9 MiB')

    Args:
        count: number of bytes.
    """
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
