"""Metrics of clients whose samples lack classes, against scikit-learn's of the classes that they have."""

import math

import pytest
import torch
from sklearn.metrics import average_precision_score, roc_auc_score
from torchmetrics import ClasswiseWrapper, MetricCollection
from torchmetrics.classification import (
    BinaryAUROC,
    BinaryAveragePrecision,
    BinaryCohenKappa,
    BinaryMatthewsCorrCoef,
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassAveragePrecision,
    MulticlassCohenKappa,
    MulticlassF1Score,
    MulticlassMatthewsCorrCoef,
    MultilabelAUROC,
    MultilabelAveragePrecision,
)

from federations import CLASSES, blobs, fit, make_client
from pfl_lightning.engines.evaluation import computed_on
from pfl_lightning.methods.fedavg import FedAvg

TARGETS = {"one": [2] * 8, "two": [0, 2, 2, 0, 2, 2, 0, 2], "all": [0, 1, 2, 2, 1, 0, 2, 2]}
OUTPUTS = torch.rand(8, CLASSES, generator=torch.Generator().manual_seed(0)).softmax(1)


def value(metric, outputs, target):
    """Its value, as of a client's evaluation."""
    (only,) = computed_on(MetricCollection({"own": metric}), outputs, target).values()
    return only


def one_vs_rest(score, outputs, having, average, needs_others):
    """scikit-learn's mean over the classes that are there, by columns of zeros and ones."""
    known = [k for k in range(having.shape[1]) if having[:, k].any() and not (needs_others and having[:, k].all())]
    weights = [float(having[:, k].sum()) if average == "weighted" else 1.0 for k in known]
    if not known:
        return math.nan
    values = [score(having[:, k].numpy(), outputs[:, k].numpy()) for k in known]
    return sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)


@pytest.mark.parametrize("classes", TARGETS)
@pytest.mark.parametrize("average", ["macro", "weighted"])
@pytest.mark.parametrize(
    ("metric", "score"), [(MulticlassAUROC, roc_auc_score), (MulticlassAveragePrecision, average_precision_score)]
)
def test_a_mean_over_classes_is_of_those_that_are_there(metric, score, average, classes):
    target = torch.tensor(TARGETS[classes])
    having = torch.nn.functional.one_hot(target, CLASSES)
    expected = one_vs_rest(score, OUTPUTS, having, average, metric is MulticlassAUROC)
    assert value(metric(CLASSES, average=average), OUTPUTS, target) == pytest.approx(expected, nan_ok=True)
    assert math.isnan(expected) == (classes == "one" and metric is MulticlassAUROC)
    # by thresholds, at each of which there is a sample
    fine = metric(CLASSES, average=average, thresholds=sorted({0.0, 1.0, *OUTPUTS.flatten().tolist()}))
    assert value(fine, OUTPUTS, target) == pytest.approx(expected, nan_ok=True, abs=1e-6)


@pytest.mark.parametrize("average", ["macro", "weighted", "micro"])
@pytest.mark.parametrize(
    ("metric", "score"), [(MultilabelAUROC, roc_auc_score), (MultilabelAveragePrecision, average_precision_score)]
)
def test_a_mean_over_labels_is_of_those_that_are_there(metric, score, average):
    # of the labels one is nobody's and one is everybody's
    having = torch.tensor([[0, 1, k % 2] for k in range(8)])
    flat = (OUTPUTS.reshape(-1, 1), having.reshape(-1, 1)) if average == "micro" else (OUTPUTS, having)
    expected = one_vs_rest(score, *flat, average, metric is MultilabelAUROC)
    assert value(metric(CLASSES, average=average), OUTPUTS, having) == pytest.approx(expected)
    nobody = torch.zeros_like(having)
    assert math.isnan(value(metric(CLASSES, average=average), OUTPUTS, nobody))


@pytest.mark.parametrize("thresholds", [None, 5])
def test_two_classes_are_needed_and_a_precision_needs_its_own(thresholds):
    scores, both = OUTPUTS[:, 0], torch.tensor([0, 1] * 4)
    none, only = torch.zeros_like(both), torch.ones_like(both)
    areas = [value(BinaryAUROC(thresholds=thresholds), scores, y) for y in (none, only, both)]
    precisions = [value(BinaryAveragePrecision(thresholds=thresholds), scores, y) for y in (none, only, both)]
    assert [math.isnan(area) for area in areas] == [True, True, False]
    assert [math.isnan(precision) for precision in precisions] == [True, False, False] and precisions[1] == 1
    if thresholds is None:
        assert areas[2] == pytest.approx(roc_auc_score(both, scores))


def test_agreement_beyond_chance_needs_two_classes():
    for metric in (MulticlassCohenKappa, MulticlassMatthewsCorrCoef):
        values = {name: value(metric(CLASSES), OUTPUTS, torch.tensor(y)) for name, y in TARGETS.items()}
        assert [math.isnan(each) for each in values.values()] == [True, False, False]
    for metric in (BinaryCohenKappa, BinaryMatthewsCorrCoef):
        assert math.isnan(value(metric(), OUTPUTS[:, 0], torch.zeros(8, dtype=torch.int64)))
    assert value(MulticlassF1Score(CLASSES), OUTPUTS, torch.tensor(TARGETS["one"])) >= 0


def test_values_of_each_class_are_of_those_that_are_there():
    wrapped = ClasswiseWrapper(MulticlassAUROC(CLASSES, average=None))
    values = computed_on(MetricCollection({"own": wrapped}), OUTPUTS, torch.tensor(TARGETS["two"]))
    assert [math.isnan(each) for each in values.values()] == [False, True, False]


def test_a_metric_of_the_user_s_own_is_left_as_it_is():
    class Own(BinaryAUROC):
        def compute(self):
            return super().compute() + 7

    assert value(Own(), OUTPUTS[:, 0], torch.zeros(8, dtype=torch.int64)) == 7


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_a_client_of_one_class_is_left_out_of_a_mean(engine):
    class Measured(FedAvg):
        def configure_metrics(self):
            # they have one state, so that torchmetrics updates it once
            areas = {"area": MulticlassAUROC(CLASSES), "precision": MulticlassAveragePrecision(CLASSES)}
            return MetricCollection({"acc": MulticlassAccuracy(CLASSES, average="micro"), **areas})

    data = blobs(30, 60, 30, by_class=True)
    run = fit(make_client(Measured), data, max_rounds=1, engine=engine, monitor="area")
    of_clients, summary = run.test(), run.federation.evaluations.summary()
    known = [client for client in range(3) if len(data.part(client, "test").y.unique()) > 1]
    assert known == [1] == [client for client, values in of_clients.items() if not math.isnan(values["area"])]
    assert summary["test/area_clients"] == 1 and run.rows[-1]["val/area_clients"] == 1
    assert summary["test/area"] == summary["test/area_worst"] == of_clients[1]["area"]
    assert not math.isnan(summary["test/precision"]) and "test/precision_clients" not in summary
