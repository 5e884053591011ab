"""CSV and Parquet, of files that are written here."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from command import QUIET, pfl, refusal, summary
from pfl_lightning.data import TableData
from pfl_lightning.tasks import Classification, MultiLabel, Regression

pandas = pytest.importorskip("pandas", reason="needs the extra tables")

COUNT = 48
ROOT = Path(__file__).parents[3]


def frame():
    rng = np.random.default_rng(0)
    return pandas.DataFrame(
        {
            "width": rng.normal(size=COUNT),
            "colour": np.array(["red", "blue", "green"])[np.arange(COUNT) % 3],
            "broken": np.arange(COUNT) % 2 == 0,
            "price": rng.normal(size=COUNT),
            "shop": np.array(["north", "south"])[np.arange(COUNT) // 24],
            "sold": [f"2024-{1 + row // 24:02}-{1 + row % 24:02}" for row in range(COUNT)],
            "fold": np.where(np.arange(COUNT) % 4 == 3, "test", "train"),
        }
    )


@pytest.fixture(params=["csv", "parquet"])
def path(request, tmp_path):
    if request.param == "parquet":
        pytest.importorskip("pyarrow", reason="needs the extra tables")
        frame().to_parquet(tmp_path / "shops.parquet")
    else:
        frame().to_csv(tmp_path / "shops.csv", index=False)
    return str(tmp_path / f"shops.{request.param}")


def ready(path, target="price", task=None, **settings):
    settings = {"client": "shop", "time": "sold", "split_column": "fold", **settings}
    data = TableData(path, target, task or Regression(), **settings)
    data.setup()
    return data


def test_rows_are_samples(path):
    data = ready(path)
    assert data.input_shape == (3,) and data.client_names == ["north", "south"]
    part, table = data.part(0, "test"), frame().iloc[3:24:4]
    assert part.x[:, 0].tolist() == pytest.approx(table["width"].tolist(), rel=1e-6)
    # in the order of the alphabet
    assert part.x[:, 1].tolist() == [["blue", "green", "red"].index(colour) for colour in table["colour"]]
    assert part.x[:, 2].tolist() == table["broken"].tolist()
    assert part.y.tolist() == pytest.approx(table["price"].tolist(), rel=1e-6) and part.y.dtype == torch.float32


def test_targets_are_texts_or_several(path):
    data = ready(path, "colour", Classification(3), features=["width"])
    whole = sum(data.class_counts(split).sum(0) for split in ("train", "val", "test"))
    assert whole.tolist() == [16, 16, 16] and data.input_shape == (1,)
    labels = ready(path, ["broken", "broken"], MultiLabel(2), features=["width", "price"]).part(0, "train").y
    assert labels.shape == (len(labels), 2) and labels.sum() > 0


def test_time_goes_forward(path):
    data = ready(path, client_split="time", features=["width"], split_column=None)
    order = dict(zip(np.float32(frame()["width"]).tolist(), frame()["sold"], strict=True))
    for client in range(2):
        train, val, test = ([order[x] for x in data.part(client, s).x[:, 0].tolist()] for s in ("train", "val", "test"))
        assert max(train) < min(val) <= max(val) < min(test)


def test_the_command_line_takes_it(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = f"--data TableData --data.path {path} --data.target price --data.task Regression --data.client shop"
    line += " --data.features [width,colour] --model.net MLP --model.optimizer SGD --model.optimizer.lr 0.1"
    pfl(f"fit --model FedAvg {line} --trainer.max_rounds 1 {QUIET}")
    assert summary("FedAvg-TableData/version_0")["final"]["test/mae"] > 0


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"target": "prices"}, "data.target: there is no column 'prices'; did you mean price?"),
        ({"client": "zzz"}, "data.client: there is no column 'zzz'; there are width, colour"),
        ({"features": ["widht"]}, "data.features: there is no column 'widht'; did you mean width?"),
        ({"split_column": "Fold"}, "data.split_column: there is no column 'Fold'; did you mean fold?"),
        ({"features": ["price"]}, "data.features has 'price', which is the target"),
        ({"features": ["width", "gaps"]}, "column 'gaps' of .* has no value in 2 of 48 rows, first in row 5"),
        ({"client": "gaps"}, "the client of 2 of 48 samples is missing, first in row 5"),
        ({"target": "gaps"}, "column 'gaps' of .* has no value in 2"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_in_a_sentence(settings, says, tmp_path):
    gaps = [None if row in (5, 9) else row for row in range(COUNT)]
    frame().assign(gaps=gaps).to_csv(tmp_path / "shops.csv", index=False)
    with pytest.raises(MisconfigurationException, match=says):
        ready(tmp_path / "shops.csv", **settings)


@pytest.mark.parametrize(
    ("name", "says"),
    [("none.csv", "cannot be read"), ("none.parquet", "cannot be read"), ("a.xlsx", "must be a .csv or .parquet file")],
)
def test_files_that_are_none(name, says, tmp_path):
    with pytest.raises(MisconfigurationException, match=says):
        ready(tmp_path / name)


def test_a_missing_package_is_named(monkeypatch, tmp_path, capsys):
    frame().to_csv(tmp_path / "shops.csv", index=False)
    monkeypatch.setitem(sys.modules, "pandas", None)
    line = f"fit --data TableData --data.path {tmp_path / 'shops.csv'} --data.target price --data.task Regression"
    assert "pip install 'pfl-lightning[tables]'" in refusal(f"{line} --model.net MLP", capsys)


def test_a_data_frame_is_what_its_file_is(path):
    frames = [
        TableData(table, "price", Regression(), client="shop", time="sold", client_split="time")
        for table in (frame(), path)
    ]
    one, other = frames
    for data in frames:
        data.setup()
    assert one.client_names == other.client_names == ["north", "south"]
    for split in ("train", "val", "test"):
        held, read = one.part(1, split), other.part(1, split)
        assert torch.equal(held.x, read.x)
        torch.testing.assert_close(held.y, read.y)
    assert "path" not in one.hparams


def test_what_is_no_table_is_refused():
    with pytest.raises(MisconfigurationException, match=r"data\.path is a list; give a file, or a pandas data frame"):
        TableData([1, 2], "price", Regression())


# Scales


def scaled():
    return frame().assign(height=lambda f: 1e4 + 5e3 * f["width"], flat=7.0)[
        ["width", "height", "flat", "price", "shop"]
    ]


@pytest.mark.parametrize("by", ["table", "client"])
def test_columns_are_standardized_by_all_rows_or_by_each_client_s(by):
    table = scaled()
    data = TableData(table, "price", Regression(), client="shop", standardize=by)
    columns = table[["width", "height", "flat"]]
    groups = columns.groupby(table["shop"]) if by == "client" else columns
    means, widths = (
        (groups.transform("mean"), groups.transform("std", ddof=0))
        if by == "client"
        else (columns.mean(), columns.std(ddof=0))
    )
    expected = ((columns - means) / widths).fillna(0).to_numpy()
    expected[:, 2] = 0
    np.testing.assert_allclose(data.load().x.numpy(), expected, atol=1e-5)


def test_very_different_scales_are_told_of():
    with pytest.warns(
        UserWarning, match=r"'height' varies by 4.*e\+03 and column 'width' by .*data\.standardize=table"
    ):
        TableData(scaled(), "price", Regression(), client="shop").load()


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"standardize": "client"}, r"data\.standardize=client needs data\.client"),
        ({"standardize": "site"}, r"data\.standardize='site' must be one of table, client"),
    ],
    ids=["nobody", "no choice"],
)
def test_what_it_cannot_be_standardized_by_is_refused(settings, sentence):
    with pytest.raises(MisconfigurationException, match=sentence):
        TableData(scaled(), "price", Regression(), **settings)


def test_the_command_of_the_documents_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    table = scaled().assign(diagnosis=np.array(["benign", "malignant"])[np.arange(COUNT) % 2])
    table.rename(columns={"shop": "hospital"}).to_csv("patients.csv", index=False)
    text = (ROOT / "docs" / "data.md").read_text()
    (line,) = re.findall(r"    pfl-lightning (fit --model FedPer(?:.*\\\n)+.*)", text)
    pfl(line.replace("\\\n", " ") + f" {QUIET} --trainer.max_rounds 2")
    assert summary("FedPer-TableData/version_0")["final"]["test/acc"] >= 0
