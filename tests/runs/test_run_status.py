"""What a run's files tell of it."""

import os
import signal
import time
from pathlib import Path

import pytest

from command import forked, wait_for
from federations import fit, make_client
from pfl_lightning.callbacks import FederatedCallback
from pfl_lightning.runs.run_status import RunStatus, is_bare, is_run


class Stuck(FederatedCallback):
    """Doesn't come to its first round's end."""

    def on_round_start(self, trainer, federation, cohort):
        time.sleep(60)


class Killed(FederatedCallback):
    """Is ended by force in its third round."""

    def on_round_start(self, trainer, federation, cohort):
        if federation.round == 2:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def stuck(tmp_path):
    process = forked(lambda: fit(make_client(), root=tmp_path, callbacks=[Stuck()]))
    folder = tmp_path / "FedAvg-Blobs" / "version_0"
    wait_for(lambda: (folder / "hparams.yaml").exists() and (folder / "rounds.csv").exists(), process)
    yield process
    process.kill()
    process.join()


def test_a_run_that_is_done(tmp_path):
    run = fit(make_client(), root=tmp_path, max_rounds=3)
    standing = RunStatus(run.folder)
    assert is_run(run.folder) and not is_bare(run.folder)
    assert (standing.round, standing.rounds, standing.finished, standing.worker) == (3, 3, True, "")
    assert standing.validation == pytest.approx(run.rows[-1]["val/acc"])
    assert standing.metric == "acc" and standing.left is None
    assert standing.checkpoints == ["best.ckpt", "last.ckpt"]
    assert 0 <= time.time() - standing.written < 60


def test_a_run_that_was_killed_and_gone_on_with(tmp_path):
    process = forked(lambda: fit(make_client(), root=tmp_path, max_rounds=6, callbacks=[Killed()]))
    process.join()
    standing = RunStatus(tmp_path / "FedAvg-Blobs" / "version_0")
    assert (standing.round, standing.rounds, standing.finished, standing.worker) == (2, 6, False, "")
    seconds = [sum(float(row[f"time/{part}"]) for part in ("train", "aggregate", "evaluate")) for row in standing.rows]
    assert standing.left == pytest.approx(4 * sum(seconds) / 2)
    assert not is_bare(standing.folder)
    fit(make_client(), root=tmp_path, max_rounds=6, ckpt_path="last")
    assert RunStatus(standing.folder).finished
    # a run that is done and gone on with is done no more
    process = forked(lambda: fit(make_client(), root=tmp_path, max_rounds=9, ckpt_path="last", callbacks=[Stuck()]))
    wait_for(lambda: RunStatus(standing.folder).worker, process)
    assert not RunStatus(standing.folder).finished
    process.kill()
    process.join()


def test_a_run_at_work_is_not_taken_over(stuck, tmp_path):
    folder = tmp_path / "FedAvg-Blobs" / "version_0"
    assert RunStatus(folder).worker.startswith(f"{stuck.pid} on ")
    assert not is_bare(folder)
    assert fit(make_client(), root=tmp_path, max_rounds=1).folder.name == "version_1"


@pytest.mark.parametrize("ckpt_path", [None, "last"])
def test_the_folder_of_a_run_that_was_killed_at_its_start_is_taken_over(stuck, tmp_path, ckpt_path):
    stuck.kill()
    stuck.join()
    folder = tmp_path / "FedAvg-Blobs" / "version_0"
    assert is_bare(folder)
    assert fit(make_client(), root=tmp_path, max_rounds=2, ckpt_path=ckpt_path).folder == folder
    assert RunStatus(folder).finished
    assert fit(make_client(), root=tmp_path, max_rounds=1).folder.name == "version_1"


@pytest.mark.parametrize("kept", ["notes.txt", "checkpoints/last.ckpt", "states/3.pt", "summary.json"])
def test_a_folder_that_holds_anything_else_is_not_taken_over(stuck, tmp_path, kept):
    stuck.kill()
    stuck.join()
    path = Path(tmp_path, "FedAvg-Blobs", "version_0", kept)
    path.parent.mkdir(exist_ok=True)
    path.touch()
    assert not is_bare(tmp_path / "FedAvg-Blobs" / "version_0")
    assert fit(make_client(), root=tmp_path, max_rounds=1).folder.name == "version_1"


@pytest.mark.parametrize(
    ("content", "rounds"), [("round,val/acc\r\n1,0.5\r\n", 1), ("round,val/acc\r\n1,0.5\r\n2", 1), ("\r\n", 0), ("", 0)]
)
def test_a_record_that_is_being_written(tmp_path, content, rounds):
    (tmp_path / "rounds.csv").write_text(content)
    (tmp_path / "config.yaml").write_text("trainer: [")
    (tmp_path / "summary.json").write_text('{"final": ')
    standing = RunStatus(tmp_path)
    assert (standing.round, standing.rounds, standing.finished, standing.left) == (rounds, None, False, None)
    assert standing.validation == (0.5 if rounds else None)


def test_a_process_of_another_machine_counts(tmp_path):
    (tmp_path / "rounds.csv").touch()
    (tmp_path / ".lock").write_text("1 on another-host")
    assert RunStatus(tmp_path).worker == "1 on another-host" and not is_bare(tmp_path)
