"""The command line as a user calls it, for tests."""

import json
import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pfl_lightning.cli.main import main

CONFIGS = Path(__file__).parents[1] / "configs"
QUICKSTART = f"--config {CONFIGS / 'quickstart.yaml'}"
ACCELERATOR = os.environ.get("ACCELERATOR", "cpu")
"""Where the tests train."""
QUIET = f"--trainer.enable_progress_bar false --trainer.enable_model_summary false --trainer.accelerator {ACCELERATOR}"


def pfl(line: str | list[str]) -> None:
    """Runs ``pfl-lightning LINE``, given whole or in words."""
    with pytest.MonkeyPatch.context() as patch:
        # Lightning warns where a program's own arguments and explicit ones come together
        patch.setattr("sys.argv", ["pfl-lightning"])
        main(line.split() if isinstance(line, str) else line)


def forked(function: Callable[..., Any], *arguments: Any) -> Any:
    """A process that runs a function; a fork starts at once, where a new program would read all packages again."""
    if "fork" not in multiprocessing.get_all_start_methods():
        pytest.skip("forks a process, which this system doesn't")
    process = multiprocessing.get_context("fork").Process(target=function, args=arguments)
    process.start()
    return process


def wait_for(condition: Callable[[], Any], process: Any) -> None:
    """Waits until a condition holds, while a process runs."""
    deadline = time.monotonic() + 60
    while not condition():
        assert process.is_alive() and time.monotonic() < deadline, "the process ended before it was to be ended"
        time.sleep(0.005)


def refusal(line: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Runs a line that must be refused; gives the one sentence that says why."""
    with pytest.raises(SystemExit) as ended:
        pfl(line)
    assert ended.value.code == 2
    printed = capsys.readouterr()
    assert "usage" not in printed.out + printed.err
    errors = [text for text in printed.err.splitlines() if text.startswith("pfl-lightning: error: ")]
    assert printed.err.splitlines()[-1:] == errors
    return errors[0].removeprefix("pfl-lightning: error: ")


def summary(run: str) -> Any:
    """What a run in the working folder says of itself at its end."""
    return json.loads(Path("runs", run, "summary.json").read_text())
