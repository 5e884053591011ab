"""An app's run to its end, with a program in Flower's place that gives prepared answers."""

import json
import tomllib
from pathlib import Path

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.flower import runner
from pfl_lightning.flower.runner import LOST, Runner, connections
from pfl_lightning.runs.deployment_status import ENDED

APP = '[project]\nname = "clinics"\n[tool.flwr.app]\npublisher = "pfl"\n'
DEAD = "No heartbeat received from the task"
PROGRAM = """#!/bin/sh
cd {folder}
echo "$@" >> asked
line=$(wc -l < asked)
cat "answer-$((line))"
"""
LOG = "Using SuperLink: local\nwaiting for sites: 0 of 4 clients have one\n"


@pytest.fixture
def flower(tmp_path, monkeypatch):
    """Returns the exit code of a run, and what Flower was asked, given its answers in turn."""
    app = tmp_path / "clinics"
    app.mkdir()
    (app / "pyproject.toml").write_text(APP)
    program = tmp_path / "flwr"
    program.write_text(PROGRAM.format(folder=tmp_path))
    program.chmod(0o700)
    monkeypatch.setattr(runner, "PAUSE", 0.0)
    monkeypatch.setattr(runner.shutil, "which", lambda name, path: str(program))

    def run(*answers, **settings):
        for number, answer in enumerate(answers, 1):
            (tmp_path / f"answer-{number}").write_text(answer if isinstance(answer, str) else json.dumps(answer))
        code = Runner(app, **{"connection": "local"} | settings).run()
        asked = Path(tmp_path, "asked").read_text().replace(str(app), "APP").splitlines()
        # else an answer was never asked for
        assert len(asked) == len(answers)
        return code, asked

    return run


def begun(number):
    return {"success": True, "run-id": number}


def runs(status=None, details="", number="7", name="pfl/clinics"):
    row = {"run-id": number, "fab-id": name, "status": status, "status-details": details}
    return {"success": True, "runs": [row] if status else []}


UNREACHABLE = {"success": False, "error-message": "Connection to the SuperLink is unavailable."}


def test_a_run_to_its_end(flower, capsys):
    code, asked = flower(
        runs("running", name="pfl/others"),
        begun("7"),
        runs("starting"),
        runs("running"),
        LOG + "round 1 of 1\n",
        runs("finished:completed"),
    )
    assert code == 0
    assert asked == [
        "list local --format json",
        'run APP local -c ckpt-path="unfinished" --format json',
        "list local --format json",
        "list local --format json",
        "log 7 local --stream",
        "list local --format json",
    ]
    assert capsys.readouterr().out == LOG + "round 1 of 1\n"


@pytest.mark.parametrize("lost", [DEAD, f"ServerApp failed with exception: {ENDED} (exit code 143)."])
def test_a_lost_run_is_followed_by_one_that_goes_on(flower, lost, capsys):
    code, asked = flower(
        begun("7"),
        runs("running"),
        LOG,
        # the SuperLink is dead, and the log comes again from its first line when it is back
        UNREACHABLE,
        UNREACHABLE,
        runs("running"),
        "",
        runs("running"),
        LOG + "round 1 of 2\n",
        runs("finished:failed", lost),
        UNREACHABLE,
        begun("8"),
        runs("running", number="8"),
        LOG + "round 2 of 2\n",
        runs("finished:completed", number="8"),
        anew=True,
        settings=["timeout=5"],
    )
    assert code == 0
    begins = [line for line in asked if line.startswith("run")]
    assert begins == [
        f'run APP local -c timeout=5 -c ckpt-path="{path}" --format json' for path in ("", "unfinished", "unfinished")
    ]
    shown = capsys.readouterr()
    assert shown.out == LOG + "round 1 of 2\n" + LOG + "round 2 of 2\n"
    assert shown.err.count("the SuperLink doesn't answer; it is asked again") == 1


def test_a_new_run_whose_server_said_nothing_is_begun_anew_again(flower):
    _, asked = flower(
        begun("7"),
        runs(),
        "",
        begun("8"),
        runs("running", number="8"),
        LOG,
        runs("finished:completed", number="8"),
        anew=True,
    )
    assert [line.split()[4] for line in asked if line.startswith("run")] == ['ckpt-path=""', 'ckpt-path=""']


def test_a_run_under_way_is_followed(flower):
    code, asked = flower(
        runs("running", number="5"), runs("running", number="5"), LOG, runs("finished:completed", number="5")
    )
    assert code == 0 and asked[2] == "log 5 local --stream"


@pytest.mark.parametrize(
    ("status", "details"),
    [("finished:failed", "ServerApp failed with exception: trainer.min_clients=0"), ("finished:stopped", "")],
)
def test_an_error_of_the_app_or_a_stop_ends_the_command(flower, status, details):
    code, asked = flower(runs(), begun("7"), runs("running"), LOG, runs(status, details))
    assert code == 1 and len(asked) == 5


@pytest.mark.parametrize("status", ["pending", "starting"])
def test_a_run_that_doesnt_start_ends_the_command_in_a_sentence(flower, monkeypatch, capsys, status):
    monkeypatch.setattr(runner, "UNSTARTED", 0.0)
    code, asked = flower(runs(), begun("7"), runs(status))
    # its log would be followed for ever
    assert code == 1 and not any(line.startswith("log") for line in asked)
    assert "run 7 is waiting: " in (said := capsys.readouterr().err) and "flower-superlink" in said


def test_a_superlink_that_doesnt_answer_at_first_ends_the_command(flower, capsys):
    code, _ = flower(UNREACHABLE, UNREACHABLE)
    assert code == 1 and "Connection to the SuperLink is unavailable" in capsys.readouterr().err


@pytest.mark.parametrize(("with_round", "runs_until_end"), [(None, LOST + 1), (3, LOST + 3)])
def test_runs_lost_one_after_another_end_the_command(flower, with_round, runs_until_end):
    answers = []
    for run in range(1, runs_until_end + 1):
        # a round's end counts as a new beginning
        log = LOG + "round 3 of 9\n" * (run == with_round)
        answers += [begun("7"), runs("running"), log, runs("finished:failed", DEAD)]
    code, _ = flower(runs(), *answers)
    assert code == 1


def test_an_address_needs_no_file_of_connections(tmp_path):
    assert tomllib.loads(connections("127.0.0.1:8000", None))["superlink"] == {
        "default": "given",
        "given": {"address": "127.0.0.1:8000", "insecure": True},
    }
    told = tomllib.loads(connections("server.example:8000", tmp_path / "ca.pem"))["superlink"]["given"]
    assert told == {"address": "server.example:8000", "root-certificates": str(tmp_path / "ca.pem")}
    with pytest.raises(MisconfigurationException, match=r"server.example:8000 is on another machine; give --root-"):
        connections("server.example:8000", None)


def test_flower_is_asked_with_the_connection_of_the_address(flower, monkeypatch, tmp_path):
    (tmp_path / "flwr").write_text(PROGRAM.format(folder=tmp_path).replace('"$@"', '"$@" $FLWR_HOME/config.toml'))
    monkeypatch.setattr(runner, "NAME", "given")
    _, asked = flower(
        runs("running", number="5"), runs("finished:completed", number="5"), LOG, connection="127.0.0.1:1"
    )
    assert all(" given " in f"{line} " for line in asked)
    homes = {line.split()[-1] for line in asked}
    assert len(homes) == 1 and "pfl-lightning-flwr-" in homes.pop()


def test_a_checkpoint_of_the_users_or_another_folder_is_refused(tmp_path):
    with pytest.raises(MisconfigurationException, match=r"ckpt-path.*--anew"):
        Runner(tmp_path, settings=['ckpt-path="last"'])
    with pytest.raises(MisconfigurationException, match="no app of Flower"):
        Runner(tmp_path)
