"""The state of a run, read from the files in its folder."""

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
"""Files that mark the folder of a begun run; one is enough."""

SIMULATED = "time/simulated"
"""The record's column of a round's seconds on the simulated clock of ``trainer.schedule``."""

STAMP = ".written"
"""The file with the time of the run's last writing."""

BEGINNING = {"config.yaml", "hparams.yaml", "rounds.csv", LOCK, STAMP}
"""Files written before the end of the first round."""


def measured_seconds(row: Mapping[str, str]) -> float:
    """Return the measured seconds of a round, without a simulated clock's.

    >>> measured_seconds({"round": "1", "time/train": "2.5", "time/evaluate": "", "time/simulated": "60"})
    2.5

    Args:
        row: the round's row of ``rounds.csv``.
    """
    return sum(float(row[name] or 0) for name in row if name.startswith("time/") and name != SIMULATED)


def is_run(folder: Path) -> bool:
    """Return whether a folder belongs to a run."""
    return any((folder / mark).is_file() for mark in MARKS)


def is_bare(folder: Path) -> bool:
    """Return whether a folder's run has begun, left no round, and isn't at work."""
    if not folder.is_dir() or at_work_in(folder):
        return False
    files = {path for path in folder.rglob("*") if not path.is_dir()}
    return files <= {folder / name for name in BEGINNING} and not RunStatus(folder).rows


def read_rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file of a run.

    Args:
        path: the file.
    """
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@dataclass(frozen=True)
class RunStatus:
    """The state of a run according to its files.

    Args:
        folder: the run's folder.
    """

    folder: Path

    @cached_property
    def rows(self) -> list[dict[str, str]]:
        """The recorded rounds."""
        try:
            rows = read_rows(self.folder / "rounds.csv")
        except OSError:
            return []
        # a row being written right now may be there in part: it is left out
        return [row for row in rows if None not in row.values() and str(row.get("round", "")).isdigit()]

    @cached_property
    def summary(self) -> Mapping[str, Any]:
        """The summary written at the end of the run; empty before."""
        try:
            summary: dict[str, Any] = json.loads((self.folder / "summary.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return summary

    @property
    def round(self) -> int:
        """Number of finished rounds."""
        return int(self.rows[-1]["round"]) if self.rows else 0

    @cached_property
    def rounds(self) -> int | None:
        """Number of requested rounds; None if unknown."""
        try:
            config = yaml.safe_load((self.folder / "config.yaml").read_text(encoding="utf-8"))
            return int(config["trainer"]["max_rounds"])
        except (OSError, ValueError, LookupError, TypeError, yaml.YAMLError):
            pass
        try:
            # searched as text: other entries of the file may have YAML tags that a safe loader refuses
            found = re.search(
                r"^max_rounds: (\d+)$", (self.folder / "hparams.yaml").read_text(encoding="utf-8"), re.MULTILINE
            )
        except (OSError, ValueError):
            return None
        return int(found[1]) if found else None

    @property
    def worker(self) -> str:
        """Process and host at work on the run; empty for an idle run."""
        return at_work_in(self.folder)

    @property
    def finished(self) -> bool:
        """True if the run has ended, by the number of rounds or by a callback, and isn't being continued."""
        return not self.worker and bool(self.rows) and self.summary.get("final", {}).get("round") == self.round

    @property
    def metric(self) -> str:
        """The metric that selects, namely the one whose worst client is recorded."""
        found = [re.fullmatch(r"val/(.+)_worst", name) for name in (self.rows[-1] if self.rows else {})]
        return next((match[1] for match in found if match), "acc")

    @property
    def validation(self) -> float | None:
        """The last recorded validation value; None without one."""
        values = [row.get(f"val/{self.metric}", "") for row in self.rows]
        known = [value for value in values if value not in ("", "nan")]
        return float(known[-1]) if known else None

    @property
    def left(self) -> float | None:
        """Estimated seconds until the last round, by the mean of past rounds; None if unknown."""
        if not self.rows or self.rounds is None or self.finished:
            return None
        return max(0, self.rounds - self.round) * sum(map(measured_seconds, self.rows)) / len(self.rows)

    @property
    def written(self) -> float:
        """Time of the last writing, in seconds of the system's clock."""
        files = [*self.folder.glob("*.*"), *(self.folder / "checkpoints").glob("*")]
        # the lock is written when a process takes the folder and emptied when it leaves, which is no progress
        times = [path.stat().st_mtime for path in files if path.is_file() and path.name != LOCK]
        return max(times, default=self.folder.stat().st_mtime)

    @property
    def checkpoints(self) -> list[str]:
        """File names of the checkpoints."""
        return sorted(path.name for path in (self.folder / "checkpoints").glob("*.ckpt"))
