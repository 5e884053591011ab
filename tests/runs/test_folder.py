"""A run's folder: one process at a time, and what goes wrong with it is told in a sentence."""

import errno
import io
import os
import shutil
import signal
import time
from collections import deque
from functools import partial
from pathlib import Path

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException

from command import QUIET, forked, refusal, wait_for
from federations import fit, load, make_client, same_end
from pfl_lightning import WeightedAverage
from pfl_lightning.callbacks import FederatedCallback
from pfl_lightning.methods import FedProx
from pfl_lightning.runs.folder import explained, held


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


def hold(folder, child):
    with held(folder):
        if child is not None:
            (folder / "child").write_text(str(forked(child).pid))
        Path("here").touch()
        time.sleep(60)


@pytest.fixture
def holder(tmp_path):
    """Starts a process that holds a folder, which may have a child."""
    processes = []

    def start(folder=tmp_path / "run", child=None):
        processes.append(forked(hold, folder, child))
        wait_for(Path("here").exists, processes[0])
        return processes[0]

    yield start
    for process in processes:
        end(process)


def end(process):
    process.kill()
    process.join()


def enter(folder):
    with held(folder):
        return (folder / ".lock").read_text()


def test_a_second_process_is_told_who_is_in_the_folder_until_that_one_is_gone(holder, tmp_path):
    first = holder()
    with pytest.raises(MisconfigurationException, match=rf"run: process {first.pid} on .* is at work there; wait for"):
        enter(tmp_path / "run")
    end(first)
    assert enter(tmp_path / "run").startswith(f"{os.getpid()} on ")
    assert (tmp_path / "run" / ".lock").read_text() == ""


def test_processes_that_outlive_the_first_one_do_not_keep_the_folder(holder, tmp_path):
    end(holder(child=partial(time.sleep, 60)))
    child = int((tmp_path / "run" / "child").read_text())
    os.kill(child, 0)
    enter(tmp_path / "run")
    os.kill(child, signal.SIGKILL)


def test_without_locks_the_process_counts_that_is_named(holder, tmp_path, monkeypatch):
    pytest.importorskip("fcntl", reason="this system has no such locks; tests/test_systems.py")

    def unsupported(*arguments):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.lockf", unsupported)
    first = holder()
    with pytest.raises(MisconfigurationException, match=rf"process {first.pid} on"):
        enter(tmp_path / "run")
    end(first)
    enter(tmp_path / "run")
    (tmp_path / "run" / ".lock").write_text("1 on another-host")
    enter(tmp_path / "run")


def test_a_run_that_another_process_is_at_stays_as_it_is(holder, tmp_path):
    half = fit(make_client(), root=tmp_path / "runs", max_rounds=1)
    before = contents(half.folder)
    process = holder(half.folder)
    with pytest.raises(MisconfigurationException, match=rf"process {process.pid} "):
        fit(make_client(), root=tmp_path / "runs", ckpt_path="last")
    assert contents(half.folder) == before
    end(process)
    resumed = fit(make_client(), root=tmp_path / "runs", ckpt_path="last")
    assert same_end(fit(make_client(), root=tmp_path / "whole"), resumed)


class Full(io.FileIO):
    """A file on a disk with room for 3,000 bytes."""

    def write(self, data):
        if self.tell() + len(data) > 3000:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(data)


class FullInTheSecondRound(FederatedCallback):
    def __init__(self, monkeypatch, name):
        self.monkeypatch, self.name = monkeypatch, name

    def on_aggregate_end(self, trainer, federation, logs):
        def opened(path, *args, open=Path.open, **kwargs):
            return Full(path, "wb") if path.name.endswith(self.name) else open(path, *args, **kwargs)

        if federation.round == 1:
            self.monkeypatch.setattr(Path, "open", opened)


def test_a_full_disk_ends_a_run_in_a_sentence_and_leaves_its_checkpoints(tmp_path, monkeypatch):
    with pytest.raises(MisconfigurationException, match=r"version_0: No space left on device; make room and go on"):
        fit(make_client(), root=tmp_path, callbacks=[FullInTheSecondRound(monkeypatch, ".ckpt.partial")])
    monkeypatch.undo()
    assert not list(tmp_path.rglob("*.partial"))
    (last,) = tmp_path.rglob("last.ckpt")
    assert load(last)["federation"]["round"] == 1
    assert same_end(fit(make_client(), root=tmp_path / "whole"), fit(make_client(), root=tmp_path, ckpt_path="last"))


class Keeping(WeightedAverage):
    """Keeps what no checkpoint could give back."""

    def aggregate(self, updates, round):
        self.state["seen"] = deque()
        return super().aggregate(updates, round)


@pytest.mark.parametrize("states", ["memory", "disk"])
@pytest.mark.parametrize(
    "settings",
    [{"clients_per_round": 9}, {"aggregator": Keeping()}, {"ckpt_path": "missing.ckpt"}, {"ckpt_path": "other.ckpt"}],
    ids=["set-up", "first-round", "no-checkpoint", "other-settings"],
)
def test_what_is_refused_leaves_no_folder(settings, states, tmp_path):
    shutil.copy(fit(make_client(FedProx, mu=0.5), root=tmp_path / "other", max_rounds=1).last, "other.ckpt")
    for root, there in ((tmp_path / "runs", []), (tmp_path / "kept", ["notes.txt"])):
        for name in there:
            root.mkdir()
            (root / name).touch()
        with pytest.raises(MisconfigurationException):
            fit(make_client(FedProx), root=root, client_states=states, **settings)
        assert [path.name for path in root.rglob("*")] == there and root.exists() == bool(there)


def test_what_is_refused_leaves_a_folder_that_was_there(tmp_path):
    half = fit(make_client(), root=tmp_path, max_rounds=1)
    before = contents(half.folder)
    with pytest.raises(MisconfigurationException, match="clients_per_round"):
        fit(make_client(), root=tmp_path, ckpt_path="last", clients_per_round=9)
    # Lightning's CSVLogger empties its file before anything is checked; the next resumed run fills it again
    before.pop(half.folder / "metrics.csv")
    assert contents(half.folder) == before


class Moves(FederatedCallback):
    """Moves the run's folder away in the second round."""

    def on_round_start(self, trainer, federation, cohort):
        if federation.round == 1:
            os.rename(trainer.log_dir, "elsewhere")


@pytest.mark.parametrize("states", ["memory", "disk"])
def test_a_folder_that_is_moved_away_is_missed_and_not_made_again(states, tmp_path):
    with pytest.raises(MisconfigurationException, match=r"No such file .*version_0 was moved, put it back"):
        fit(make_client(), root=tmp_path / "runs", callbacks=[Moves()], client_states=states)
    (parent,) = (tmp_path / "runs").iterdir()
    assert not list(parent.iterdir())
    os.rename("elsewhere", parent / "version_0")
    resumed = fit(make_client(), root=tmp_path / "runs", ckpt_path="last")
    assert same_end(fit(make_client(), root=tmp_path / "whole"), resumed)


LINE = f"fit --model FedAvg --model.net MLP --data Digits --data.max_samples 400 --trainer.max_rounds 1 {QUIET}"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (f"{LINE} --trainer.default_root_dir file/runs", "file/runs/FedAvg-Digits/version_0: Not a directory; take"),
        ("compare --methods FedAvg --data Digits --out file/out", "file/out/FedAvg/seed_0: Not a directory; take an"),
    ],
)
def test_a_folder_that_cannot_be_made_is_named(line, says, capsys):
    Path("file").touch()
    assert refusal(line, capsys).startswith(says)


def test_other_errors_of_the_system_stay_what_they_are(tmp_path):
    for folder, name in ((tmp_path / "run", "data.csv"), (tmp_path / "run", str(tmp_path / "runs" / "x"))):
        with pytest.raises(FileNotFoundError), explained(folder):
            open(name)
    with pytest.raises(ConnectionError), explained(tmp_path):
        raise ConnectionError("lost")


def test_weights_and_biases_without_a_login_are_refused(capsys, monkeypatch):
    for name, value in {"WANDB_API_KEY": "", "HOME": "gone", "NETRC": "gone", "WANDB_SILENT": "true"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("WANDB_API_KEY")
    # Lightning's logger sets it for the whole process when it is offline, as in other tests
    monkeypatch.delenv("WANDB_MODE", raising=False)
    said = refusal(f"{LINE} --trainer.logger WandbLogger", capsys)
    assert said.startswith("WandbLogger: ") and said.endswith("by --trainer.logger.offline true.")
