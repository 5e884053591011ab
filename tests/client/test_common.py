"""Parameters that the net is built with frozen: they exist once, whatever the method."""

from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.optim import SGD

from federations import (
    CLASSES,
    FEATURES,
    HIDDEN,
    NETS,
    Pause,
    Spy,
    blobs,
    equal,
    fit,
    load,
    load_client,
    make_client,
    noisy,
    plain,
    same_end,
)
from pfl_lightning.callbacks import FederatedCallback
from pfl_lightning.client.common import common_parameters, trained_parameters, whole_model
from pfl_lightning.messages import digest, num_bytes, tensors
from pfl_lightning.methods import (
    APPLE,
    IFCA,
    MOON,
    CloudProx,
    ControlVariates,
    Ditto,
    FedALA,
    FedAvg,
    FedClassAvg,
    FedFomo,
    FedLAW,
    FedPer,
    FedProx,
    PFedMe,
)
from pfl_lightning.nets import Net

WEIGHT, BIAS = "net.features.0.weight", "net.features.2.bias"
ROOM = HIDDEN * HIDDEN + HIDDEN
"""Trained numbers of the features of `half_frozen`."""
HEAD = CLASSES * HIDDEN + CLASSES
METHODS = [FedAvg, FedPer, Ditto, ControlVariates, MOON, PFedMe]


def half_frozen(input_shape, num_classes):
    """A frozen layer under a trained one."""
    first = nn.Linear(input_shape[0], HIDDEN).requires_grad_(False)
    body = nn.Sequential(first, nn.Tanh(), nn.Linear(HIDDEN, HIDDEN), nn.Tanh())
    return Net(body, nn.Linear(HIDDEN, num_classes))


def frozen_norm(input_shape, num_classes):
    net = noisy(input_shape, num_classes)
    net.features[:2].requires_grad_(False)
    return net


class Watch(FederatedCallback):
    """Keeps the names of all entries that travel or stay, and the numbers in a client's."""

    def __init__(self):
        self.names, self.sent, self.kept = set(), 0, 0

    def on_aggregate_start(self, trainer, federation, updates):
        self.note(updates)
        self.sent = num_bytes(updates[0]["weights"])

    def on_train_epoch_end(self, trainer, federation):
        self.note({client: vars(state) for client, state in federation.clients.items()})
        self.note(federation.federation_state())
        self.kept = num_bytes(federation.clients[0].personal)

    def note(self, record):
        if isinstance(record, dict):
            self.names |= {name for name in record if isinstance(name, str)}
            for value in record.values():
                self.note(value)
        elif isinstance(record, (list, tuple)):
            for value in record:
                self.note(value)


def run(method, engine="sequential", net=half_frozen, **settings):
    watch = Watch()
    model = make_client(method, net=net, optimizer=partial(SGD, lr=0.05))
    before = digest(common_parameters(model))
    assert before != digest([])
    done = fit(model, engine=engine, callbacks=[watch], **settings)
    assert digest(common_parameters(model)) == before
    assert all(equal(done.weights[name], p.detach()) for name, p in common_parameters(model).items())
    assert not watch.names & model.common_names
    return done, watch


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("precision", "near"), [("32-true", 1e-6), ("64-true", 1e-9)])
def test_frozen_parameters_exist_once_under_both_engines(method, precision, near):
    one, other = (run(method, engine, precision=precision)[0] for engine in ("sequential", "vectorised"))
    for a, b in zip(*(map(tensors, (r.weights, r.federation.federation_state()["clients"])) for r in (one, other))):
        raise AssertionError
    trees = [(r.weights, [vars(state) for state in r.federation.clients.values()]) for r in (one, other)]
    for a, b in zip(*map(tensors, trees), strict=True):
        torch.testing.assert_close(a, b, atol=near, rtol=near)
    assert any(not equal(one.weights[name], make_client(method, net=half_frozen).state_dict()[name]) for name in [BIAS])
