import copy
import math
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback
from torch.nn import functional as F

from federations import Blobs, Pause, Spy, blobs, equal, fit, make_client, make_trainer, noisy, points
from pfl_lightning.aggregators import WeightedAverage
from pfl_lightning.callbacks import RoundLogger
from pfl_lightning.data import CHUNK, Samples
from pfl_lightning.engines import ClientMetrics, ClientState, Job
from pfl_lightning.engines.evaluation import evaluate
from pfl_lightning.federation import federation
from pfl_lightning.federation.evaluation import alike, all_alike, margin, over_clients
from pfl_lightning.methods import FedPer


def test_metrics_are_those_of_the_whole_part_whatever_the_chunks():
    model = make_client(net=noisy)
    part = Samples(*points(CHUNK + 300, seed=2))
    values = evaluate(model, part, model.configure_metrics(), nullcontext)
    model.eval()
    logits = model(part.x)
    assert values["acc"] == pytest.approx(float((logits.argmax(1) == part.y).float().mean()))
    assert values["loss"] == pytest.approx(float(F.cross_entropy(logits, part.y)), rel=1e-5)


def test_evaluation_restores_the_mode_and_moves_no_statistics():
    model = make_client(net=noisy).train()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    evaluate(model, Samples(*points(10, seed=2)), model.configure_metrics(), nullcontext)
    assert model.training and model.net.training
    assert equal(before, dict(model.state_dict()))


def test_metrics_do_not_add_up_over_clients():
    model = make_client()
    metrics = model.configure_metrics()
    parts = [Samples(*points(10, seed=seed)) for seed in (2, 3)]
    once = [evaluate(model, part, model.configure_metrics(), nullcontext) for part in parts]
    assert [evaluate(model, part, metrics, nullcontext) for part in parts] == once


def test_summary_by_hand():
    results = {4: {"acc": 0.2, "loss": 3.0}, 1: {"acc": 0.8, "loss": 1.0}}
    summary = over_clients(ClientMetrics.of(results), {1: 10, 4: 30})
    assert summary["acc"] == pytest.approx(0.35) and summary["loss"] == pytest.approx(2.5)
    assert summary["acc_mean"] == pytest.approx(0.5) and summary["acc_std"] == pytest.approx(0.3)
    assert summary["acc_worst"] == 0.2 and summary["acc_p10"] == pytest.approx(0.26)
    assert summary["acc_worst10"] == 0.2
    assert over_clients(ClientMetrics(), {}) == {}


def test_clients_with_one_model_are_evaluated_together_up_to_a_number_of_samples(monkeypatch):
    monkeypatch.setattr("pfl_lightning.federation.evaluation.CHUNK", 10)
    common, sizes = (ClientState(), {"weights": torch.zeros(1)}), dict(enumerate([3, 4, 3, 1, 9, 10, 2, 25, 5, 5]))

    def job_of(client, splits, received=common):
        return Job(client, 0, *received, data=None, seed=0)

    jobs = list(all_alike(sizes, ("test",), job_of, common))
    assert [(job.client, *job.alike) for job in jobs] == [(0, 1, 2), (3, 4), (5,), (6,), (7,), (8, 9)]
    # as where each client's model is looked at
    one_by_one = list(alike(sizes, ("test",), job_of, lambda client: common))
    assert [(job.client, job.alike) for job in jobs] == [(job.client, job.alike) for job in one_by_one]


def test_both_records_both():
    before, after = (fit(make_client(FedPer), evaluate=when).rows for when in ("before", "after"))
    for both, b, a in zip(fit(make_client(FedPer), evaluate="both").rows, before, after, strict=True):
        assert both["val/loss"] == b["val/loss"] != a["val/loss"] == both["val_after/loss"]


def test_without_asking_nothing_is_evaluated_after_training():
    after = []

    class Watch(Spy):
        def on_client_fit_end(self, trainer, federation, client, outcome):
            after.append(outcome.after)

    run = fit(make_client(FedPer), callbacks=[Watch()])
    assert after == [{}] * 12 and not run.federation.evaluations.after


@pytest.mark.parametrize("when", ["before", "after", "both"])
@pytest.mark.by_default("after")
def test_test_parts_are_evaluated_every_round_where_asked(when):
    asked = fit(make_client(FedPer), evaluate=when, test_every_round=True)
    assert all({"val/acc", "test/acc", "test/acc_std", "test/acc_worst"} <= set(row) for row in asked.rows)
    assert all(("test_after/acc" in row) == (when == "both") for row in asked.rows)
    unasked = fit(make_client(FedPer), evaluate=when)
    assert not any(name.startswith("test") for row in unasked.rows for name in row)
    assert asked.rows[-1]["val/loss"] == unasked.rows[-1]["val/loss"]


@pytest.mark.parametrize("when", ["before", "after", "both"])
def test_validating_a_federation_trains_nobody_and_covers_all_clients(when):
    model, data = make_client(FedPer, net=noisy, optimizer_lifetime="run"), blobs()
    trainer = make_trainer(evaluate=when, clients_per_round=1)
    trainer.fit(model, datamodule=data)
    federation = trainer.lightning_module
    before = copy.deepcopy(federation.federation_state())
    (values,) = trainer.validate(model, datamodule=data, verbose=False)
    assert equal(before, federation.federation_state())
    assert set(federation.evaluations.results["val"]) == {0, 1, 2, 3}
    assert ("val_after/acc" in values) == (when == "both")
    (again,) = trainer.validate(model, datamodule=data, verbose=False)
    assert values == again


def test_testing_tells_what_the_record_says():
    model, data = make_client(FedPer), blobs()
    trainer = make_trainer()
    trainer.fit(model, datamodule=data)
    (values,) = trainer.test(model, datamodule=data, verbose=False)
    record = next(c for c in trainer.callbacks if hasattr(c, "rows"))
    assert values["test/acc"] == pytest.approx(record.summary["final"]["test/acc"])


def test_a_federation_without_validation_or_test_parts_runs():
    run = fit(make_client(), blobs(val_fraction=0, test_fraction=0), limit_val_batches=0)
    assert len(run.rows) == 3 and not any(name.startswith(("val/", "test/")) for name in run.rows[0])
    assert run.logger.summary["final"]["test/acc"] is None


@pytest.mark.parametrize(
    ("data", "settings"),
    [({"val_fraction": 0}, {}), ({}, {"limit_val_batches": 0})],
    ids=["no-samples", "no-validation"],
)
@pytest.mark.parametrize("engine", ["sequential", "vectorised", "processes"])
@pytest.mark.by_default("sequential-no-samples", "vectorised-no-samples", "processes-no-samples")
def test_rounds_are_tested_without_validation_too(data, settings, engine, tmp_path):
    watch = WatchedMetric()
    settings = {"test_every_round": True, "engine": engine, **settings}
    run = fit(make_client(FedPer), blobs(**data), tmp_path, callbacks=[watch], **settings)
    assert all({"test/acc", "test/acc_worst", "time/evaluate"} <= set(row) for row in run.rows)
    assert not any(name.startswith("val/") for row in run.rows for name in row)
    assert [row["test/acc"] for row in run.rows] == pytest.approx(watch.seen)
    best = run.logger.summary["best_on_test"]
    assert best["test/acc"] == max(row["test/acc"] for row in run.rows)
    if data:
        return
    validated = fit(make_client(FedPer), test_every_round=True, engine=engine)
    assert [row["test/acc"] for row in run.rows] == [row["test/acc"] for row in validated.rows]


class WatchedMetric(Callback):
    """Looks for the metric where callbacks that monitor it do."""

    def __init__(self):
        self.seen = []

    def on_train_epoch_end(self, trainer, federation):
        self.seen.append(float(trainer.callback_metrics["test/acc"]))


@pytest.mark.parametrize(
    ("data", "settings"),
    [({}, {}), ({"val_fraction": 0}, {}), ({}, {"limit_val_batches": 0})],
    ids=["validated", "no-samples", "no-validation"],
)
def test_rounds_are_tested_once_and_as_often_as_they_are_validated(data, settings, monkeypatch):
    evaluate, measured = federation.Federation._evaluate_round, []

    def watched(self, *args):
        measured.append(self.round)
        return evaluate(self, *args)

    monkeypatch.setattr(federation.Federation, "_evaluate_round", watched)
    settings = {"test_every_round": True, "check_val_every_n_epoch": 2, **settings}
    run = fit(make_client(), blobs(**data), max_rounds=4, **settings)
    assert ["test/acc" in row for row in run.rows] == [False, True] * 2
    assert measured == [2, 4]


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_evaluation_leaves_the_global_generator_where_it_was(when):
    run = fit(make_client(net=noisy), evaluate=when)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    run.test()
    assert torch.equal(torch.rand(3), expected)


SAMPLED = {"evaluate_clients": 3, "clients_per_round": 2, "test_every_round": True}
"""Settings of a run whose rounds evaluate three of eight clients."""


def many(**settings):
    return blobs(*[12] * 8, **{"val_fraction": 0.2, "test_fraction": 0.2, **settings})


def sampled(root="unused", **settings):
    own = SAMPLED | {"callbacks": [RoundLogger(client_rounds=True)]}
    return fit(make_client(FedPer), many(), root=root, **own | settings)


def seen(run):
    """The evaluated clients of each round."""
    rows = run.logger.client_rows
    return [[each["client"] for each in rows if each["round"] == row["round"]] for row in run.rows]


def test_a_round_evaluates_a_sample_of_the_clients_and_the_last_test_all():
    run = sampled(max_rounds=4)
    assert all(len(set(clients)) == 3 for clients in seen(run)) and len(set(map(tuple, seen(run)))) > 1
    assert [row["clients_evaluated"] for row in run.rows] == [3] * 4
    assert all("test/acc" in row for row in run.logger.clients) and len(run.logger.clients) == 8
    everybody = fit(make_client(FedPer), many(), **SAMPLED | {"evaluate_clients": 1.0, "max_rounds": 4})
    assert "clients_evaluated" not in everybody.rows[0] and "val/acc_margin" not in everybody.rows[0]
    assert equal(run.weights, everybody.weights)
    assert run.logger.clients == everybody.logger.clients
    # the sample's mean, with its own margin
    sizes = {client: run.data.size(client, "val") for client in range(8)}
    own = {each["client"]: each["val/acc"] for each in run.logger.client_rows if each["round"] == 1}
    mean = sum(sizes[k] * own[k] for k in own) / sum(sizes[k] for k in own)
    assert run.rows[0]["val/acc"] == pytest.approx(mean)
    assert run.rows[0]["val/acc_margin"] == pytest.approx(margin([*own.values()], [sizes[k] for k in own], 8))
    # all clients where nobody trains
    assert len(run.trainer.validate(verbose=False)) == 1 and len(run.federation.evaluations.results["val"]) == 8


@pytest.mark.parametrize("engine", ["vectorised", "processes", "auto"])
@pytest.mark.by_default("vectorised")
def test_the_sample_is_that_of_every_engine(engine):
    assert seen(sampled(engine=engine)) == seen(sampled())


@pytest.mark.parametrize("when", ["before", "after", "both"])
def test_the_sample_is_that_of_a_resumed_run(when, tmp_path):
    settings = {"max_rounds": 4, "evaluate": when}
    whole = sampled(tmp_path / "whole", **settings)
    sampled(tmp_path / "two", callbacks=[RoundLogger(client_rounds=True), Pause(2)], **settings)
    (path,) = (tmp_path / "two").rglob("last.ckpt")
    resumed = sampled(tmp_path / "two", ckpt_path=path, **settings)
    assert seen(resumed) == seen(whole) and len(seen(whole)) == 4
    timed = ("time/train", "time/aggregate", "time/evaluate")
    for one, other in zip(whole.rows, resumed.rows, strict=True):
        assert {k: v for k, v in one.items() if k not in timed} == {k: v for k, v in other.items() if k not in timed}


def test_the_selected_round_is_tested_on_all_clients(tmp_path):
    run = sampled(tmp_path, max_rounds=4)
    selected = run.logger.summary["selected"]
    # by the sample's validation, as ModelCheckpoint and EarlyStopping see it
    assert selected["val/acc"] == max(row["val/acc"] for row in run.rows)
    (best,) = run.folder.rglob("best.ckpt")
    run.trainer.test(ckpt_path=best, verbose=False)
    own = run.federation.evaluations.results["test"]
    assert len(own) == 8
    assert selected["test/acc"] == pytest.approx(over_clients(own, dict.fromkeys(own, 1))["acc"], abs=1e-6)


def test_other_samples_may_not_continue_a_run(tmp_path):
    run = sampled(tmp_path, max_rounds=1)
    with pytest.raises(MisconfigurationException, match="evaluate_clients"):
        sampled(tmp_path, max_rounds=2, ckpt_path=run.last, evaluate_clients=4)


@pytest.mark.parametrize("part", [0, -1, 0.0, 1.5, 9, "3", None, True])
def test_impossible_samples_are_refused(part):
    with pytest.raises(MisconfigurationException, match=f"trainer.evaluate_clients={part!r}"):
        sampled(evaluate_clients=part)


def test_a_sample_is_of_clients_with_samples():
    class Few(Blobs):
        def size(self, client, split):
            return super().size(client, split) if split == "train" or client in (2, 5) else 0

        def parts(self, clients, split, device="cpu"):
            whole = super().parts(clients, split, device)
            return [part.take(slice(self.size(k, split))) for k, part in zip(clients, whole, strict=True)]

    run = fit(make_client(), many(data=Few), callbacks=[RoundLogger(client_rounds=True)], evaluate_clients=1)
    assert all(clients in ([2], [5]) for clients in seen(run))
    assert all(math.isnan(row["val/acc_margin"]) for row in run.rows)
    run = fit(make_client(), many(data=Few), callbacks=[RoundLogger(client_rounds=True)], evaluate_clients=0.5)
    assert seen(run) == [[2, 5]] * 3 and [row["val/acc_margin"] for row in run.rows] == [0.0] * 3


def test_the_margin_covers_the_mean_of_all_clients():
    random = np.random.default_rng(0)
    weights = random.integers(1, 30, 200)
    values = random.beta(2, 1, 200) * (1 + weights / 60)
    mean = np.average(values, weights=weights)
    covered, widths = [], []
    for _ in range(1000):
        drawn = random.choice(200, 60, replace=False)
        width = margin(values[drawn], weights[drawn], 200)
        covered.append(abs(np.average(values[drawn], weights=weights[drawn]) - mean) <= width)
        widths.append(width)
    assert np.mean(covered) == pytest.approx(0.945, abs=0.02)
    # without the correction for a finite population, the interval would be 1.2 times as wide
    assert margin(values[:60], weights[:60], 10**9) / margin(values[:60], weights[:60], 200) == pytest.approx(0.7**-0.5)


def test_nobody_is_tested_where_there_is_nothing_to_test(monkeypatch):
    def parts(self, clients, split, device="cpu", before=Blobs.parts):
        assert split == "train"
        return before(self, clients, split, device)

    monkeypatch.setattr(Blobs, "parts", parts)
    run = fit(make_client(), many(val_fraction=0, test_fraction=0))
    assert all("test/acc" not in row for row in run.logger.clients) and len(run.logger.clients) == 8


@pytest.mark.parametrize("seconds", [1.0, 100.0])
def test_what_takes_most_of_the_time_is_told_once(seconds, monkeypatch, caplog):
    before = federation.Evaluations.evaluate

    def slow(self, *args):
        before(self, *args)
        clock.now += seconds

    clock = SimpleNamespace(now=0.0)
    clock.perf_counter = lambda: clock.now
    monkeypatch.setattr(federation, "time", clock)
    monkeypatch.setattr(federation.Evaluations, "evaluate", slow)
    with caplog.at_level("INFO"):
        fit(make_client(), max_rounds=3, check_val_every_n_epoch=1)
    told = [record.message for record in caplog.records if "check_val_every_n_epoch=5" in record.message]
    assert len(told) == (seconds > 10)
    # of four clients there is nobody to leave out
    assert not any("evaluate_clients" in text for text in told)


class Telling(WeightedAverage):
    """Sends some clients a model of their own."""

    def __init__(self, look):
        super().__init__()
        self.look = look

    def download(self, client):
        weights = super().download(client)["weights"]
        return {"weights": {name: tensor + 1 for name, tensor in weights.items()} if self.look(client) else weights}


@pytest.mark.parametrize(
    "look",
    [
        lambda client: client == 2,
        lambda client: client,
        lambda client: client > 0,
        lambda client: client in {2},
        lambda client: client in [2],
        lambda client: [0, 0, 1, 0][client],
        lambda client: f"client {client}" == "client 2",
        lambda client: str(client) == "2",
        lambda client: {2: True}.get(client, False),
    ],
)
def test_a_server_is_asked_for_each_client_where_it_looks_at_the_client(look):
    run = fit(make_client(), aggregator=Telling(look), test_every_round=True)
    assert run.federation.received_by_all() is None
    models = {client: bool(look(client)) for client in range(4)}
    tested = run.federation.evaluations.results["test"]
    job = run.federation.job
    alone = {k: run.federation.engines[0].evaluate(job(k, ("test",)))["test"]["loss"] for k in models}
    assert {k: tested[k]["loss"] for k in models} == pytest.approx(alone, rel=1e-5)


def test_it_is_asked_once_where_all_get_the_same_and_keep_nothing():
    asked = []

    class Counting(WeightedAverage):
        def download(self, client):
            asked.append(client)
            return super().download(client)

    run = fit(make_client(), aggregator=Counting(), max_rounds=1)
    asked.clear()
    run.trainer.test(verbose=False)
    assert not {1, 2, 3} & {client for client in asked if isinstance(client, int)}
    assert run.federation.received_by_all() is not None
    assert fit(make_client(FedPer), max_rounds=1).federation.received_by_all() is None
