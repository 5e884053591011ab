import json
import math
import random
import sys
from typing import Any

import pytest
import torch
import yaml
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from federations import Spy, blobs, fit, load, make_client, read_csv
from pfl_lightning.callbacks import RoundLogger
from pfl_lightning.data.client_data import class_counts
from pfl_lightning.messages import num_bytes
from pfl_lightning.methods import FedPer
from pfl_lightning.runs.report import PackedRows, append_row, columns_of, write_rows
from pfl_lightning.selection import Cyclic
from pfl_lightning.tasks import Classification

ALWAYS = {
    "round",
    "clients",
    "clients_diverged",
    "clients_refused",
    "clients_absent",
    "cohort",
    "lr",
    "bytes/up",
    "bytes/down",
    "local/steps",
    "local/samples",
}
TIMES = {"time/train", "time/aggregate", "time/evaluate"}
SUMMARY = {"", "_mean", "_std", "_worst", "_p10", "_worst10"}


def test_a_row_a_round_with_a_stable_schema(tmp_path):
    run = fit(make_client(FedPer), root=tmp_path, clients_per_round=0.5)
    rows = read_csv(run.folder / "rounds.csv")
    assert [row["round"] for row in rows] == ["1", "2", "3"]
    metrics = {"train/loss", "val/loss", *(f"val/acc{suffix}" for suffix in SUMMARY)}
    assert all(set(row) == ALWAYS | TIMES | metrics for row in rows)
    assert all(value != "" for row in rows for value in row.values())
    assert [{name: str(value) for name, value in row.items()} for row in run.rows] == rows


def test_rows_of_the_file_and_of_the_logger_are_the_same(tmp_path):
    run = fit(make_client(), root=tmp_path)
    logged = read_csv(run.folder / "metrics.csv")
    assert [row["step"] for row in logged] == ["1", "2", "3"]
    for row, other in zip(run.rows, logged, strict=True):
        for name, value in row.items():
            assert name == "cohort" or float(other[name]) == pytest.approx(float(value))


def test_what_travels_is_counted_in_bytes():
    spy = Spy()
    run = fit(make_client(FedPer), callbacks=[spy], clients_per_round=3)
    for row, updates in zip(run.rows, spy.updates, strict=True):
        assert row["bytes/up"] == sum(map(num_bytes, updates.values()))
        assert row["bytes/down"] == 3 * num_bytes(run.federation.aggregator.download(0))


def test_training_metrics_are_means_over_samples():
    losses = {}

    class Watch(Spy):
        def on_client_fit_end(self, trainer, federation, client, outcome):
            losses[client] = outcome.metrics["loss"]

    run = fit(make_client(), callbacks=[Watch()], max_rounds=1)
    sizes = {client: run.data.size(client, "train") for client in losses}
    expected = sum(losses[client] * sizes[client] for client in losses) / sum(sizes.values())
    assert run.rows[0]["train/loss"] == pytest.approx(expected)


def test_the_table_of_clients(tmp_path):
    run = fit(make_client(), blobs(30, 20, by_class=True), tmp_path)
    rows = read_csv(run.folder / "clients.csv")
    assert [int(row["client"]) for row in rows] == [0, 1]
    assert [int(row["samples"]) for row in rows] == [run.data.size(client, "train") for client in range(2)]
    assert [int(row["classes"]) for row in rows] == [1, 2]
    assert all(0 <= float(row["test/acc"]) <= 1 for row in rows)


def test_the_summary_selects_on_validation_and_reports_on_test(tmp_path):
    run = fit(make_client(FedPer), root=tmp_path, max_rounds=6, test_every_round=True)
    summary = json.loads((run.folder / "summary.json").read_text())
    best = max(run.rows, key=lambda row: (row["val/acc"], -row["round"]))
    best_test = max(run.rows, key=lambda row: (row["test/acc"], -row["round"]))
    assert summary["selected"] == {name: best[name] for name in ("round", "val/acc", "test/acc")}
    assert summary["best_on_test"] == {name: best_test[name] for name in ("round", "test/acc")}
    assert summary["final"] == {"round": 6, "test/acc": run.rows[-1]["test/acc"]}
    assert (summary["method"], summary["aggregator"], summary["seed"]) == ("FedPer", "WeightedAverage", 3)
    assert set(summary["versions"]) >= {"torch", "lightning", "pfl-lightning"}


@pytest.mark.exhaustive
def test_the_selected_round_is_tested_from_its_checkpoint(tmp_path):
    settings = {"max_rounds": 6, "root": tmp_path}
    every = fit(make_client(FedPer), test_every_round=True, **settings).logger.summary
    once = fit(make_client(FedPer), **settings).logger.summary
    assert every["selected"]["round"] < 6
    assert once["selected"] == every["selected"] and once["final"] == every["final"]
    assert once["best_on_test"] == {"round": None, "test/acc": None}


def test_looking_at_the_selected_round_leaves_the_federation_at_the_last(tmp_path):
    run = fit(make_client(FedPer), root=tmp_path, max_rounds=6)
    assert run.logger.summary["selected"]["round"] < run.federation.round == 6
    tested = {row["client"]: row["test/acc"] for row in run.logger.clients}
    assert {client: values["acc"] for client, values in run.federation.evaluations.results["test"].items()} == tested


def test_rounds_without_validation_are_recorded_too(tmp_path):
    run = fit(make_client(), root=tmp_path, check_val_every_n_epoch=2, max_rounds=5)
    rows = read_csv(run.folder / "rounds.csv")
    assert [row["round"] for row in rows] == list("12345")
    assert [row["val/acc"] != "" for row in rows] == [False, True, False, True, False]
    assert all(row["train/loss"] != "" for row in rows)


def test_the_final_table_is_printed_once(tmp_path, capsys):
    run = fit(make_client(), root=tmp_path)
    printed = capsys.readouterr().out
    assert printed.count("test accuracy, last round") == 1 and str(run.folder) in printed
    assert "FedAvg (client FedAvg, aggregator WeightedAverage)" in printed and "3, 4" in printed


def test_several_loggers_share_one_record(tmp_path):
    loggers = [CSVLogger(tmp_path, name) for name in ("a", "b")]
    fit(make_client(), root=tmp_path, logger=loggers)
    a, b = (read_csv(next(tmp_path.glob(f"{name}/*/metrics.csv"))) for name in "ab")
    assert a == b and len(a) == 3
    assert len(list(tmp_path.rglob("rounds.csv"))) == 1


def test_rows_get_new_columns_and_keep_their_order(tmp_path):
    path = tmp_path / "rows.csv"
    write_rows(path, [{"a": 1}, {"a": 2, "b": 3}])
    append_row(path, {"b": 5, "a": 4})
    assert read_csv(path) == [{"a": "1", "b": ""}, {"a": "2", "b": "3"}, {"a": "4", "b": "5"}]
    assert columns_of([{"x": 1}, {"y": 2, "x": 3}]) == ["x", "y"]
    assert [p.name for p in tmp_path.iterdir()] == ["rows.csv"]


def test_callbacks_get_the_test_at_the_end_before_fit_ends(tmp_path):
    calls = []

    class Watch(Spy):
        def on_final_test(self, trainer, federation, tested):
            calls.append(tested)

        def on_fit_end(self, trainer, federation):
            calls.append("fit_end")

    run = fit(make_client(FedPer), root=tmp_path, max_rounds=6, callbacks=[Watch()])
    tested, end = calls
    assert end == "fit_end"
    assert tested.metrics["test/acc"] == run.logger.summary["final"]["test/acc"]
    assert {row["client"]: row["test/acc"] for row in run.logger.clients} == {
        client: metrics["test/acc"] for client, metrics in tested.clients.items()
    }
    selected = run.logger.summary["selected"]
    assert (tested.selected["round"], tested.selected["test/acc"]) == (selected["round"], selected["test/acc"])


class Calls(Callback):
    """Counts the calls that Python makes in each round, from its start to that of the next one."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def on_train_epoch_start(self, *args: Any) -> None:
        self.counts.append(0)
        sys.setprofile(self.count)

    def count(self, frame: Any, event: str, arg: Any) -> None:
        self.counts[-1] += event in ("call", "c_call")

    def on_train_end(self, *args: Any) -> None:
        sys.setprofile(None)


@pytest.mark.exhaustive
def test_a_round_costs_the_same_however_many_there_were(tmp_path):
    calls = Calls()
    try:
        fit(make_client(), blobs(8, 8), tmp_path, max_rounds=40, callbacks=[calls])
    finally:
        sys.setprofile(None)
    early, late = sorted(calls.counts[5:12])[3], sorted(calls.counts[-8:-1])[3]
    assert late <= 1.01 * early


def a_row(round: int) -> dict[str, Any]:
    values = {name: random.random() for name in TIMES} | {"val/acc": math.inf if round % 7 else 0.1}
    return {"round": round, "cohort": " ".join(map(str, range(round % 5))), "lr": 0.1, **values, "a\u2028b": None}


def test_rows_are_packed_once_and_stay_exactly_as_they_were(tmp_path):
    packed = PackedRows()
    rows: list[dict[str, Any]] = []
    for round in range(1, 1201):
        rows.append(a_row(round))
        state = packed.state(rows)
        if rows[0].pop("lr", None):
            # what was packed isn't looked at again
            given = state
    torch.save(state, tmp_path / "state")
    saved = load(tmp_path / "state")
    assert (tmp_path / "state").stat().st_size < 1200 * 150
    assert saved["packed"].numel() and saved["lines"] and len(saved["lines"]) < PackedRows.SIZE
    unpacked = PackedRows.unpacked(saved)
    assert unpacked == PackedRows.unpacked(given) + rows[1:]
    assert [list(row) for row in unpacked[1:]] == [list(row) for row in rows[1:]]


def test_each_client_has_a_row_a_round_on_request(tmp_path):
    run = fit(make_client(), root=tmp_path, callbacks=[RoundLogger(client_rounds=True)], test_every_round=True)
    rows = read_csv(run.folder / "client_rounds.csv")
    clients = range(run.data.num_clients)
    assert [(int(row["round"]), int(row["client"])) for row in rows] == [(r, c) for r in (1, 2, 3) for c in clients]
    sizes = [run.data.size(client, "val") for client in clients]
    for number, row in enumerate(run.rows):
        own = [float(each["val/acc"]) for each in rows[number * len(sizes) :][: len(sizes)]]
        assert row["val/acc"] == pytest.approx(sum(map(math.prod, zip(own, sizes, strict=True))) / sum(sizes))
    assert {"test/acc", "test/loss", "val/loss"} <= set(rows[0])


def test_clients_of_rounds_are_complete_after_resuming(tmp_path):
    def go(folder, rounds, **settings):
        callbacks = [RoundLogger(client_rounds=True)]
        return fit(make_client(), root=folder, callbacks=callbacks, max_rounds=rounds, **settings)

    whole, half = go(tmp_path / "whole", 4), go(tmp_path / "half", 2)
    later = go(tmp_path / "later", 4, ckpt_path=half.last)
    assert read_csv(later.folder / "client_rounds.csv") == read_csv(whole.folder / "client_rounds.csv")
    assert not (fit(make_client(), root=tmp_path / "without").folder / "client_rounds.csv").exists()


def test_rounds_without_validation_have_no_rows_of_clients(tmp_path):
    callbacks = [RoundLogger(client_rounds=True)]
    run = fit(make_client(), root=tmp_path, callbacks=callbacks, check_val_every_n_epoch=2, max_rounds=3)
    assert {row["round"] for row in read_csv(run.folder / "client_rounds.csv")} == {"2"}


def test_trackers_get_a_curve_per_client_up_to_the_number_asked_for(tmp_path):
    class Tracker(TensorBoardLogger):
        def log_metrics(self, metrics, step=None):
            logged.append(metrics)

    logged: list[dict[str, float]] = []
    for limit in (3, 50):
        loggers = [CSVLogger(tmp_path / str(limit)), Tracker(tmp_path / str(limit))]
        settings = {"logger": loggers, "callbacks": [RoundLogger(client_curves=limit)], "max_rounds": 1}
        settings |= {"test_every_round": True}
        if limit == 3:
            with pytest.warns(UserWarning, match="client_curves=3, but there are 4 clients"):
                run = fit(make_client(), **settings)
            assert not any(name.startswith("client/") for metrics in logged for name in metrics)
        else:
            run = fit(make_client(), **settings)
    curves = [{k: v for k, v in metrics.items() if k.startswith("client/")} for metrics in logged]
    results = run.federation.evaluations.results
    assert [each for each in curves if each] == [
        {
            f"client/{client}/{split}/{name}": results[split][client][name]
            for client in range(4)
            for split in ("val", "test")
            for name in ("acc", "loss")
        }
    ]
    assert not any(name.startswith("client/") for path in tmp_path.rglob("metrics.csv") for name in read_csv(path)[0])


def test_a_negative_number_of_curves_is_refused():
    with pytest.raises(MisconfigurationException, match="client_curves=-1"):
        RoundLogger(client_curves=-1)


def test_settings_made_in_python_are_hyper_parameters(tmp_path):
    run = fit(make_client(FedPer), blobs(seed=7), root=tmp_path, max_rounds=1, cohort=Cyclic(), clients_per_round=2)
    logged = yaml.unsafe_load((run.folder / "hparams.yaml").read_text())
    expected = {
        "method": "FedPer",
        "data.seed": 7,
        "data.partitioner": "Sizes",
        "model.net": "Net",
        "model.optimizer": "SGD",
        "model.optimizer.lr": 0.1,
        "model.optimizer.momentum": 0.9,
        "aggregator.name": run.federation.aggregator.name,
        "trainer.cohort": "Cyclic",
        "trainer.clients_per_round": "2 of 4",
    }
    assert {name: logged.get(name) for name in expected} == expected
    assert logged["data.task"] == "Classification(num_classes=3)"
    assert not {"data", "aggregator"} & set(logged)


def test_the_end_of_a_run_asks_once_for_all_clients(monkeypatch, tmp_path):
    counted, checked = [], []
    count, check = class_counts, Classification.__post_init__
    monkeypatch.setattr("pfl_lightning.data.datamodule.class_counts", lambda *a: counted.append(1) or count(*a))
    monkeypatch.setattr(Classification, "__post_init__", lambda self: checked.append(1) or check(self))
    data = blobs(*[4] * 30)
    run = fit(make_client(), data, tmp_path, max_rounds=1, logger=False)
    assert (len(counted), len(checked) < 10) == (0, True)
    described = [(row["client"], row["samples"], row["classes"]) for row in run.logger.clients]
    counts = [data.counts_of(client, "train") for client in range(30)]
    assert described == [(client, int(own.sum()), int((own > 0).sum())) for client, own in enumerate(counts)]
