"""``pfl-lightning status``."""

import json
import os
import re
import subprocess
import time
from pathlib import Path

import pytest

from command import pfl, refusal
from pfl_lightning.cli.status import described_deployment, described_site
from pfl_lightning.runs.deployment_status import DeploymentStatus, write_status

RUN = Path("runs/FedPer-Digits/version_0")


def make_run(folder: Path, done: int, rounds: int, **columns: str) -> None:
    """The files of a run."""
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.yaml").write_text(f"trainer: {{max_rounds: {rounds}}}")
    given = {"val/acc": "0.5", "val/acc_worst": "0.1", "time/train": "9", "time/evaluate": "1", **columns}
    rows = [f"{round},{','.join(given.values())}" for round in range(1, done + 1)]
    (folder / "rounds.csv").write_text("\n".join([f"round,{','.join(given)}", *rows]) + "\n")
    (folder / "checkpoints" / "last.ckpt").touch()
    if done == rounds:
        (folder / "summary.json").write_text(json.dumps({"final": {"round": done}}))


def status(line, capsys):
    with pytest.raises(SystemExit) as ended:
        pfl(f"status {line}")
    assert not ended.value.code
    return capsys.readouterr().out.splitlines()


def test_a_run(capsys):
    make_run(RUN, done=11, rounds=200)
    lines = dict(re.split(" {2,}", line, maxsplit=1) for line in status(RUN, capsys))
    assert re.fullmatch(r"\d+ s ago", lines.pop("last written"))
    assert lines == {
        "run": str(RUN),
        "state": "stopped",
        "round": "11 of 200",
        "validation": "50.00 %",
        "time left": "31 min 30 s",
        "checkpoints": "last.ckpt",
        "go on by": "the same command with --ckpt_path last",
    }


def test_a_run_at_work(capsys):
    make_run(RUN, done=1, rounds=2)
    (RUN / "rounds.csv").write_text("round,val/mae,val/mae_worst\n1,0.25,0.5\n")
    (RUN / ".lock").write_text("1 on another-host")
    lines = status(RUN, capsys)
    assert "state         running, process 1 on another-host" in lines and "validation    mae 0.25" in lines
    assert not any(line.startswith("go on") for line in lines)


@pytest.mark.parametrize("line", ["compared", "compared/FedPer"])
def test_the_runs_of_a_comparison_have_a_line_each(line, capsys):
    make_run(Path("compared/FedPer/seed_0/FedPer-Digits/version_0"), done=20, rounds=20)
    make_run(Path("compared/FedPer/seed_1/FedPer-Digits/version_0"), done=3, rounds=20)
    head, _, *rows = status(line, capsys)
    assert head.split() == ["run", "round", "validation", "written", "left", "state"]
    cells = [re.split(" {2,}", row) for row in rows]
    assert [(row[0].split("/")[-3], row[1], row[2], row[-1]) for row in cells] == [
        ("seed_0", "20 of 20", "50.00 %", "finished"),
        ("seed_1", "3 of 20", "50.00 %", "stopped"),
    ]
    assert cells[1][-2] == "2 min 50 s"


def test_where_there_is_no_run(capsys, tmp_path):
    assert (
        refusal("status", capsys)
        == "status: runs is no folder; give that of a run, such as runs/METHOD-DATA/version_0."
    )
    (tmp_path / "runs").mkdir()
    assert refusal("status", capsys) == "status: runs holds no run; give the folder of one, or of several."


SITE = {"node": "17", "clients": ["0", "2"], "present": False, "seen": 0.0}


@pytest.mark.parametrize(
    ("told", "state", "code"),
    [
        ({"state": "waiting"}, "waiting for sites", 0),
        ({"state": "running", "round": 2, "rounds": 5}, "running", 0),
        ({"state": "finished"}, "finished", 0),
        ({"state": "stopped"}, "stopped", 1),
        ({"state": "failed", "reason": "no site"}, "failed", 1),
    ],
)
def test_a_deployment_says_how_it_stands_by_its_exit_code(tmp_path, capsys, told, state, code):
    write_status(tmp_path / "deployment.status", {**told, "sites": [SITE], "without_site": ["1", "3"]})
    with pytest.raises(SystemExit) as ended:
        pfl(f"status {tmp_path}")
    assert ended.value.code == code
    lines = dict(re.split(" {2,}", line, maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["state"].split(", process ")[0] == state and lines["without a site"] == "1, 3"
    assert lines["site"].startswith("clients 0, 2: lost, last heard ") and lines["site"].endswith("ago, node 17")
    assert lines.get("reason") == told.get("reason")


def test_a_deployment_whose_server_is_gone_is_dead(tmp_path):
    path = tmp_path / "deployment.status"
    write_status(path, {"state": "running"})
    told = json.loads(path.read_text())
    for change, state in (
        ({}, "running"),
        # the largest process id of Linux is below this one
        ({"process": 2**22 + 1}, "dead"),
        # the number of a process that has begun since
        ({"started": "1"}, "dead"),
        ({"host": "another"}, "running"),
        ({"host": "another", "written": told["written"] - 3600}, "dead"),
    ):
        path.write_text(json.dumps(told | change))
        assert DeploymentStatus(path).state == state
    path.write_text("{")
    assert (DeploymentStatus(path).state, DeploymentStatus(path).exit_code) == ("dead", 1)
    assert described_deployment(DeploymentStatus(path))[0] == ("state", "dead, without a last word")


def test_a_process_that_has_ended_and_isnt_looked_at_is_dead(tmp_path):
    path = tmp_path / "deployment.status"
    with subprocess.Popen(["true"]) as ended:
        # as Flower's own process leaves a killed server's app for a minute
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        write_status(path, {"state": "running"})
        path.write_text(json.dumps(json.loads(path.read_text()) | {"process": ended.pid, "started": ""}))
        assert DeploymentStatus(path).state == "dead"


@pytest.mark.parametrize(
    ("present", "silent", "words"), [(True, 10, "connected"), (True, 50, "silent"), (False, 10, "lost")]
)
def test_a_site_is_said_to_be_connected_only_while_it_is_heard(present, silent, words):
    seen = time.time() - silent
    line = described_site({"node": "17", "clients": ["0"], "present": present, "seen": seen})
    assert line.startswith(f"clients 0: {words}, last heard {silent} s ago")


def test_a_running_round_says_for_whom_it_waits(tmp_path):
    path = tmp_path / "deployment.status"
    now = {"round": 7, "since": time.time() - 84, "clients": ["4 (Ulm)"]}
    write_status(path, {"state": "running", "now": now, "late": {"5": "answers come 3 rounds late"}})
    lines = dict(described_deployment(DeploymentStatus(path)))
    assert lines["now"] == "round 7 for 84 s; waiting for client 4 (Ulm)"
    assert lines["late"] == "client 5: answers come 3 rounds late"


def test_an_app_whose_server_has_said_nothing_isnt_wrong(tmp_path, capsys):
    (tmp_path / "pyproject.toml").write_text('[tool.flwr.app]\npublisher = "pfl"\n')
    with pytest.raises(SystemExit) as ended:
        pfl(f"status {tmp_path}")
    assert ended.value.code == 0 and "not begun" in capsys.readouterr().out


def test_waiting_for_a_deployment_prints_its_rounds(tmp_path, capsys, monkeypatch):
    path = tmp_path / "deployment.status"
    write_status(path, {"state": "running", "last": {"line": "round 1 of 2"}})
    later = iter([("running", "round 1 of 2"), ("running", "round 2 of 2"), ("failed", "round 2 of 2")])

    def sleep(_):
        state, line = next(later)
        write_status(path, {"state": state, "last": {"line": line}})

    monkeypatch.setattr("pfl_lightning.cli.status.time.sleep", sleep)
    with pytest.raises(SystemExit) as ended:
        pfl(f"status {tmp_path} --wait")
    assert ended.value.code == 1
    assert capsys.readouterr().out.splitlines()[:2] == ["round 1 of 2", "round 2 of 2"]
    os.unlink(path)
    assert "--wait is for a deployment" in refusal(f"status {tmp_path} --wait", capsys)
