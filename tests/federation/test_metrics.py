"""Metrics that client modules configure: how they are named, what is refused, and what NaN does."""

import math

import pytest
import torch
import torchmetrics
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score, MulticlassRecall

from federations import CLASSES, blobs, fit, make_client, read_csv
from pfl_lightning.callbacks import FederatedCallback
from pfl_lightning.engines import ClientMetrics
from pfl_lightning.federation.evaluation import over_clients
from pfl_lightning.methods.fedavg import FedAvg

ENGINES = ["sequential", "vectorised"]


def measured_by(*metrics, **named):
    """A client module with these metrics, or with this one alone."""

    class Measured(FedAvg):
        def configure_metrics(self):
            return metrics[0] if metrics else MetricCollection(named)

    return make_client(Measured)


def accuracy():
    return MulticlassAccuracy(CLASSES, average="micro")


class Found(Metric):
    """The share of a class's samples that is found; NaN where there are none."""

    def __init__(self, number):
        super().__init__()
        self.number = number
        for name in ("right", "all"):
            self.add_state(name, torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, logits, target):
        mine = target == self.number
        self.right += (logits.argmax(1)[mine] == self.number).sum()
        self.all += mine.sum()

    def compute(self):
        return self.right / self.all


# What it takes


def test_a_mistake_in_configure_metrics_is_named():
    class Typo(FedAvg):
        def configure_metrics(self):
            return torchmetrics.NoSuchMetric()

    with pytest.raises(RuntimeError, match=r"Typo can't be set up: .*NoSuchMetric"):
        fit(make_client(Typo))


def test_a_single_accuracy_is_the_accuracy(tmp_path):
    one, plain = fit(measured_by(accuracy()), root=tmp_path), fit(make_client())
    assert [row["val/acc"] for row in one.rows] == [row["val/acc"] for row in plain.rows]
    assert one.logger.summary["selected"]["round"] is not None


def test_another_single_metric_has_the_name_of_its_class():
    run = fit(measured_by(MulticlassF1Score(CLASSES)))
    assert {"val/MulticlassF1Score", "val/loss"} == {name for name in run.rows[0] if name.startswith("val/")}
    assert run.logger.summary["selected"]["round"] is None


def test_without_the_metric_by_which_rounds_are_selected_no_round_begins(tmp_path):
    class Watch(FederatedCallback):
        def on_round_start(self, *args):
            raise AssertionError("a round has begun")

    words = (
        r"Measured\.configure_metrics has MulticlassF1Score and no acc, by which the best round is kept; name another"
    )
    with pytest.raises(MisconfigurationException, match=words):
        fit(measured_by(MulticlassF1Score(CLASSES)), root=tmp_path, callbacks=[Watch()])


def test_what_is_no_metric_is_refused():
    with pytest.raises(MisconfigurationException, match=r"Measured\.configure_metrics gives a dict; return a"):
        fit(measured_by({"acc": accuracy()}))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_metric_that_is_no_number_is_refused_by_its_name(engine):
    recall = MulticlassRecall(CLASSES, average=None)
    with pytest.raises(
        MisconfigurationException, match=r"recall gives values of shape \[3\] and not a number; take its"
    ):
        fit(measured_by(acc=accuracy(), recall=recall), engine=engine)
    with pytest.raises(MisconfigurationException, match="roc gives a tuple and not a number"):
        fit(measured_by(acc=accuracy(), roc=torchmetrics.classification.MulticlassROC(CLASSES)), engine=engine)


def test_wrapped_by_class_it_is_recorded_by_class(tmp_path):
    recall = torchmetrics.ClasswiseWrapper(MulticlassRecall(CLASSES, average=None), prefix="recall_")
    run = fit(measured_by(acc=accuracy(), recall=recall), root=tmp_path, engine="vectorised", test_every_round=True)
    named = [f"recall_{number}" for number in range(CLASSES)]
    assert all({f"val/{name}" for name in named} <= set(row) for row in run.rows)
    rows = read_csv(run.folder / "clients.csv")
    assert all(0 <= float(row[f"test/{name}"]) <= 1 for row in rows for name in named)


# What isn't defined for some


@pytest.mark.parametrize("engine", ENGINES)
def test_clients_without_a_value_are_left_out_of_the_mean_and_counted(engine):
    # of the three clients two hold a class alone
    data = blobs(40, 40, 40, by_class=True, test_fraction=0.3)
    run = fit(measured_by(acc=accuracy(), found=Found(1)), data, engine=engine, test_every_round=True)
    found = {client: values["found"] for client, values in run.federation.evaluations.results["test"].items()}
    assert [math.isnan(found[client]) for client in range(3)] == [True, False, True]
    row = run.rows[-1]
    assert row["test/found"] == found[1] and row["test/found_clients"] == 1
    assert "test/acc_clients" not in row and "test/loss_clients" not in row


def test_a_summary_is_over_those_that_have_a_value():
    nothing = math.nan
    results = {0: {"acc": 0.2, "f1": 0.4}, 1: {"acc": nothing, "f1": 0.8}, 2: {"acc": 0.6}}
    summary = over_clients(ClientMetrics.of(results), {0: 10, 1: 50, 2: 30})
    expected = {"acc": 0.5, "acc_mean": 0.4, "acc_std": 0.2, "acc_worst": 0.2, "acc_p10": 0.24, "acc_worst10": 0.2}
    assert summary == pytest.approx(expected | {"acc_clients": 2, "f1": 44 / 60, "f1_clients": 2})


def test_where_nobody_has_a_value_there_is_none():
    summary = over_clients(ClientMetrics([([0, 1], {"acc": [math.nan, math.nan]})]), {0: 10, 1: 50})
    assert summary.pop("acc_clients") == 0
    assert list(summary) == ["acc", "acc_mean", "acc_std", "acc_worst", "acc_p10", "acc_worst10"]
    assert all(map(math.isnan, summary.values()))


class Undefined(MulticlassAccuracy):
    """Has no value in the first round."""

    now = True

    def compute(self):
        return super().compute() * (math.nan if Undefined.now else 1)


class FirstRound(FederatedCallback):
    def on_round_start(self, trainer, federation, cohort):
        Undefined.now = federation.round == 0


def test_a_round_without_a_value_is_never_the_best(tmp_path):
    settings = {"root": tmp_path, "callbacks": [FirstRound()], "test_every_round": True}
    run = fit(measured_by(Undefined(CLASSES, average="micro")), **settings)
    assert math.isnan(run.rows[0]["val/acc"]) and run.rows[0]["val/acc_clients"] == 0
    summary = run.logger.summary
    assert summary["selected"]["val/acc"] == max(row["val/acc"] for row in run.rows[1:])
    assert summary["best_on_test"]["test/acc"] == max(row["test/acc"] for row in run.rows[1:])
