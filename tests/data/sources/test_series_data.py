"""Series in long tables: windows, cuts by time, and forecasts after the last row."""

import re
from typing import Any

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from command import QUIET, pfl
from pfl_lightning import FederatedTrainer
from pfl_lightning.data import IID, Preprocessing, SeriesData
from pfl_lightning.data.sources import base
from pfl_lightning.data.sources.series_data import Windows
from pfl_lightning.methods import WDR, Ditto, FedAvg, FedPer
from pfl_lightning.nets import MLP
from pfl_lightning.tasks import Classification, Poisson, Quantile, Regression

pandas = pytest.importorskip("pandas", reason="needs the extra tables")

HOURS, HISTORY, HORIZON = 40, 6, 2


def frame(hours=HOURS, **columns):
    """Three homes, whose load is the hour, plus 1000 for the second and 2000 for the third; rows in no order."""
    times = pandas.date_range("2024-03-30", periods=hours, freq="h")
    homes = [
        pandas.DataFrame({"home": name, "hour": times.astype(str), "load": np.arange(hours) + 1000.0 * place})
        for place, name in enumerate("abc")
    ]
    table = pandas.concat(homes, ignore_index=True)
    return table.assign(**columns).sample(frac=1, random_state=0).reset_index(drop=True)


def small():
    """The homes with loads of a size that trains."""
    return frame().assign(load=lambda table: table["load"] / 1000)


def ready(table=None, windows=(HISTORY, HORIZON), **settings):
    settings = {"time": "hour", "client": "home", **settings}
    data = SeriesData(frame() if table is None else table, windows, **settings)
    data.setup()
    return data


def hours_of(data, client, split):
    """The hours of each window: of its rows, and of its targets."""
    part = data.part(client, split)
    return (part.x[:, :, 0] % 1000).tolist(), (part.y % 1000).tolist()


def test_windows_are_consecutive_rows_in_the_order_of_times():
    data = ready()
    assert data.input_shape == (HISTORY, 1) and data.task == Regression(HORIZON)
    assert data.client_names == ["a", "b", "c"]
    part = data.part(1, "train")
    assert part.x.shape[1:] == (HISTORY, 1) and part.y.shape[1:] == (HORIZON,)
    for x, y in zip(part.x[:, :, 0], part.y, strict=True):
        assert torch.cat([x, y]).diff().eq(1).all() and x.min() >= 1000 and y.max() < 2000


@pytest.mark.parametrize("stride", [1, 3])
@pytest.mark.parametrize(("test_fraction", "val_fraction"), [(0.25, 0.2), (0.25, 0.0), (0.0, 0.2)])
def test_no_window_of_training_knows_a_later_row(stride, test_fraction, val_fraction):
    data = ready(stride=stride, test_fraction=test_fraction, val_fraction=val_fraction)
    num_test = int(test_fraction * HOURS)
    first_test = HOURS - num_test
    first_val = first_test - int(val_fraction * first_test)
    x, y = hours_of(data, 2, "train")
    assert max(map(max, x + y)) < first_val and x[0][0] == 0 and (len(x) < 2 or x[1][0] == stride)
    targets = {"train": y}
    for split, first, last, share in (
        ("val", first_val, first_test - 1, val_fraction),
        ("test", first_test, HOURS - 1, test_fraction),
    ):
        x, targets[split] = hours_of(data, 2, split)
        assert bool(x) == (share > 0)
        for of_window in targets[split]:
            assert min(of_window) >= first and max(of_window) <= last
        # the first forecast of a part begins with its first row, so its history reaches back
        assert not x or (targets[split][0][0] == first and x[0][0] == first - HISTORY)
    rows = [{hour for window in windows for hour in window} for windows in targets.values()]
    assert sum(map(len, rows)) == len(set.union(*rows))


@pytest.mark.parametrize(
    "settings",
    [
        {"standardize": "table"},
        {"standardize": "client"},
        {"preprocessing": "auto"},
        {"preprocessing": Preprocessing(by="client", scale="robust")},
        {},
    ],
    ids=["table", "client", "auto", "robust", "none"],
)
def test_later_rows_change_neither_training_nor_preprocessing(settings):
    """Whoever changes all rows after the first cut changes no bit of the training windows."""
    settings = {"features": ["warm", "kind"] if "preprocessing" in settings else ["warm"], **settings}
    table = frame()
    drawn = np.random.default_rng(0)
    table["warm"] = drawn.normal(size=len(table))
    table["kind"] = drawn.choice(["flat", "house"], len(table))
    is_later = table["load"] % 1000 >= HOURS - 10 - 3
    other = table.copy()
    other.loc[is_later, ["load", "warm"]] = drawn.normal(size=(int(is_later.sum()), 2)) * 1e6
    other.loc[is_later, "kind"] = "attic"
    one, two = (ready(each, target="load", **settings) for each in (table, other))
    assert repr(one.preprocessing) == repr(two.preprocessing)
    for client in range(3):
        own, changed = one.part(client, "train"), two.part(client, "train")
        assert torch.equal(own.x, changed.x) and torch.equal(own.y, changed.y)
        assert not torch.equal(one.part(client, "test").y, two.part(client, "test").y)


def test_standardizing_is_of_rows_and_leaves_targets():
    data = ready(standardize="client")
    train = frame()["load"][lambda load: load < HOURS - 10 - 3]
    assert data.preprocessing["mean"]["load"][0] == pytest.approx(train.mean())
    assert data.preprocessing["deviation"]["load"][0] == pytest.approx(train.std(ddof=0))
    part = data.part(0, "train")
    assert part.x[0, 0].item() == pytest.approx((0 - train.mean()) / train.std(ddof=0), rel=1e-5)
    assert part.y[0].tolist() == [HISTORY, HISTORY + 1]


def test_several_targets_stand_side_by_side_and_further_columns_are_inputs():
    table = frame()
    table["gas"], table["warm"] = -table["load"], 0.5
    data = ready(table, target=["load", "gas"])
    assert data.input_shape == (HISTORY, 3) and data.task == Regression(4)
    part = data.part(0, "train")
    assert part.x[0, 1].tolist() == [1, -1, 0.5] and part.y[0].tolist() == [6, 7, -6, -7]
    assert ready(table, features=["gas"]).input_shape == (HISTORY, 1)
    assert ready(table, target="load", features=[]).input_shape == (HISTORY, 1)


@pytest.mark.parametrize("by", ["table", "client"])
def test_each_target_has_the_scale_of_its_own_training_rows(by):
    table = frame().assign(gas=lambda rows: 5 - 300 * rows["load"])
    plain = ready(table, target=["load", "gas"])
    scaled = ready(table, target=["load", "gas"], preprocessing=Preprocessing(by=by))
    for split in ("train", "test"):
        y = scaled.part(1, split).y
        assert torch.allclose(scaled.target_scale(1).undone(y), plain.part(1, split).y, rtol=1e-4, atol=1e-2)
    assert y.abs().max() < 10
    # no later row has a part in it
    later = table["hour"] > "2024-03-31 12"
    table.loc[later, ["load", "gas"]] *= 7
    assert ready(table, target=["load", "gas"], preprocessing=Preprocessing(by=by)).target_scale(1) == (
        scaled.target_scale(1)
    )


def test_large_windows_stay_views_of_rows(monkeypatch):
    whole = ready(standardize="client")
    monkeypatch.setattr(base, "RESIDENT", 0)
    viewed = ready(standardize="client")
    assert isinstance(viewed._pool.samples.x, Windows)
    for split in ("train", "val", "test"):
        assert torch.equal(whole.part(1, split).x, viewed.part(1, split).x)


TIMES: dict[str, Any] = {
    "numbers": np.arange(HOURS),
    "fractions": np.arange(HOURS) * 0.1,
    "texts with zones": pandas.date_range("2024-03-30", periods=HOURS, freq="h", tz="Europe/Berlin").map(str),
    "months": pandas.date_range("2020-01-01", periods=HOURS, freq="MS"),
    "ends of months": pandas.date_range("2020-01-31", periods=HOURS, freq="ME").astype(str),
    "quarters": pandas.date_range("2020-01-01", periods=HOURS, freq="QS").astype(str),
    "days": pandas.date_range("2020-02-01", periods=HOURS, freq="D").date,
    "zoned": pandas.date_range("2024-03-30", periods=HOURS, freq="h", tz="Europe/Berlin"),
}


@pytest.mark.parametrize("times", TIMES.values(), ids=TIMES)
def test_times_of_any_kind_are_sorted(times):
    own = pandas.DataFrame({"hour": times, "load": np.arange(HOURS) * 1.0})
    table = pandas.concat([own.assign(home=home, load=own["load"] + place) for place, home in enumerate("ab")]).sample(
        frac=1, random_state=1
    )
    data = ready(table)
    assert hours_of(data, 0, "train")[0][0] == list(range(HISTORY))
    assert data.size(0, "train") == HOURS - 10 - 3 - HISTORY - HORIZON + 1


def without(hour):
    table = frame()
    return table[table["load"] != hour]


def test_gaps_are_refused_by_client_and_time_or_skipped_or_accepted():
    with pytest.raises(MisconfigurationException, match=r"client 'b'.*2024-03-30 13:00:00 after 2024-03-30 11:00:00"):
        ready(without(1012))
    skipped = ready(without(1012), gaps="skip")
    for split in ("train", "val", "test"):
        x, y = hours_of(skipped, 1, split)
        assert all(np.ptp(own + after) == HISTORY + HORIZON - 1 for own, after in zip(x, y, strict=True))
    accepted = ready(without(1012), gaps="accept")
    assert [7, 8, 9, 10, 11, 13] in hours_of(accepted, 1, "train")[0]
    assert accepted.size(1, "train") > skipped.size(1, "train") > 0


def test_missing_values_are_gaps_if_left_out():
    table = frame()
    table.loc[table["load"] == 5, "load"] = np.nan
    with pytest.raises(MisconfigurationException, match=r"'load'.*no value in 1"):
        ready(table, target="load")
    with pytest.raises(MisconfigurationException, match="client 'a'"):
        ready(table, drop_missing_target=True)
    assert hours_of(ready(table, drop_missing_target=True, gaps="skip"), 0, "train")[0][0][0] == 6


def renamed(hour, text):
    table = frame()
    table.loc[table["load"] == hour, "hour"] = text
    return table


@pytest.mark.parametrize(
    ("table", "settings", "says"),
    [
        (renamed(7, "2024-03-30 08:00:00"), {}, "client 'a'.*several rows of the time 2024-03-30 08:00:00"),
        (renamed(7, "30.03.2024 08:00"), {}, "'30.03.2024 08:00'.*2024-05-31"),
        (renamed(7, "2024-03-30 08:00 noon"), {}, "2024-03-30 08:00 noon.*no date"),
        (frame(hour=["first", "second"] * 60), {}, "column 'hour'.*(first|second).*no date"),
        (renamed(7, None), {}, "time of 1 of 120 .*missing"),
        (frame(12), {}, r"windows=\[6, 2\]: 3 of 3 clients .* in val: a \(12 rows\)"),
        (frame()[lambda table: (table["home"] != "c") | (table["load"] < 2009)], {}, r"1 of 3 clients .* c \(9 rows\)"),
        (frame(kind="flat"), {"target": "load"}, "column 'kind'.*data.categories.kind.*preprocessing=auto"),
        (frame(), {"windows": (6,)}, r"data.windows=\(6,\).*\[24, 6\]"),
        (frame(), {"windows": (6, 0)}, r"data.windows=\[6, 0\]"),
        (frame(), {"stride": 0}, "data.stride=0"),
        (frame(), {"stride": 1.5}, "data.stride=1.5"),
        (frame(), {"gaps": "fill"}, "data.gaps='?fill"),
        (frame(), {"client": None}, "data.client is missing"),
        (frame(), {"client": "homes"}, "data.client.*'homes'.*home"),
        (frame(), {"time": "hours"}, "data.time.*'hours'.*hour"),
        (frame(), {"target": "loud"}, "data.target.*'loud'.*load"),
        (frame(), {"target": "hour"}, "'hour'.*column of clients or times"),
        (frame(), {"features": []}, "data.target must name"),
        (frame(), {"task": Classification(2)}, "data.task=.*Regression, Poisson or Quantile"),
        (frame(), {"task": Regression(3)}, "3 quantities.*data.task.quantities=2"),
        (frame(), {"client_split": "random"}, "data.client_split='random'.*leave it out"),
        (frame(), {"partitioner": IID(), "num_clients": 3}, "data.partitioner=.*leave it out"),
        (frame(), {"central_test": 0.2}, "data.central_test=0.2.*leave it out"),
        (frame(), {"val_fold": 0, "val_fraction": 0.2}, "data.val_fold=0.*leave it out"),
    ],
    ids=lambda value: None if isinstance(value, pandas.DataFrame) else str(value)[:30],
)
def test_what_cannot_be_is_refused_in_a_sentence(table, settings, says):
    with pytest.raises(MisconfigurationException, match=says) as refused:
        ready(table, **settings)
    assert "\n" not in str(refused.value) and re.search(r"\.\s", str(refused.value)) is None


def test_the_naive_forecast_repeats_the_last_period():
    table = frame()
    table["load"] = table["load"] % 3 + table["home"].map({"a": 0.0, "b": 10.0, "c": 20.0})
    data = ready(table)
    assert data.seasonal_naive(3) == {"a": 0.0, "b": 0.0, "c": 0.0}
    # a period of one row repeats the last value, here for each of two rows ahead
    table["load"] = table["load"] % 10 * frame()["load"] % 7
    data = ready(table)
    x, y = data.part(0, "test").x[:, -1], data.part(0, "test").y
    assert (x - y).abs().mean() > 0.1
    assert data.seasonal_naive(1)["a"] == pytest.approx((x - y).abs().mean().item())
    with pytest.raises(MisconfigurationException, match="period=7 must be 1 to 6"):
        data.seasonal_naive(7)


class Recurrent(nn.Module):
    """A network of a user: a GRU, and a linear layer to the horizon."""

    def __init__(self, input_shape, num_outputs):
        super().__init__()
        self.rows = nn.GRU(input_shape[-1], 4, batch_first=True)
        self.out = nn.Linear(4, num_outputs)

    def forward(self, x):
        return self.out(self.rows(x)[0][:, -1])


def trainer(**settings):
    quiet = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False)
    return FederatedTrainer(**{**quiet, "max_rounds": 1, **settings})


def trained(data, method=FedPer, net=Recurrent, **settings):
    torch.manual_seed(0)
    client = method(net, data.input_shape, task=data.task)
    made = trainer(**settings)
    made.fit(client, datamodule=data)
    return made, client


@pytest.mark.parametrize("method", [FedAvg, FedPer, Ditto])
def test_a_network_with_a_recurrence_trains_and_forecasts_after_the_last_row(method):
    table = small()
    data = ready(table, standardize="client")
    made, client = trained(data, method, engine="sequential")
    assert made.callback_metrics["test/mae"] > 0 and made.callback_metrics["test/r2"].isfinite()
    found = made.predict(client, clients=dict(tuple(table.groupby("home"))), datamodule=data)
    last = table[table["home"] == "b"].reset_index(drop=True)
    place = int(last["load"].argmax())
    assert found["b"].values.shape == (1, HORIZON)
    assert found["b"].labels == {"row": [place], "time": ["2024-03-31 15:00:00"]}
    x = data.inputs(last, "b")
    assert x.shape == (1, *data.input_shape) and x[0, -1] > x[0, 0]
    assert torch.equal(x, data.inputs(last.nlargest(HISTORY, "load"), "b"))
    windows = made.predict(client, datamodule=data)["b"]
    assert windows.labels["time"][0] == "2024-03-31 05:00:00" and len(windows) == data.size(1, "test")
    assert list(windows.columns()) == ["time", "prediction_0", "prediction_1"]


def test_engines_agree():
    data = ready(small(), standardize="client")
    one, two = (trained(data, FedPer, MLP, engine=engine)[0] for engine in ("sequential", "vectorised"))
    assert one.callback_metrics["test/mae"] == pytest.approx(two.callback_metrics["test/mae"].item(), rel=1e-4)


def test_methods_of_classes_are_refused():
    with pytest.raises(MisconfigurationException, match="class"):
        trained(ready(small()), WDR, MLP)


@pytest.mark.parametrize("task", [Poisson(HORIZON), Quantile(HORIZON)], ids=str)
def test_counts_and_quantiles_are_tasks_of_a_forecast(task):
    data = ready(small(), target="load", task=task, standardize="client")
    assert data.task == task
    made, _ = trained(data, FedAvg, MLP)
    assert made.callback_metrics[f"test/{task.monitor}"].isfinite()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda own: own.iloc[:3], "client 'a', has 3 rows.*last 6"),
        (lambda own: own.drop(columns="hour"), "no column 'hour'"),
        (lambda own: own[own["load"] != 38], "2024-03-31 15:00:00 after 2024-03-31 13:00:00.*0 days 01:00:00"),
        (lambda own: pandas.concat([own, own]), "once"),
        (lambda own: own.assign(hour=np.arange(len(own))), "numbers.*dates"),
    ],
)
def test_rows_without_a_history_are_refused(change, says):
    data = ready(standardize="client")
    own = frame().query("home == 'a'").sort_values("hour")
    for client in ("a", 0):
        with pytest.raises(MisconfigurationException, match=says):
            data.inputs(change(own), client)


def test_a_checkpoint_makes_inputs_without_the_table():
    data = ready(standardize="client")
    alone = SeriesData.from_state(data.state_dict())
    own = frame().query("home == 'c'")
    assert alone.input_shape == data.input_shape and torch.equal(alone.inputs(own, "c"), data.inputs(own, "c"))
    assert alone.prediction_labels(own, "c") == data.prediction_labels(own, "c")
    other = SeriesData(frame(), (HISTORY + 1, HORIZON), "hour", "home", standardize="client")
    with pytest.raises(MisconfigurationException, match=r"data.windows=\[7, 2\].*\[6, 2\]"):
        other.load_state_dict(data.state_dict())


def test_a_folder_has_a_series_for_each_file(tmp_path):
    for home, own in frame().groupby("home"):
        own.drop(columns="home").to_csv(tmp_path / f"{home}.csv", index=False)
    data = SeriesData(tmp_path, (HISTORY, HORIZON), "hour")
    data.setup()
    assert data.client_names == ["a", "b", "c"] and hours_of(data, 2, "train") == hours_of(ready(), 2, "train")


@pytest.mark.exhaustive
def test_the_command_line_trains_and_predicts_the_next_hours(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    frame().to_csv("loads.csv", index=False)
    pfl(
        "fit --config methods/fedper --model.net MLP --data SeriesData --data.path loads.csv --data.windows [6,2] "
        f"--data.time hour --data.client home --data.standardize client --trainer.max_rounds 1 {QUIET}"
    )
    for line in ("predict --data loads.csv", "predict --client all"):
        with pytest.raises(SystemExit) as ended:
            pfl(line)
        assert not ended.value.code
        found = pandas.read_csv("predictions.csv")
        assert list(found) == ["row", "client", "time", "prediction_0", "prediction_1"]
        assert set(found["client"]) == {"a", "b", "c"}
        if "--data" in line:
            rows = frame().loc[found["row"]].reset_index(drop=True)
            assert rows["home"].equals(found["client"]) and rows["hour"].equals(found["time"])
            assert set(found["time"]) == {"2024-03-31 15:00:00"}
