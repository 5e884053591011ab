"""Hugging Face data sets, of files that are written here."""

import socket

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.data import HFData
from pfl_lightning.data.sources import base
from pfl_lightning.tasks import Classification, Regression

datasets = pytest.importorskip("datasets", reason="needs the extra hf")

COUNT = 40


@pytest.fixture(autouse=True)
def no_network(monkeypatch, tmp_path):
    def refused(*args, **kwargs):
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refused)
    monkeypatch.setattr(socket, "getaddrinfo", refused)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))


def made():
    return datasets.Dataset.from_dict(
        {
            "values": [[float(row), 1.0, 2.0] for row in range(COUNT)],
            "size": list(range(COUNT)),
            "weight": [row / 2 for row in range(COUNT)],
            "label": [row % 2 for row in range(COUNT)],
            "text": ["word"] * COUNT,
            "speaker": [f"speaker {row // 10}" for row in range(COUNT)],
            "fold": ["test" if row % 5 == 4 else "train" for row in range(COUNT)],
        }
    )


def ready(dataset, features=("values",), **settings):
    settings = {"client": "speaker", "split_column": "fold", **settings}
    data = HFData(dataset, "label", Classification(2), features=list(features), **settings)
    data.setup()
    return data


@pytest.mark.parametrize("limit", [2**30, 0])
@pytest.mark.parametrize("kind", ["dataset", "parquet", "folder", "jsonl"])
def test_rows_are_samples(tmp_path, monkeypatch, limit, kind):
    monkeypatch.setattr(base, "RESIDENT", limit)
    source = made()
    if kind == "parquet":
        source.to_parquet(tmp_path / "it.parquet")
        source = str(tmp_path / "it.parquet")
    elif kind == "jsonl":
        source.to_json(tmp_path / "it.jsonl")
        source = str(tmp_path / "it.jsonl")
    elif kind == "folder":
        source.save_to_disk(tmp_path / "saved")
        source = str(tmp_path / "saved")
    data = ready(source)
    assert data.input_shape == (3,) and data.client_names == [f"speaker {k}" for k in range(4)]
    assert isinstance(data._pool.samples.x, torch.Tensor) == (limit > 0)
    assert data.part(2, "test").x[:, 0].tolist() == [24, 29] and data.part(2, "test").y.tolist() == [0, 1]
    x = torch.cat([data.part(2, split).x[:, 0] for split in ("train", "val")])
    assert x.sort().values.tolist() == [20, 21, 22, 23, 25, 26, 27, 28] and x.dtype == torch.float32


def test_rows_that_are_selected_keep_their_columns():
    data = ready(made().select(range(10, 30)))
    assert data.client_names == ["speaker 1", "speaker 2"] and data.part(0, "test").x[:, 0].tolist() == [14, 19]


def test_several_columns_of_numbers():
    assert ready(made(), ("size", "weight")).part(1, "test").x.tolist() == [[14, 7], [19, 9.5]]


@pytest.mark.parametrize(
    ("kinds", "common"),
    [
        (("int64", "int64"), torch.int64),
        (("int32", "int64"), torch.int64),
        (("int32", "uint16"), torch.int64),
        (("int64", "float64"), torch.float32),
    ],
    ids=str,
)
@pytest.mark.parametrize("length", [None, 5])
def test_columns_of_integers_stay_integers(kinds, common, length):
    kind = [
        datasets.Value(name) if length is None else datasets.Sequence(datasets.Value(name), length) for name in kinds
    ]
    # above 2**24, single precision loses the last digit
    large = 7 if "uint16" in kinds else 2**24 + 1
    rows = [large if length is None else [large] * length] * COUNT
    held = {"one": rows, "other": rows, "label": [0, 1] * 20, "who": [row // 20 for row in range(COUNT)]}
    features = datasets.Features(
        dict(zip(("one", "other"), kind, strict=True)) | dict.fromkeys(("label", "who"), datasets.Value("int64"))
    )
    data = ready(datasets.Dataset.from_dict(held, features=features), ("one", "other"), client="who", split_column=None)
    x = data.part(0, "train").x
    assert x.dtype == common and x.shape[1:] == ((2,) if length is None else (2, length)) and (x == large).all()


def test_images():
    pictures = [np.full((4, 5, 3), row, np.uint8) for row in range(COUNT)]
    kinds = {"picture": datasets.Image(), "label": datasets.Value("int64"), "who": datasets.Value("int8")}
    held = {"picture": pictures, "label": [0, 1] * 20, "who": [row // 20 for row in range(COUNT)]}
    source = datasets.Dataset.from_dict(held, features=datasets.Features(kinds))
    data = ready(source, ("picture",), client="who", split_column=None)
    assert data.input_shape == (3, 4, 5) and data.client_names == ["0", "1"]
    assert sum(data.size(0, split) for split in ("train", "val", "test")) == 20


@pytest.mark.parametrize("limit", [2**30, 0])
@pytest.mark.parametrize("bad", [float("inf"), float("nan"), None], ids=str)
@pytest.mark.parametrize("column", ["values", "weight"])
def test_numbers_that_are_not_finite_are_refused(monkeypatch, limit, bad, column):
    monkeypatch.setattr(base, "RESIDENT", limit)
    whole = made().to_dict()
    whole[column][21] = [21.0, bad, 2.0] if column == "values" else bad
    with pytest.raises(
        MisconfigurationException, match=rf"column '{column}' has (inf|nan) in row 21(, column 1)? \(count"
    ):
        ready(datasets.Dataset.from_dict(whole), [column]).part(2, "train")


@pytest.mark.parametrize(("bad", "says"), [("text", "numbers of one shape"), (float("inf"), "has inf in row 3")])
def test_targets_that_are_no_numbers_are_refused(bad, says):
    target = ["a", "b", "a", "b"] * 10 if bad == "text" else [1.0, 2.0, 3.0, bad] * 10
    whole = made().remove_columns("label").add_column("label", target)
    with pytest.raises(MisconfigurationException, match=f"data.target: column 'label' .*{says}"):
        HFData(whole, "label", Regression(), ["values"], "speaker").setup()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"dataset": "squad"}, "data.dataset='squad' is no local folder .* nothing is fetched here"),
        ({"dataset": "none.parquet"}, "'none.parquet' is no local folder"),
        ({"features": ["valeus"]}, "data.features: there is no column 'valeus'; did you mean values?"),
        ({"features": ["text"]}, "column 'text' .* numbers of one shape"),
        ({"client": "speakr"}, "did you mean speaker"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_in_a_sentence(given, says):
    with pytest.raises(MisconfigurationException, match=says):
        ready(**{"dataset": made(), **given})


def test_a_file_of_another_kind(tmp_path):
    (tmp_path / "it.parquet").write_text("no table")
    with pytest.raises(MisconfigurationException, match=r"it.parquet' cannot be read"):
        ready(tmp_path / "it.parquet")


def test_several_data_sets_in_a_folder(tmp_path):
    datasets.DatasetDict({"train": made()}).save_to_disk(tmp_path / "saved")
    with pytest.raises(MisconfigurationException, match=r"has several data sets; .*saved/train"):
        ready(tmp_path / "saved")
