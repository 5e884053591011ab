"""Evaluation of the models that clients have after their own training, with few of them in a round."""

import copy
from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback
from test_evaluation_phases import central
from test_federation import Poison, Poisoned
from torch.optim.lr_scheduler import ExponentialLR

from federations import Spy, blobs, equal, fit, load, make_client, make_trainer, noisy, read_csv, same_end
from pfl_lightning.engines import ClientMetrics, Sequential
from pfl_lightning.federation.evaluation import over_clients
from pfl_lightning.federation.final_test import metrics_at
from pfl_lightning.methods import FedBABU, FedPer
from sweeps import all_but


class Last(Spy):
    """Keeps what each client's training gave last, by round."""

    def __init__(self, initial):
        super().__init__()
        self.last, self.by_round = dict(initial), []

    def on_client_fit_end(self, trainer, federation, client, outcome):
        if outcome.finite:
            self.last[client] = outcome.after

    def on_aggregate_end(self, trainer, federation, logs):
        self.by_round.append(dict(self.last))


def initial(model, data, part="val"):
    """What clients' models are worth before they have trained."""
    trainer = make_trainer(evaluate="after")
    (trainer.validate if part == "val" else trainer.test)(model, datamodule=data, verbose=False)
    results = trainer.lightning_module.evaluations.results
    clients = range(data.num_clients)
    return {k: {name: results[name][k] for name in results if k in results[name]} for k in clients}


def summary(run, metrics, part):
    sizes = {client: run.data.size(client, part) for client in metrics}
    return over_clients(ClientMetrics.of({client: values[part] for client, values in metrics.items()}), sizes)


@pytest.mark.parametrize("method", [FedPer, FedBABU])
@pytest.mark.parametrize("when", ["after", "both"])
@pytest.mark.parametrize("every", all_but([1], [1, 3]))
@pytest.mark.by_default("3-both-FedPer")
def test_every_client_counts_with_the_model_that_it_had_after_its_last_training(method, when, every):
    spy = Last(initial(make_client(method, net=noisy), blobs()))
    settings = {"evaluate": when, "check_val_every_n_epoch": every, "clients_per_round": 1}
    run = fit(make_client(method, net=noisy), callbacks=[spy], **settings)
    assert {client for cohort in spy.cohorts for client in cohort} < {0, 1, 2, 3}
    name = "val" if when == "after" else "val_after"
    validated = [row for row in run.rows if f"{name}/acc" in row]
    assert [row["round"] for row in validated] == ([3] if every == 3 else [1, 2, 3])
    for row in validated:
        expected = summary(run, spy.by_round[row["round"] - 1], "val")
        assert {metric: row[f"{name}/{metric}"] for metric in expected} == expected


def test_nobody_trains_for_an_evaluation_of_a_finished_run(tmp_path):
    class Counted(FedPer):
        steps = 0

        def training_step(self, batch, batch_idx):
            Counted.steps += 1
            return super().training_step(batch, batch_idx)

    settings = {"evaluate": "after", "clients_per_round": 1}
    fit(make_client(Counted), blobs(25, 25), tmp_path, local_steps=3, **settings)
    assert Counted.steps == 9
    trainer = make_trainer(tmp_path, **settings)
    for ckpt_path in ("last", "best"):
        trainer.validate(make_client(Counted), datamodule=blobs(25, 25), ckpt_path=ckpt_path, verbose=False)
        trainer.test(make_client(Counted), datamodule=blobs(25, 25), ckpt_path=ckpt_path, verbose=False)
    assert Counted.steps == 9


@pytest.mark.parametrize("tested", [False, True])
@pytest.mark.by_default("False")
def test_row_table_summary_and_checkpoints_tell_the_same(tested, tmp_path):
    settings = {"evaluate": "after", "test_every_round": tested, "clients_per_round": 1, "max_rounds": 6}
    run = fit(make_client(FedPer, seed=5), root=tmp_path, **settings)
    final, selected = run.logger.summary["final"], run.logger.summary["selected"]
    assert selected["round"] < 6, "choose another seed: validation was best in the last round"
    rows = read_csv(run.folder / "clients.csv")
    sizes = [run.data.size(client, "test") for client in range(4)]
    mean = sum(float(row["test/acc"]) * size for row, size in zip(rows, sizes, strict=True)) / sum(sizes)
    assert final["test/acc"] == pytest.approx(mean)
    trainer = make_trainer(tmp_path, evaluate="after")
    for ckpt_path, expected in (("last", final), ("best", selected)):
        data, model = blobs(), make_client(FedPer)
        (values,) = trainer.test(model, datamodule=data, ckpt_path=ckpt_path, verbose=False)
        assert values["test/acc"] == pytest.approx(expected["test/acc"])
        assert set(trainer.lightning_module.evaluations.results["test"]) == {0, 1, 2, 3}
        if tested:
            assert run.rows[expected["round"] - 1]["test/acc"] == expected["test/acc"]
    best = load(run.folder / "checkpoints" / "best.ckpt")["federation"]["after"]
    assert selected["val/acc"] == summary(run, best, "val")["acc"]


@pytest.mark.parametrize("when", ["after", "both"])
@pytest.mark.by_default("after")
def test_a_resumed_run_knows_what_clients_had_before_it(when, tmp_path):
    settings = {"evaluate": when, "test_every_round": True, "clients_per_round": 1, "max_rounds": 4}
    make = partial(make_client, FedPer, net=noisy, optimizer_lifetime="run")
    spy = Last(initial(make(), blobs()))
    whole = fit(make(), root=tmp_path / "whole", callbacks=[spy], **settings)
    fit(make(), root=tmp_path / "halves", **{**settings, "max_rounds": 2})
    resumed = fit(make(seed=99), root=tmp_path / "halves", ckpt_path="last", resume_changed=True, **settings)
    assert same_end(whole, resumed)
    assert read_csv(whole.folder / "clients.csv") == read_csv(resumed.folder / "clients.csv")
    name = "val" if when == "after" else "val_after"
    assert resumed.rows[-1][f"{name}/loss"] == summary(resumed, spy.by_round[-1], "val")["loss"]


def test_a_client_that_diverges_keeps_its_metrics():
    before = initial(make_client(FedPer), blobs(data=Poisoned))
    poison, spy = Poison({0: {0}, 1: {1, 3}}), Last(before)
    with pytest.warns(UserWarning, match="left out"):
        run = fit(make_client(FedPer), blobs(data=Poisoned), callbacks=[poison, spy], evaluate="after")
    assert spy.by_round[0][0] == before[0] and spy.by_round[1][1] == spy.by_round[0][1]
    for row, last in zip(run.rows, spy.by_round, strict=True):
        # clients that have not trained have the same model, and are evaluated together
        assert row["val/loss"] == pytest.approx(summary(run, last, "val")["loss"], rel=1e-6)


def test_clients_that_never_trained_are_evaluated_with_the_initial_model_as_they_received_it():
    expected = {part: initial(make_client(), blobs(), part) for part in ("val", "test")}
    run = fit(make_client(), evaluate="after", clients_per_round=1)
    trained = {int(client) for row in run.rows for client in row["cohort"].split()}
    kept = run.federation.evaluations.after
    assert len(kept) == 4 and len(trained) < 4
    for client in set(kept) - trained:
        before = expected["val"][client] | expected["test"][client]
        for split, metrics in kept[client].items():
            # a GPU adds in another order for several clients than for one
            assert metrics == pytest.approx(before[split], rel=1e-6)


def test_without_validation_the_last_round_is_of_all_clients_too():
    run = fit(make_client(), blobs(val_fraction=0), evaluate="after", limit_val_batches=0, clients_per_round=1)
    tested = run.federation.evaluations.results["test"]
    assert tested == {client: kept["test"] for client, kept in run.federation.evaluations.after.items()}
    assert set(tested) == {0, 1, 2, 3} and len(run.rows) == 3


def test_a_checkpoint_without_such_metrics_is_refused(tmp_path):
    fit(make_client(), root=tmp_path, max_rounds=1)
    for act in ("fit", "test"):
        trainer = make_trainer(tmp_path, evaluate="after")
        with pytest.raises(
            MisconfigurationException, match=r"trainer\.evaluate=after: the checkpoint is of a run with"
        ):
            getattr(trainer, act)(make_client(), datamodule=blobs(), ckpt_path="last")


def test_a_checkpoint_with_such_metrics_can_be_evaluated_as_received(tmp_path):
    run = fit(make_client(), root=tmp_path, evaluate="both", test_every_round=True)
    trainer = make_trainer(tmp_path)
    (values,) = trainer.test(make_client(), datamodule=blobs(), ckpt_path="last", verbose=False)
    assert values["test/acc"] == pytest.approx(run.rows[-1]["test/acc"])
    assert not any("after" in name for name in values)


# The round that validation selects


class Fails(Sequential):
    """Evaluates no earlier round again."""

    newest = 0

    def evaluate_all(self, jobs):
        for job in jobs:
            if job.round < Fails.newest:
                raise KeyError("what nobody expects")
            Fails.newest = job.round
            yield from super().evaluate_all([job])


def test_an_evaluation_of_a_checkpoint_that_fails_leaves_the_federation_as_it_was(tmp_path):
    trainer = make_trainer(tmp_path, max_rounds=6, engine=Fails)
    with pytest.raises(KeyError, match="what nobody expects"):
        trainer.fit(make_client(FedPer), datamodule=blobs())
    last = load(next(tmp_path.rglob("last.ckpt")))["federation"]
    last.pop("settings")
    assert equal(last, trainer.lightning_module.federation_state()) and last["round"] == 6


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.by_default("before")
def test_the_server_s_model_of_the_selected_round_is_tested_from_its_checkpoint(when, tmp_path):
    settings = {"evaluate": when, "max_rounds": 6, "root": tmp_path}
    every = fit(make_client(net=noisy), central(), test_every_round=True, **settings).logger.summary
    once = fit(make_client(net=noisy), central(), **settings).logger.summary
    assert every["selected"]["round"] < 6, "choose another seed: validation was best in the last round"
    assert once["selected"] == every["selected"] and "test/global_acc" in once["selected"]


def test_a_checkpoint_is_evaluated_without_a_change_of_the_federation(tmp_path):
    model = make_client(FedBABU, net=noisy, lr_scheduler=partial(ExponentialLR, gamma=0.5))
    run = fit(model, root=tmp_path, max_rounds=4, test_every_round=True)
    checkpoint = load(run.folder / "checkpoints" / "best.ckpt")
    round = checkpoint["federation"]["round"]
    federation = run.federation
    before, evaluations = copy.deepcopy(federation.federation_state()), federation.evaluations
    run.back_on_device()
    tested = metrics_at(federation, checkpoint)
    assert round < 4, "choose another seed: validation was best in the last round"
    assert tested == {name: run.rows[round - 1][name] for name in tested} and "test/loss" in tested
    assert equal(before, federation.federation_state()) and federation.evaluations is evaluations


def test_a_best_checkpoint_of_another_round_than_the_selected_one_says_nothing_of_it(tmp_path):
    class Replaced(Callback):
        def on_train_end(self, trainer, federation):
            best = next(tmp_path.rglob("best.ckpt"))
            checkpoint = load(best)
            checkpoint["federation"]["round"] -= 1
            torch.save(checkpoint, best)

    run = fit(make_client(FedPer), root=tmp_path, max_rounds=6, callbacks=[Replaced()])
    assert run.logger.summary["selected"]["round"] < 6 and run.logger.summary["selected"]["test/acc"] is None
