"""Tables with gaps, texts and dates, prepared by training rows."""

import io
import re
import warnings

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from sklearn.compose import make_column_transformer
from sklearn.impute import SimpleImputer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler, OneHotEncoder, RobustScaler, StandardScaler

from command import QUIET, pfl, refusal, summary
from federations import fit, make_trainer
from pfl_lightning.cli import predict
from pfl_lightning.cli.predict import read_rows
from pfl_lightning.data import Column, Preprocessing, TableData
from pfl_lightning.data.preprocessing import fitted_numbers
from pfl_lightning.flower.site import Site
from pfl_lightning.methods import FedAvg
from pfl_lightning.nets import MLP
from pfl_lightning.tasks import Classification

pandas = pytest.importorskip("pandas", reason="needs the extra tables")

SITES = ["Bremen", "Erfurt", "Ulm"]
COUNT = 60
MINIMAL = {"state_dict": {}, "federation": {}, "pytorch-lightning_version": "2.6.0"}
"""Entries of every checkpoint."""


def frame():
    """Return a table of three hospitals, with gaps in all columns of inputs and a rare ward in one test row."""
    drawn = np.random.default_rng(0)
    table = pandas.DataFrame(
        {
            "age": drawn.normal(50, 12, COUNT),
            "smoker": drawn.choice([True, False], COUNT).astype(object),
            "ward": drawn.choice(["surgery", "eyes", "heart"], COUNT, p=[0.6, 0.3, 0.1]),
            "admitted": pandas.date_range("2024-01-01", periods=COUNT, freq="36h").astype(str),
            "ill": drawn.choice(["no", "yes"], COUNT),
            "site": np.array(SITES)[np.arange(COUNT) % 3],
            "fold": np.where(np.arange(COUNT) % 12 < 8, "train", "test"),
        }
    )
    for column in ("age", "smoker", "ward", "admitted"):
        table.loc[drawn.choice(COUNT, 9, replace=False), column] = None
    table.loc[11, "ward"] = "garden"
    return table


def hospitals(table=None, preprocessing="auto", **settings):
    table = frame() if table is None else table
    if preprocessing == "auto" and "features" not in settings:
        settings["features"] = ["age", "smoker", "ward"]
    roles = {"client": "site", "split_column": "fold", "val_fraction": 0.0}
    return TableData(table, "ill", Classification(2), preprocessing=preprocessing, **{**roles, **settings})


def ready(*args, **settings):
    data = hospitals(*args, **settings)
    data.setup()
    return data


def rows_of(data, client, split):
    return frame().iloc[data.division.clients[client][split].numpy()]


DATES = {"dates": {"admitted": ["month", "weekday", "days"]}}
KINDS = {
    "defaults": DATES,
    "client": {**DATES, "by": "client"},
    "clipped": {"clip": 1.5, "scale": "robust", "indicator": True, "encode": "codes", **DATES},
    "quantiles": {
        "by": "client",
        "clip": [0.1, 0.9],
        "scale": "minmax",
        "fill": "mean",
        "fill_category": "mode",
        **DATES,
    },
    "constants": {"fill": 7.0, "scale": "none", "fill_category": "none", "drop": ["admitted"]},
    "columns": {
        "columns": {"age": {"fill": "mode", "scale": [50, 12]}, "ward": Column(indicator=True, max_categories=2)},
        "vocabulary": {"smoker": [True, False]},
        **DATES,
    },
}


@pytest.mark.parametrize("kind", KINDS)
def test_raw_rows_become_the_inputs_of_the_test_rows(kind, tmp_path):
    data = ready(preprocessing=Preprocessing(**KINDS[kind]))
    stream = io.BytesIO()
    torch.save(data.state_dict(), stream)
    stream.seek(0)
    # a table of other rows: nothing may come from it
    alone = hospitals(frame().iloc[:6].assign(age=1.0), preprocessing=Preprocessing(**KINDS[kind]))
    alone.load_state_dict(torch.load(stream, weights_only=True))
    assert alone.input_shape == data.input_shape == (len(data.preprocessing["inputs"]),)
    for client, name in enumerate(SITES):
        expected = data.part(client, "test").x
        rows = rows_of(data, client, "test").drop(columns=["ill", "site", "fold"])
        rows.to_csv(tmp_path / "rows.csv", index=False)
        for form in (rows, rows.to_dict("records"), rows[rows.columns[::-1]].to_dict("list"), tmp_path / "rows.csv"):
            assert torch.equal(data.inputs(form, name), expected)
            assert torch.equal(alone.inputs(form, client), expected)
        assert expected.isfinite().all() and expected.dtype == torch.float32


SCALERS = {"standard": StandardScaler, "minmax": MinMaxScaler, "robust": RobustScaler}
STRATEGIES = {"median": "median", "mean": "mean", "mode": "most_frequent"}


@pytest.mark.parametrize("by", ["table", "client"])
@pytest.mark.parametrize(("fill", "scale"), [("median", "standard"), ("mean", "minmax"), ("mode", "robust")])
def test_values_are_those_of_scikit_learn_on_training_rows(by, fill, scale):
    table = frame()
    data = ready(preprocessing=Preprocessing(by=by, fill=fill, scale=scale), features=["age", "smoker", "ward"])
    train = table[table["fold"] == "train"]
    words = OneHotEncoder(handle_unknown="ignore", sparse_output=False).fit(train[["ward"]].dropna())
    for client, name in enumerate(SITES):
        fitted = train if by == "table" else train[train["site"] == name]
        numbers = make_pipeline(SimpleImputer(strategy=STRATEGIES[fill]), SCALERS[scale]())
        numbers.fit(fitted[["age", "smoker"]].astype(float))
        for split in ("train", "test"):
            rows = rows_of(data, client, split)
            expected = np.hstack(
                [numbers.transform(rows[["age", "smoker"]].astype(float)), words.transform(rows[["ward"]])]
            )
            np.testing.assert_allclose(data.part(client, split).x.numpy(), expected, rtol=1e-5, atol=1e-6)
    assert data.preprocessing["inputs"] == ["age", "smoker", "ward=eyes", "ward=heart", "ward=surgery"]


@pytest.mark.parametrize("by", ["table", "client"])
def test_rows_that_are_tested_on_change_nothing_that_is_fitted(by):
    table = frame()
    tested = table["fold"] == "test"
    other = table.assign(
        age=table["age"].mask(tested, 1e6), ward=table["ward"].mask(tested, "roof"), smoker=table["smoker"].mask(tested)
    )
    settings = Preprocessing(by=by, clip=[0.05, 0.95], fill_category="mode", drop=["admitted"])
    assert ready(table, settings).preprocessing == ready(other, settings).preprocessing


def test_clipping_filling_and_scaling_go_in_this_order():
    values = np.array([0.0, 1.0, 2.0, 3.0, 4.0, 1000.0, np.nan])
    fitted = fitted_numbers(values, Column(fill="mean", clip=[0.0, 0.8], scale="minmax"))
    assert fitted == {
        "low": 0.0,
        "high": 4.0,
        "fill": 14 / 6,
        "center": 0.0,
        "width": 4.0,
        "least": 0.0,
        "most": 1000.0,
    }
    assert fitted_numbers(values[:2], Column(fill=9.0, clip=1.0, scale="none")) == {
        "low": 0.0,
        "high": 1.0,
        "fill": 9.0,
        "center": 0.0,
        "width": 1.0,
        "least": 0.0,
        "most": 1.0,
    }
    # equal quartiles: the deviation in their place; a constant column has no width
    mostly = np.array([0.0] * 9 + [10.0])
    assert fitted_numbers(mostly, Column(fill=0.0, scale="robust"))["width"] == mostly.std() == 3.0
    assert fitted_numbers(np.full(5, 0.1), Column(fill=0.0, scale="standard"))["width"] == 0


@pytest.mark.parametrize("way", ["standardize", "preprocessing"])
@pytest.mark.parametrize("by", ["table", "client"])
def test_rows_in_another_unit_are_told_once_with_both_ranges(way, by):
    rows = pandas.DataFrame({"age": [*range(20, 80)] * 3, "flag": 1.0, "ill": [0, 1] * 90, "site": SITES * 60})
    # of one client alone, whose range is then wider
    rows.loc[rows.site == "Ulm", "age"] += 30
    settings = {"preprocessing": Preprocessing(by=by)} if way == "preprocessing" else {"standardize": by}
    data = TableData(rows, "ill", Classification(2), client="site", **settings)
    data.setup()
    trained = rows["age"] if by == "table" else rows["age"][rows.site == "Bremen"]
    saved = TableData.from_state(data.state_dict())
    for each in (data, saved):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            each.inputs({"age": [20, 90], "flag": [1, 9]}, "Bremen")
        with pytest.warns(UserWarning, match="far outside") as told:
            each.inputs({"age": [30, 960], "flag": [1, 1]}, "Bremen")
            each.inputs({"age": [30, 960], "flag": [1, 1]}, "Ulm")
        (said,) = [str(each.message) for each in told]
        assert "'age'" in said and "30 to 960" in said and "1 of 2 rows" in said
        least, most = map(float, re.search(r"in training (\S+) to (\S+)\)", said).groups())
        assert trained.min() <= least < trained.min() + 10 and trained.max() - 10 < most <= trained.max()


def test_given_numbers_keep_no_range():
    rows = {"age": [*range(20, 80)], "ill": [0, 1] * 30, "site": SITES * 20}
    for settings in (
        {"standardize": {"age": [50, 12]}},
        {"preprocessing": Preprocessing(fill=50, scale=[50, 12])},
        {"preprocessing": Preprocessing(fill=50, scale="none")},
        {},
    ):
        data = TableData(pandas.DataFrame(rows), "ill", Classification(2), client="site", **settings)
        data.setup()
        assert data.fitted_on == "nothing" and "least" not in str(data.state_dict())


def test_categories_gaps_and_unknown_texts():
    onehot = ready(preprocessing=Preprocessing(drop=["admitted", "age", "smoker"]))
    codes = ready(preprocessing=Preprocessing(drop=["admitted", "age", "smoker"], encode="codes"))
    mode = ready(preprocessing=Preprocessing(drop=["admitted", "age", "smoker"], fill_category="mode"))
    own = ready(preprocessing=Preprocessing(drop=["admitted", "age", "smoker"], fill_category="absent"))
    rows = {"ward": ["heart", None, "garden", "", "surgery"]}
    assert onehot.inputs(rows, "new").tolist() == [[0, 1, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0], [0, 0, 1]]
    assert codes.inputs(rows, "new").flatten().tolist() == [1, 3, 3, 3, 2]
    assert mode.inputs(rows, "new").tolist() == [[0, 1, 0], [0, 0, 1], [0, 0, 0], [0, 0, 1], [0, 0, 1]]
    assert own.preprocessing["inputs"][-1] == "ward=absent"
    assert own.inputs(rows, "new")[:, 3].tolist() == [0, 1, 0, 1, 0]


def test_rare_categories_are_left_out():
    table = frame()
    counts = table[table["fold"] == "train"]["ward"].value_counts().to_dict()
    first, second, _ = sorted(counts, key=counts.get, reverse=True)
    assert len(set(counts.values())) == 3
    few = ready(features=["ward"], preprocessing=Preprocessing(min_count=counts[second]))
    most = ready(features=["ward"], preprocessing=Preprocessing(columns={"ward": Column(max_categories=1)}))
    assert few.preprocessing["categories"]["ward"] == sorted([first, second])
    assert most.preprocessing["categories"]["ward"] == [first]


def test_categories_in_numbers_and_in_their_own_order(tmp_path):
    table = frame().assign(code=np.where(np.arange(COUNT) % 2, 10.0, 2.0))
    table.loc[0, "code"] = None
    table["ward"] = pandas.Categorical(table["ward"], ["surgery", "heart", "garden", "eyes"])
    data = ready(table, Preprocessing(categories=["code"]), features=["code", "ward"])
    assert data.preprocessing["categories"] == {"code": ["10", "2"], "ward": ["surgery", "heart", "eyes"]}
    rows = table.iloc[:4][["code", "ward"]]
    rows.to_csv(tmp_path / "rows.csv", index=False)
    assert torch.equal(data.inputs(rows, "Ulm"), data.inputs(tmp_path / "rows.csv", "Ulm"))
    assert data.inputs({"code": [2, "10", None], "ward": ["eyes"] * 3}, 0)[:, :2].tolist() == [[0, 1], [1, 0], [0, 0]]


def test_dates_become_numbers_where_they_are_named():
    settings = Preprocessing(
        dates={"admitted": ["year", "month", "day", "weekday", "hour", "days"]}, scale="none", since="2024-01-01"
    )
    data = ready(features=["admitted"], preprocessing=settings)
    made = data.inputs({"admitted": ["2024-05-31T12:00", "2023-12-31", "1969-07-20"]}, "Ulm")
    assert made.tolist() == [[2024, 5, 31, 4, 12, 151.5], [2023, 12, 31, 6, 0, -1], [1969, 7, 20, 6, 0, -19888]]
    days = data.preprocessing["numbers"]["admitted.days"]["fill"]
    assert data.inputs({"admitted": [None]}, "Ulm")[0, 5] == np.float32(days)
    # the same from dates as pandas has them, with a zone or without
    typed = frame().assign(admitted=pandas.to_datetime(frame()["admitted"]))
    for table in (typed, typed.assign(admitted=typed["admitted"].dt.tz_localize("Europe/Berlin"))):
        other = ready(table, features=["admitted"], preprocessing=settings)
        assert torch.equal(other.part(0, "test").x, data.part(0, "test").x)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"admitted": "31.12.2024"}, "column 'admitted' of the data frame has '31.12.2024' in row 7 .* no date"),
        ({"admitted": 20240101}, "column 'admitted' of the data frame has '20240101' in row 7 .* no date"),
        ({"age": np.inf}, "column 'age' of the data frame has inf in row 7"),
        ({"age": "old"}, "column 'age' of the data frame is mostly of numbers, and has the text 'old' in row 7"),
        ({"ward": ["eyes"]}, "column 'ward' of the data frame has a list in row 7"),
    ],
    ids=str,
)
def test_values_that_fit_no_column_are_refused_with_their_row(change, says):
    table = frame().astype(object)
    for column, value in change.items():
        table.at[7, column] = value
    with pytest.raises(MisconfigurationException, match=says):
        ready(table, Preprocessing(**DATES))


def test_dates_and_ids_that_nobody_named_are_refused():
    typed = frame().assign(admitted=pandas.to_datetime(frame()["admitted"]))
    for table in (frame(), typed):
        for features in (None, ["age", "admitted"]):
            with pytest.raises(MisconfigurationException, match=r"'admitted' .* dates.* data\.preprocessing\.dates"):
                ready(table, Preprocessing(), features=features)
    table = frame().assign(id=[f"patient {row}" for row in range(COUNT)])
    with pytest.raises(MisconfigurationException, match=r"'id' .* holds ids: .* data\.preprocessing\.categories"):
        ready(table, preprocessing=Preprocessing(**DATES))
    assert ready(table, Preprocessing(drop=["id", "admitted"])).input_shape == (5,)


def test_a_client_without_any_value_has_zeros_and_nobody_else():
    table = frame()
    table.loc[(table["site"] == "Ulm") & (table["fold"] == "train"), "age"] = None
    with pytest.warns(UserWarning, match=r"Ulm \(age\)"):
        own = ready(table, Preprocessing(by="client", clip=2, scale="none"), features=["age"])
    assert own.part(2, "test").x.abs().max() == 0 and own.part(1, "test").x.abs().max() > 0
    whole = ready(table, Preprocessing(), features=["age"])
    assert whole.part(2, "train").x.unique().numel() == 1 and whole.part(2, "test").x.unique().numel() > 1
    for column in ("age", "ward"):
        table[column] = table[column].mask(table["fold"] == "train")
        with pytest.raises(MisconfigurationException, match=f"column '{column}' .* no value in the training rows"):
            ready(table, Preprocessing(), features=[column, "smoker"])


def test_rows_without_a_target():
    table = frame()
    table.loc[[3, 20], "ill"] = None
    with pytest.raises(MisconfigurationException, match=r"column 'ill' .* no value in 2 of 60 rows, first in row 3"):
        ready(table)
    data = ready(table, drop_missing_target=True)
    assert sum(data.size(client, split) for client in range(3) for split in ("train", "test")) == COUNT - 2
    # rows keep their numbers in messages, also without preprocessing
    table.loc[30, "age"] = np.inf
    for preprocessing, features in (("auto", ["age"]), (None, ["site", "age"])):
        with pytest.raises(MisconfigurationException, match=r"has inf in row 30|no value in .* first in row"):
            ready(table, preprocessing, features=features, drop_missing_target=True)
    with pytest.raises(MisconfigurationException, match="no row of the data frame has a target"):
        ready(table.assign(ill=None), drop_missing_target=True)


# Whose rows


GIVEN = {
    "fill": 0.0,
    "scale": "none",
    "columns": {"age": {"scale": [50, 12]}},
    "vocabulary": {"ward": ["eyes", "heart", "surgery"]},
}


@pytest.mark.parametrize(
    ("settings", "fitted_on", "reason"),
    [
        ({}, "all clients", r"data\.preprocessing\.by=table"),
        ({"by": "client"}, "all clients", r"data\.preprocessing\.vocabulary\.ward"),
        ({**GIVEN, "by": "client", "fill": "median"}, "each client", ""),
        ({**GIVEN, "by": "client", "fill_category": "mode"}, "each client", ""),
        ({**GIVEN, "fill_category": "mode"}, "all clients", r"data\.preprocessing\.by=table"),
        (GIVEN, "nothing", ""),
    ],
    ids=str,
)
def test_whose_rows_decide(settings, fitted_on, reason):
    data = ready(features=["age", "smoker", "ward"], preprocessing=Preprocessing(**settings), classes=["no", "yes"])
    assert data.fitted_on == fitted_on
    if not reason:
        assert data.needs_all_clients == ""
        return
    with pytest.raises(MisconfigurationException, match=reason):
        Site(data, [4, 5, 6])


def test_a_site_makes_the_inputs_of_the_simulation():
    settings = {"preprocessing": Preprocessing(**{**GIVEN, "by": "client", "fill": "median"}), "classes": ["no", "yes"]}
    whole = ready(features=["age", "smoker", "ward"], **settings)
    table = frame()
    own = ready(table[table["site"] == "Erfurt"], features=["age", "smoker", "ward"], **settings)
    assert torch.equal(own.part(0, "train").x, whole.part(1, "train").x)
    # the server's table is a line of names, in which columns without a vocabulary are numbers
    server = hospitals(table[:0], features=["age", "smoker", "ward"], **settings)
    assert server.input_shape == whole.input_shape == (5,) and server._pool is None


def test_new_clients_take_the_federation_s_values_or_their_own():
    settings = {"features": ["age", "smoker", "ward"], "new_clients": 1}
    table = ready(preprocessing=Preprocessing(), **settings)
    names, rows = table.client_names, frame().query("fold == 'train'")
    members = rows[rows["site"] != names[2]]["age"]
    assert table.preprocessing["numbers"]["age"]["fill"] == members.median()
    client = ready(preprocessing=Preprocessing(by="client"), **settings)
    medians = [rows[rows["site"] == name]["age"].median() for name in names]
    assert client.preprocessing["numbers"]["age"]["fill"] == medians
    assert set(client.preprocessing["categories"]["ward"]) == set(rows[rows["site"] != names[2]]["ward"].dropna())


@pytest.mark.parametrize("by", ["table", "client"])
def test_a_table_of_late_clients_takes_what_a_checkpoint_has(by, tmp_path):
    table = frame()
    settings = {"features": ["age", "smoker", "ward"], "preprocessing": Preprocessing(by=by)}
    first = ready(table[table["site"] != "Ulm"], **settings)
    torch.save({"TableData": first.state_dict()}, tmp_path / "last.ckpt")
    late = table[table["site"] != "Bremen"].assign(ill="yes")
    data = ready(late, **settings, fitted=tmp_path / "last.ckpt")
    assert torch.equal(data.part(0, "test").x, first.part(1, "test").x)
    # classes too: of the late table alone, "yes" would be class 0
    assert data.part(0, "test").y.unique().tolist() == [1] and data.input_shape == first.input_shape
    ulm = rows_of(first, 0, "test").assign(site="Ulm")
    if by == "table":
        assert data.preprocessing["numbers"] == first.preprocessing["numbers"]
        assert torch.equal(data.inputs(ulm, "Ulm"), first.inputs(ulm, "new"))
        return
    median = table.query("site == 'Ulm' and fold == 'train'")["age"].median()
    assert data.preprocessing["numbers"]["age"]["fill"][1] == median
    for client in ("Ulm", "new", 2):
        with pytest.raises(MisconfigurationException, match="take one of Bremen, Erfurt"):
            first.inputs(ulm, client)


@pytest.mark.filterwarnings("ignore:.*such different scales")
@pytest.mark.parametrize("by", ["table", "client"])
def test_given_texts_and_standardize_come_from_a_checkpoint_too(by, tmp_path):
    table = frame().dropna()
    settings = {"features": ["age", "ward"], "preprocessing": None, "standardize": by}
    first = ready(table[table["site"] != "Ulm"], **settings)
    torch.save({"TableData": first.state_dict()}, tmp_path / "last.ckpt")
    few = table[(table["site"] == "Erfurt") & (table["ward"] != "eyes")]
    data = ready(few, **settings, fitted=tmp_path / "last.ckpt")
    rows = few[few["fold"] == "test"]
    assert torch.equal(data.part(0, "test").x, first.inputs(rows, "Erfurt"))
    assert data.preprocessing["categories"] == first.preprocessing["categories"]
    with pytest.raises(MisconfigurationException, match=r"data\.fitted=.*none\.ckpt"):
        hospitals(fitted=tmp_path / "none.ckpt")


def test_a_late_client_joins_with_the_checkpoint_s_values(tmp_path):
    table = frame()
    settings = {"features": ["age", "smoker", "ward"], "preprocessing": Preprocessing(by="client")}
    first = hospitals(table[table["site"] != "Ulm"], **settings)
    client = FedAvg(MLP, first.input_shape, task=first.task)
    fit(client, first, tmp_path, enable_checkpointing=True, max_rounds=1)
    (path,) = tmp_path.rglob("last.ckpt")
    late = hospitals(table[table["site"] == "Ulm"], **settings, fitted=path)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*made otherwise")
        joined = make_trainer().join(client, late, ckpt_path=path)
    assert late.client_names == ["Bremen", "Erfurt", "Ulm"] and joined["new/acc"] >= 0
    assert torch.equal(late.inputs(table[:5], "Ulm"), ready(table, **settings).inputs(table[:5], "Ulm"))


def test_codes_that_were_texts_in_training_stay_texts_at_every_door(tmp_path):
    table = pandas.DataFrame({"code": ["01", "A1", "B1"] * 20, "ill": [0, 1] * 30, "site": SITES * 20})
    first = TableData(table, "ill", Classification(2), client="site", preprocessing="auto")
    first.setup()
    torch.save(MINIMAL | {"TableData": first.state_dict()}, tmp_path / "last.ckpt")
    # by themselves they would be read as the number 1
    late = pandas.DataFrame({"code": ["01"] * 40, "ill": [0, 1] * 20, "site": "Jena"})
    late.to_csv(tmp_path / "late.csv", index=False)
    settings = {"client": "site", "preprocessing": "auto", "fitted": tmp_path / "last.ckpt"}
    joins = TableData(tmp_path / "late.csv", "ill", Classification(2), **settings)
    joins.setup()
    rows = torch.cat([joins.part(0, split).x for split in ("train", "val", "test")])
    assert torch.equal(rows.sum(0), torch.tensor([40.0, 0.0, 0.0]))
    assert torch.equal(first.inputs(tmp_path / "late.csv", "new")[:1], torch.eye(3)[:1])
    sites = read_rows(tmp_path / "late.csv", "site", {}, tmp_path / "last.ckpt").of_clients
    assert torch.equal(first.inputs(sites["Jena"], "new")[:1], torch.eye(3)[:1])


def test_fitted_values_of_other_settings_are_refused(tmp_path):
    torch.save({"TableData": ready().state_dict()}, tmp_path / "last.ckpt")
    for settings in ({"preprocessing": Preprocessing(by="client")}, {"preprocessing": None}):
        with pytest.raises(MisconfigurationException, match=r"preprocessing\.by=table, and here it is (client|null)"):
            ready(**settings, features=["age", "smoker", "ward"], fitted=tmp_path / "last.ckpt")
    with pytest.raises(MisconfigurationException, match=r"data\.fitted: there is no column 'smoker'"):
        hospitals(frame().drop(columns="smoker"), features=["age"], fitted=tmp_path / "last.ckpt")


def test_training_rows_outside_a_given_vocabulary_are_told_of():
    with pytest.warns(UserWarning, match=r"vocabulary\.ward: \d+ of 40 training rows hold other texts \(heart\)"):
        ready(preprocessing=Preprocessing(vocabulary={"ward": ["eyes", "surgery"]}, drop=["admitted"]))


# scikit-learn's own


def transformer():
    return make_column_transformer(
        (make_pipeline(SimpleImputer(), StandardScaler()), ["age"]),
        (OneHotEncoder(handle_unknown="ignore"), ["ward"]),
    )


@pytest.mark.parametrize("by", ["table", "client"])
def test_a_given_transformer_is_fitted_on_training_rows(by):
    table = frame().assign(ward=lambda rows: rows["ward"].fillna("eyes").replace("heart", "eyes"))
    settings = {"features": ["age", "ward"], "preprocessing": Preprocessing(by=by, transformer=transformer())}
    settings["classes"] = ["no", "yes"]
    data = ready(table, **settings)
    train = table[table["fold"] == "train"]
    for client, name in enumerate(SITES):
        made = transformer().fit(train if by == "table" else train[train["site"] == name])
        rows = table.iloc[data.division.clients[client]["test"].numpy()]
        expected = torch.from_numpy(made.transform(rows).astype(np.float32))
        assert torch.equal(data.part(client, "test").x, expected)
        assert torch.equal(data.inputs(rows, name), expected)
    assert data.fitted_on == {"table": "all clients", "client": "each client"}[by]
    alone = hospitals(table, **settings)
    alone.load_state_dict(data.state_dict())
    assert alone.input_shape == (3,) == data.input_shape
    with pytest.raises(MisconfigurationException, match="in no checkpoint"):
        alone.inputs(table, "Ulm")


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (make_column_transformer((StandardScaler(), ["age"])), "NaN or infinity"),
        (make_column_transformer((OneHotEncoder(), ["ward"])), "makes . inputs for client"),
    ],
    ids=["gaps", "widths"],
)
def test_a_transformer_that_makes_no_inputs_is_refused(made, says):
    table = frame()
    table.loc[table["site"] == "Ulm", "ward"] = "eyes"
    with pytest.raises(MisconfigurationException, match=says):
        ready(table, Preprocessing(by="client", transformer=made), features=["age", "ward"])


# Settings


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"by": "site"}, r"preprocessing\.by='site'"),
        ({"scale": "wide"}, r"preprocessing\.scale='wide'"),
        ({"clip": [0.5, 0.1]}, r"preprocessing\.clip=\[0\.5, 0\.1\]"),
        ({"clip": 0}, r"preprocessing\.clip=0"),
        ({"fill": float("nan")}, r"preprocessing\.fill=nan"),
        ({"fill": "medium"}, "fill='medium' .* 'age'"),
        ({"columns": {"ward": {"fill": "mean"}}}, "fill='mean' .* 'ward'"),
        ({"columns": {"age": {"scale": [0, 0]}}}, r"preprocessing\.columns\.age\.scale=\[0, 0\]"),
        ({"columns": {"wards": {}}}, r"preprocessing\.columns: there is no column 'wards'; did you mean ward"),
        ({"drop": ["site"]}, r"preprocessing\.drop: there is no column 'site'"),
        ({"dates": {"admitted": []}}, r"preprocessing\.dates\.admitted=\[\]"),
        ({"dates": {"admitted": ["week"]}}, r"preprocessing\.dates\.admitted='week'"),
        ({**DATES, "categories": ["admitted"]}, r"'admitted'.* data\.preprocessing\.categories"),
        ({**DATES, "since": "yesterday"}, r"preprocessing\.since='yesterday'"),
        ({"vocabulary": {"ward": ["eyes", "eyes"]}}, r"preprocessing\.vocabulary\.ward"),
        ({"min_count": 0}, r"preprocessing\.min_count=0"),
        ({"drop": ["age", "smoker", "ward", "admitted"]}, r"preprocessing\.drop leaves no column"),
        ({"transformer": 3}, r"preprocessing\.transformer=3"),
        ({"transformer": StandardScaler(), "clip": 3}, r"preprocessing\.clip=3 .*\.transformer"),
    ],
    ids=str,
)
def test_settings_that_cannot_be_are_refused(settings, says):
    with pytest.raises(MisconfigurationException, match=says):
        ready(preprocessing=Preprocessing(**{**({} if "drop" in settings else DATES), **settings}))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"standardize": "table"}, r"standardize='table' .* data\.preprocessing\.scale"),
        ({"categories": {"ward": ["eyes"]}}, r"categories=.* data\.preprocessing\.vocabulary"),
        ({"preprocessing": Preprocessing(by="client"), "central_test": 0.2}, r"central_test=0\.2"),
        ({"preprocessing": StandardScaler()}, r"Preprocessing\(transformer=\.\.\.\)"),
    ],
    ids=str,
)
def test_settings_beside_it_that_have_no_place(settings, says):
    with pytest.raises(MisconfigurationException, match=says):
        hospitals(features=["age", "smoker", "ward"], **settings)


def test_raw_rows_without_a_column_are_refused():
    data = ready()
    with pytest.raises(MisconfigurationException, match="no column 'smoker'"):
        data.inputs({"age": [1], "ward": ["eyes"]}, "Ulm")
    with pytest.raises(MisconfigurationException, match="'old' in row 1"):
        data.inputs({"age": [1, "old"], "ward": ["eyes"] * 2, "smoker": [True] * 2}, "Ulm")
    with pytest.raises(MisconfigurationException, match="'age' is beyond single precision"):
        ready(frame().assign(age=lambda rows: rows["age"] * 1e-30)).inputs(
            {"age": [1e30], "ward": ["eyes"], "smoker": [True]}, "Ulm"
        )


# The command line

YAML = """
data:
  class_path: TableData
  init_args:
    path: hospitals.csv
    target: ill
    task: {class_path: Classification, init_args: {num_classes: 2}}
    client: site
    split_column: fold
    preprocessing:
      by: client
      scale: robust
      dates: {admitted: [month, weekday]}
      vocabulary: {ward: [eyes, heart, surgery]}
      columns:
        age: {fill: 40, indicator: true}
"""


@pytest.mark.exhaustive
def test_the_command_line_takes_it_from_a_file_and_in_words(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    frame().to_csv("hospitals.csv", index=False)
    (tmp_path / "data.yaml").write_text(YAML)
    tail = f"--model.net MLP --trainer.max_rounds 1 {QUIET}"
    pfl(f"fit --model FedAvg --config data.yaml {tail}")
    state = torch.load("runs/FedAvg-TableData/version_0/checkpoints/last.ckpt", weights_only=True)["TableData"]
    names = ["age", "age missing", "smoker", "ward=eyes", "ward=heart", "ward=surgery"]
    assert state["preprocessing"]["inputs"] == [*names, "admitted.month", "admitted.weekday"]
    assert state["classes"] == ["no", "yes"] and state["preprocessing"]["numbers"]["age"]["fill"] == [40.0] * 3
    words = YAML[: YAML.index("    preprocessing")]
    (tmp_path / "data.yaml").write_text(words)
    pfl(f"fit --model FedAvg --config data.yaml --data.preprocessing.drop [admitted] {tail}")
    assert summary("FedAvg-TableData/version_1")["final"]["test/acc"] >= 0
    # goes on, with the same values from the same rows
    pfl(
        "fit --model FedAvg --config data.yaml --data.preprocessing.drop [admitted] --model.net MLP "
        f"--ckpt_path last --trainer.max_rounds 2 {QUIET}"
    )
    assert summary("FedAvg-TableData/version_1")["final"]["round"] == 2


def numbers(*sites, **more):
    """Return a table of hospitals with two columns of numbers, one of texts, and further ones."""
    drawn = np.random.default_rng(3)
    count = 40 * len(sites)
    table = pandas.DataFrame({"age": drawn.normal(50, 10, count), "bmi": drawn.normal(25, 3, count)})
    table["ward"] = drawn.choice(["eyes", "heart"], count)
    own = {"ill": np.where(table["age"] > 50, "yes", "no"), "site": np.repeat(sites, 40)}
    return table.assign(**own | more)


@pytest.mark.parametrize("by", ["table", "client"])
def test_a_late_table_has_a_column_more_or_fewer(by, tmp_path):
    settings = {"client": "site", "preprocessing": Preprocessing(by=by)}
    task = Classification(2)
    first = TableData(numbers("Bremen", "Ulm"), "ill", task, **settings)
    first.setup()
    torch.save(MINIMAL | {"TableData": first.state_dict()}, tmp_path / "last.ckpt")
    settings["fitted"] = tmp_path / "last.ckpt"
    late = numbers("Jena")
    same = TableData(late, "ill", task, **settings)
    more = TableData(late.assign(pulse=70, hair="red"), "ill", task, **settings)
    same.setup()
    with pytest.warns(UserWarning, match="no inputs of the federation: pulse, hair"):
        more.setup()
    for split in ("train", "test"):
        assert torch.equal(same.part(0, split).x, more.part(0, split).x)
    with pytest.raises(MisconfigurationException, match=r"no column 'bmi'.*data\.fill_missing_columns=true"):
        TableData(late.drop(columns="bmi"), "ill", task, **settings)
    fewer = TableData(late.drop(columns=["bmi", "ward"]), "ill", task, **settings, fill_missing_columns=True)
    with pytest.warns(UserWarning) as told:
        fewer.setup()
    assert any("has no column bmi, ward" in str(each.message) for each in told)
    # filled by the federation's median under `table`; without any value of its own under `client`
    median = (
        (first.preprocessing["numbers"]["bmi"]["fill"] - first.preprocessing["numbers"]["bmi"]["center"])
        / (first.preprocessing["numbers"]["bmi"]["width"])
        if by == "table"
        else 0.0
    )
    x = fewer.part(0, "train").x
    assert fewer.preprocessing["inputs"] == ["age", "bmi", "ward=eyes", "ward=heart"]
    assert torch.allclose(x[:, 1], torch.tensor(median)) and not x[:, 2:].any()
    assert torch.equal(x[:, 0], same.part(0, "train").x[:, 0])


def test_missing_columns_are_filled_only_with_values_for_gaps():
    with pytest.raises(MisconfigurationException, match=r"fill_missing_columns=true .*data\.preprocessing"):
        TableData(numbers("Ulm"), "ill", Classification(2), client="site", fill_missing_columns=True)
    named = TableData(
        numbers("Ulm", "Jena").drop(columns="bmi"),
        "ill",
        Classification(2),
        features=["age", "bmi"],
        client="site",
        preprocessing=Preprocessing(by="client"),
        fill_missing_columns=True,
    )
    with pytest.warns(UserWarning, match="no column bmi"):
        named.setup()
    # as at a site, which fits by its own rows
    assert named.preprocessing["inputs"] == ["age", "bmi"] and not named.part(0, "train").x[:, 1].any()


@pytest.mark.exhaustive
def test_predict_and_join_take_rows_with_other_columns(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    numbers("Bremen", "Ulm").to_csv("hospitals.csv", index=False)
    numbers("Jena", pulse=70, ward="eyes").drop(columns="bmi").to_csv("late.csv", index=False)
    numbers("Ulm").drop(columns="bmi").head(3).to_csv("fewer.csv", index=False)
    data = "--data TableData --data.path hospitals.csv --data.target ill --data.client site --data.preprocessing auto"
    task = "--data.task Classification --data.task.num_classes 2 --model FedPer --model.net MLP"
    pfl(f"fit {data} {task} --trainer.max_rounds 1 {QUIET}")
    assert "no column 'bmi'" in refusal("predict --client Ulm --data fewer.csv", capsys)
    assert predict.main("--client Ulm --data fewer.csv --fill_missing_columns".split()) == 0
    assert len(pandas.read_csv("predictions.csv")) == 3
    assert "no column 'bmi' in late.csv, which has pulse" in refusal("join --data late.csv", capsys)
    with pytest.warns(UserWarning, match="no inputs of the federation: pulse"):
        pfl("join --data late.csv --data.fill_missing_columns true")
    assert predict.main("--client Jena --data fewer.csv --fill_missing_columns".split()) == 0
