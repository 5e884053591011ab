"""The runs of a comparison: each a ``pfl-lightning fit`` in a process of its own."""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.engines import die_with_parent
from pfl_lightning.runs.folder import held

PROGRAM = "pfl_lightning.cli.main"
QUIET = ("--trainer.enable_progress_bar", "false", "--trainer.enable_model_summary", "false")
GRACE = 5.0
"""Seconds that a run has to end by itself before it is killed; its last checkpoint stands in any case."""


@dataclass(frozen=True)
class Run:
    """A method with a seed.

    Args:
        method: the method's label.
        seed: the seed.
        folder: where all that the run leaves is kept.
        arguments: what ``fit`` is given.
    """

    method: str
    seed: int
    folder: Path
    arguments: tuple[str, ...]

    @property
    def finished(self) -> Path | None:
        """The folder that the run has left, if it has finished."""
        return next((path.parent for path in self.folder.glob("*/*/summary.json")), None)

    @property
    def begun(self) -> Path | None:
        """The newest folder of the run, finished or not."""
        begun = [path.parent for path in self.folder.glob("*/*/config.yaml")]
        return max(begun, key=lambda folder: folder.stat().st_mtime, default=None)

    @property
    def output(self) -> Path:
        """What the run says."""
        return self.folder / "output.txt"

    @property
    def command(self) -> list[str]:
        """The process's arguments; it goes on where an earlier one stopped."""
        where = ["--trainer.default_root_dir", str(self.folder)]
        if has_logger(self.arguments):
            where = ["--trainer.logger.save_dir", str(self.folder)]
            # a logger's own folder bears its version, which for Weights & Biases is the run's id
            where += ["--trainer.logger.version", self.begun.name] if self.begun else []
        # a comparison that is killed takes its runs along
        program = [sys.executable, die_with_parent.__file__, str(os.getpid()), PROGRAM]
        return [*program, "fit", *QUIET, *self.arguments, *where, "--ckpt_path", "last"]

    @property
    def line(self) -> str:
        """The same as a line of a shell, for another machine or a queue."""
        return shlex.join(["pfl-lightning", *self.command[4:]])

    @property
    def settings(self) -> str:
        """The arguments and the files that they name."""
        texts = [f"\n{file}:\n{file.read_text(encoding='utf-8', errors='replace')}" for file in files(self.arguments)]
        return "\n".join([" ".join(self.arguments), *texts])

    @property
    def kept_settings(self) -> Path:
        """The file that keeps them beside the run."""
        return self.folder / "settings.txt"

    def refuse_others(self) -> None:
        """Refuse a folder that holds a run of other settings.

        Raises:
            MisconfigurationException: if it does.
        """
        if self.begun and self.kept_settings.read_text(encoding="utf-8") != self.settings:
            raise MisconfigurationException(
                f"compare: {self.folder} holds a run of other settings, which are in {self.kept_settings.name} there; "
                "give another --out, or delete that folder."
            )

    def claim(self) -> None:
        """Make the folder, and keep the settings in it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.kept_settings.write_text(self.settings, encoding="utf-8")


def has_logger(arguments: Sequence[str]) -> bool:
    """Whether a logger is asked for on the command line."""
    return any(argument.split("=")[0] == "--trainer.logger" for argument in arguments)


def files(arguments: Sequence[str]) -> list[Path]:
    """The files of settings on a command line.

    >>> [str(path) for path in files(["--config", "a.yaml", "--data.root", "b", "--config=c.yaml"])]
    ['a.yaml', 'c.yaml']
    """
    words = [part for word in arguments for part in (word.split("=", 1) if word.startswith("--config=") else [word])]
    return [Path(after) for word, after in pairwise(words) if word in ("--config", "-c")]


class Fit:
    """A run's process, in whose folder no other comparison can start it.

    Args:
        run: the run.
        environment: of the process, besides this one's.

    Raises:
        MisconfigurationException: if another process holds the run's folder.
    """

    def __init__(self, run: Run, environment: Mapping[str, str]) -> None:
        own = {"WANDB_NAME": f"{run.method} seed {run.seed}"}
        with ExitStack() as stack:
            stack.enter_context(held(run.folder))
            output = stack.enter_context(run.output.open("wb"))
            self.process = subprocess.Popen(
                run.command,
                env={**os.environ, **own, **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            self._folder = stack.pop_all()

    def leave(self) -> int:
        """Frees the folder of a process that has ended, and gives its exit code."""
        self._folder.close()
        return int(self.process.returncode)


def run_all(
    runs: Sequence[Run], jobs: int, environment: Mapping[str, str], report: Callable[[Run, str], None]
) -> dict[Run, str]:
    """Runs what hasn't finished yet, some at a time; when it is interrupted, so are the processes.

    Args:
        runs: all runs.
        jobs: how many run at a time.
        environment: of the processes, besides this one's.
        report: is called with each run that ends, and why it failed; empty where it didn't.

    Returns:
        Why runs failed.
    """
    waiting = list(runs)
    running: dict[Run, Fit] = {}
    failures: dict[Run, str] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                run = waiting.pop(0)
                if run.finished is None:
                    try:
                        running[run] = Fit(run, environment)
                        continue
                    except MisconfigurationException as error:
                        failures[run] = str(error)
                report(run, failures.get(run, ""))
            for run in [run for run, fit in running.items() if fit.process.poll() is not None]:
                code = running.pop(run).leave()
                if run.finished is None:
                    failures[run] = reason(run, code)
                report(run, failures.get(run, ""))
            time.sleep(0.1 if running else 0)
    finally:
        end([fit.process for fit in running.values()])
        for fit in running.values():
            fit.leave()
    return failures


def end(processes: Sequence["subprocess.Popen[bytes]"]) -> None:
    """Ends processes: by asking, then by force."""
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + GRACE
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def reason(run: Run, code: int) -> str:
    """Why a run failed: its last line, which is a sentence where the settings are at fault.

    Args:
        run: the run, whose process has ended.
        code: the process's exit code.
    """
    number = -code if code < 0 else code - 128
    if number in set(signal.Signals):
        return f"ended by {signal.Signals(number).name}"
    lines = [line for line in run.output.read_text(errors="replace").splitlines() if line.strip()]
    last = lines[-1].removeprefix("pfl-lightning: error: ") if lines else f"exit code {code}"
    return last if code else f"ended without a record: {last}"
