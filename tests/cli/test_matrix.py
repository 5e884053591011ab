"""``pfl-lightning matrix``, and predictions of runs made from Python."""

import csv
from pathlib import Path

import pytest

from command import QUIET, pfl, refusal
from federations import fit, make_client
from pfl_lightning.methods import FedPer

FIT = f"fit {QUIET} --model FedPer --model.net MLP --model.net.hidden [4] --data Digits --data.num_clients 3"


def rows_of(path):
    with Path(path).open(newline="") as file:
        return list(csv.DictReader(file))


def call(line):
    with pytest.raises(SystemExit) as ended:
        pfl(line)
    assert not ended.value.code


@pytest.mark.exhaustive
def test_a_run_has_its_matrix_beside_its_record(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    pfl(f"{FIT} --trainer.max_rounds 2")
    run = Path("runs/FedPer-Digits/version_0")
    capsys.readouterr()
    call(f"matrix {run}/checkpoints/last.ckpt")
    printed = capsys.readouterr().out
    tested = [float(row["test/acc"]) for row in rows_of(run / "clients.csv")]
    matrix = rows_of(run / "matrix.csv")
    assert [float(row[row["model"]]) for row in matrix] == tested
    assert (run / "matrix.md").is_file() and (run / "matrix.png").is_file() and str(run / "matrix.csv") in printed
    call(f"matrix {run} --metric loss --client 1 --out elsewhere/new")
    (row,) = rows_of("elsewhere/new/matrix.csv")
    assert row["model"] == "1" and list(row) == ["model", "0", "1", "2"]
    call("matrix --out newest")
    assert len(rows_of("newest/matrix.csv")) == 3
    assert "auc" in (said := refusal(f"matrix {run} --metric auc", capsys)) and "acc" in said
    assert "'7'" in refusal(f"matrix {run} --client 7", capsys)
    assert "best.ckpt" in refusal("matrix elsewhere", capsys)


def test_what_is_no_run_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert "best.ckpt" in refusal("matrix", capsys) and "nowhere" in refusal("matrix nowhere", capsys)


@pytest.mark.parametrize("command", ["matrix", "predict"])
@pytest.mark.by_default("predict")
def test_a_run_from_python_is_told_what_to_call_there(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    pfl(f"{FIT} --trainer.max_rounds 1")
    fit(make_client(FedPer), root="runs", max_rounds=1)
    words = {"matrix": "matrix", "predict": "predict --client 0 --data rows.csv"}[command]
    said = refusal(words, capsys)
    assert "config.yaml" in said and f"trainer.{command}(" in said and "--config" in said
    assert f"{command if command == 'matrix' else '--ckpt_path'} runs/FedPer-Digits/version_0" in said
