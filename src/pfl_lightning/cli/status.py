"""The command ``pfl-lightning status``: show the progress of runs, from the files in their folders alone."""

import os
import time
from pathlib import Path

from pfl_lightning.cli.usage import Arguments, UsageError
from pfl_lightning.runs.run_status import MARKS, RunStatus, is_run
from pfl_lightning.runs.tables import duration, labelled, text_table

DESCRIPTION = """\
Show how far a run has come, from the files in its folder. For a folder of several runs, such as a comparison's, print
one line per run.
"""


def main(args: list[str]) -> int:
    """Run ``pfl-lightning status``.

    Args:
        args: the command's arguments.

    Returns:
        The exit code.

    Raises:
        UsageError: if the folder is missing or holds no run.
    """
    parser = Arguments("status", usage="%(prog)s [RUN]", description=DESCRIPTION)
    parser.add_argument(
        "run",
        nargs="?",
        type=Path,
        default=Path("runs"),
        metavar="RUN",
        help="folder of one run, or of several (default: runs)",
    )
    folder: Path = parser.parse_args(args).run
    if not os.path.isdir(folder):
        raise UsageError(f"status: {folder} is no folder; give that of a run, such as runs/METHOD-DATA/version_0.")
    if is_run(folder):
        print(labelled(described(RunStatus(folder))))
        return 0
    # any of a run's files marks its folder: a run that has just begun has no summary yet
    runs = sorted({path.parent for mark in MARKS for path in folder.rglob(mark)})
    if not runs:
        raise UsageError(f"status: {folder} holds no run; give the folder of one, or of several.")
    rows = [row(RunStatus(run), str(run.relative_to(folder))) for run in runs]
    print(text_table([["run", "round", "validation", "written", "left", "state"], *rows]))
    return 0


def described(run: RunStatus) -> list[tuple[str, str]]:
    """Return a run's description as labels and values."""
    lines = [
        ("run", str(run.folder)),
        ("state", state(run) + (f", process {run.worker}" if run.worker else "")),
        ("round", rounds(run)),
        ("validation", validation(run)),
        ("last written", f"{ago(run)} ago"),
    ]
    if run.left is not None:
        lines.append(("time left", left(run)))
    lines.append(("checkpoints", ", ".join(run.checkpoints) or "none"))
    # the command itself isn't stored, so the advice names only what to add
    if not run.finished and not run.worker and "last.ckpt" in run.checkpoints:
        lines.append(("go on by", "the same command with --ckpt_path last"))
    return lines


def row(run: RunStatus, name: str) -> list[str]:
    """Return a run's cells in the table of runs."""
    return [name, rounds(run), validation(run), f"{ago(run)} ago", left(run), state(run)]


def state(run: RunStatus) -> str:
    """Return "running", "finished" or "stopped"."""
    return "running" if run.worker else "finished" if run.finished else "stopped"


def rounds(run: RunStatus) -> str:
    """Return the number of finished rounds, "of" the number of rounds asked for if known."""
    return str(run.round) if run.rounds is None else f"{run.round} of {run.rounds}"


def validation(run: RunStatus) -> str:
    """Return the last validation value: accuracies in per cent, other metrics with their name."""
    if run.validation is None:
        return "none"
    return f"{100 * run.validation:.2f} %" if run.metric == "acc" else f"{run.metric} {run.validation:.4g}"


def ago(run: RunStatus) -> str:
    """Return the time since the run last wrote a file."""
    # clocks of a file server and this machine may differ by a second
    return duration(max(0.0, time.time() - run.written))


def left(run: RunStatus) -> str:
    """Return the estimated time for the remaining rounds; empty if unknown."""
    return "" if run.left is None else duration(run.left)
