"""Folders with one file for each client, which names the client."""

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from command import QUIET, pfl
from pfl_lightning.cli import predict
from pfl_lightning.data import HFData, Preprocessing, TableData
from pfl_lightning.tasks import Classification

pandas = pytest.importorskip("pandas", reason="needs the extra tables")
TASK = Classification(2)
CODES = (["A1", "B2"] * 20, ["01"] * 40, ["C3"] * 40)


def sales(number, **more):
    ages = range(20 + number, 60 + number)
    return pandas.DataFrame({"age": ages, "code": CODES[number]} | more).assign(ill=["no", "yes"] * 20)


def written(folder, names, ending="csv", **more):
    folder.mkdir(exist_ok=True)
    for number, name in enumerate(names):
        table = sales(number, **more)
        if ending == "csv":
            table.to_csv(folder / f"{name}.csv", index=False)
        else:
            table.to_parquet(folder / f"{name}.parquet")
    return folder


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_a_folder_of_tables_is_one_table_with_a_column_of_clients(ending, tmp_path):
    if ending == "parquet":
        pytest.importorskip("pyarrow", reason="needs the extra tables")
    names = ["Bremen", "Jena", "Ulm"]
    folder = TableData(written(tmp_path / "sites", names, ending), "ill", TASK, preprocessing="auto")
    whole = pandas.concat([sales(number).assign(site=name) for number, name in enumerate(names)])
    one = TableData(whole, "ill", TASK, client="site", preprocessing="auto")
    for data in (folder, one):
        data.setup()
    assert folder.client_names == one.client_names == names
    # cells such as 01 stay texts beside a file with A1
    assert (
        folder.preprocessing["inputs"]
        == one.preprocessing["inputs"]
        == [*("age", "code=01", "code=A1", "code=B2", "code=C3")]
    )
    for client in range(3):
        assert torch.equal(folder.part(client, "train").x, one.part(client, "train").x)


def test_files_with_numbers_are_clients_in_the_order_of_numbers(tmp_path):
    data = TableData(written(tmp_path / "sites", ["10", "2", "1"]), "ill", TASK, preprocessing="auto")
    data.setup()
    assert data.client_names == ["1", "2", "10"]


def test_a_column_that_one_file_lacks_is_named_or_filled(tmp_path):
    folder = written(tmp_path / "sites", ["Bremen", "Ulm"])
    sales(0, bmi=25.0).to_csv(folder / "Jena.csv", index=False)
    refused = TableData(folder, "ill", TASK, preprocessing="auto")
    with pytest.raises(MisconfigurationException, match=r"Bremen\.csv has no column 'bmi', as Jena\.csv has"):
        refused.setup()
    named = TableData(folder, "ill", TASK, features=["age"], preprocessing="auto")
    filled = TableData(folder, "ill", TASK, preprocessing=Preprocessing(indicator=True), fill_missing_columns=True)
    for data in (named, filled):
        data.setup()
    assert named.input_shape == (1,)
    place = filled.preprocessing["inputs"].index("bmi missing")
    assert [bool(filled.part(client, "train").x[:, place].all()) for client in range(3)] == [True, False, True]


def test_folders_that_are_none_of_clients_are_refused(tmp_path):
    (tmp_path / "none").mkdir()
    split = written(tmp_path / "split", ["train", "test"])
    both = written(tmp_path / "both", ["Ulm"])
    (both / "Jena.parquet").touch()
    (tmp_path / "empty").mkdir()
    sales(0).head(0).to_csv(tmp_path / "empty" / "Ulm.csv", index=False)
    for folder, word in ((tmp_path / "none", "CLIENT.csv"), (split, r"test\.csv"), (both, "one kind")):
        with pytest.raises(MisconfigurationException, match=word):
            TableData(folder, "ill", TASK, preprocessing="auto")
    with pytest.raises(MisconfigurationException, match=r"Ulm\.csv has no rows"):
        TableData(tmp_path / "empty", "ill", TASK, features=["age"], preprocessing="auto").setup()
    with pytest.raises(MisconfigurationException, match=r"data\.client='site'"):
        TableData(written(tmp_path / "sites", ["Ulm"]), "ill", TASK, client="site", preprocessing="auto")


@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet"])
def test_a_data_set_of_a_file_for_each_client(tmp_path, ending):
    pytest.importorskip("datasets", reason="needs the extra hf")
    writers = {
        "jsonl": lambda table, path: table.to_json(path, orient="records", lines=True),
        "csv": lambda table, path: table.to_csv(path, index=False),
        "parquet": lambda table, path: table.to_parquet(path),
    }
    tables = {name: sales(number)[["age", "ill"]] for number, name in enumerate(["Kiel", "Bremen"])}
    for name, table in tables.items():
        writers[ending](table.assign(ill=[0, 1] * 20), tmp_path / f"{name}.{ending}")
    data = HFData(str(tmp_path), "ill", TASK)
    data.setup()
    assert data.client_names == ["Bremen", "Kiel"]
    for client, name in enumerate(data.client_names):
        held = torch.cat([data.part(client, split).x for split in ("train", "val", "test")])
        assert sorted(held.flatten().tolist()) == tables[name]["age"].tolist()
    with pytest.raises(MisconfigurationException, match=r"data\.client='ill'.*by its name"):
        HFData(str(tmp_path), "ill", TASK, client="ill")


@pytest.mark.parametrize(
    ("name", "rows", "message"),
    [
        ("train", '{"age": 1, "ill": 0}', r"has train\.jsonl, and each file .* name files by clients"),
        ("Ulm", '{"age": 1}', r"Ulm\.jsonl has no column 'ill'"),
        ("Ulm", '{"age": 1, "ill": 0, "size": 2}', r"Bremen\.jsonl has no column 'size'"),
        ("Ulm", '{"age": "old", "ill": 0}', "columns of different types"),
        ("Ulm", "no rows", r"Ulm\.jsonl.* cannot be read"),
    ],
)
def test_a_data_set_of_files_that_do_not_fit_is_refused(tmp_path, name, rows, message):
    pytest.importorskip("datasets", reason="needs the extra hf")
    (tmp_path / "Bremen.jsonl").write_text('{"age": 5, "ill": 1}')
    (tmp_path / f"{name}.jsonl").write_text(rows)
    with pytest.raises(MisconfigurationException, match=message):
        HFData(str(tmp_path), "ill", TASK)
    (tmp_path / "none").mkdir()
    with pytest.raises(MisconfigurationException, match=r"folder without tables; give one with a CLIENT\.jsonl"):
        HFData(str(tmp_path / "none"), "ill", TASK)


@pytest.mark.exhaustive
def test_a_run_on_a_folder_has_late_clients_from_another_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "sites", ["Bremen", "Kiel", "Ulm"])
    written(tmp_path / "late", ["Jena"])
    data = "--data TableData --data.path sites --data.target ill --data.preprocessing auto"
    task = "--data.task Classification --data.task.num_classes 2 --model FedPer --model.net MLP"
    pfl(f"fit {data} {task} --trainer.max_rounds 1 {QUIET}")
    pfl("join --data.path late")
    # a late folder with texts of one file alone has the inputs of the federation
    assert predict.main("--client Jena --data late/Jena.csv".split()) == 0
    assert len(pandas.read_csv("predictions.csv")) == 40
