"""Hooks of download and upload that run once for all clients of a block."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.optim import SGD

from federations import OneClient, Spy, blobs, equal, fit, make_client, points
from pfl_lightning import WeightedAverage
from pfl_lightning.client.at_once import at_once, runs_at_once
from pfl_lightning.data import ClientData, Samples
from pfl_lightning.engines.base import ReadsClient
from pfl_lightning.engines.vmap import block_hooks
from pfl_lightning.engines.vmap.block_hooks import BlockData, BlockHooks, Differ, Payload
from pfl_lightning.messages import tensors
from pfl_lightning.methods import (
    GPFL,
    MOON,
    FedALA,
    FedAS,
    FedCAC,
    FedDistill,
    FedEM,
    FedGH,
    FedNTD,
    FedPCL,
    FedPer,
    FedProto,
    FedProx,
    NormalizedHead,
    PACClient,
    PerFCL,
)
from pfl_lightning.methods.fedamp import CloudProx
from pfl_lightning.methods.scaffold import ControlVariates
from pfl_lightning.methods.wdr import WDR
from pfl_lightning.tasks import Regression


@pytest.fixture
def runs(monkeypatch):
    """Each hook that was run for several clients, with whether that went well."""
    seen = []

    def run(self, hook, *args, of=BlockHooks._run):
        found = of(self, hook, *args)
        seen.append((hook, found is not None))
        return found

    monkeypatch.setattr(BlockHooks, "_run", run)
    return seen


def ends(model, tmp_path, data=None, **settings):
    """The server's and the clients' states after the same run by both engines."""
    found = []
    for engine in ("sequential", "vectorised"):
        torch.manual_seed(0)
        settings = {"max_rounds": 3, "precision": "64-true"} | settings
        run = fit(model(), data or blobs(), tmp_path / engine, engine=engine, **settings)
        found.append(list(tensors(torch.load(run.last, weights_only=True)["federation"])))
    return found


@pytest.mark.parametrize(
    "method",
    [ControlVariates, MOON, WDR, CloudProx, FedProx, FedNTD, FedCAC, GPFL, PerFCL],
    ids=lambda m: m.__name__,
)
@pytest.mark.by_default("ControlVariates", "MOON")
def test_results_are_those_of_one_client_after_another(method, tmp_path, runs):
    one, other = ends(partial(make_client, method), tmp_path, clients_per_round=0.6)
    assert len(one) == len(other) > 0
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-9)
    assert ("on_download", True) in runs


@pytest.mark.parametrize("filled", [8192, 7])
@pytest.mark.parametrize(
    "method", [FedProto, PACClient, NormalizedHead, FedGH, FedDistill, FedPCL], ids=lambda m: m.__name__
)
@pytest.mark.by_default("PACClient-7", "FedProto-8192")
def test_class_means_of_unequal_clients_that_lack_classes(method, filled, tmp_path, runs, monkeypatch):
    monkeypatch.setattr(block_hooks, "FILLED", filled)
    one, other = ends(partial(make_client, method), tmp_path, blobs(31, 12, 44, 9, by_class=True))
    assert len(one) == len(other) > 0
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-9)
    assert ("upload", True) in runs and ("upload", False) not in runs


def test_a_client_is_filled_up_by_samples_of_its_own():
    x, y = points(40, seed=1)
    sources = [OneClient(Samples(torch.full_like(x, torch.inf), y)), OneClient(Samples(x[:8], y[:8]))]
    members = [SimpleNamespace(data=ClientData(source, 0)) for source in sources]
    ((inputs, classes, own),) = BlockData(members, lambda tensor: tensor).marked_chunks()
    assert inputs.shape[:2] == classes.shape == (2, 40) and inputs[1].isfinite().all()
    assert torch.equal(classes[1][:8], y[:8]) and torch.equal(classes[0], y) and own.sum(1).tolist() == [40, 8]


def test_marked_samples_are_a_client_s_own_in_their_order_and_the_filling_finite():
    x, y = points(40, seed=1)
    sizes = (40, 8, 0)
    sources = [
        OneClient(Samples(torch.full_like(x, torch.inf), y)),
        *(OneClient(Samples(x[:n], y[:n])) for n in sizes[1:]),
    ]
    members = [SimpleNamespace(data=ClientData(source, 0)) for source in sources]
    data = BlockData(members, lambda tensor: tensor)
    parts = list(data.marked_chunks(15, ignored=True))
    assert [own.sum(1).tolist() for *_, own in parts] == [[15, 8, 0], [15, 0, 0], [10, 0, 0]]
    assert all(inputs.isfinite()[1].all() and torch.equal(own, classes >= 0) for inputs, classes, own in parts)
    for k, member in enumerate(members):
        alone = list(member.data.marked_chunks(15))
        assert all(own.all() for *_, own in alone)
        for (inputs, classes, _), (its, given, own) in zip(alone, parts, strict=False):
            assert torch.equal(inputs, its[k][own[k]]) and torch.equal(classes, given[k][own[k]])
    # targets of any kind where they needn't be told from filling
    ((_, targets, own),) = data.marked_chunks()
    assert torch.equal(targets[1][own[1]], y[:8]) and (targets >= 0).all()
    sources[0].task = Regression()
    with pytest.raises(ReadsClient):
        next(data.marked_chunks(ignored=True))


UNEQUAL = {
    "em": (partial(FedEM, num_learners=2), {}),
    "batches": (partial(FedAS, align_batch_size=5, fisher_batch_size=7), {"local_steps": 2, "local_epochs": None}),
    "steps": (partial(FedAS, align_epochs=0), {}),
}


@pytest.mark.parametrize("filled", [8192, 7])
@pytest.mark.parametrize("case", UNEQUAL)
@pytest.mark.by_default("em-7", "batches-7")
def test_passes_over_samples_of_unequal_clients_are_those_of_each_alone(case, filled, tmp_path, runs, monkeypatch):
    """Clients of several ages, as the first round of each differs."""
    monkeypatch.setattr(block_hooks, "FILLED", filled)
    method, settings = UNEQUAL[case]
    data = blobs(31, 12, 44, 9, 5, by_class=True)
    one, other = ends(partial(make_client, method), tmp_path, data, clients_per_round=0.6, max_rounds=5, **settings)
    assert len(one) == len(other) > 0
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-9)
    # the number of steps, which a hook asks for, makes groups
    assert ("on_download", True) in runs and ("upload", True) in runs
    assert sum(not well for _, well in runs) == (case != "em")


class Scales(FedPer):
    """Keeps a tensor of what it receives, by which it sends its classifier's bias."""

    sends = FedPer.sends | {"scaled"}
    caches = frozenset({"scale"})

    @at_once
    def on_download(self, payload, data):
        super().on_download(payload, data)
        self.scale = self.of_received(payload)

    def of_received(self, payload):
        return payload["weights"]["net.features.0.bias"].norm()

    @at_once
    def upload(self, data):
        return super().upload(data) | {"scaled": self.scale * self.net.classifier.bias}


class OwnScale(Scales):
    """The same, of the client's own classifier."""

    def of_received(self, payload):
        return self.net.classifier.bias.norm() + payload["weights"]["net.features.0.bias"][0]


@pytest.mark.parametrize(("method", "common"), [(Scales, True), (OwnScale, False)])
def test_a_cache_may_be_of_what_all_clients_have_in_common(method, common, tmp_path, runs):
    spies = [Spy(), Spy()]
    for spy, engine in zip(spies, ("sequential", "vectorised"), strict=True):
        client = make_client(method)
        fit(client, engine=engine, max_rounds=3, precision="64-true", callbacks=[spy], aggregator=Takes())
    for one, other in zip(*(tensors(spy.updates) for spy in spies), strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-12)
    assert (("on_download", common) in runs) and (("upload", True) in runs) == common
    assert ("on_download", not common) not in runs


class Takes(WeightedAverage):
    """Takes notice of nothing more than `WeightedAverage`."""

    needs = WeightedAverage.needs | {"scaled"}


class Alternates(FedPer):
    """Trains its classifier alone in every second of its rounds."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.register_buffer("rounds", torch.tensor(0))

    def is_shared(self, name):
        return super().is_shared(name) and name != "rounds"

    def local_phases(self):
        return self.joining_phases() if self.rounds % 2 else super().local_phases()

    @at_once
    def upload(self, data):
        self.rounds.add_(1)
        return super().upload(data)


class Downloads(Alternates):
    """The same, with a download for all clients at once."""

    @at_once
    def on_download(self, payload, data):
        super().on_download(payload, data)


@pytest.mark.parametrize("method", [Alternates, Downloads])
def test_phases_are_by_the_clients_own_entries(method, tmp_path, runs):
    one, other = ends(partial(make_client, method), tmp_path)
    assert len(one) == len(other) > 0
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-9)
    assert runs.count(("local_phases", False)) == 1 and ("upload", True) in runs


@pytest.mark.parametrize("settings", [{}, {"layers": 2, "threshold": 1e-3}], ids=["settles", "layers"])
@pytest.mark.by_default("settles")
def test_samples_drawn_by_unequal_clients_are_those_of_each_alone(settings, tmp_path, runs):
    """Clients of several ages, so that some learn until their loss settles, some in one pass, and some not at all."""
    client = partial(FedALA, num_pre_loss=2, ala_batch_size=5, rand_percent=60, **settings)
    data = blobs(31, 12, 44, 9, 5, by_class=True)
    one, other = ends(partial(make_client, client), tmp_path, data, clients_per_round=0.6, max_rounds=5)
    assert len(one) == len(other) > 0
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-9)
    assert ("on_download", True) in runs and ("upload", True) in runs and not any(not well for _, well in runs)


def test_samples_drawn_for_many_clients_are_marked_by_whose_they_are():
    x, y = points(40, seed=1)
    sources = [OneClient(Samples(torch.full_like(x, torch.inf), y)), OneClient(Samples(x[:8], y[:8]))]
    members = [SimpleNamespace(data=ClientData(s, 0), job=SimpleNamespace(seed=k)) for k, s in enumerate(sources)]
    samples, own = BlockData(members, lambda tensor: tensor).drawn(50, "draw")
    assert own.sum(1).tolist() == [20, 4] and samples.x[1].isfinite().all()
    assert (samples.y[1, 4:] == -100).all()
    for k, member in enumerate(members):
        torch.manual_seed(k)
        alone, all_own = member.data.drawn(50, "draw")
        assert (
            all_own.all() and torch.equal(samples.x[k][own[k]], alone.x) and torch.equal(samples.y[k][own[k]], alone.y)
        )
    sources[0].task = Regression()
    with pytest.raises(ReadsClient):
        BlockData(members, lambda tensor: tensor).drawn(50, "draw")


class Doubled(FedProx):
    """Overrides a marked hook without a mark of its own."""

    def on_download(self, payload, data):
        super().on_download(payload, data)
        assert isinstance(self.client_id, int)


class Branching(FedProx):
    """Branches on a value in a hook that has the mark, after it has changed an entry."""

    @at_once
    def upload(self, data):
        for tensor in self.received.tensors().values():
            tensor.add_(1)
        if next(iter(self.received.tensors().values())).sum() > 0:
            return super().upload(data)
        return super().upload(data)


def test_an_override_without_a_mark_runs_client_by_client(tmp_path, runs):
    assert runs_at_once(make_client(FedProx), "on_download")
    assert not runs_at_once(make_client(Doubled), "on_download")
    one, other = ends(partial(make_client, Doubled), tmp_path)
    assert not runs
    assert all(torch.allclose(a, b) for a, b in zip(one, other, strict=True))


def test_a_marked_hook_that_fails_runs_client_by_client_from_unchanged_entries(tmp_path, runs):
    one, other = ends(partial(make_client, Branching), tmp_path)
    assert runs.count(("upload", False)) in (1, 2)
    assert all(torch.allclose(a, b) for a, b in zip(one, other, strict=True))


class Stepwise(ControlVariates):
    """Changes an entry, and then branches on a value if the client has made one number of steps."""

    @at_once
    def upload(self, data):
        weight = next(iter(self.parameters()))
        weight.mul_(2)
        if self.steps_done == 2 and weight.sum() > 0:
            return super().upload(data)
        return super().upload(data)


def test_groups_before_one_that_fails_are_as_before_too(tmp_path, runs):
    # 6, 2 and 2 steps: the first client's hook has changed its row when that of the others fails
    data = blobs(60, 20, 20, batch_size=10, val_fraction=0.0, test_fraction=0.0)
    one, other = ends(partial(make_client, Stepwise), tmp_path, data)
    assert [well for hook, well in runs if hook == "upload"] == [False, True, False]
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-9)


def test_payloads_of_different_entries_have_no_common_form():
    cpu, a, b = torch.device("cpu"), torch.ones(2), torch.zeros(2)
    shared = {"weights": {"w": a}}
    same = Payload.of([shared, {"weights": {"w": a}}], cpu)
    assert [rows for _, rows in same.entries] == [False]
    assert equal(same.under_vmap(lambda t: t), shared)
    rows = Payload.of([{"w": a, "n": 1}, {"w": b, "n": 1}], cpu)
    assert rows.under_vmap(lambda t: t[1])["w"].equal(b)
    for other in ({"v": a}, {"w": torch.ones(3)}, {"w": a, "n": 1}, {"w": 1.0}):
        with pytest.raises(Differ):
            Payload.of([{"w": a}, other], cpu)


def test_steps_too_long_for_the_regulariser_are_warned_of_by_client(tmp_path):
    model = partial(make_client, WDR, wdr_lambda=1000.0, optimizer=partial(SGD, lr=1.0))
    told = []
    for engine in ("sequential", "vectorised"):
        torch.manual_seed(0)
        with pytest.warns(UserWarning, match=r"model\.wdr_lambda") as caught:
            fit(model(), blobs(), tmp_path / engine, engine=engine, max_rounds=1, precision="64-true")
        told.append({str(warning.message) for warning in caught if "wdr_lambda" in str(warning.message)})
    assert told[0] == told[1] and "client 0" in min(told[0])
