"""``pfl-lightning predict``."""

import csv
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from command import QUIET, pfl, refusal
from pfl_lightning.methods import FedPer

pd = pytest.importorskip("pandas", reason="needs the extra tables")

SITES = ["Bremen", "Erfurt", "Ulm"]
RUN = Path("runs/FedPer-TableData/version_0")
FIT = (
    f"fit {QUIET} --model {{model}} --model.net MLP --model.net.hidden [4] --data TableData --data.path rows.csv "
    "--data.target flu --data.client site --data.standardize table --data.task Classification "
    "--data.task.num_classes 2 --trainer.max_rounds 2"
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a table of three sites, and runs of two methods."""
    folder = tmp_path_factory.mktemp("predict")
    drawn = np.random.default_rng(0)
    age = drawn.normal(50, 10, 90).round(1)
    flu = np.where(age + drawn.normal(0, 5, 90) > 50, "yes", "no")
    pd.DataFrame({"site": SITES * 30, "age": age, "flu": flu}).to_csv(folder / "rows.csv", index=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for model in ("PerFedAvg", "FedPer"):
            pfl(FIT.format(model=model))
    return folder


@pytest.fixture
def here(trained, tmp_path, monkeypatch):
    shutil.copytree(trained, tmp_path / "own")
    monkeypatch.chdir(tmp_path / "own")


def predict(line: str) -> None:
    with pytest.raises(SystemExit) as ended:
        pfl(f"predict {line}")
    assert ended.value.code == 0


def written(path: str = "predictions.csv") -> list[dict[str, str]]:
    with Path(path).open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_client_predicts_without_the_table_of_the_run(here):
    shutil.move("rows.csv", "new.csv")
    # without the target and the clients, and with a column that nobody asked for
    pd.read_csv("new.csv")[["age"]].assign(other=1).to_csv("new.csv", index=False)
    predict("--client Ulm --data new.csv --out out/some.csv")
    rows = written("out/some.csv")
    assert len(rows) == 90 and {row["client"] for row in rows} == {"Ulm"}
    assert list(rows[0]) == ["row", "client", "prediction", "p_no", "p_yes"]
    model = FedPer.load_from_checkpoint(RUN / "checkpoints/best.ckpt", client="Ulm").eval()
    fitted = torch.load(RUN / "checkpoints/best.ckpt", weights_only=True)["TableData"]["preprocessing"]
    ages = torch.tensor(pd.read_csv("new.csv")["age"].to_numpy())
    x = ((ages - fitted["mean"]["age"]) / fitted["deviation"]["age"]).float()[:, None]
    expected = model(x).softmax(1)
    assert np.allclose(
        [[float(row["p_no"]), float(row["p_yes"])] for row in rows], expected.detach().numpy(), atol=1e-6
    )
    assert [row["prediction"] for row in rows] == [["no", "yes"][number] for number in expected.argmax(1)]


def test_the_table_may_name_each_row_s_client(here):
    predict("--data rows.csv --out by_site.csv")
    together = written("by_site.csv")
    assert [row["row"] for row in together] == [str(number) for number in range(90)]
    assert [row["client"] for row in together] == SITES * 30
    for site in SITES:
        predict(f"--data rows.csv --client {site}")
        own = {row["row"]: row["p_yes"] for row in written()}
        assert all(own[row["row"]] == row["p_yes"] for row in together if row["client"] == site)
    pd.read_csv("rows.csv").rename(columns={"site": "place"}).to_csv("places.csv", index=False)
    predict("--data places.csv --client_column place")
    assert written() == together


def test_codes_of_clients_keep_their_zeros(here):
    codes = {"Bremen": "01", "Erfurt": "1", "Ulm": "2"}
    pd.read_csv("rows.csv").replace({"site": codes}).to_csv("codes.csv", index=False)
    pfl(FIT.format(model="FedPer").replace("rows.csv", "codes.csv") + " --trainer.default_root_dir coded")
    (run,) = Path("coded").glob("**/version_0")
    predict(f"--ckpt_path {run} --data codes.csv")
    assert [row["client"] for row in written()] == [codes[site] for site in SITES] * 30


@pytest.mark.parametrize(("words", "clients"), [("Ulm Bremen", ["Ulm", "Bremen"]), ("all", SITES), ("new", ["new"])])
def test_several_clients_all_and_a_new_one_predict_for_all_rows(words, clients, here):
    predict(f"--data rows.csv --client {words} --ckpt_path {RUN}")
    assert [row["client"] for row in written()] == [client for client in clients for _ in range(90)]


def test_without_data_clients_predict_for_their_test_rows(here):
    predict(f"--ckpt_path {RUN}/checkpoints/last.ckpt")
    rows = written()
    own = [row for row in csv.DictReader((RUN / "clients.csv").open()) if row["client"] in ("0", "Bremen")]
    assert {row["client"] for row in rows} == set(SITES)
    first = [row["prediction"] for row in rows if row["client"] == "Bremen"]
    assert own and [row["row"] for row in rows if row["client"] == "Bremen"] == [str(k) for k in range(len(first))]


def test_a_method_that_needs_the_run_s_rows_reads_or_asks_for_them(here, capsys):
    run = "runs/Per-FedAvg-TableData/version_0"
    shutil.copy("rows.csv", "new.csv")
    predict(f"--data new.csv --client Ulm --ckpt_path {run}")
    adapted = written()
    assert len(adapted) == 90
    Path("rows.csv").unlink()
    capsys.readouterr()
    assert "rows.csv" in refusal(f"predict --data new.csv --client Ulm --ckpt_path {run}", capsys)


def test_other_kinds_of_rows(here, capsys):
    np.save("rows.npy", np.zeros((2, 1)))
    assert "TableData" not in refusal("predict --data rows.npy --client Ulm", capsys)
    torch.save(torch.zeros(2, 1), "rows.pt")
    assert refusal("predict --data rows.pt --client Ulm --client_column site", capsys)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--data rows.csv --client Ulmm", "did you mean Ulm?"),
        ("--data rows.csv --client Ulm --client_column site", "--client_column"),
        ("--data rows.csv --client_column plaice", "plaice"),
        ("--data gone.csv --client Ulm", "gone.csv is no file"),
        ("--data . --client Ulm", ".npy"),
        ("--data config.yaml --client Ulm", "config.yaml"),
        ("--data ages.csv", "--client is missing"),
        ("--data sites.csv --client Ulm", "'age'"),
        ("--ckpt_path gone.ckpt", "gone.ckpt"),
        ("--data gone.txt", "gone.txt"),
        ("--data empty.txt", "empty.txt has 0 prompts"),
        ("--data prompts.txt", "TableData"),
        ("--data prompts.txt --max_new_tokens 0", "--max_new_tokens is 0"),
        ("--ckpt_path runs", "checkpoints/best.ckpt"),
        ("--runs gone", "gone"),
        ("--ckpt_path lonely/checkpoints/best.ckpt", "--config"),
    ],
)
def test_mistakes_are_told_in_one_sentence(line, words, here, capsys):
    table = pd.read_csv("rows.csv")
    table[["age"]].to_csv("ages.csv", index=False)
    table[["site"]].to_csv("sites.csv", index=False)
    Path("config.yaml").write_text("{}")
    Path("empty.txt").write_text("\n \n")
    Path("prompts.txt").write_text("who goes there?\n")
    shutil.copytree(RUN / "checkpoints", "lonely/checkpoints")
    assert words in refusal(f"predict {line}", capsys)
    assert not Path("predictions.csv").exists()
