"""Federations whose task is no classification: what selects, what is recorded, what resumes."""

import csv
import json
import math

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import MultilabelF1Score

from pfl_lightning import FederatedTrainer
from pfl_lightning.callbacks import ClassPictures, DistributionEstimate, FeaturePictures, RoundLogger
from pfl_lightning.data import IID, Dirichlet
from pfl_lightning.engines import ClientMetrics, evaluation
from pfl_lightning.engines.client_parallel import ClientParallel
from pfl_lightning.engines.vmap.evaluator import BlockEvaluator
from pfl_lightning.federation.evaluation import over_clients
from pfl_lightning.messages import digest
from pfl_lightning.methods import ControlVariates, Ditto, FedAvg, FedPer
from pfl_lightning.nets import Net
from pfl_lightning.tasks import Monitor, MultiLabel, NextToken, Regression
from sweeps import all_but, swept
from tasks_and_data import Kind, OfKind, client_of, drawn, flat, kinds


def fit(kind, method=FedAvg, rounds=3, root=None, client=None, data=None, **settings):
    record = RoundLogger()
    own = {"enable_checkpointing": root is not None, "logger": None if root else False, "engine": "sequential"}
    trainer = FederatedTrainer(
        max_rounds=rounds,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
        default_root_dir=str(root),
        **own | {"callbacks": [record]} | settings.pop("trainer", {}),
    )
    trainer.fit(
        client_of(kind, method) if client is None else client,
        datamodule=OfKind(kind) if data is None else data,
        **settings,
    )
    trainer.record = record
    return trainer


def everything(trainer):
    federation = trainer.lightning_module
    return digest([federation.state_dict(), [state.personal for state in federation.clients.values()]])


@pytest.mark.parametrize("name", ["Regression", "NextToken"])
def test_the_best_round_is_that_of_the_least(name, tmp_path):
    kind = kinds()[name]
    trainer = fit(kind, rounds=4, root=tmp_path)
    column = f"val/{kind.task.monitor}"
    values = [row[column] for row in trainer.record.rows]
    summary = trainer.record.summary
    assert summary["selected"]["round"] == 1 + values.index(min(values))
    assert summary["monitor"] == {"metric": kind.task.monitor, "mode": "min"}
    best = next(tmp_path.rglob("best.ckpt"))
    assert torch.load(best, weights_only=True)["federation"]["round"] == summary["selected"]["round"]
    assert len(set(values)) == len(values)


def test_a_rising_error_keeps_the_first_round(tmp_path):
    kind = kinds()["Regression"]
    wild = Kind(kind.task, kind.x, kind.y, kind.net, rate=1.4)
    trainer = fit(wild, rounds=3, root=tmp_path)
    values = [row["val/mae"] for row in trainer.record.rows]
    assert values.index(min(values)) == 0
    assert trainer.record.summary["selected"]["round"] == 1


def test_spread_and_pooled_values_are_recorded(tmp_path):
    kind = kinds()["Regression"]
    trainer = fit(kind, root=tmp_path, trainer={"test_every_round": True})
    row, summary = trainer.record.rows[-1], trainer.record.summary
    own = [client["test/mae"] for client in trainer.record.clients]
    assert row["test/mae_worst"] == max(own)
    assert row["test/mae_p90"] <= max(own)
    assert {"test/r2", "test/r2_pooled"} <= summary["final"].keys()
    written = json.loads(next(tmp_path.rglob("summary.json")).read_text())
    assert written["final"] == summary["final"]
    columns = next(csv.reader(next(tmp_path.rglob("clients.csv")).open()))
    assert "test/r2" in columns
    assert not any("pooled" in column for column in columns)


def test_the_pooled_value_is_that_of_all_samples():
    kind = kinds()["Regression"]
    trainer = fit(kind, trainer={"test_every_round": True})
    federation = trainer.lightning_module
    model, data = federation.client, federation.data
    model.load_state_dict(federation.state_dict())
    metric = kind.task.pooled()["r2"]
    with torch.no_grad():
        for client in range(data.num_clients):
            part = data.part(client, "test")
            metric.update(model.eval()(part.x), part.y)
    row = trainer.record.rows[-1]
    assert row["test/r2_pooled"] == pytest.approx(float(metric.compute()), rel=1e-6)
    assert row["test/r2_pooled"] != pytest.approx(row["test/r2"], rel=1e-3)


@pytest.mark.parametrize(
    "name", all_but(["MultiLabel", "NextToken"], ["Regression", "MultiLabel", "Segmentation", "NextToken"])
)
@pytest.mark.parametrize(
    "method", swept([FedAvg, FedPer, Ditto, ControlVariates], ("FedPer", "ControlVariates"), lambda m: m.__name__)
)
@pytest.mark.by_default("FedPer-Regression")
def test_a_resumed_run_is_the_whole_run(name, method, tmp_path):
    kind = kinds()[name]
    whole = fit(kind, method, rounds=2, root=tmp_path / "whole")
    fit(kind, method, rounds=1, root=tmp_path / "cut")
    resumed = fit(kind, method, rounds=2, root=tmp_path / "cut", ckpt_path="last")
    assert everything(resumed) == everything(whole)
    assert resumed.record.rows[-1]["val/loss"] == whole.record.rows[-1]["val/loss"]


@pytest.mark.parametrize("name", ["Regression", "NextToken"])
def test_processes_give_the_same_bits(name):
    kind = kinds()[name]
    one, several = (fit(kind, rounds=2, trainer={"engine": engine}) for engine in ("sequential", "processes"))
    assert everything(one) == everything(several)
    assert one.record.rows[-1]["val/loss"] == several.record.rows[-1]["val/loss"]


def test_two_ranks_give_the_same_bits(tmp_path, monkeypatch):
    # what Lightning seeds each rank with anew, if an earlier test has left it
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    kind = kinds()["Regression"]
    one = everything(fit(kind, rounds=2))
    # forks, whose work is in the checkpoint
    ranks = {"devices": 2, "strategy": ClientParallel(start_method="fork")}
    fit(kind, rounds=2, root=tmp_path, trainer=ranks)
    saved = torch.load(next(tmp_path.rglob("last.ckpt")), weights_only=True)
    assert digest([saved["state_dict"], []]) == one


@pytest.mark.parametrize("name", ["Regression", "MultiLabel", "Segmentation", "NextToken"])
def test_clients_are_scored_at_once(name, monkeypatch):
    results = []
    evaluate = BlockEvaluator.evaluate
    monkeypatch.setattr(
        BlockEvaluator, "evaluate", lambda self, *args: results.append(evaluate(self, *args)) or results[-1]
    )
    fit(kinds()[name], trainer={"engine": "vectorised"})
    assert results
    assert None not in results


def test_a_client_s_model_leaves_its_checkpoint(tmp_path):
    kind = kinds()["Regression"]
    trainer = fit(kind, FedPer, root=tmp_path)
    path = next(tmp_path.rglob("last.ckpt"))
    model = FedPer.load_from_checkpoint(path, client=3, net=kind.net)
    assert model.task == kind.task
    part = trainer.lightning_module.data.part(3, "test")
    with torch.no_grad():
        mae = (model.eval()(part.x) - part.y).abs().mean()
    assert float(mae) == pytest.approx(trainer.record.clients[3]["test/mae"], rel=1e-5)


class AsTree(OfKind):
    """The same samples with their columns apart."""

    def load(self):
        x, y = super().load()
        return {"left": x[:, :2], "right": [x[:, 2:]]}, y


class Joins(nn.Module):
    """Puts columns together again."""

    def forward(self, x):
        return torch.cat([x["left"], *x["right"]], 1)


def joining(input_shape, outputs):
    net = flat(8, input_shape, outputs)
    return Net(nn.Sequential(Joins(), net.features), net.classifier)


@pytest.mark.parametrize("engine", ["sequential", "vectorised", "processes", "auto"])
@pytest.mark.by_default("vectorised")
def test_a_tree_gives_what_its_columns_give_together(engine):
    kind = kinds()["Regression"]
    tree = Kind(kind.task, kind.x, kind.y, joining, kind.rate)
    settings = {"max_samples": 120, "central_test": 0.1}
    plain = fit(kind, data=OfKind(kind, **settings), trainer={"engine": engine})
    trees = fit(tree, data=AsTree(tree, **settings), trainer={"engine": engine})
    names = [name for name in plain.record.rows[-1] if name.startswith(("val/", "train/"))]
    for row, other in zip(plain.record.rows, trees.record.rows, strict=True):
        assert [row[name] for name in names] == pytest.approx([other[name] for name in names], rel=1e-6)
    assert "test/global_mae" in trees.record.summary["final"]


def test_another_metric_may_select(tmp_path):
    kind = kinds()["MultiLabel"]
    trainer = fit(kind, root=tmp_path, trainer={"monitor": "val/f1"})
    values = [row["val/f1"] for row in trainer.record.rows]
    assert trainer.record.summary["monitor"] == {"metric": "f1", "mode": "max"}
    assert trainer.record.summary["selected"]["round"] == 1 + values.index(max(values))
    assert {"val/f1_worst", "val/f1_p10"} <= trainer.record.rows[-1].keys()
    assert "val/map_worst" not in trainer.record.rows[-1]


def test_the_loss_may_select(tmp_path):
    trainer = fit(kinds()["Classification"], root=tmp_path, trainer={"monitor": "loss"})
    values = [row["val/loss"] for row in trainer.record.rows]
    assert trainer.record.summary["selected"]["round"] == 1 + values.index(min(values))
    assert next(tmp_path.rglob("best.ckpt"))


def test_what_is_not_measured_selects_nothing():
    with pytest.raises(MisconfigurationException, match=r"monitor='val/auc' .* mae, r2, r2_pooled, loss"):
        fit(kinds()["Regression"], trainer={"monitor": "val/auc"})


class Directionless(Metric):
    higher_is_better = None

    def update(self, outputs, target):
        pass

    def compute(self):
        return torch.tensor(0.0)


class Measured(FedAvg):
    def configure_metrics(self):
        return MetricCollection({"odd": Directionless(), "f1": MultilabelF1Score(4)})


def test_a_metric_without_direction_selects_nothing():
    kind = kinds()["MultiLabel"]
    with pytest.raises(MisconfigurationException, match="monitor='odd': Directionless doesn't say whether more"):
        fit(kind, Measured, trainer={"monitor": "odd"})


def test_model_and_data_of_two_tasks_are_refused():
    kind = kinds()["Regression"]
    other = Kind(Regression(2), kind.x, kind.y, kind.net)
    with pytest.raises(MisconfigurationException, match=r"model\.task=Regression\(quantities=2\), and OfKind has Regr"):
        fit(kind, client=client_of(other, FedAvg))


def test_a_net_whose_outputs_do_not_fit_is_refused():
    kind = kinds()["MultiLabel"]
    narrow = Kind(kind.task, kind.x, kind.y, lambda input_shape, outputs: flat(8, input_shape, 3))
    with pytest.raises(MisconfigurationException, match=r"Net gives outputs of shape \[2, 3\] .* needs shape \[2, 4\]"):
        fit(narrow)


def test_partitioners_by_class_need_strata():
    kind = kinds()["Regression"]

    class Quantiles(OfKind):
        def strata(self, y):
            return (y[:, 0] > y.median()).long()

    with pytest.raises(MisconfigurationException, match="Dirichlet tells samples apart by their class, and task Regr"):
        OfKind(kind, partitioner=Dirichlet(0.5)).setup()
    data = Quantiles(kind, partitioner=Dirichlet(0.1), seed=3)
    data.setup()
    means = [float(data.part(client, "train").y.mean()) for client in range(4)]
    even = OfKind(kind, partitioner=IID())
    even.setup()
    assert max(means) - min(means) > 0.5 + max(float(even.part(client, "train").y.mean()) for client in range(4)) - min(
        float(even.part(client, "train").y.mean()) for client in range(4)
    )


def test_a_client_without_a_value_is_left_out_of_the_mean():
    x = drawn(60, 5)
    y = torch.zeros(60, 4, dtype=torch.int64)
    y[::10] = 1
    kind = Kind(MultiLabel(4), x, y, kinds()["MultiLabel"].net)
    record = fit(kind).record
    row = record.rows[-1]
    assert row["val/map"] == row["val/map"]
    assert row["val/map_clients"] < 4


@pytest.mark.parametrize("callback", [ClassPictures, FeaturePictures, DistributionEstimate])
def test_callbacks_that_look_at_classes_are_refused_without(callback):
    with pytest.raises(MisconfigurationException, match=rf"callback {callback.__name__} .* none; leave it out"):
        fit(kinds()["Regression"], trainer={"callbacks": [callback()]})


@pytest.mark.parametrize("name", ["Segmentation", "NextToken"])
@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_parts_in_pieces_are_evaluated_as_whole(name, engine, monkeypatch):
    kind = kinds()[name]
    whole = fit(kind, trainer={"engine": engine}).record.rows[-1]
    monkeypatch.setattr(evaluation, "OUTPUTS", 3 * kind.task.outputs * kind.y[0].numel())
    pieces = fit(kind, trainer={"engine": engine}).record.rows[-1]
    names = [name for name in whole if name.startswith("val/")]
    assert [pieces[name] for name in names] == pytest.approx([whole[name] for name in names], rel=1e-5)


def test_perplexity_is_of_all_tokens_together_and_the_mean_over_clients_has_its_own_name():
    # mean losses of 1 and 3 over 300 and 100 tokens, of 10 and 90 texts
    losses, tokens = {0: 1.0, 1: 3.0}, {0: 300, 1: 100}
    results = {
        client: {"perplexity": math.exp(loss), "perplexity_pooled": {"total": total * loss, "count": total}}
        for (client, loss), total in zip(losses.items(), map(torch.tensor, tokens.values()), strict=True)
    }
    results[2] = {"perplexity": math.nan, "perplexity_pooled": {"total": torch.tensor(0.0), "count": torch.tensor(0)}}
    task = NextToken(7)
    for monitor in (Monitor("perplexity", "min"), Monitor("loss", "min")):
        found = over_clients(ClientMetrics.of(results), {0: 10, 1: 90, 2: 5}, monitor, task.pooled())
        assert found["perplexity"] == pytest.approx(math.exp(600 / 400))
        assert found["perplexity_mean"] == pytest.approx((math.exp(1) + math.exp(3)) / 2)
        assert found["perplexity_clients"] == 2 and "perplexity_pooled" not in found


def test_a_client_whose_positions_all_do_not_count_is_left_out(monkeypatch):
    kind = kinds()["NextToken"]
    silent = OfKind(kind, seed=2)
    silent.setup()
    rows = silent.division.clients[1]
    kind.y[torch.cat([rows["val"], rows["test"]])] = -100
    row = fit(kind, data=OfKind(kind, seed=2)).record.rows[-1]
    assert row["val/perplexity_clients"] == row["val/loss_clients"] == 3
    assert math.isfinite(row["val/perplexity"])
    assert math.isfinite(row["val/perplexity_mean"]) and "val/perplexity_pooled" not in row


def test_a_client_module_made_for_samples_of_another_shape_is_refused():
    kind = kinds()["Regression"]
    wrong = FedAvg(net=client_of(kind, FedAvg).nets[0], task=kind.task, input_shape=(3, 5))
    with pytest.raises(MisconfigurationException, match=r"model.input_shape=\(3, 5\), and samples of OfKind are \("):
        fit(kind, client=wrong)
