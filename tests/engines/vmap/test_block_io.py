"""What is done for a whole block has a twin that does it for one client: both say the same."""

import copy
from functools import partial
from typing import ClassVar

import pytest
import torch
from lightning.pytorch.plugins.precision import Precision
from torch.nn.utils.rnn import pad_sequence
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from federations import CLASSES, blobs, make_client, noisy, points
from pfl_lightning.client import Phase
from pfl_lightning.client.module import ClientModule
from pfl_lightning.data import Samples
from pfl_lightning.engines import ClientMetrics, ClientState, Job, LocalWork, Sequential, Vectorised
from pfl_lightning.engines.evaluation import evaluate, evaluate_padded, is_accuracy, metrics_of
from pfl_lightning.engines.vmap.block_io import BlockIO
from pfl_lightning.messages import detached
from pfl_lightning.methods import FedAvg, FedPer
from pfl_lightning.tasks import Classification

RAGGED = (24, 7, 30, 20)


def outcomes(model, cls=Vectorised):
    """What an engine gives of clients, each with entries of its own."""
    # engines leave a client behind in theirs
    model = copy.deepcopy(model)
    model.requested = frozenset({"class_counts"})
    data = blobs(*RAGGED)
    data.setup()
    torch.manual_seed(7)
    jobs = []
    for k in range(len(RAGGED)):
        own = {name: t * (1 + 0.5 * torch.rand(t.shape)) for name, t in detached(model.state_dict()).items()}
        personal = {name: t for name, t in own.items() if model.is_personal(name)}
        payload = {"weights": {name: t for name, t in own.items() if model.is_shared(name)}}
        jobs.append(Job(k, 0, ClientState(personal), payload, data.client(k), seed=k, evaluate=("train",)))
    return list(cls(model, LocalWork(batch_size=5), Precision()).run(jobs))


def assert_same(first, second, **tolerance):
    for one, other in zip(first, second, strict=True):
        assert (one.client, one.finite) == (other.client, other.finite)
        assert list(one.update) == list(other.update)
        for part in ("update", "state"):
            a, b = (getattr(outcome, part) for outcome in (one, other))
            a, b = (x if part == "update" else x.personal for x in (a, b))
            torch.testing.assert_close(a, b, **tolerance)
        assert one.metrics == pytest.approx(other.metrics, rel=1e-5)
        for part, values in one.after.items():
            assert values == pytest.approx(other.after[part], rel=1e-5)


@pytest.fixture
def at_once(monkeypatch):
    """Ends in an error where clients go one by one."""

    def refuse(self, *args):
        raise AssertionError("one by one")

    monkeypatch.setattr(BlockIO, "_loaded", refuse)
    monkeypatch.setattr(BlockIO, "_upload_one_by_one", refuse)


@pytest.mark.parametrize("method", [FedAvg, FedPer])
def test_clients_at_once_give_the_bits_of_clients_one_by_one(method):
    class Hooked(method):
        """Whose hooks are its own, and do what they did."""

        def on_download(self, payload, data):
            super().on_download(payload, data)

        def upload(self, data):
            return super().upload(data)

    assert_same(*(outcomes(make_client(cls, net=noisy)) for cls in (method, Hooked)), atol=0, rtol=0)


@pytest.mark.parametrize("method", [FedAvg, FedPer])
def test_a_client_module_that_uploads_something_else_does_so_from_a_block(method, monkeypatch):
    def upload(self, data, before=ClientModule.upload):
        update = before(self, data)
        turn = torch.tensor([self.client_id, self.steps_done])
        return {**update, "weights": {name: 2 * t for name, t in update["weights"].items()}, "turn": turn}

    monkeypatch.setattr(ClientModule, "upload", upload)
    both = [outcomes(make_client(method), cls) for cls in (Vectorised, Sequential)]
    assert both[0][2].update["turn"].tolist() == [2, 4]
    assert_same(*both, atol=1e-5, rtol=1e-4)


class Counted(FedAvg):
    """Whose downloads are counted."""

    downloads: ClassVar[list[int]] = []

    def on_download(self, payload, data):
        super().on_download(payload, data)
        self.downloads.append(1)


class BySample(Counted):
    def on_download(self, payload, data):
        super().on_download(payload, data)
        self.net.classifier.bias.add_(data.train.x.mean())


class ById(Counted):
    def on_download(self, payload, data):
        super().on_download(payload, data)
        self.net.classifier.bias.add_(self.client_id)


class ByChance(Counted):
    def on_download(self, payload, data):
        super().on_download(payload, data)
        self.net.classifier.bias.add_(torch.rand(CLASSES))


class ByPhase(Counted):
    def local_phases(self):
        return [Phase(epochs=1 + self.client_id // 10)]


class ByClass(Counted):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, task=Classification(CLASSES, class_weights="balanced"), **kwargs)


@pytest.mark.parametrize(
    ("method", "downloads"),
    [(Counted, [1, 1]), (BySample, [5, 4]), (ById, [5, 4]), (ByChance, [5, 4]), (ByPhase, [5, 4]), (ByClass, [4, 4])],
)
def test_clients_that_receive_the_same_have_one_download_that_looks_at_none(method, downloads):
    model, data = make_client(method), blobs(*RAGGED)
    data.setup()
    payload = {"weights": detached(model.state_dict())}
    jobs = [Job(k, 0, ClientState(), payload, data.client(k), seed=k) for k in range(len(RAGGED))]
    engine = Vectorised(copy.deepcopy(model), LocalWork(batch_size=5), Precision(), block_size=len(jobs))
    expected = list(Sequential(model, LocalWork(batch_size=5), Precision()).run(jobs))
    for count in downloads:
        Counted.downloads.clear()
        assert_same(engine.run(jobs), expected, atol=1e-5, rtol=1e-4)
        assert len(Counted.downloads) == count


def test_an_error_in_a_common_download_is_that_of_a_client():
    def on_download(payload, data):
        raise ValueError("no such entry")

    model, data = make_client(), blobs(*RAGGED)
    data.setup()
    vars(model)["on_download"] = on_download
    jobs = [Job(k, 0, ClientState(), {}, data.client(k), seed=k) for k in range(len(RAGGED))]
    with pytest.raises(ValueError, match="no such entry") as caught:
        list(Vectorised(model, LocalWork(), Precision()).run(jobs))
    assert caught.value.__notes__ == ["Raised in the download of client 0 for round 1."]


def test_a_value_that_is_not_finite_is_found_in_what_a_block_sends_beside_weights(monkeypatch):
    def upload(self, data, before=ClientModule.upload):
        return {**before(self, data), "scale": torch.tensor(torch.nan if self.client_id == 1 else 1.0)}

    monkeypatch.setattr(ClientModule, "upload", upload)
    assert [outcome.finite for outcome in outcomes(make_client())] == [True, False, True, True]


class Confusing(FedAvg):
    """With metrics that aren't a number of right ones over all."""

    def configure_metrics(self):
        f1 = MulticlassF1Score(CLASSES, average="macro")
        return MetricCollection({"acc": MulticlassAccuracy(CLASSES, average="micro"), "f1": f1})


@pytest.mark.parametrize("method", [FedAvg, Confusing])
def test_evaluation_of_padded_logits_is_that_of_each_client(method):
    model = make_client(method).eval()
    metrics = metrics_of(model)
    x, y = points(sum(RAGGED), seed=2)
    parts = [Samples(*part) for part in zip(x.split(RAGGED), y.split(RAGGED), strict=True)]
    with torch.no_grad():
        logits = pad_sequence([model(part.x) for part in parts], batch_first=True)
    together = evaluate_padded(logits, [part.y for part in parts], metrics, model.task)
    for part, values in zip(parts, ClientMetrics([(range(len(parts)), together)]).values(), strict=True):
        alone = evaluate(model, part, metrics, Precision().forward_context)
        assert list(values) == list(alone)
        assert values.pop("loss") == pytest.approx(alone.pop("loss"), rel=1e-6)
        assert values == alone


ACCURACY = partial(MulticlassAccuracy, CLASSES, average="micro")


@pytest.mark.parametrize(
    "metric",
    [
        ACCURACY(top_k=2),
        ACCURACY(ignore_index=0),
        MulticlassAccuracy(CLASSES, average="macro"),
        MulticlassF1Score(CLASSES, average="micro"),
    ],
)
def test_only_the_share_of_right_ones_is_counted_for_many_at_once(metric):
    assert not is_accuracy(metric)
    assert is_accuracy(metrics_of(make_client())["acc"])
