"""The command ``pfl-lightning status``: where runs stand, by their files alone."""

import os
import time
from pathlib import Path

from pfl_lightning.cli.arguments import Arguments
from pfl_lightning.cli.usage import UsageError
from pfl_lightning.runs.run_status import MARKS, Standing, is_run
from pfl_lightning.runs.tables import duration, labelled, text_table

DESCRIPTION = """\
Where a run stands, by the files in its folder. Of a folder that holds runs, such as that of a comparison, a line a run.
"""


def main(args: list[str]) -> int:
    """Runs ``pfl-lightning status``.

    Args:
        args: the command's arguments.

    Returns:
        The exit code.

    Raises:
        UsageError: if there is no run.
    """
    parser = Arguments("status", usage="%(prog)s [RUN]", description=DESCRIPTION)
    parser.add_argument(
        "run", nargs="?", type=Path, default=Path("runs"), metavar="RUN", help="folder of a run or of runs; runs"
    )
    folder: Path = parser.parse_args(args).run
    if not os.path.isdir(folder):
        raise UsageError(f"status: {folder} is no folder; give that of a run, such as runs/METHOD-DATA/version_0.")
    if is_run(folder):
        print(labelled(described(Standing(folder))))
        return 0
    runs = sorted({path.parent for mark in MARKS for path in folder.rglob(mark)})
    if not runs:
        raise UsageError(f"status: {folder} holds no run; give the folder of one, or of several.")
    rows = [row(Standing(run), str(run.relative_to(folder))) for run in runs]
    print(text_table([["run", "round", "validation", "written", "left", "state"], *rows]))
    return 0


def described(run: Standing) -> list[tuple[str, str]]:
    """What is known of a run, by names."""
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
    if not run.finished and not run.worker and "last.ckpt" in run.checkpoints:
        lines.append(("go on by", "the same command with --ckpt_path last"))
    return lines


def row(run: Standing, name: str) -> list[str]:
    """The same in a line."""
    return [name, rounds(run), validation(run), f"{ago(run)} ago", left(run), state(run)]


def state(run: Standing) -> str:
    """Whether a run is running or finished, or neither."""
    return "running" if run.worker else "finished" if run.finished else "stopped"


def rounds(run: Standing) -> str:
    """Rounds that are done, of those that were asked for."""
    return str(run.round) if run.rounds is None else f"{run.round} of {run.rounds}"


def validation(run: Standing) -> str:
    """The last validation, accuracies in per cent."""
    if run.validation is None:
        return "none"
    return f"{100 * run.validation:.2f} %" if run.metric == "acc" else f"{run.metric} {run.validation:.4g}"


def ago(run: Standing) -> str:
    """How long ago something was written."""
    return duration(max(0.0, time.time() - run.written))


def left(run: Standing) -> str:
    """How long the rounds that are left take; empty where that can't be told."""
    return "" if run.left is None else duration(run.left)
