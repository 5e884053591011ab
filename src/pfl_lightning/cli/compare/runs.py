"""Run the fits of a comparison, each in a separate process.

A process keeps the memory and the random state of a run apart from all others, and a crash ends one run only. On Linux
all processes are forks of one that has imported the package (`starter`), since a small run takes less time than the
import.
"""

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

from pfl_lightning.cli.compare.starter import Forked, Starter
from pfl_lightning.internals.light_start import hidden
from pfl_lightning.runs.folder import held

PROGRAM = "pfl_lightning"
WHOLE = "pfl_lightning.cli.trainer_commands"
"""A module that imports what all runs need."""
LIGHT = "pfl_lightning.cli.main:import_trainer_commands"
"""A function that imports the same in half of the time, without optional packages of torchmetrics."""
LATER = ("sklearn.model_selection", "sklearn.cluster", "scipy.optimize", "pandas", "torchvision", "torch._dynamo")
"""Modules that some runs need, and that take long to import."""
QUIET = ("--trainer.enable_progress_bar", "false", "--trainer.enable_model_summary", "false")
GRACE = 5.0
"""Seconds for a run to end by itself before it is killed; the last checkpoint exists in any case."""


@dataclass(frozen=True)
class Run:
    """A method with a seed.

    Args:
        method: the method's label.
        seed: the seed.
        folder: the folder for everything that the run writes.
        arguments: arguments of ``fit``.
    """

    method: str
    seed: int
    folder: Path
    arguments: tuple[str, ...]

    @property
    def finished(self) -> Path | None:
        """The folder with the finished run's record; None if unfinished."""
        return next((path.parent for path in self.folder.glob("*/*/summary.json")), None)

    @property
    def begun(self) -> Path | None:
        """The newest folder of the run, finished or not; None if not begun."""
        # logger and version are part of the path: default_root_dir/NAME/version_0
        begun = [path.parent for path in self.folder.glob("*/*/config.yaml")]
        return max(begun, key=lambda folder: folder.stat().st_mtime, default=None)

    @property
    def output(self) -> Path:
        """File with the process's output."""
        return self.folder / "output.txt"

    @property
    def command(self) -> list[str]:
        """Arguments of ``pfl-lightning``, which resume an earlier process if any."""
        where = ["--trainer.default_root_dir", str(self.folder)]
        if any(argument.split("=")[0] == "--trainer.logger" for argument in self.arguments):
            # a logger of the user's decides itself where to write, below its save_dir
            where = ["--trainer.logger.save_dir", str(self.folder)]
            # a logger's own folder bears its version, which for Weights & Biases is the run's id
            where += ["--trainer.logger.version", self.begun.name] if self.begun else []
        return ["fit", *QUIET, *self.arguments, *where, "--ckpt_path", "last"]

    @property
    def line(self) -> str:
        """Command line of the run, for a shell on another machine or a batch queue."""
        return shlex.join(["pfl-lightning", *self.command])

    @property
    def settings(self) -> str:
        """Arguments of the run, and the text of each configuration among these."""
        # by content: a configuration edited between two starts makes other runs
        texts = [f"\n{file}:\n{file.read_text(encoding='utf-8', errors='replace')}" for file in files(self.arguments)]
        return "\n".join([" ".join(self.arguments), *texts])

    @property
    def kept_settings(self) -> Path:
        """File beside the run with a copy of the settings."""
        return self.folder / "settings.txt"

    def refuse_others(self) -> None:
        """Refuse a folder with a run of other settings.

        Raises:
            MisconfigurationException: if the folder holds such a run.
        """
        # a folder of another method or data would be resumed, or taken for finished
        if self.begun and self.kept_settings.read_text(encoding="utf-8") != self.settings:
            raise MisconfigurationException(
                f"compare: {self.folder} holds a run of other settings, which are in {self.kept_settings.name} there; "
                "give another --out, or delete that folder."
            )

    def claim(self) -> None:
        """Create the folder, and store the settings inside."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.kept_settings.write_text(self.settings, encoding="utf-8")


def files(arguments: Sequence[str]) -> list[Path]:
    """Return the configurations on a command line.

    >>> [str(path) for path in files(["--config", "a.yaml", "--data.root", "b", "--config=c.yaml"])]
    ['a.yaml', 'c.yaml']
    """
    words = [part for word in arguments for part in (word.split("=", 1) if word.startswith("--config=") else [word])]
    return [Path(after) for word, after in pairwise(words) if word in ("--config", "-c")]


class Fit:
    """A run's process, which locks the run's folder against other comparisons.

    Args:
        run: the run.
        environment: variables of the process, in addition to this process's.
        starter: forks the process; without one, a new Python starts.

    Raises:
        MisconfigurationException: if another process holds the run's folder.
    """

    def __init__(self, run: Run, environment: Mapping[str, str], starter: Starter | None) -> None:
        variables = {**environment, "WANDB_NAME": f"{run.method} seed {run.seed}"}
        self.process: Forked | subprocess.Popen[bytes]
        with ExitStack() as stack:
            stack.enter_context(held(run.folder))
            if starter:
                self.process = starter.start(run.command, run.output, variables)
            else:
                output = stack.enter_context(run.output.open("wb"))
                # ends if this process is killed
                program = [sys.executable, "-m", "pfl_lightning.stopping", str(os.getpid()), PROGRAM]
                self.process = subprocess.Popen(
                    [*program, *run.command],
                    env={**os.environ, **variables},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            # the lock outlives this method; an error before this line releases it
            self._folder = stack.pop_all()

    def leave(self) -> None:
        """Release the folder."""
        self._folder.close()


def new_starter(environment: Mapping[str, str]) -> Starter | None:
    """Return a process that forks runs; None on systems without fork, or with libraries that a fork breaks.

    Args:
        environment: variables of the process and of all runs, in addition to this process's.
    """
    # this process has left out optional packages if the command line names no class that may need any
    first = LIGHT if hidden else WHOLE
    return Starter(PROGRAM, first, LATER, environment) if sys.platform == "linux" else None


def run_all(
    runs: Sequence[Run],
    jobs: int,
    environment: Mapping[str, str],
    report: Callable[[Run, str], None],
    starter: Starter | None,
) -> dict[Run, str]:
    """Make all unfinished runs, some at a time; an interrupt ends the processes too.

    Args:
        runs: all runs.
        jobs: number of processes at a time.
        environment: variables of the processes, in addition to this process's.
        report: called with each ended run and the reason if it failed, else an empty string.
        starter: forks the processes; without one, a new Python starts for each.

    Returns:
        Reasons of failed runs.
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
                        # another comparison may be making the same run: this one goes on with the others
                        running[run] = Fit(run, environment, starter)
                        continue
                    except MisconfigurationException as error:
                        failures[run] = str(error)
                report(run, failures.get(run, ""))
            for run, fit in list(running.items()):
                code = fit.process.poll()
                if code is not None:
                    running.pop(run).leave()
                    if run.finished is None:
                        failures[run] = reason(run, code)
                    report(run, failures.get(run, ""))
            # polled: a wait for the first of several processes isn't portable
            time.sleep(0.05 if running else 0)
    finally:
        end([fit.process for fit in running.values()])
        for fit in running.values():
            fit.leave()
    return failures


def end(processes: Sequence["Forked | subprocess.Popen[bytes]"]) -> None:
    """End processes: with SIGTERM first, by force after `GRACE` seconds."""
    for process in processes:
        process.terminate()
    # one deadline for all, so that many runs don't take many times as long
    deadline = time.monotonic() + GRACE
    while time.monotonic() < deadline and any(process.poll() is None for process in processes):
        time.sleep(0.02)
    for process in processes:
        while process.poll() is None:
            process.kill()
            time.sleep(0.02)


def reason(run: Run, code: int) -> str:
    """Return why a run failed: the last line of the output, one sentence where the settings are at fault.

    Args:
        run: the run, whose process has ended.
        code: exit code of the process.
    """
    # negative if the process itself was killed, 128 + signal if the run told its own end
    number = -code if code < 0 else code - 128
    if number in set(signal.Signals):
        return f"ended by {signal.Signals(number).name}"
    lines = [line for line in run.output.read_text("locale", errors="replace").splitlines() if line.strip()]
    last = lines[-1].removeprefix("pfl-lightning: error: ") if lines else f"exit code {code}"
    # exit code 0 without a summary is a failure too, as the table would have nothing to show
    return last if code else f"ended without a record: {last}"
