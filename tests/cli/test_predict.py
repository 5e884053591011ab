"""``pfl-lightning predict``."""

import csv
import os
import pickle
import re
import shutil
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from command import ACCELERATOR, QUIET, pfl, refusal
from pfl_lightning import FederatedTrainer
from pfl_lightning.cli.predict import write
from pfl_lightning.data import TableData
from pfl_lightning.federation.prediction import Predictions
from pfl_lightning.methods import FedAvg, FedPer
from pfl_lightning.nets import MLP
from pfl_lightning.tasks import Classification

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


@pytest.mark.exhaustive
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


@pytest.mark.exhaustive
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


@pytest.mark.exhaustive
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


@pytest.mark.exhaustive
def test_without_data_clients_predict_for_their_test_rows(here):
    predict(f"--ckpt_path {RUN}/checkpoints/last.ckpt")
    rows = written()
    own = [row for row in csv.DictReader((RUN / "clients.csv").open()) if row["client"] in ("0", "Bremen")]
    assert {row["client"] for row in rows} == set(SITES)
    first = [row["prediction"] for row in rows if row["client"] == "Bremen"]
    assert own and [row["row"] for row in rows if row["client"] == "Bremen"] == [str(k) for k in range(len(first))]


@pytest.mark.exhaustive
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


def test_rows_in_another_unit_are_told_in_a_line(here, capfd):
    table = pd.read_csv("rows.csv")
    table.assign(age=table["age"] * 12).to_csv("months.csv", index=False)
    with pytest.warns(UserWarning, match=r"months\.csv.*'age' is .* in 90 of 90 rows") as told:
        predict("--data months.csv --client Ulm Bremen")
    (said,) = [str(each.message) for each in told if "far outside" in str(each.message)]
    trained = re.search(r"\(in training (\S+) to (\S+)\)", said)
    assert table["age"].min() <= float(trained[1]) < float(trained[2]) <= table["age"].max()
    assert len(said.splitlines()) == 1


def test_names_of_classes_and_clients_are_no_formulas(tmp_path):
    outputs = torch.tensor([[-1.5, 2.0]])
    found = Predictions(outputs, torch.tensor([0]), outputs.softmax(1), class_names=["=1+1", "@x"])
    write(tmp_path / "out.csv", {"-cmd": found, 3: Predictions(-outputs[:, 1:], values=-outputs[:, 1:])}, {})
    first, second = written(tmp_path / "out.csv")
    assert first["client"] == "'-cmd" and first["prediction"] == "'=1+1" and {"p_=1+1", "p_@x"} < first.keys()
    assert second["client"] == "3" and second["prediction"] == "-2"


def test_the_newest_run_from_python_is_told_with_a_way(here, capsys):
    data = TableData("rows.csv", "flu", Classification(2), client="site", standardize="table")
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": ACCELERATOR}
    FederatedTrainer(max_rounds=1, **quiet).fit(FedAvg(MLP, (1,), 2), datamodule=data)
    capsys.readouterr()
    said = refusal("predict --data rows.csv --client Ulm", capsys)
    assert "FedAvg-TableData" in said and "trainer.predict" in said and f"--ckpt_path {RUN}" in said
    predict(f"--data rows.csv --client Ulm --ckpt_path {RUN}")


class Stranger:
    """An object whose code would run when it is unpickled."""

    def __reduce__(self):
        return Path.touch, (Path("ran"),)


def write_damaged() -> None:
    """Write files of every kind that can't be read."""
    np.save("objects.npy", np.array([Stranger(), None]), allow_pickle=True)
    np.save("whole.npy", np.zeros((50, 1)))
    whole = Path("whole.npy").read_bytes()
    Path("short.npy").write_bytes(whole[:200])
    header = f"{{'descr': '<f8', 'fortran_order': False, 'shape': ({10 * 2**40 // 8}, 1), }}"
    for name, text in (("huge", header), ("header", header + " " * 60_000)):
        text = text.ljust(-(len(text) + 11) % 64 + len(text)) + "\n"
        start = b"\x93NUMPY\x02\x00" + len(text).to_bytes(4, "little")
        Path(f"{name}.npy").write_bytes(start + text.encode() + bytes(64))
    garbage = bytes(range(256)) * 20
    for name in ("garbage.npy", "garbage.pt", "garbage.ckpt", "garbage.csv", "garbage.parquet", "garbage.yaml"):
        Path(name).write_bytes(garbage)
    for name in ("empty.npy", "empty.pt", "empty.ckpt", "empty.csv"):
        Path(name).touch()
    for name in ("pickle.pt", "pickle.ckpt"):
        Path(name).write_bytes(pickle.dumps(Stranger()))
        torch.save({"state_dict": Stranger()}, f"torch_{name}")
    torch.save({"state_dict": {}}, "other.ckpt")
    torch.save([1], "list.ckpt")
    best = (RUN / "checkpoints/best.ckpt").read_bytes()
    Path("cut.ckpt").write_bytes(best[:3000])
    weights = torch.load(RUN / "checkpoints/best.ckpt", weights_only=True)["state_dict"]
    place = best.index(max(weights.values(), key=len).numpy().tobytes())
    Path("flipped.ckpt").write_bytes(best[:place] + bytes([best[place] ^ 1]) + best[place + 1 :])
    Path("broken.yaml").write_text("data: [TableData")
    Path("twice.yaml").write_text("data: A\ndata: B\n")
    Path("list.yaml").write_text("[1, 2]")
    Path("number.yaml").write_text("data: 3\nmodel: 4\n")
    Path("norows.csv").write_text("site,age,flu\n")
    Path("latin.txt").write_bytes("Grüße".encode("latin-1"))
    Path("file").touch()
    Path("folder.csv").mkdir()


DAMAGED = {
    "--data": "objects.npy short.npy huge.npy header.npy garbage.npy garbage.pt pickle.pt torch_pickle.pt empty.npy "
    "empty.pt garbage.csv garbage.parquet empty.csv norows.csv folder.csv latin.txt",
    "--data rows.csv --ckpt_path": "garbage.ckpt pickle.ckpt torch_pickle.ckpt empty.ckpt other.ckpt list.ckpt "
    "cut.ckpt flipped.ckpt",
    "--data rows.csv --config": "garbage.yaml broken.yaml twice.yaml list.yaml folder.csv",
    "--data rows.csv --out": "folder.csv /proc/a.csv /proc/a/b.csv file/a.csv",
}


@pytest.mark.parametrize(
    ("option", "file"), [(option, file) for option, files in DAMAGED.items() for file in files.split()]
)
def test_damaged_files_of_all_kinds_are_named_in_one_sentence(option, file, here, capsys):
    write_damaged()
    beside = f"--config {RUN}/config.yaml" if "--ckpt_path" in option else ""
    with warnings.catch_warnings():
        # torch's own would stand before the sentence
        warnings.filterwarnings("error", message="Detected pickle")
        said = refusal(f"predict --client Ulm {beside} {option} {file}", capsys)
    assert file in said and "weights_only" not in said and "allow_pickle" not in said
    assert not Path("ran").exists() and not Path("predictions.csv").exists()


def test_a_pipe_is_written_to(here):
    os.mkfifo("pipe")
    with ThreadPoolExecutor() as others:
        text = others.submit(Path("pipe").read_text)
        predict("--data rows.csv --client Ulm --out pipe")
        assert text.result(timeout=60).startswith("row,client,prediction,p_no,p_yes")
    assert Path("pipe").is_fifo()


@pytest.mark.parametrize(
    "option", ["--client_column site --data norows.csv", "--client Ulm --data rows.csv --config number.yaml"]
)
def test_files_without_rows_or_settings_are_refused(option, here, capsys):
    write_damaged()
    assert option.split()[-1].removeprefix("number.yaml") in refusal(f"predict {option}", capsys)
