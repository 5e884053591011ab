"""Clients with the same model, evaluated together: what each would have by itself."""

import math
from functools import partial

import pytest
import torch
from torch import nn
from torchmetrics import MeanSquaredError, MetricCollection

from federations import Altered, blobs, equal, fit, make_client, noisy
from pfl_lightning.engines import ClientMetrics, Sequential, evaluation
from pfl_lightning.engines.alike import Alike
from pfl_lightning.engines.evaluation import POOLED, computed_on, evaluate_outputs, mean_of
from pfl_lightning.methods import IFCA, ControlVariates, FedAvg, FedBABU, FedBN, FedPer, FedProx, Local
from pfl_lightning.nets import Net
from pfl_lightning.seeds import derive_seed
from pfl_lightning.tasks import (
    Classification,
    MultiLabel,
    NextToken,
    Poisson,
    Quantile,
    Regression,
    Segmentation,
    Survival,
)

NAMES = (
    "acc",
    "balanced_acc",
    "auroc",
    "average_precision",
    "f1",
    "precision",
    "recall",
    "specificity",
    "ece",
    "brier",
)
OF_CLIENTS = [1, 5, 2, 30, 1, 7]
"""Samples of the clients: of one sample, most metrics are undefined."""


def logits(*shape):
    # rounded, so that some are equal
    return torch.randn(*shape).mul(4).round() / 4


def classes(k, *shape, ignored=0.0):
    return torch.where(torch.rand(*shape) < ignored, -100, torch.randint(k, shape))


def times(n):
    return torch.stack([torch.rand(n).mul(9).round(), torch.randint(2, (n,)).float()], 1)


TASKS = {
    "classes": (Classification(10, NAMES), lambda n: (logits(n, 10), classes(10, n))),
    "two classes": (Classification(2, NAMES), lambda n: (logits(n, 2), classes(2, n))),
    "weighted": (Classification(3, class_weights=(1, 2, 3)), lambda n: (logits(n, 3), classes(3, n))),
    "regression": (Regression(), lambda n: (torch.randn(n, 1), torch.randn(n))),
    "three quantities": (Regression(3), lambda n: (torch.randn(n, 3), torch.randn(n, 3))),
    "quantiles": (Quantile(2), lambda n: (torch.randn(n, 6), torch.randn(n, 2))),
    "counts": (Poisson(), lambda n: (torch.randn(n, 1), torch.randint(5, (n,)).float())),
    "Cox": (Survival(), lambda n: (logits(n, 1), times(n))),
    "discrete time": (Survival((3, 6)), lambda n: (logits(n, 2), times(n))),
    "next token": (NextToken(7), lambda n: (logits(n, 5, 7), classes(7, n, 5, ignored=0.5))),
    "labels": (MultiLabel(4), lambda n: (logits(n, 4), classes(2, n, 4).float())),
    "masks": (Segmentation(3, dice_weight=1.0), lambda n: (logits(n, 3, 2, 2), classes(3, n, 2, 2, ignored=0.5))),
    "pixels": (Segmentation(3), lambda n: (logits(n, 3, 2, 2), classes(3, n, 2, 2, ignored=0.5))),
}
ALONE = {"Cox": {"c_index", "loss"}, "discrete time": {"c_index"}, "labels": {"f1"}}
"""Values that aren't computed for all clients at once."""


@pytest.mark.parametrize("name", TASKS)
def test_values_from_the_outputs_of_many_are_those_of_each(name, monkeypatch):
    torch.manual_seed(0)
    task, make = TASKS[name]
    metrics = task.configure_metrics()
    metrics.add_metrics({f"{key}{POOLED}": metric for key, metric in task.pooled().items()})
    outputs, target = make(sum(OF_CLIENTS))
    alone = set()
    monkeypatch.setattr(evaluation, "computed_on", lambda few, *args: alone.update(few) or computed_on(few, *args))
    together = evaluate_outputs(outputs, target, OF_CLIENTS, metrics, task)
    assert {key for key in alone if not key.endswith(POOLED)} == ALONE.get(name, set()) - {"loss"}
    of_clients = ClientMetrics([(range(len(OF_CLIENTS)), together)]).values()
    for rows, found in zip(torch.arange(len(outputs)).split(OF_CLIENTS), of_clients, strict=True):
        own = outputs[rows], target[rows]
        expected = computed_on(metrics, *own) | {"loss": mean_of(task.loss(*own, "sum"), task.weight(own[1]))}
        assert list(found) == list(expected)
        for key, value in expected.items():
            if key.endswith(POOLED):
                assert {part: (t.dtype, t.shape) for part, t in found[key].items()} == {
                    part: (t.dtype, t.shape) for part, t in value.items()
                }
                assert all(torch.allclose(found[key][part], value[part], rtol=1e-6) for part in value)
            else:
                assert found[key] == pytest.approx(value, rel=1e-6, abs=1e-7, nan_ok=True)
        # counts and ranks have no rounding
        exact = {"acc", "auroc", "f1", "recall", "precision", "specificity", "token_acc", "c_index"} & set(found)
        assert all(found[key] == expected[key] or math.isnan(expected[key]) for key in exact)


@pytest.fixture
def passes(monkeypatch):
    """The numbers of samples of the forward passes in evaluations."""
    made = []

    def forward(self, x, before=FedAvg.forward):
        if not self.training:
            made.append(len(x))
        return before(self, x)

    monkeypatch.setattr(FedAvg, "forward", forward)
    return made


def one_by_one(make, **settings):
    """A run whose clients are evaluated by themselves."""

    class Plain(Sequential):
        def evaluate(self, job):
            return super().evaluate(job)

    return fit(make(), engine=Plain, **settings)


def close(one, other):
    assert len(one) == len(other)
    for left, right in zip(one, other, strict=True):
        assert left.keys() == right.keys()
        for name, value in left.items():
            if isinstance(value, float) and not name.startswith("time"):
                assert right[name] == pytest.approx(value, rel=1e-5, abs=1e-7, nan_ok=True), name


def results(run):
    return list(run.test().values())


@pytest.mark.parametrize("engine", ["sequential", "vectorised", "processes", "auto"])
@pytest.mark.parametrize("method", [FedAvg, FedProx, ControlVariates, FedPer, FedBN, Local, FedBABU, IFCA])
@pytest.mark.by_default(
    "FedAvg-sequential", "FedAvg-vectorised", "FedAvg-processes", "FedAvg-auto", "FedPer-sequential"
)
def test_every_engine_has_the_results_of_each_client_by_itself(method, engine):
    make = partial(make_client, method, net=noisy)
    run = fit(make(), engine=engine, clients_per_round=2, test_every_round=True)
    alone = one_by_one(make, clients_per_round=2, test_every_round=True)
    close(alone.rows, run.rows)
    close(results(alone), results(run))


@pytest.mark.parametrize("precision", ["bf16-mixed", "64-true"])
def test_so_it_is_in_other_precisions(precision):
    run, alone = fit(make_client(), precision=precision), one_by_one(make_client, precision=precision)
    for one, other in zip(results(run), results(alone), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-2 if precision == "bf16-mixed" else 1e-12)
    assert equal(run.weights, alone.weights)


def test_one_pass_is_of_all_clients(passes):
    run = fit(make_client(), max_rounds=1)
    held = [run.data.size(client, "val") for client in range(4)]
    # after a pass of the set-up, the first evaluation compares two clients with passes of their own
    assert passes[1:4] == [sum(held), held[0], held[-1]]
    passes.clear()
    run.trainer.validate(verbose=False)
    assert passes[1:] == [sum(held)]


def test_a_pass_has_no_more_samples_than_one_client_may_have(passes, monkeypatch):
    run = fit(make_client(), max_rounds=1)
    expected, held = results(run), [run.data.size(client, "test") for client in range(4)]
    monkeypatch.setattr("pfl_lightning.federation.evaluation.CHUNK", held[0] + held[1])
    passes.clear()
    close(expected, results(run))
    assert passes == [held[0] + held[1], held[2], held[3]]
    monkeypatch.setattr("pfl_lightning.engines.alike.rows_at_once", lambda *args: held[1])
    passes.clear()
    close(expected, results(run))
    assert sorted(passes) == sorted(held)


class Lacking(Altered):
    """Client 1 has no validation and no test samples, client 2 one test sample, and client 3 no validation samples."""

    def alter(self, part, client, split):
        return part.take(slice(self.size(client, split)))

    def size(self, client, split):
        most = {(1, "val"): 0, (1, "test"): 0, (2, "test"): 1, (3, "val"): 0}
        return min(most.get((client, split), 99), super().size(client, split))


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
@pytest.mark.parametrize("at_once", [4, 1000])
def test_jobs_with_one_model_are_evaluated_together_with_the_bits_of_each(at_once, engine, passes, monkeypatch):
    # two or three clients a pass, of which client 1 has no samples and client 3 none for validation
    monkeypatch.setattr("pfl_lightning.federation.evaluation.CHUNK", 13)
    monkeypatch.setattr("pfl_lightning.engines.alike.rows_of_outputs", lambda *args: at_once)
    loads, common = [], Sequential.common
    monkeypatch.setattr(Sequential, "common", lambda *args: loads.append(args) or common(*args))
    found = []
    for neighbours in (lambda self, jobs: ([job] for job in jobs), Alike.neighbours):
        monkeypatch.setattr(Alike, "neighbours", neighbours)
        run = fit(make_client(), blobs(30, 8, 12, 20, 9, 9, 15, data=Lacking), engine=engine, max_rounds=1)
        passes.clear()
        loads.clear()
        found.append((run.test(), list(passes), len(loads)))
    (each, of_each, loads_of_each), (all_at_once, of_all, loads_of_all) = found
    assert of_all == of_each and len(of_all) > 2 and max(of_all) <= 13
    assert loads_of_each > loads_of_all == 1
    assert equal(each, all_at_once)


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_clients_without_samples_are_absent(engine, passes):
    data = partial(blobs, data=Lacking)
    run, alone = fit(make_client(), data(), engine=engine), one_by_one(make_client, data=data())
    close(alone.rows, run.rows)
    found = run.test()
    assert sorted(found) == [0, 2, 3] and equal(sorted(found), sorted(alone.test()))
    assert [row.get("test/acc") is None for row in run.logger.clients] == [False, True, False, False]


class BySample(FedAvg):
    """Shifts its inputs by its own training samples."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.register_buffer("shift", torch.zeros(()), persistent=False)

    def on_download(self, payload, data):
        super().on_download(payload, data)
        self.shift.copy_(data.train.x.mean())

    def forward(self, x):
        return super().forward(x + self.shift)


class ById(FedAvg):
    """Knows which client it is."""

    def forward(self, x):
        return super().forward(x + self.client_id)


class BySeed(FedAvg):
    def on_download(self, payload, data):
        super().on_download(payload, data)
        # a generator of its own, of which engines know nothing
        generator = torch.Generator().manual_seed(derive_seed("of a client", self.client_id))
        weight = self.net.classifier.weight
        self.assign({"net.classifier.weight": torch.randn(weight.shape, generator=generator).to(weight)})


class ByChance(FedAvg):
    """Draws noise for its inputs."""

    def forward(self, x):
        return super().forward(x if self.training else x + torch.randn_like(x))


class Meeting(FedAvg):
    """Subtracts the mean of a pass."""

    def forward(self, x):
        return super().forward(x - x.mean(0))


class Unusual(FedAvg):
    """With a metric that isn't this package's."""

    def configure_metrics(self):
        return MetricCollection({"acc": self.task.configure_metrics()["acc"], "mse": OfLogits()})


class OfLogits(MeanSquaredError):
    def update(self, outputs, target):
        super().update(outputs[:, 0], target.float())


@pytest.mark.parametrize("method", [BySample, ById, BySeed, ByChance, Meeting, Unusual])
@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_what_makes_clients_differ_is_seen(method, engine):
    data = {"data": blobs(24, 18, 30, 20)}
    run, alone = fit(make_client(method), engine=engine, **data), one_by_one(partial(make_client, method), **data)
    close(results(alone), results(run))


def test_normalisation_over_a_pass_is_of_one_client(passes):
    def net(input_shape, num_classes):
        return Net(
            nn.Sequential(nn.Linear(*input_shape, 5), nn.BatchNorm1d(5, track_running_stats=False)), nn.Linear(5, 3)
        )

    run = fit(make_client(net=net), blobs(30, 40, 30, 20, val_fraction=0.2), max_rounds=1)
    passes.clear()
    run.trainer.validate(verbose=False)
    assert passes[1:] == [run.data.size(client, "val") for client in range(4)]


def test_an_error_names_its_client():
    class Failing(FedAvg):
        def forward(self, x):
            if not self.training and self.client_id == 2:
                raise ValueError("of this client")
            return super().forward(x)

    with pytest.raises(ValueError, match="of this client") as raised:
        fit(make_client(Failing))
    assert "client 2" in "".join(raised.value.__notes__)
