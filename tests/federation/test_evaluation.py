import copy
from contextlib import nullcontext

import pytest
import torch
from lightning.pytorch import Callback
from torch.nn import functional as F

from federations import Spy, blobs, equal, fit, make_client, make_trainer, noisy, points
from pfl_lightning.data import CHUNK, Samples
from pfl_lightning.engines.evaluation import evaluate
from pfl_lightning.federation.summary import over_clients
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
    summary = over_clients(results, {1: 10, 4: 30})
    assert summary["acc"] == pytest.approx(0.35) and summary["loss"] == pytest.approx(2.5)
    assert summary["acc_mean"] == pytest.approx(0.5) and summary["acc_std"] == pytest.approx(0.3)
    assert summary["acc_worst"] == 0.2 and summary["acc_p10"] == pytest.approx(0.26)
    assert summary["acc_worst10"] == 0.2
    assert over_clients({}, {}) == {}


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


@pytest.mark.parametrize("data", [{}, {"val_fraction": 0}], ids=["validated", "not-validated"])
def test_rounds_are_tested_as_often_as_they_are_validated(data):
    run = fit(make_client(), blobs(**data), test_every_round=True, check_val_every_n_epoch=2, max_rounds=4)
    assert ["test/acc" in row for row in run.rows] == [False, True] * 2


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_evaluation_leaves_the_global_generator_where_it_was(when):
    run = fit(make_client(net=noisy), evaluate=when)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    run.test()
    assert torch.equal(torch.rand(3), expected)
