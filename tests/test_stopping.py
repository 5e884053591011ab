"""Runs that are killed or told to end, and go on."""

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch.utilities.exceptions import SIGTERMException

from command import QUIET, forked, pfl, wait_for
from federations import equal, load, read_csv, untimed
from pfl_lightning import stopping
from pfl_lightning.methods import FedAvg
from pfl_lightning.runs.checkpoint_io import save
from pfl_lightning.stopping import STARTED_BY, RankLost, Stopped, ending_at_once, postponed, stoppable
from sweeps import swept


def write_config(root: Path, max_rounds: int, local_epochs: int, **data: Any) -> Path:
    config = {
        "seed_everything": 1,
        "model": {
            "class_path": "FedPer",
            "init_args": {
                "net": {"class_path": "MLP", "init_args": {"hidden": [16]}},
                "optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.05, "momentum": 0.9}},
                "optimizer_lifetime": "run",
            },
        },
        "data": {"class_path": "Digits", "init_args": {"num_clients": 6, "max_samples": 360}},
        "trainer": {
            "max_rounds": max_rounds,
            "local_epochs": local_epochs,
            "clients_per_round": 0.5,
            "default_root_dir": str(root / "runs"),
            "accelerator": "cpu",
            "enable_progress_bar": False,
            "enable_model_summary": False,
        },
    }
    config["data"]["init_args"]["partitioner"] = {"class_path": "Dirichlet", "init_args": {"alpha": 1.0, "min_size": 8}}
    config["data"]["init_args"] |= data
    root.mkdir(exist_ok=True)
    path = root / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def run_folder(root: Path, version: int = 0) -> Path:
    return root / "runs" / "FedPer-Digits" / f"version_{version}"


def rows(folder: Path) -> list[Any]:
    path = folder / "rounds.csv"
    return read_csv(path) if path.exists() else []


def start_and_kill(config: Path, when: Callable[[], bool], after: float = 0.0, number: int = signal.SIGKILL) -> int:
    """Starts a run in another process, and ends it some seconds after a condition holds; gives the exit code."""
    process = forked(pfl, f"fit --config {config}")
    try:
        wait_for(when, process)
        time.sleep(after)
        assert process.is_alive(), "the run ended before it was to be killed; give it more rounds"
        os.kill(process.pid, number)
    except BaseException:
        process.kill()
        raise
    finally:
        process.join()
    return process.exitcode


def end_of(folder: Path) -> tuple[Any, Any, Any]:
    checkpoint = load(folder / "checkpoints" / "last.ckpt")
    return checkpoint["state_dict"], checkpoint["federation"], untimed(rows(folder))


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("whole")
    pfl(f"fit --config {write_config(root, max_rounds=30, local_epochs=4)}")
    return run_folder(root)


def assert_goes_on(config: Path, uninterrupted: Path) -> None:
    """Resumes, and compares the end."""
    folder = run_folder(config.parent)
    assert 2 <= len(rows(folder)) < 30
    pfl(f"fit --config {config} --ckpt_path last")
    for one, other in zip(end_of(uninterrupted), end_of(folder), strict=True):
        assert equal(one, other)
    assert read_csv(folder / "clients.csv") == read_csv(uninterrupted / "clients.csv")
    assert not list(folder.rglob("*.partial"))
    assert not run_folder(config.parent, 1).exists()


@pytest.mark.parametrize("moment", swept(range(3), ("1",), str))
@pytest.mark.exhaustive
def test_a_run_killed_at_any_moment_goes_on_to_the_same_end(moment, uninterrupted, tmp_path):
    config = write_config(tmp_path, max_rounds=30, local_epochs=4)
    after = random.Random(moment).uniform(0, 0.4)
    assert start_and_kill(config, lambda: len(rows(run_folder(tmp_path))) >= 2, after) == -signal.SIGKILL
    assert_goes_on(config, uninterrupted)


DRIFT = {
    "val_fraction": 0.2,
    "drift": {20: {"class_path": "Dirichlet", "init_args": {"alpha": 0.5, "min_size": 8}}},
    "input_drift": [
        {"start": 20, "scale": -1.0, "clients": [0, 3]},
        {"start": 17, "rotate": 90.0, "rounds": 6, "clients": 0.5},
    ],
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("killed", [18, 20, 21])
def test_a_drift_at_round_20_goes_on_when_killed_around_it(killed, tmp_path):
    configs = [write_config(tmp_path / name, max_rounds=30, local_epochs=4, **DRIFT) for name in ("whole", "killed")]
    pfl(f"fit --config {configs[0]}")
    folder = run_folder(tmp_path / "killed")
    assert start_and_kill(configs[1], lambda: len(rows(folder)) >= killed) == -signal.SIGKILL
    assert_goes_on(configs[1], run_folder(tmp_path / "whole"))
    assert (folder / "summary.json").exists() and len(rows(folder)) == 30


@pytest.fixture
def heeding_interrupts():
    """As in the foreground: a shell has what it runs in the background ignore SIGINT, these tests too."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeding_interrupts")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.by_default("15")
def test_a_run_that_is_told_to_end_says_by_its_exit_code_that_it_did_not_finish(number, uninterrupted, tmp_path, capfd):
    # that which isn't resumed is long enough not to end before the signal comes
    config = write_config(tmp_path, max_rounds=30 if number == signal.SIGTERM else 300, local_epochs=4)
    code = start_and_kill(config, lambda: len(rows(run_folder(tmp_path))) >= 2, number=number)
    assert code == 128 + number
    said = capfd.readouterr().err.splitlines()[-1]
    assert said == (
        f"pfl-lightning: stopped by {number.name}; go on with: pfl-lightning fit --config {config} --ckpt_path last"
    )
    assert not list(tmp_path.rglob("*.partial"))
    if number == signal.SIGTERM:
        assert_goes_on(config, uninterrupted)


class Waiting(FedAvg):
    """Its clients take five seconds to begin."""

    def on_download(self, payload, data):
        Path("begun").touch()
        time.sleep(5)


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("fit", " before there was a checkpoint; start again with: pfl-lightning fit --model test_stopping.Waiting"),
        ("validate", "."),
        ("test", "."),
    ],
)
@pytest.mark.by_default("validate-.")
def test_a_command_that_is_told_to_end_does_so_at_once(command, says, tmp_path, capfd):
    process = forked(
        pfl, f"{command} --model test_stopping.Waiting --model.net MLP --data Digits --data.num_clients 2 {QUIET}"
    )
    wait_for(Path("begun").exists, process)
    process.terminate()
    process.join()
    assert process.exitcode == 128 + signal.SIGTERM
    said = capfd.readouterr().err.splitlines()[-1]
    assert said.startswith(f"pfl-lightning: stopped by SIGTERM{says}")
    assert "--ckpt_path" not in said and not list(tmp_path.rglob("*.ckpt"))


@pytest.fixture
def own_handlers():
    """Handlers of this test alone, as tests before it may have left some."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    own = {signal.SIGTERM: lambda number, frame: None, signal.SIGINT: signal.default_int_handler}
    for number, handler in own.items():
        signal.signal(number, handler)
    yield own
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_context_leaves_the_handlers_of_signals_as_they_were(own_handlers):
    def now():
        return {number: signal.getsignal(number) for number in own_handlers}

    with stoppable():
        assert {*now().values()} == {stopping._stop}
        with stoppable():
            pass
        assert {*now().values()} == {stopping._stop}
    assert now() == own_handlers
    with pytest.raises(ZeroDivisionError), stoppable():
        _ = 1 / 0
    assert now() == own_handlers


@pytest.mark.parametrize(
    ("given", "says", "code"),
    [(-15, "stopped by SIGTERM", 143), (137, "stopped by SIGKILL", 137), (3, "failed with exit code 3", 3)],
)
def test_a_lost_rank_is_told_by_its_signal_or_its_exit_code(given, says, code):
    lost = RankLost.by_exit_code(2, given)
    assert str(lost).startswith("rank 2") and says in str(lost) and lost.code == code


def test_at_once_a_process_says_its_signal_and_ends_without_an_exception(capfd):
    def end():
        with stoppable(), ending_at_once(lambda stopped: print(stopped, file=sys.stderr)):
            try:
                signal.raise_signal(signal.SIGTERM)
            finally:
                print("an exception", file=sys.stderr)

    process = forked(end)
    process.join()
    assert process.exitcode == 128 + signal.SIGTERM
    assert "stopped by SIGTERM" in (said := capfd.readouterr().err) and "an exception" not in said


@pytest.mark.parametrize("orphan", [False, True])
def test_at_once_a_rank_ends_when_its_parent_has_ended(orphan, monkeypatch):
    monkeypatch.setattr(stopping, "POLL", 0.01)

    def wait():
        # a process has another parent once its own has ended
        os.environ[STARTED_BY] = str(os.getppid() + orphan)
        with ending_at_once(print):
            time.sleep(10 if orphan else 0.2)

    process = forked(wait)
    process.join()
    assert process.exitcode == int(orphan)


@pytest.mark.exhaustive
def test_a_run_killed_before_any_checkpoint_starts_anew(uninterrupted, tmp_path):
    endless = write_config(tmp_path, max_rounds=30, local_epochs=100_000)
    folder = run_folder(tmp_path)
    assert start_and_kill(endless, (folder / "config.yaml").exists) == -signal.SIGKILL
    assert not list(folder.rglob("*.ckpt"))
    config = write_config(tmp_path, max_rounds=30, local_epochs=4)
    pfl(f"fit --config {config} --ckpt_path last")
    (finished,) = (path.parent for path in folder.parent.glob("*/summary.json"))
    for one, other in zip(end_of(uninterrupted), end_of(finished), strict=True):
        assert equal(one, other)


def test_what_is_being_written_comes_to_its_end_first(tmp_path):
    class Told:
        def __reduce__(self):
            os.kill(os.getpid(), signal.SIGTERM)
            return str, ("whole",)

    path = tmp_path / "file"
    with pytest.raises(Stopped), stoppable():
        save({"told": Told(), "more": torch.ones(3)}, path)
    assert torch.load(path, weights_only=False)["told"] == "whole"
    with pytest.raises(ZeroDivisionError), stoppable(), postponed():
        _ = 1 / 0


def test_a_signal_that_meets_a_finalizer_ends_the_run_all_the_same(monkeypatch):
    # signals of the test before are no echo
    monkeypatch.setattr(stopping, "_stop", stopping._Stop())

    class Last:
        def __del__(self):
            # Python ignores exceptions of finalizers, and of the callbacks around a fork
            signal.raise_signal(signal.SIGTERM)

    hook = sys.unraisablehook
    with pytest.raises(Stopped), stoppable(), stoppable():
        Last()
        time.sleep(1)
    assert sys.unraisablehook == hook


def test_what_lightning_raises_at_a_signal_ends_the_run_by_the_signal_s_exit_code():
    with pytest.raises(Stopped, match=r"^stopped by SIGTERM$") as ended, stoppable():
        raise SIGTERMException
    assert ended.value.code == 128 + signal.SIGTERM
    with pytest.raises(SystemExit) as own, stoppable():
        sys.exit(3)
    assert own.value.code == 3
