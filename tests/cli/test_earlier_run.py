from pathlib import Path

import numpy as np
import pytest

from command import QUIET, pfl, refusal
from federations import read_csv
from pfl_lightning.cli.argv import CommandLine
from pfl_lightning.cli.earlier_run import newest, with_run
from pfl_lightning.runs.folder import stamp

TABLE = "--data TableData --data.target y --data.task Regression --data.client site --model.net MLP"


def write(path, *sites):
    rng = np.random.default_rng(0)
    lines = [f"{site},{a:.3f},{a + b:.3f}" for site in sites for a, b in rng.normal(size=(12, 2))]
    Path(path).write_text("\n".join(["site,x,y", *lines]))


@pytest.mark.exhaustive
def test_clients_of_a_new_table_join_the_newest_run(capsys):
    pytest.importorskip("pandas", reason="needs the extra tables")
    write("old.csv", "Bremen", "Ulm")
    write("new.csv", "Erfurt")
    write("all.csv", "Bremen", "Erfurt", "Jena", "Ulm")
    pfl(f"fit --model FedPer {TABLE} --data.path old.csv {QUIET} --trainer.max_rounds 1")
    for line, names in (("--data new.csv", ["Erfurt"]), ("--data=all.csv --names Jena --ckpt_path best", ["Jena"])):
        pfl(f"join {line}")
        last = max(Path("runs/FedPer-TableData").glob("version_*"), key=lambda path: int(path.name[8:]))
        assert [row["name"] for row in read_csv(last / "clients.csv")] == names
    # what they have trained predicts, from the rows alone
    Path("rows.csv").write_text("x\n0.5\n-1\n")
    made = {}
    for name in ("Erfurt", "Jena", "new"):
        with pytest.raises(SystemExit) as ended:
            pfl(f"predict --client {name} --data rows.csv")
        assert not ended.value.code
        made[name] = [row["prediction"] for row in read_csv(Path("predictions.csv"))]
    assert len({tuple(each) for each in made.values()}) == 3
    assert "Ulm" in refusal("join --data all.csv --names Ulm", capsys)
    assert refusal("join --data new.csv --ckpt_path gone.ckpt", capsys).startswith("--data new.csv")


def run(root, name, best=True, config=True):
    folder = Path(root, name)
    (folder / "checkpoints").mkdir(parents=True)
    for kind in ("last", "best") if best else ("last",):
        (folder / "checkpoints" / f"{kind}.ckpt").touch()
    if config:
        (folder / "config.yaml").touch()
    stamp(folder)
    return folder


def test_the_newest_run_with_a_configuration_and_the_checkpoint_counts(tmp_path):
    assert newest(tmp_path, "last") is None
    first = run(tmp_path, "B-TableData/version_0")
    second = run(tmp_path, "A-TableData/version_3", best=False)
    run(tmp_path, "C-TableData/version_9", config=False)
    assert newest(tmp_path, "last") == second / "checkpoints/last.ckpt"
    assert newest(tmp_path, "best") == first / "checkpoints/best.ckpt"


@pytest.mark.parametrize(
    "line",
    [
        "fit --data new.csv",
        "join --help",
        "join --data.help TableData",
        "join --data Digits --ckpt_path last",
        "join --model FedPer",
        "join -c mine.yaml --data.new_clients 3",
        "join --ckpt_path last",
        "",
    ],
)
def test_other_lines_stay_as_they_are(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert with_run(CommandLine(line.split())).words == line.split()


def test_options_replace_the_settings_of_the_run(tmp_path):
    folder = run(tmp_path, "A-TableData/version_0")
    checkpoint = str(folder / "checkpoints" / "best.ckpt")
    words = with_run(CommandLine(["join", "--data", "new.csv", "--epochs=2", "--ckpt_path", checkpoint])).words
    given = ["--data.path", "new.csv", "--epochs=2", "--ckpt_path", checkpoint]
    assert words == ["join", "--config", str(folder / "config.yaml"), *given, "--ckpt_path", checkpoint]
    assert (
        with_run(CommandLine(["join", "--data", "new.csv", "-c", "mine.yaml"])).words
        == "join --data.path new.csv -c mine.yaml".split()
    )
