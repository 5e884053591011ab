"""Metrics of classification against scikit-learn's, where classes are absent, and added up over clients."""

import json
import math
from typing import get_args

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from sklearn import metrics as sk

from federations import CLASSES, Blobs, blobs, fit, load, make_client
from pfl_lightning.callbacks import RoundLogger
from pfl_lightning.engines.evaluation import pooled_value, state_of
from pfl_lightning.methods import FedAvg
from pfl_lightning.tasks import Classification, MultiLabel
from pfl_lightning.tasks.classification import ClassMetric
from pfl_lightning.tasks.plain import hparams, made, plain
from tasks_and_data import drawn, labels

ALL = get_args(ClassMetric)


def measured(task, outputs, y):
    """Values of two chunks; logits between 0 and 1 in the first, which are no probabilities either."""
    made = task.configure_metrics()
    for rows in (slice(9), slice(9, None)):
        if len(y[rows]):
            made.update(outputs[rows], y[rows])
    return {name: float(value) for name, value in made.compute().items()}


def outputs_of(n, classes):
    outputs = drawn(n, classes)
    outputs[:9] = outputs[:9].abs().clamp(max=1)
    # ties
    outputs[20:30] = outputs[10:20]
    return outputs


@pytest.mark.parametrize("classes", [2, 4])
def test_values_are_scikit_learn_s(classes):
    outputs, y = outputs_of(80, classes), labels(80, classes=classes)
    y = y[:, 0] if y.dim() > 1 else y
    values = measured(Classification(classes, ALL), outputs, y)
    p, predicted = outputs.double().softmax(1).numpy(), outputs.argmax(1)
    of, one_hot = {"average": "binary" if classes == 2 else "macro"}, np.eye(classes)[y]
    negatives = [float(((predicted != k) & (y != k)).sum() / (y != k).sum()) for k in range(classes)]
    expected = {
        "acc": sk.accuracy_score(y, predicted),
        "balanced_acc": sk.balanced_accuracy_score(y, predicted),
        "auroc": sk.roc_auc_score(y, p[:, 1] if classes == 2 else p, multi_class="ovr"),
        "average_precision": sk.average_precision_score(*((y, p[:, 1]) if classes == 2 else (one_hot, p))),
        "f1": sk.f1_score(y, predicted, **of),
        "precision": sk.precision_score(y, predicted, **of),
        "recall": sk.recall_score(y, predicted, **of),
        "specificity": negatives[1] if classes == 2 else np.mean(negatives),
        "brier": ((p - one_hot) ** 2).sum(1).mean(),
    }
    assert {name: values[name] for name in expected} == pytest.approx(expected, rel=1e-6)


def test_the_calibration_error_by_hand():
    # probabilities .75, .75 and .6 of the predicted class, one of the first two is right, and the last
    logit = torch.tensor([3.0, 3.0, 1.5]).log()
    outputs = torch.stack([logit, torch.zeros(3)], 1)
    values = measured(Classification(2, ("ece",)), outputs, torch.tensor([0, 1, 0]))
    assert values["ece"] == pytest.approx(abs(1 - 1.5) / 3 + abs(1 - 0.6) / 3)


def test_samples_of_one_class_have_no_area_and_no_nan_where_there_is_a_value():
    outputs = outputs_of(40, 2)
    for y, undefined in (
        (torch.zeros(40), {"auroc", "average_precision", "recall"}),
        (torch.ones(40), {"auroc", "specificity"}),
    ):
        values = measured(Classification(2, ALL), outputs, y.long())
        assert {name for name, value in values.items() if math.isnan(value)} == undefined


def test_means_leave_out_classes_that_nobody_has():
    outputs, y = outputs_of(60, 4), labels(60, classes=3)
    values = measured(Classification(4, ALL), outputs, y)
    p, predicted = outputs.double().softmax(1).numpy(), outputs.argmax(1)
    assert (predicted == 3).any()
    columns = [sk.roc_auc_score(y == k, p[:, k]) for k in range(3)]
    assert values["auroc"] == pytest.approx(np.mean(columns))
    assert (
        values["recall"]
        == values["balanced_acc"]
        == pytest.approx(sk.recall_score(y, predicted, average=None)[:3].mean())
    )
    assert values["f1"] == pytest.approx(sk.f1_score(y, predicted, average=None, zero_division=0)[:3].mean())


@pytest.mark.parametrize("classes", [2, 3])
def test_states_of_clients_add_up(classes):
    outputs, y = outputs_of(90, classes), labels(90, classes=classes)
    values = measured(Classification(classes, ALL), outputs, y)
    for name, metric in Classification(classes, ALL).pooled().items():
        assert of_clients(metric, outputs, y) == (pytest.approx(values[name], rel=1e-9), 0)
    assert set(Classification(3, ALL).pooled()) == set(ALL) - {"acc", "brier"} and not Classification(3).pooled()


def of_clients(metric, outputs, y):
    """Value of two clients' samples together, and its largest error."""
    states = []
    for rows in (slice(len(y) // 2), slice(len(y) // 2, None)):
        metric.reset()
        metric.update(outputs[rows], y[rows])
        states.append(state_of(metric))
    return pooled_value(metric, states)


SHAPES = {
    "calibrated": lambda z, rate: z + math.log(rate / (1 - rate)),
    "sure": lambda z, rate: 20 * z - 5,
    "hardly trained": lambda z, rate: z / 100 + math.log(rate / (1 - rate)),
    "few values": lambda z, rate: z.round(),
    "constant": lambda z, rate: 0 * z,
}
"""Logits of nets from a signal and the rate of the class."""


@pytest.mark.parametrize("rate", [0.5, 0.01, 0.001])
@pytest.mark.parametrize("shape", SHAPES)
def test_areas_of_rare_classes_and_sure_nets_are_scikit_learn_s(shape, rate):
    generator = torch.Generator().manual_seed(0)
    y = (torch.rand(20_000, generator=generator) < rate).long()
    logits = SHAPES[shape](torch.randn(20_000, generator=generator, dtype=torch.float64) + 1.25 * y, rate)
    outputs = torch.stack([torch.zeros_like(logits), logits], 1)
    for name, reference in (("auroc", sk.roc_auc_score), ("average_precision", sk.average_precision_score)):
        metric = Classification(2, (name,)).pooled()[name]
        expected = reference(y, logits)
        assert of_clients(metric, outputs, y) == (pytest.approx(expected, rel=1e-9), 0)
        value, error = of_clients(metric.by_counts(), outputs, y)
        assert abs(value - expected) <= error + 1e-9
        # nets that tell samples apart are told apart by bins
        if shape in ("calibrated", "sure"):
            assert abs(value - expected) < 0.001 and error < 0.004


@pytest.mark.parametrize("counting", [False, True])
def test_areas_of_labels_leave_out_labels_that_nobody_has(counting):
    outputs, y = drawn(300, 3), (drawn(300, 3) > 1.5).long()
    y[:, 2] = 0
    # float32 rounds these probabilities to 1, and their order is lost
    outputs[:, 0] += 20
    metric = MultiLabel(3).pooled()["map"]
    value, error = of_clients(metric.by_counts() if counting else metric, outputs, y)
    expected = sk.average_precision_score(y[:, :2], outputs[:, :2].double())
    assert abs(value - expected) <= error + 1e-9 and error < 0.05
    assert MultiLabel(3).configure_metrics()["map"](outputs, y) == pytest.approx(expected)


def test_counts_have_a_state_of_one_size_and_outputs_one_row_a_sample():
    metric = Classification(4, ("auroc",)).pooled()["auroc"]
    sizes = []
    for each in (metric, metric.by_counts()):
        for n in (3, 300):
            each.reset()
            each.update(drawn(n, 4), labels(n, classes=4))
            sizes.append({name: list(state.shape) for name, state in state_of(each).items()})
    rows, more, counts, same = sizes
    assert rows == {"outputs": [3, 4], "target": [3]} and more == {"outputs": [300, 4], "target": [300]}
    assert counts == same and [*counts] == ["counts"]


def test_settings_survive_as_plain_values_and_the_default_as_before():
    task = Classification(3, ["auroc", "ece"], class_weights=[1, 2, 0.5])
    assert made(plain(task)) == task and made(hparams(task)["task"]) == task and hash(task)
    assert hparams(Classification(3)) == {"num_classes": 3}
    assert (task.monitor, task.mode, Classification(2, ("ece",)).mode) == ("auroc", "max", "min")


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"metrics": ("auc",)}, r"task.metrics=\['auc'\] .* auroc"),
        ({"metrics": ("f1", "f1")}, "different names"),
        ({"metrics": ()}, "task.metrics=.*"),
        ({"class_weights": (1.0, 2.0)}, r"task.class_weights=\(1.0, 2.0\) .* 3 finite"),
        ({"class_weights": (1.0, -2.0, 1.0)}, "from 0 up"),
        ({"class_weights": (0, 0, 0)}, "not all 0"),
        ({"class_weights": "balance"}, "task.class_weights='balance'"),
    ],
)
def test_settings_out_of_range_are_refused(settings, named):
    with pytest.raises(MisconfigurationException, match=named):
        Classification(3, **settings)


class Measured(FedAvg):
    """FedAvg with all metrics, on data that name the plain task."""

    def configure_metrics(self):
        return Classification(CLASSES, ALL).configure_metrics()


@pytest.mark.parametrize("monitor", ["ece", "auroc"])
def test_any_metric_selects_and_clients_without_it_are_counted(monitor):
    found = {}
    for engine in ("sequential", "vectorised"):
        data = blobs(30, 60, 30, by_class=True)
        run = fit(make_client(Measured), data, max_rounds=2, engine=engine, monitor=monitor)
        row = run.rows[-1]
        # of three clients, two have samples of one class alone
        assert row["val/auroc_clients"] == 1 and "val/ece_clients" not in row
        assert run.federation.monitor.mode == ("min" if monitor == "ece" else "max")
        assert f"val/{monitor}_worst" in row
        found[engine] = [value for name, value in row.items() if name.startswith("val/")]
    assert found["vectorised"] == pytest.approx(found["sequential"], rel=1e-5, nan_ok=True)


class OneClassEach(Blobs):
    """Clients of one class each, with AUROC as the metric that selects."""

    task = Classification(CLASSES, ("auroc", "acc"))


def one_class_each(**settings):
    settings = {"max_rounds": 2, "engine": "sequential", "enable_checkpointing": True, **settings}
    data = blobs(40, 40, 40, by_class=True, data=OneClassEach)
    return fit(make_client(FedAvg, task=OneClassEach.task), data, **settings)


def test_a_metric_that_no_client_has_is_refused_with_the_pooled_one_to_take(tmp_path):
    with pytest.raises(MisconfigurationException, match=r"val/auroc has no value .* one class; .*auroc_pooled"):
        one_class_each(root=tmp_path)


def test_the_metric_of_all_samples_selects(tmp_path):
    run = one_class_each(root=tmp_path, monitor="val/auroc_pooled", callbacks=[RoundLogger()])
    values = [row["val/auroc_pooled"] for row in run.rows]
    assert all(0 <= value <= 1 for value in values) and math.isnan(run.rows[-1]["val/auroc"])
    (folder,) = {path.parent for path in tmp_path.rglob("summary.json")}
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["monitor"] == {"metric": "auroc_pooled", "mode": "max"}
    assert summary["selected"]["val/auroc_pooled"] == max(values) and math.isfinite(
        summary["final"]["test/auroc_pooled"]
    )
    assert load(next(tmp_path.rglob("best.ckpt")))["federation"]["round"] == 1 + values.index(max(values))
