"""What the page on who takes part shows."""

import re
from pathlib import Path

import pytest

from command import QUIET, pfl
from federations import Spy, blobs, fit, make_client, read_csv
from pfl_lightning import schedules, selection
from pfl_lightning.schedules import Asynchronous, Schedule, Synchronous
from pfl_lightning.selection import Selection
from pfl_lightning.settings import parameters_of

PAGE = (Path(__file__).parents[2] / "docs" / "participation.md").read_text()
COMMANDS = re.findall(r"^    pfl-lightning (.*)$", PAGE, re.MULTILINE)


@pytest.mark.exhaustive
@pytest.mark.parametrize("line", COMMANDS, ids=range(len(COMMANDS)))
def test_each_command(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("clients.csv").write_text("client,rate\n" + "".join(f"{client},1\n" for client in range(10)))
    pfl(f"{line} {QUIET} --trainer.max_rounds 1")
    (path,) = Path("runs").glob("*/version_0/rounds.csv")
    (row,) = read_csv(path)
    assert int(row["clients"]) == (1 if "fedasync" in line else 3) or "Poisson" in line


def test_a_choice_of_ones_own():
    names = {}
    (own,) = [block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "class LongestAgo" in block]
    exec(own, names)
    spy = Spy()
    fit(make_client(), blobs(), cohort=names["LongestAgo"](), callbacks=[spy], clients_per_round=2, max_rounds=4)
    assert spy.cohorts == [[0, 1], [2, 3], [0, 1], [2, 3]]


def test_a_table_of_clients_that_come_and_go(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (table,) = [block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "there.csv" in block]
    exec(table, {})
    rates = {row.pop("client"): row for row in read_csv(Path("there.csv"))}
    assert {client: [own[str(round)] for round in (1, 19, 20, 29, 30)] for client, own in rates.items()} == {
        "0": ["1"] * 5,
        "1": ["0", "0", "1", "1", "1"],
        "2": ["1", "1", "1", "1", "0"],
    }


def test_all_choices_are_in_its_table():
    choices, _, clock = PAGE.partition("## On a clock of devices")
    for part, kind, room in ((choices, Selection, selection), (clock, Schedule, schedules)):
        named = set(re.findall(r"^\| \[?`(\w+)`", part, re.MULTILINE)) - {"aggregator", "FedBuff", "FedAsync"}
        there = {name for name, value in vars(room).items() if isinstance(value, type) and issubclass(value, kind)}
        assert named == there - {kind.__name__}


def test_all_settings_of_schedules_are_told():
    settings = parameters_of(Synchronous()).keys() | parameters_of(Asynchronous()).keys()
    assert {name for name in settings if f"`schedule.{name}" in PAGE} == settings - {"self", "kwargs"}
