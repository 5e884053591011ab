"""Files and tables that a run leaves: CSV, JSON, and text for the terminal."""

import csv
import json
import math
import os
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeAlias

import torch

from pfl_lightning.runs.whole_files import replacing

Row: TypeAlias = dict[str, Any]


def numbers(row: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a row that a logger can plot.

    >>> numbers({"round": 3, "cohort": "0 4", "lr": 0.1})
    {'round': 3, 'lr': 0.1}
    """
    return {name: value for name, value in row.items() if isinstance(value, (int, float))}


def columns_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Every name in the rows, in the order of appearance."""
    return list(dict.fromkeys(name for row in rows for name in row))


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes a CSV file in one step: readers see the old one or the new one."""
    with replacing(path) as partial, partial.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns_of(rows))
        writer.writeheader()
        writer.writerows(rows)


def append_row(path: Path, row: Mapping[str, Any]) -> None:
    """Appends a row to a CSV file, under the columns that it has."""
    with path.open("r+", newline="") as file:
        columns = next(csv.reader(file))
        file.seek(0, os.SEEK_END)
        csv.DictWriter(file, columns).writerow(row)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes a JSON file in one step."""
    with replacing(path) as partial:
        partial.write_text(json.dumps(content, indent=2) + "\n")


def environment(device: torch.device) -> dict[str, Any]:
    """Versions and hardware that a number depends on."""
    packages = ("pfl-lightning", "torch", "lightning", "torchmetrics", "numpy")
    cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else f"{device.type} ({platform.machine()})",
        "threads": torch.get_num_threads(),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in packages}},
    }


def summary_table(summary: Mapping[str, Any], rows: Sequence[Row], clients: Sequence[Row], folder: Path) -> str:
    """The final table as text.

    Args:
        summary: as in ``summary.json``.
        rows: as in ``rounds.csv``.
        clients: as in ``clients.csv``.
        folder: the run's folder, named in the last line.
    """
    accuracies = sorted(row["test/acc"] for row in clients if not math.isnan(row.get("test/acc", math.nan)))
    selected, central = summary["selected"], summary.get("best_global")
    extremes = [accuracies[0], accuracies[len(accuracies) // 2]] if accuracies else []
    lines = [
        ("method / aggregator", f"{summary['method']} / {summary['aggregator']}"),
        ("rounds, clients", f"{summary['final']['round']}, {len(clients)}"),
    ]
    # with a central test set clients may have no test samples of their own
    if accuracies or not central:
        lines += [
            ("test accuracy, last round", percent(summary["final"]["test/acc"])),
            ("  worst and median client", ", ".join(map(percent, extremes)) or percent(None)),
            (f"test accuracy, round {selected['round']} (best on validation)", percent(selected["test/acc"])),
        ]
    if central:
        lines += [
            ("server's model on the central test set", percent(summary["final"]["test/global_acc"])),
            (f"  best, round {central['round']}", percent(central["test/global_acc"])),
        ]
    lines += [
        ("sent up and down a round", " and ".join(size(rows[-1][f"bytes/{way}"]) for way in ("up", "down"))),
        ("seconds", f"{summary['seconds']:.1f}"),
        ("files", str(folder)),
    ]
    width = max(len(name) for name, _ in lines)
    return "\n" + "\n".join(f"{name:<{width}}  {value}" for name, value in lines)


def percent(share: float | None) -> str:
    """A share in per cent.

    >>> percent(0.98765), percent(None)
    ('98.77 %', 'not evaluated')
    """
    return "not evaluated" if share is None else f"{100 * share:.2f} %"


def size(count: float) -> str:
    """A number of bytes for people.

    >>> size(20), size(22_373), size(46_000_000)
    ('20 B', '21.8 KiB', '43.9 MiB')
    """
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
