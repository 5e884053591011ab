"""Nets with adapters that take the samples of all clients as one batch, and those that can't."""

from copy import deepcopy
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from federations import MOMENTUM, blobs, fit, make_client, near
from pfl_lightning.engines import Sequential, Vectorised, auto
from pfl_lightning.methods import Ditto, FedAvg, Local
from pfl_lightning.nets import Adapted, Net
from pfl_lightning.nets.adapted import LowRank

SIZES = (20, 15, 20, 13)
BATCH = 5


class Centred(nn.Module):
    """A layer that computes with the samples of a batch together."""

    def forward(self, x):
        return x - x.mean(0)


class TimeFirst(nn.Module):
    """A layer whose samples are in the second dimension."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x[:, None].repeat(1, 3, 1).transpose(0, 1)).sum(0)


class Drawing(nn.Module):
    """A layer with random numbers that are no dropout."""

    def forward(self, x):
        return x + torch.randn(x.shape) * self.training


def deep(*inner, input_shape=(4,), num_classes=3):
    body = nn.Sequential(
        nn.Linear(input_shape[0], 8), nn.Tanh(), *deepcopy(inner), nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.2)
    )
    return Net(body, nn.Linear(8, num_classes))


def adapted(*inner):
    return partial(Adapted, net=lambda shape, classes: deep(*inner, input_shape=shape, num_classes=classes), rank=2)


class Scaled(nn.Module):
    """A layer with a buffer that is in no state_dict."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(1), persistent=False)

    def forward(self, x):
        return x * self.scale


class OwnScale(Local):
    """Each client has a buffer of its own in the features."""

    def on_download(self, payload, data):
        super().on_download(payload, data)
        next(layer for layer in self.net.modules() if isinstance(layer, Scaled)).scale.fill_(1.0 + self.client_id)


def time_first(input_shape, num_classes):
    net = adapted()(input_shape, num_classes)
    net.features[3] = TimeFirst(net.features[2])
    del net.features[2]
    return net


@pytest.fixture
def batches(monkeypatch):
    """Numbers of samples of each call of a frozen layer in training outside of vmap."""
    seen = []

    def spied(self, x, run=LowRank.forward):
        if self.training and not torch._C._functorch.is_functorch_wrapped_tensor(x):
            seen.append(len(x))
        return run(self, x)

    monkeypatch.setattr(LowRank, "forward", spied)
    return seen


def ends(net, method=FedAvg, data=SIZES, **settings):
    own = {"optimizer": partial(AdamW, lr=0.01), "optimizer_lifetime": "round"}
    made = {name: settings.pop(name, default) for name, default in own.items()}
    return [
        fit(make_client(method, net=net, **made), blobs(*data, batch_size=BATCH), engine=engine, **settings)
        for engine in ("sequential", "vectorised")
    ]


def same(one, other):
    clients = [{k: state.personal for k, state in run.federation.clients.items()} for run in (one, other)]
    return near(one.weights, other.weights) and near(*clients)


@pytest.mark.parametrize("method", [FedAvg, Local, Ditto])
@pytest.mark.parametrize("settings", [{}, {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}])
def test_results_are_those_of_one_client_after_another(batches, method, settings):
    runs = ends(adapted(), method, max_rounds=2, optimizer_lifetime="run", **settings)
    assert same(*runs)
    # the last batches of clients with 13 samples are by themselves
    assert BATCH * len(SIZES) in batches and BATCH in batches


@pytest.mark.parametrize(
    ("net", "named"),
    [(adapted(Centred()), "other results"), (time_first, "other results"), (adapted(Drawing()), "randn")],
)
def test_nets_with_other_results_run_under_vmap(caplog, net, named):
    assert same(*ends(net, Local, data=(20, 20, 20)))
    (line,) = [line for line in caplog.messages if "vmap for adapters" in line]
    assert named in line


@pytest.mark.parametrize(("method", "merged"), [(Local, True), (OwnScale, False)])
def test_buffers_of_a_client_s_own_stay_its_own(batches, method, merged):
    assert same(*ends(adapted(Scaled()), method, data=(20, 20, 20)))
    assert (3 * BATCH in batches) == merged


@pytest.mark.parametrize(
    ("inner", "named"), [(nn.BatchNorm1d(8), "2"), (nn.BatchNorm1d(8, track_running_stats=False), "2")]
)
def test_layers_across_samples_are_named(caplog, inner, named):
    assert same(*ends(adapted(inner), data=(20, 20, 20), optimizer=MOMENTUM))
    (line,) = [line for line in caplog.messages if "vmap for adapters" in line]
    assert f"layer {named} " in line


def test_nets_without_adapters_say_nothing(caplog):
    fit(make_client(), engine="vectorised")
    assert not any("adapters" in line for line in caplog.messages)


# by vmap, too, clients with adapters train faster together than one after another
@pytest.mark.parametrize("net", [adapted(), adapted(Centred())])
@pytest.mark.parametrize("cores", [1, 2])
def test_auto_takes_adapters_together_on_a_single_core(monkeypatch, net, cores):
    monkeypatch.setattr(auto, "PARAMETERS", 10)
    monkeypatch.setattr(auto, "FOR_A_CORE", 2**20)
    took = []
    for kind in (Sequential, Vectorised, auto.Processes):

        def spied(self, jobs, run=kind.run, name=kind.__name__):
            done = list(run(self, jobs))
            took.append(name)
            return iter(done)

        monkeypatch.setattr(kind, "run", spied)
    fit(make_client(net=net), blobs(20, 20, 20), engine="auto", workers=cores)
    assert took[-1] == ("Vectorised" if cores == 1 else "Processes")
