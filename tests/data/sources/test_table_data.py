"""CSV and Parquet, of files that are written here."""

import datetime
import io
import re
import sys
from decimal import Decimal
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from command import QUIET, pfl, refusal, summary
from pfl_lightning.data import IID, TableData
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


@pytest.mark.by_default("parquet")
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


def test_a_reversed_data_frame_is_a_table():
    table = pandas.DataFrame({"age": [1.5, 2.0, 4.0], "beds": [3, 1, 2], "late": [True, False, True]})
    data = TableData(table.iloc[::-1], "age", Regression(), test_fraction=0.0, partitioner=IID(), num_clients=1)
    loaded = data.load()
    assert loaded.x.tolist() == [[2, 1], [1, 0], [3, 1]] and loaded.y.tolist() == [4, 2, 1.5]
    assert data.inputs(table[["beds", "late"]][::-1], 0).tolist() == loaded.x.tolist()


def test_what_is_no_table_is_refused():
    with pytest.raises(MisconfigurationException, match=r"data\.path is a list; give a file, or a pandas data frame"):
        TableData([1, 2], "price", Regression())


# Scales


def scaled():
    return frame().assign(height=lambda f: 1e4 + 5e3 * f["width"], flat=7.0)[
        ["width", "height", "flat", "price", "shop"]
    ]


def rows_of(data, client, split):
    return data.division.clients[client][split].numpy()


@pytest.mark.filterwarnings("ignore:.*such different scales")
@pytest.mark.parametrize("by", ["table", "client"])
@pytest.mark.parametrize(
    "settings",
    [
        {"client": "shop"},
        {"client": "shop", "time": "sold", "client_split": "time"},
        {"client": "shop", "split_column": "fold"},
        {"partitioner": IID(), "num_clients": 3},
        {"partitioner": IID(), "num_clients": 2, "new_clients": 1},
        {"client": "shop", "max_samples": 30},
    ],
    ids=lambda settings: " ".join(settings),
)
def test_columns_are_standardized_by_training_rows(by, settings):
    names = ["width", "height", "flat"]
    table = frame().assign(height=1.7e9 + 60 * np.arange(COUNT), flat=np.where(np.arange(COUNT) == 47, 0.1 + 7, 0.1))
    plain, data = (TableData(table, "price", Regression(), names, standardize=s, **settings) for s in (None, by))
    # as it was loaded: in the pool of the other module times have lost their seconds
    columns, members = table[names].to_numpy(), range(data.num_clients or 2)
    plain.setup()
    data.setup()
    if "max_samples" in settings:
        found = {float(np.float32(width)): row for row, width in enumerate(table["width"])}
        columns = columns[[found[float(width)] for width in plain._pool.samples.x[:, 0]]]
    assert data.fitted_on == {"table": "all clients", "client": "each client"}[by]
    for client in (*members, *data.newcomers):
        fitted = members if by == "table" else [client]
        own = columns[np.concatenate([rows_of(data, each, "train") for each in fitted])]
        mean, deviation = own.mean(0), own.std(0)
        constant = own.min(0) == own.max(0)
        for split in ("train", "val", "test"):
            expected = (columns[rows_of(data, client, split)] - mean) / np.where(constant, np.inf, deviation)
            found = data.part(client, split).x
            assert found.dtype == torch.float32
            np.testing.assert_allclose(found.numpy(), expected, atol=1e-5)
        place = () if by == "table" else (client,)
        for column, name in enumerate(names):
            kept = (data.preprocessing[what][name] for what in ("mean", "deviation"))
            of_client = [values[place[0]] if place else values for values in kept]
            assert of_client == pytest.approx([mean[column], 0 if constant[column] else deviation[column]], rel=1e-9)


@pytest.mark.parametrize("by", ["table", "client"])
def test_rows_that_are_tested_on_change_no_statistic(by):
    def means(table):
        data = TableData(table, "price", Regression(), ["width"], "shop", split_column="fold", standardize=by)
        data.setup()
        return data.preprocessing["mean"]

    table = frame()
    changed = table.assign(width=table["width"].where(table["fold"] == "train", 1e6))
    assert means(table) == means(changed)


def test_rows_of_the_server_are_scaled_as_those_of_clients():
    data = TableData(
        scaled(), "price", Regression(), ["height"], partitioner=IID(), num_clients=2, central_test=0.25,
        server_fraction=0.5, standardize="table",
    )  # fmt: skip
    data.setup()
    mean, deviation = data.preprocessing["mean"]["height"], data.preprocessing["deviation"]["height"]
    for rows, found in (
        (data.division.central, data.central_data()),
        (data.division.server, data.server_data()),
    ):
        expected = (scaled()["height"].to_numpy()[rows.numpy()] - mean) / deviation
        np.testing.assert_allclose(found.x[:, 0].numpy(), expected, atol=1e-5)


def test_public_rows_of_the_server_are_standardized_among_themselves():
    kind = {"partitioner": IID(), "num_clients": 2, "standardize": "client"}
    public = TableData(scaled(), "price", Regression(), ["height"], **kind)
    data = TableData(scaled(), "price", Regression(), ["width"], public=public, public_samples=20, **kind)
    data.setup()
    x = data.server_data().x.double()
    assert x.shape == (20, 1) and abs(float(x.mean())) < 1e-5 and float(x.std(correction=0)) == pytest.approx(1, 1e-5)


def test_given_means_and_deviations_are_of_no_client():
    given = {"height": [1.7e9, 600.0]}
    plain, data = (
        TableData(scaled(), "price", Regression(), ["width", "height"], "shop", standardize=by) for by in (None, given)
    )
    plain.setup()
    data.setup()
    for client in range(data.num_clients):
        raw, found = plain.part(client, "train").x.double(), data.part(client, "train").x.double()
        assert torch.equal(raw[:, 0], found[:, 0])
        assert torch.allclose((raw[:, 1] - 1.7e9) / 600, found[:, 1], atol=0.2)
    assert data.fitted_on == "nothing" and data.preprocessing["mean"] == {"width": 0.0, "height": 1.7e9}
    assert "standardized by given numbers" in str(data.head_lines)


def test_very_different_scales_are_told_of():
    with pytest.warns(UserWarning, match=r"'height' varies by .*e\+03 and column 'width' by .*data\.standardize=table"):
        TableData(scaled(), "price", Regression(), client="shop").setup()


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"standardize": "site"}, r"data\.standardize='site' must be one of table, client"),
        (
            {"standardize": {"height": [1.0, 0.0]}},
            r"data\.standardize\.height=\[1\.0, 0\.0\] must be the",
        ),
        ({"standardize": {"height": 3.0}}, r"data\.standardize\.height=3\.0 must be .*such as \[50, 12\]"),
        ({"standardize": {"heigth": [1.0, 2.0]}}, r"data\.standardize\.heigth is no feature"),
        ({"standardize": "client", "central_test": 0.2}, r"data\.standardize=client: .*data\.central_test=0\.2.*table"),
    ],
    ids=["no choice", "no width", "one number", "no column", "rows of no client"],
)
def test_what_it_cannot_be_standardized_by_is_refused(settings, sentence):
    with pytest.raises(MisconfigurationException, match=sentence):
        TableData(scaled(), "price", Regression(), **settings)


# Values


def columns(**new):
    return frame().assign(**new)


def one(value, row=7, others=None):
    """A column of numbers, or others, with one value among them."""
    values = list(np.arange(COUNT) / 4) if others is None else list(others)
    values[row] = value
    return values


def loaded(table, features=None, target="price", task=None, **settings):
    return TableData(table, target, task or Regression(), features, "shop", "sold", "fold", **settings).load()


@pytest.mark.parametrize("value", [np.inf, -np.inf, 1e39, -1e300], ids=str)
@pytest.mark.parametrize("setting", ["features", "target"])
@pytest.mark.parametrize("standardize", [None, "table"])
def test_numbers_that_are_not_finite_are_refused(value, setting, standardize):
    table = columns(**{"width" if setting == "features" else "price": one(value)})
    column = "width" if setting == "features" else "price"
    with pytest.raises(MisconfigurationException, match=rf"column '{column}' of the data frame has .* in row 7 \(coun"):
        loaded(table, ["width"], standardize=standardize)


def test_a_number_in_a_file_that_no_float_holds(tmp_path):
    columns(width=one("1e400")).to_csv(tmp_path / "shops.csv", index=False)
    with pytest.raises(MisconfigurationException, match=r"column 'width' of .*shops\.csv has inf in row 7"):
        loaded(tmp_path / "shops.csv")


@pytest.mark.parametrize("setting", ["features", "target"])
@pytest.mark.parametrize(
    ("value", "others", "says"),
    [
        ("oops", None, r"has the text 'oops' in row 7 \(counted from 0\)"),
        ("0,1", None, r"has the text '0,1' in row 7 .* data\.decimal=','"),
        ("1\x00", None, r"has the text '1\\x00' in row 7"),
        ("2024-05-31", None, "has the text '2024-05-31' in row 7"),
        ("unknown", ["unknown"] * 30 + [str(row / 4) for row in range(COUNT - 30)], "has the text 'unknown' in row 0"),
        ("1,5", [f"{row},5" for row in range(COUNT)], r"has the text '0,5' in row 0 .* data\.decimal=','"),
        ("50 %", [f"{row} %" for row in range(COUNT)], "has the text '0 %' in row 0"),
        ("1,000", [f"{row},000" for row in range(COUNT)], "has the text '0,000' in row 0"),
    ],
    ids=str,
)
def test_a_text_among_numbers_is_refused(value, others, says, setting, tmp_path):
    if "\x00" in value and sys.version_info < (3, 11):
        pytest.skip("Python 3.10's csv can't write this file")
    column = "width" if setting == "features" else "price"
    columns(**{column: one(value, others=others)}).to_csv(tmp_path / "shops.csv", index=False)
    with pytest.raises(
        MisconfigurationException, match=f"column '{column}' of .*shops.csv is mostly of numbers.*{says}"
    ):
        loaded(tmp_path / "shops.csv", ["width"])


def test_numbers_that_are_texts_are_refused():
    with pytest.raises(MisconfigurationException, match=r"'width' .* the text '0' in row 0 .*data\.categories\.width"):
        loaded(columns(width=[str(row) for row in range(COUNT)]))


def test_decimal_commas_are_read(tmp_path):
    columns().drop(columns="colour").to_csv(tmp_path / "shops.csv", index=False, sep=";", decimal=",")
    found = loaded(tmp_path / "shops.csv", ["width"], decimal=",", separator=";")
    np.testing.assert_allclose(found.x[:, 0].numpy(), frame()["width"], rtol=1e-6)
    columns(width=one("0.1")).to_csv(tmp_path / "shops.csv", index=False, sep=";", decimal=",")
    with pytest.raises(MisconfigurationException, match=r"the text '0\.[01]' in row"):
        loaded(tmp_path / "shops.csv", ["width"], decimal=",", separator=";")


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ([f"patient {row}" for row in range(COUNT)], "'extra' .* ids.*'patient 0'.* data.features"),
        ([f"2024-05-{1 + row % 9:02}" for row in range(COUNT)], "'extra' .* dates.*'2024-05-01'.* data.features"),
        ([f"{1 + row % 9}.5.2024 10:30" for row in range(COUNT)], "'extra' .* dates"),
    ],
    ids=["ids", "dates", "dates with dots"],
)
def test_ids_and_dates_are_features_only_if_they_are_named(values, says):
    with pytest.raises(MisconfigurationException, match=says):
        loaded(columns(extra=values))
    codes = loaded(columns(extra=values), ["extra"]).x[:, 0]
    assert codes.tolist() == [sorted(set(values)).index(value) for value in values]


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ([[row, 1] for row in range(COUNT)], "'extra' of the data frame has a list in row 0"),
        ([np.arange(2)] * COUNT, "has a ndarray in row 0"),
        ([b"a", b"b"] * 24, "has a bytes in row 0"),
        (one((1, 2)), "has a tuple in row 7"),
        ([1j] * COUNT, "has a complex in row 0"),
        (pandas.date_range("2024-01-01", periods=COUNT), "holds dates"),
        ([datetime.date(2024, 5, 1)] * COUNT, "holds dates"),
    ],
    ids=["lists", "arrays", "bytes", "one tuple", "complex", "timestamps", "dates"],
)
def test_what_is_neither_number_nor_text_is_refused(values, says):
    with pytest.raises(MisconfigurationException, match=says):
        loaded(columns(extra=values), ["width", "extra"])


def test_a_parquet_column_of_lists_is_refused(tmp_path, capsys):
    pytest.importorskip("pyarrow", reason="needs the extra tables")
    columns(extra=[[row, 1] for row in range(COUNT)]).to_parquet(tmp_path / "shops.parquet")
    line = f"fit --data TableData --data.path {tmp_path / 'shops.parquet'} --data.target price --data.task Regression"
    said = refusal(f"{line} --data.client shop --data.features [extra] --model FedAvg --model.net MLP {QUIET}", capsys)
    assert "column 'extra'" in said and "row 0" in said


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([Decimal("0.5")] * COUNT, 0.5),
        (pandas.array([3] * COUNT, dtype="Int64"), 3.0),
        (np.full(COUNT, 2**63, np.uint64), 2.0**63),
        ([10**20] * COUNT, 1e20),
        ([True] * COUNT, 1.0),
        (pandas.array([0.25] * COUNT, dtype="Float32"), 0.25),
    ],
    ids=["decimals", "nullable", "unsigned", "large", "truth values", "nullable floats"],
)
def test_numbers_of_other_types(values, expected):
    assert loaded(columns(extra=values), ["extra"]).x.unique().tolist() == [np.float32(expected)]


@pytest.mark.parametrize("kind", ["csv", "parquet", "frame"])
def test_two_columns_of_one_name_are_refused(kind, tmp_path):
    path = tmp_path / f"shops.{kind}"
    table = frame().rename(columns={"broken": "width"})
    if kind == "csv":
        table.to_csv(path, index=False)
    elif kind == "parquet":
        arrow = pytest.importorskip("pyarrow", reason="needs the extra tables")
        parquet = pytest.importorskip("pyarrow.parquet", reason="needs the extra tables")
        whole = arrow.Table.from_pandas(frame(), preserve_index=False)
        parquet.write_table(whole.rename_columns(list(table.columns)).replace_schema_metadata(), path)
    with pytest.raises(MisconfigurationException, match="2 columns of the name 'width'"):
        TableData(table if kind == "frame" else path, "price", Regression())


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a,b\n0,2,3\n1,5,6\n", "cannot be read"),
        ("a,b\n1,2\n4,5,6\n", "cannot be read"),
        (",a,b\n0,1,2\n1,4,5\n", "column without a name"),
        ("", "cannot be read"),
    ],
    ids=["all rows longer", "a row longer", "row numbers", "empty"],
)
def test_a_file_whose_cells_have_no_names_is_refused(text, says, tmp_path):
    (tmp_path / "it.csv").write_text(text)
    with pytest.raises(MisconfigurationException, match=says):
        TableData(tmp_path / "it.csv", "b", Regression()).load()


def test_columns_of_a_frame_may_be_numbered():
    table = pandas.DataFrame(np.arange(30.0).reshape(10, 3))
    found = TableData(table, "2", Regression(), partitioner=IID(), num_clients=2).load()
    assert found.x.tolist() == table[[0, 1]].to_numpy().tolist()


# Vocabularies


@pytest.mark.parametrize("is_ordered", [True, False])
def test_a_categorical_has_its_own_order(is_ordered, tmp_path):
    sizes = pandas.CategoricalDtype(["small", "medium", "large", "huge"], ordered=is_ordered)
    texts = np.array(["large", "small", "medium"])[np.arange(COUNT) % 3]
    table = columns(size=pandas.Series(texts).astype(sizes))
    tables = [table]
    if find_spec("pyarrow"):
        table.to_parquet(tmp_path / "shops.parquet")
        tables.append(tmp_path / "shops.parquet")
    for source in tables:
        data = TableData(source, "price", Regression(), ["size"], "shop")
        assert data.load().x[:3, 0].tolist() == [2, 0, 1]
        assert data.preprocessing["categories"] == {"size": ["small", "medium", "large", "huge"]}
    times = TableData(table, "price", Regression(), ["width"], "shop", time="size").load().time
    assert (list(times[:3]) == [2, 0, 1]) == is_ordered


def test_vocabularies_that_are_given(path):
    words = {"classes": ["green", "red", "blue"], "categories": {"sold": sorted(set(frame()["sold"]))}}
    data = TableData(path, "colour", Classification(3), ["width", "sold"], "shop", **words)
    loaded = data.load()
    assert loaded.y.tolist() == [words["classes"].index(colour) for colour in frame()["colour"]]
    assert loaded.x[:, 1].tolist() == [words["categories"]["sold"].index(day) for day in frame()["sold"]]
    assert data.preprocessing["classes"] == {"colour": words["classes"]}
    assert data.preprocessing["categories"] == words["categories"]
    assert data.fitted_on == "nothing" and not data.needs_all_clients


@pytest.mark.parametrize(
    ("labels", "classes"),
    [
        ([2, 1, 3], [3, 2, 1]),
        ([2.0, 1.0, 3.0], [3, 2, 1]),
        ([True, False, True], ["True", "False"]),
        (["2", "1", "3"], [3, 2, 1]),
        (["2+", "1", "1"], ["2+", "1"]),
    ],
    ids=str,
)
def test_classes_may_be_numbers(labels, classes):
    values = np.array(labels)[np.arange(COUNT) % 3]
    y = loaded(columns(kind=values), ["width"], "kind", Classification(len(classes)), classes=classes).y
    assert y[:3].tolist() == [[str(word) for word in classes].index(str(label).removesuffix(".0")) for label in labels]


def test_integers_are_classes_as_they_are():
    y = loaded(columns(kind=np.arange(COUNT) % 2 * 2), ["width"], "kind", Classification(3)).y
    assert y.unique().tolist() == [0, 2]


def test_texts_are_labels():
    table = columns(ill=["no", "yes", "no"] * 16, old=["yes", "yes", "no"] * 16)
    y = loaded(table, ["width"], ["ill", "old"], MultiLabel(2), classes=["no", "yes"]).y
    assert y[:3].tolist() == [[0, 1], [1, 1], [0, 0]]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"classes": ["blue", "green"]}, r"data\.classes has 2 classes .*num_classes=3"),
        ({"classes": ["blue", "green", "blue"]}, r"data\.classes=.* each of them once"),
        ({"classes": []}, r"data\.classes=\[\] must be a list"),
        ({"classes": ["blue", "green", "grey"]}, r"'colour' .* 'red' in row 0 .* data\.classes \(blue, green, grey\)"),
        ({"categories": {"wdith": ["a"]}}, r"data\.categories: 'wdith' is no column of the inputs, which are width"),
        ({"categories": {"colour": ["a"]}}, "'colour' is no column of the inputs"),
        ({"categories": {"shop": ["north"]}}, r"'south' in row 24 .* data\.categories\.shop \(north\)"),
        ({"categories": {"shop": []}}, r"data\.categories\.shop=\[\]"),
        ({"task": Classification(2)}, r"'colour' .* has 3 classes \(blue, green, red\), and .*num_classes=2"),
        ({"task": Regression()}, "'colour' .* texts .* predicts numbers"),
        ({"task": Regression(), "classes": ["a"]}, "data.classes=.*Regression.* has no classes"),
        ({"task": MultiLabel(1), "classes": ["a", "b", "c"]}, "data.classes has 3 classes"),
    ],
    ids=str,
)
def test_vocabularies_that_do_not_fit_are_refused(settings, says):
    with pytest.raises(MisconfigurationException, match=says):
        TableData(frame(), "colour", **{"task": Classification(3), "features": ["width", "shop"], **settings}).load()


def test_vocabularies_of_the_command_line(path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    line = f"fit --model FedAvg --model.net MLP --data TableData --data.path {path} --data.target colour"
    line += " --data.task Classification --data.task.num_classes 3 --data.client shop --data.features [width,sold,fold]"
    line += " --data.classes [red,green,blue] --data.standardize client --trainer.max_rounds 1"
    pfl(f"{line} --data.categories.fold [train,test] {QUIET} --trainer.enable_model_summary true")
    saved = torch.load("runs/FedAvg-TableData/version_0/checkpoints/last.ckpt", weights_only=True)
    fitted = saved["TableData"]["preprocessing"]
    assert fitted["classes"] == {"colour": ["red", "green", "blue"]} and len(fitted["mean"]["width"]) == 2
    assert fitted["categories"]["fold"] == ["train", "test"] and len(fitted["categories"]["sold"]) == COUNT
    said = capsys.readouterr().out
    assert re.search(
        r"^features  3; codes of sold \(48 texts\), fold \(2 texts\); standardized by each client", said, re.M
    )
    assert re.search(r"^classes   0 red, 1 green, 2 blue$", said, re.M)


@pytest.mark.exhaustive
def test_the_command_of_the_documents_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    table = scaled().assign(diagnosis=np.array(["benign", "malignant"])[np.arange(COUNT) % 2])
    table.rename(columns={"shop": "hospital"}).to_csv("patients.csv", index=False)
    text = (ROOT / "docs" / "data" / "tables.md").read_text()
    (line,) = re.findall(r"    pfl-lightning (fit --model FedPer(?:.*\\\n)+.*)", text)
    pfl(line.replace("\\\n", " ") + f" {QUIET} --trainer.max_rounds 2")
    assert summary("FedPer-TableData/version_0")["final"]["test/acc"] >= 0


def test_standardized_inputs_are_rounded_once():
    table = frame().assign(width=lambda rows: 1e6 + rows["width"])
    data = ready(table, standardize="table", features=["width", "colour"])
    values = np.stack([table["width"], [["blue", "green", "red"].index(each) for each in table["colour"]]], axis=1)
    rows = torch.cat([data.division.clients[client]["train"] for client in range(2)]).numpy()
    mean = values[rows].sum(0) / len(rows)
    deviation = np.sqrt(((values[rows] - mean) ** 2).sum(0) / len(rows))
    expected = ((values - mean) / deviation).astype(np.float32)
    held = data.division.clients[1]["test"].numpy()
    assert np.array_equal(data.part(1, "test").x.numpy(), expected[held])


@pytest.mark.filterwarnings("ignore:.*such different scales")
@pytest.mark.parametrize("by", [None, "table", "client", {"width": [0.1, 0.3]}], ids=str)
def test_raw_rows_become_the_inputs_of_the_test_rows(by, path):
    settings = {"standardize": by, "client_split": "given"}
    data, table = ready(path, **settings), frame()
    empty = TableData(table[:0], "price", Regression(), **settings)
    empty.load_state_dict(data.state_dict())
    for client, name in enumerate(data.client_names):
        rows = table[(table["shop"] == name) & (table["fold"] == "test")].drop(columns=["price", "fold", "shop"])
        expected = data.part(client, "test").x
        for form in (rows, rows.to_dict("list"), rows.to_dict("records"), rows[rows.columns[::-1]]):
            assert torch.equal(data.inputs(form, name), expected)
            assert torch.equal(empty.inputs(form, client), expected)
    stored = torch.load(saved(data), weights_only=True)
    assert empty.input_shape == (3,) and stored["preprocessing"] == empty.preprocessing == data.preprocessing


def saved(data):
    stream = io.BytesIO()
    torch.save(data.state_dict(), stream)
    stream.seek(0)
    return stream


def test_raw_rows_in_a_file_are_read_as_the_table_was(tmp_path):
    frame().to_csv(tmp_path / "shops.csv", index=False, sep=";", decimal=",")
    data = ready(tmp_path / "shops.csv", separator=";", decimal=",")
    rows = frame().query("shop == 'south' and fold == 'test'")
    rows.to_csv(tmp_path / "rows.csv", index=False, sep=";", decimal=",")
    assert torch.equal(data.inputs(tmp_path / "rows.csv", "south"), data.part(1, "test").x)


@pytest.mark.parametrize(
    ("change", "client", "says"),
    [
        ({"width": None}, "north", "column 'width' of the rows has no value in 1 of 2 rows, first in row 1"),
        ({"width": "wide"}, "north", "column 'width' of the rows "),
        ({"width": float("inf")}, "north", "column 'width' of the rows has inf in row 1"),
        ({"colour": "pink"}, "north", r"column 'colour' of the rows has 'pink' in row 1 .*\(blue, green, red\)"),
        ({}, "west", "client 'west': .* take one of north, south"),
        ({}, 2, "client 2: .* take one of north, south"),
    ],
    ids=str,
)
def test_raw_rows_that_cannot_be_inputs_are_refused(change, client, says):
    data = ready(frame(), standardize="client")
    good = {"width": 0.5, "colour": "red", "broken": True}
    with pytest.raises(MisconfigurationException, match=says):
        data.inputs([good, {**good, **change}], client)
    with pytest.raises(MisconfigurationException, match="there is no column 'colour'"):
        data.inputs([{"width": 0.5, "broken": True}], "north")


def test_class_labels_are_in_the_state():
    labels = [
        ready(frame(), target, Classification(count), features=["width"], **settings).state_dict()["classes"]
        for target, count, settings in [
            ("colour", 3, {}),
            ("colour", 3, {"classes": ["red", "green", "blue"]}),
            ("broken", 2, {}),
        ]
    ]
    assert labels == [["blue", "green", "red"], ["red", "green", "blue"], ["False", "True"]]
    assert ready(frame()).state_dict()["classes"] == []


def test_codes_of_clients_stay_texts(tmp_path):
    codes = np.array(["1", "01", "2"]).repeat(COUNT // 3)
    frame().assign(shop=codes).to_csv(tmp_path / "shops.csv", index=False)
    assert ready(tmp_path / "shops.csv", features=["width"]).client_names == ["01", "1", "2"]
    # as an input the column is of numbers, as before
    data = ready(tmp_path / "shops.csv", features=["width", "shop"])
    assert data.client_names == ["01", "1", "2"] and data.part(0, "train").x[:, 1].unique().tolist() == [1.0]


def test_numbers_of_clients_stay_in_their_order(tmp_path):
    frame().assign(shop=np.array([10, 2, 1]).repeat(COUNT // 3)).to_csv(tmp_path / "shops.csv", index=False)
    assert ready(tmp_path / "shops.csv", features=["width"]).client_names == ["1", "2", "10"]
