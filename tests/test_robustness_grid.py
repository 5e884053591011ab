"""A grid of rules and attacks from one command: resumable, with tables, a CSV file and a picture."""

import csv
import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SMALL = ["--rounds", "1", "--seeds", "0", "--partitions", "alike", "--rules", "mean", "median"]


def script(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def ended(path, words, monkeypatch):
    """The exit code of a script."""
    monkeypatch.setattr(sys, "argv", [str(path), *words])
    return script(path).main() or 0


def benchmark(words, monkeypatch):
    return ended(ROOT / "benchmarks" / "robustness.py", [*words, "--out", "grid"], monkeypatch)


@pytest.mark.exhaustive
def test_a_grid_goes_on_where_it_stopped_and_is_told_in_a_table_a_file_and_a_picture(monkeypatch, capfd):
    words = [*SMALL, "--attacks", "AdaptiveAttack", "--percents", "0", "20"]
    assert benchmark(words, monkeypatch) == 0
    said = capfd.readouterr().out
    assert "runs: 4, of which 0" in said and said.count(": done") == 4
    assert "| rule | nobody | AdaptiveAttack |" in said
    with Path("grid/runs.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {(row["rule"], row["attack"], row["percent"]) for row in rows} == {
        (rule, *attack) for rule in ("mean", "median") for attack in (("nobody", "0"), ("AdaptiveAttack", "20"))
    }
    assert all(0 < float(row["accuracy"]) < 100 for row in rows) and Path("grid/robustness.png").stat().st_size > 1000
    # one run was never begun
    shutil.rmtree("grid/alike/median/AdaptiveAttack")
    assert benchmark(words, monkeypatch) == 0
    said = capfd.readouterr().out
    assert "runs: 4, of which 3" in said and said.count(": done") == 1
    with pytest.raises(SystemExit):
        benchmark([*words, "--rounds", "2"], monkeypatch)
    assert "grid/alike/mean/nobody/0/0 holds a run of other settings" in capfd.readouterr().err


@pytest.mark.exhaustive
def test_two_at_a_time_make_each_run_once_and_tell_of_those_that_fail():
    words = [*SMALL, "--rules", "FLTrust", "mean", "--attacks", "SignFlip", "--percents", "20", "--jobs", "2"]
    command = [sys.executable, ROOT / "benchmarks" / "robustness.py", *words, "--out", "grid"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert done.stdout.count(": done") == 1 and "FLTrust trains by samples" in done.stdout
    assert len(list(Path("grid").rglob("summary.json"))) == 1 and "1 runs" in done.stdout


def test_commands_are_told_and_rules_are_set_for_as_many_bad_clients_as_there_are(monkeypatch, capsys):
    words = [*SMALL, "--commands", "--attacks", "IPM", "ALIE", "--percents", "0", "5", "40"]
    assert benchmark([*words, "--rules", "trimmed"], monkeypatch) == 0
    lines = capsys.readouterr().out.splitlines()
    trims = [line.split("--aggregator.mean.trim ")[1].split()[0] for line in lines]
    assert trims == ["1", "1", "1", "8", "8"] and not Path("grid").exists()


@pytest.mark.parametrize("words", [["--percents", "100"], ["--jobs", "0"], ["--partitions", "even"]])
def test_values_that_there_can_not_be_are_refused(words, monkeypatch, capsys):
    with pytest.raises(SystemExit) as end:
        benchmark(words, monkeypatch)
    assert end.value.code == 2 and words[1] in capsys.readouterr().err


def keep(partition, rule, attack, percent, seed, accuracy):
    folder = Path("kept", partition, rule, attack, str(percent), str(seed), "FedAvg-Digits", "version_0")
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text(json.dumps({"final": {"benign/test/acc": accuracy}}))


def test_a_picture_of_no_runs_is_refused_in_a_sentence(monkeypatch, capsys):
    with pytest.raises(SystemExit) as end:
        ended(ROOT / "docs" / "plot_robustness.py", ["picture.png", "kept"], monkeypatch)
    assert end.value.code == 2 and "kept has no finished run" in capsys.readouterr().err
    assert not Path("picture.png").exists()


def test_a_picture_is_made_of_the_runs_that_there_are(monkeypatch, capsys):
    # no main partition, a rule without seed 1, and one without an attack
    for seed, accuracy in ((0, 0.5), (1, 0.75)):
        keep("unlike-served", "mean", "nobody", 0, seed, accuracy)
        keep("unlike-served", "mean", "SignFlip", 20, seed, accuracy - 0.25)
        keep("unlike-served", "mean", "IPM", 20, seed, accuracy - 0.125)
    keep("unlike-served", "FLTrust", "SignFlip", 20, 0, 0.5)
    ended(ROOT / "docs" / "plot_robustness.py", ["picture.png", "kept"], monkeypatch)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "unlike-served, 20 % bad, 2 seeds"
    assert "| mean | 62.5 ± 17.7 | 37.5 ± 17.7 | 50.0 ± 17.7 | 37.5 |" in lines
    assert "| FLTrust |  | 50.0 (1) |  |  |" in lines
    assert Path("picture.png").stat().st_size > 1000
