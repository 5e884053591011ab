"""Where a run stands, by the files in its folder."""

import csv
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from pfl_lightning.runs.locks import LOCK, at_work_in

MARKS = ("rounds.csv", "config.yaml")
"""A folder with one of these is that of a run that has begun."""

STAMP = ".written"
"""The file that tells when a run wrote last."""

BEGINNING = {"config.yaml", "hparams.yaml", "rounds.csv", LOCK, STAMP}
"""What is written before the first round is done."""


def is_run(folder: Path) -> bool:
    """Whether a folder is that of a run."""
    return any((folder / mark).is_file() for mark in MARKS)


def is_bare(folder: Path) -> bool:
    """Whether a run has begun in a folder and left nothing of a round there, and nobody is at work in it."""
    if not folder.is_dir() or at_work_in(folder):
        return False
    files = {path for path in folder.rglob("*") if not path.is_dir()}
    return files <= {folder / name for name in BEGINNING} and not Standing(folder).rows


@dataclass(frozen=True)
class Standing:
    """What a run's files tell.

    Args:
        folder: the run's folder.
    """

    folder: Path

    @cached_property
    def rows(self) -> list[dict[str, str]]:
        """The rounds that are recorded."""
        try:
            with (self.folder / "rounds.csv").open(newline="", encoding="utf-8") as file:
                rows = list(csv.DictReader(file))
        except OSError:
            return []
        # of a row that is being written part may be there
        return [row for row in rows if None not in row.values() and str(row.get("round", "")).isdigit()]

    @cached_property
    def summary(self) -> Mapping[str, Any]:
        """What the run has written at its end; empty before."""
        try:
            summary: dict[str, Any] = json.loads((self.folder / "summary.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return summary

    @property
    def round(self) -> int:
        """Rounds that are done."""
        return int(self.rows[-1]["round"]) if self.rows else 0

    @cached_property
    def rounds(self) -> int | None:
        """Rounds that were asked for; None where nothing says."""
        try:
            config = yaml.safe_load((self.folder / "config.yaml").read_text(encoding="utf-8"))
            return int(config["trainer"]["max_rounds"])
        except (OSError, ValueError, LookupError, TypeError, yaml.YAMLError):
            pass
        try:
            # the rest of the file may be of kinds that YAML doesn't know
            found = re.search(r"^max_rounds: (\d+)$", (self.folder / "hparams.yaml").read_text(), re.MULTILINE)
        except (OSError, ValueError):
            return None
        return int(found[1]) if found else None

    @property
    def worker(self) -> str:
        """The process that is at work, and its host; empty where there is none."""
        return at_work_in(self.folder)

    @property
    def finished(self) -> bool:
        """Whether the run has come to its end, by its rounds or by a callback that stopped it, and goes on no more."""
        return not self.worker and bool(self.rows) and self.summary.get("final", {}).get("round") == self.round

    @property
    def metric(self) -> str:
        """The metric that selects: the one of which the worst client is recorded."""
        found = [re.fullmatch(r"val/(.+)_worst", name) for name in (self.rows[-1] if self.rows else {})]
        return next((match[1] for match in found if match), "acc")

    @property
    def validation(self) -> float | None:
        """The last round's validation; None where there is none."""
        values = [row.get(f"val/{self.metric}", "") for row in self.rows]
        known = [value for value in values if value not in ("", "nan")]
        return float(known[-1]) if known else None

    @property
    def left(self) -> float | None:
        """Seconds until the last round, by the mean of the rounds so far; None where it can't be told."""
        if not self.rows or self.rounds is None or self.finished:
            return None
        spent = sum(float(value or 0) for row in self.rows for name, value in row.items() if name.startswith("time/"))
        return max(0, self.rounds - self.round) * spent / len(self.rows)

    @property
    def written(self) -> float:
        """When something was last written, in seconds of the system's clock."""
        files = [*self.folder.glob("*.*"), *(self.folder / "checkpoints").glob("*")]
        times = [path.stat().st_mtime for path in files if path.is_file() and path.name != LOCK]
        return max(times, default=self.folder.stat().st_mtime)

    @property
    def checkpoints(self) -> list[str]:
        """Names of the checkpoints."""
        return sorted(path.name for path in (self.folder / "checkpoints").glob("*.ckpt"))
