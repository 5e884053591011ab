"""Who takes part, as a command says it."""

from pathlib import Path

import pytest
import yaml

from command import QUICKSTART, QUIET, pfl, refusal
from federations import read_csv

FIT = f"fit {QUICKSTART} {QUIET} --trainer.max_rounds 2 --trainer.clients_per_round 0.5"


@pytest.mark.parametrize(
    "words, cohort",
    [
        ("--trainer.cohort PowerOfChoice --trainer.cohort.candidates 7", {"candidates": 7, "losses": "asked"}),
        ("--trainer.cohort Oort --trainer.cohort.exploration 0.5", {"exploration": 0.5, "percentile": None}),
        ("--trainer.cohort Poisson --trainer.cohort.rate 0.5 --trainer.clients_per_round 1.0", {"rate": 0.5}),
        ("--trainer.cohort Availability --trainer.cohort.table table.csv", {"table": "table.csv"}),
        ("--trainer.cohort Availability --trainer.cohort.table [1,0.5]", {"table": [1.0, 0.5]}),
    ],
    ids=lambda value: value.split()[1] if isinstance(value, str) else "",
)
@pytest.mark.by_default("Availability-1", "Oort-")
def test_one_setting_names_it(words, cohort, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("table.csv").write_text("client,a,b\n" + "".join(f"{client},1,0\n" for client in range(10)))
    pfl(f"{FIT} {words}")
    (folder,) = Path("runs").glob("*/version_0")
    kept = yaml.safe_load((folder / "config.yaml").read_text())["trainer"]["cohort"]
    assert kept["class_path"].rpartition(".")[2] == words.split()[1] and kept["init_args"].items() >= cohort.items()
    rows = read_csv(folder / "rounds.csv")
    assert len(rows) == 2
    if cohort.get("table") == "table.csv":
        assert [int(row["clients"]) for row in rows] == [5, 0]
        sentence = refusal(f"{FIT} --ckpt_path last", capsys)
        assert sentence.startswith("ckpt_path: the checkpoint's run had other settings of trainer.cohort")


@pytest.mark.parametrize(
    "words, sentence",
    [
        ("--trainer.cohort PowerOfChoise", "did you mean PowerOfChoice?"),
        ("--trainer.cohort PowerOfChoice", "candidates"),
        ("--trainer.cohort PowerOfChoice --trainer.cohort.candidates 2", "candidates=2 must be from 5"),
        ("--trainer.cohort Poisson --trainer.cohort.rate 0.1", "clients_per_round=0.5 fixes the size of a round"),
        ("--trainer.cohort Poisson --trainer.cohort.rate 2", "rate=2.0 must be above 0 and up to 1"),
        ("--trainer.cohort Availability --trainer.cohort.table gone.csv", "gone.csv can't be read: No such file"),
        ("--trainer.cohort Oort --trainer.cohort.clip 0", "clip=0.0 must be above 0"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(words, sentence, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert sentence in refusal(f"{FIT} {words}", capsys)
