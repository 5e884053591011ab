"""Clients with different networks in one federation."""

import copy
import inspect
import pickle
from functools import partial
from pathlib import Path

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from command import QUIET, pfl, summary
from federations import (
    CLASSES,
    FEATURES,
    HIDDEN,
    MOMENTUM,
    NETS,
    Shuffled,
    Small,
    Spy,
    Wide,
    equal,
    fit,
    make_client,
    same_end,
)
from pfl_lightning.methods import FedPer, Local
from pfl_lightning.methods.fedavg import FedAvg


class HeadOnly(FedAvg):
    """Shares the classifier alone."""

    def is_shared(self, name):
        return super().is_shared(name) and name.startswith("net.classifier.")


NETS_FILE = """
model:
  class_path: Local
  init_args:
    net:
      - class_path: MLP
        init_args: {hidden: [8]}
      - class_path: MLP
        init_args: {hidden: [16, 8]}
"""
HEAD = {"net.classifier.weight", "net.classifier.bias"}


def test_networks_are_dealt_in_turn_or_in_blocks():
    turn, block = (make_client(net=[Small, Wide, Small], assign_nets=by) for by in ("turn", "block"))
    assert [turn.architecture_of(client, 7) for client in range(7)] == [0, 1, 2, 0, 1, 2, 0]
    assert [block.architecture_of(client, 7) for client in range(7)] == [0, 0, 0, 1, 1, 1, 2]
    assert [block.architecture_of(client, 20) for client in range(20)] == [0] * 7 + [1] * 7 + [2] * 6


def test_there_is_one_module_a_network_and_each_is_whole():
    client = make_client(partial(FedPer), net=NETS)
    first, second = client.architectures()
    assert first is client and type(second) is FedPer
    assert isinstance(first.net, Small) and isinstance(second.net, Wide)
    assert equal(dict(second.state_dict()), dict(make_client(FedPer, net=NETS).architectures()[1].state_dict()))


class Doubling(FedAvg):
    """Changes an argument before it passes the others on."""

    def __init__(self, mu=1.0, **kwargs):
        mu = mu * 2
        super().__init__(**kwargs)
        self.mu = mu


class Popping(FedAvg):
    """Takes an argument out of those that it passes on."""

    def __init__(self, **kwargs):
        self.mu = kwargs.pop("mu", 0.1)
        super().__init__(**kwargs)


class PoppingWithin(FedAvg):
    """Takes something out of an argument, in place."""

    def __init__(self, settings, **kwargs):
        self.mu = settings.pop("mu", 0.1)
        super().__init__(**kwargs)


class Wrapping(FedAvg):
    """Passes other factories on than it is given."""

    def __init__(self, net, mu, **kwargs):
        super().__init__(net=[partial(each) for each in net], **kwargs)
        self.mu = mu


class Defaulting(FedAvg):
    """Has a list of networks of its own."""

    def __init__(self, net=(Small, Wide, Small), mu=1.0, **kwargs):
        super().__init__(net=list(net), **kwargs)
        self.mu = mu


class Derived(Popping):
    pass


@pytest.mark.parametrize(
    ("method", "given", "mu"),
    [
        (Doubling, {"mu": 5.0}, 10.0),
        (Popping, {"mu": 5.0}, 5.0),
        (Derived, {"mu": 5.0}, 5.0),
        (PoppingWithin, {"settings": {"mu": 5.0}}, 5.0),
        (Wrapping, {"mu": 5.0}, 5.0),
    ],
)
def test_all_are_made_with_the_arguments_that_the_first_was_given(method, given, mu):
    given = copy.deepcopy(given)
    modules = make_client(method, net=[Small, Wide, Small], **given).architectures()
    assert [module.mu for module in modules] == [mu] * 3
    assert [type(module.net) for module in modules] == [Small, Wide, Small]


def test_a_list_that_the_method_has_itself_is_taken_too():
    modules = Defaulting(input_shape=(FEATURES,), num_classes=CLASSES).architectures()
    assert [type(module.net) for module in modules] == [Small, Wide, Small]


@pytest.mark.parametrize("again", [copy.deepcopy, lambda made: pickle.loads(pickle.dumps(made))])
def test_copies_of_a_module_give_the_same(again):
    client = again(make_client(Doubling, net=NETS, mu=5.0))
    assert [module.mu for module in client.architectures()] == [10.0, 10.0]


@pytest.mark.parametrize("method", [FedAvg, Doubling, Popping, Derived])
def test_signatures_are_those_of_init(method):
    assert inspect.signature(method) == inspect.signature(partial(method.__init__, None))


def test_making_them_leaves_the_random_state_alone():
    client = make_client(net=NETS)
    before = torch.get_rng_state()
    client.architectures()
    assert torch.equal(before, torch.get_rng_state())


def test_a_list_given_by_position_works_too():
    architectures = FedAvg([Small, Wide], (FEATURES,), CLASSES).architectures()
    assert [type(kind.net) for kind in architectures] == [Small, Wide]


def test_what_is_alike_travels_and_the_rest_stays():
    spy = Spy()
    run = fit(make_client(HeadOnly, net=NETS), callbacks=[spy], max_rounds=2)
    assert all(set(update["weights"]) == HEAD for update in spy.updates[0].values())
    states = run.federation.clients
    assert set(states[0].personal) == {"net.features.weight", "net.features.bias"}
    assert len(states[1].personal) == 9
    assert not equal(states[0].personal, states[2].personal)
    assert run.rows[-1]["bytes/up"] == 4 * (4 * (HIDDEN * CLASSES + CLASSES) + 2 * 4)
    payloads = [run.federation.aggregator.download(client)["weights"] for client in range(4)]
    assert all(equal(payloads[0], payload) for payload in payloads)


def test_all_start_from_the_same_shared_entries():
    spy = Spy()
    model = make_client(HeadOnly, net=NETS, optimizer=partial(torch.optim.SGD, lr=0.0))
    fit(model, callbacks=[spy], max_rounds=1)
    uploads = [update["weights"] for update in spy.updates[0].values()]
    assert all(equal(uploads[0], upload) for upload in uploads)


def test_each_client_is_evaluated_with_its_own_network():
    run = fit(make_client(Local, net=NETS), max_rounds=2)
    federation = run.federation
    for client in range(4):
        kind = federation.architectures[federation.architecture_of(client)]
        kind.receive(federation.clients[client].personal, {}, None)
        kind.eval()
        part = run.data.part(client, "test")
        assert run.logger.clients[client]["test/acc"] == float((kind(part.x).argmax(1) == part.y).float().mean())


@pytest.mark.parametrize("by", ["turn", "block"])
def test_resuming_and_the_order_change_nothing(by, tmp_path):
    make = partial(make_client, HeadOnly, net=NETS, assign_nets=by, optimizer_lifetime="run")
    whole = fit(make(), root=tmp_path / "whole", clients_per_round=0.75, evaluate="both")
    other = fit(make(), root=tmp_path / "other", clients_per_round=0.75, evaluate="both", engine=Shuffled)
    assert same_end(whole, other)
    settings = {"root": tmp_path / "half", "clients_per_round": 0.75, "evaluate": "both"}
    fit(make(), max_rounds=1, **settings)
    resumed = fit(make(seed=9), ckpt_path="last", resume_changed=True, **settings)
    assert same_end(whole, resumed)


def test_a_client_of_any_network_comes_out_of_a_checkpoint(tmp_path):
    run = fit(make_client(HeadOnly, net=NETS), root=tmp_path)
    for client, net in enumerate((Small, Wide, Small, Wide)):
        model = HeadOnly.load_from_checkpoint(run.last, client=client, net=NETS, optimizer=MOMENTUM, weights_only=True)
        assert isinstance(model.net, net)
        model.eval()
        part = run.data.part(client, "test")
        accuracy = float((model(part.x).argmax(1) == part.y).float().mean())
        assert accuracy == run.logger.clients[client]["test/acc"]


def test_a_method_that_shares_what_differs_is_refused():
    with pytest.raises(MisconfigurationException, match=r"model\.net: Small and Wide differ in .* which FedAvg shares"):
        fit(make_client(net=NETS))


def test_an_empty_list_is_refused():
    with pytest.raises(MisconfigurationException, match=r"model\.net=\[\]"):
        make_client(net=[])


@pytest.mark.exhaustive
def test_the_command_line_takes_a_list():
    Path("nets.yaml").write_text(NETS_FILE)
    pfl(f"fit --config nets.yaml --data Digits --trainer.max_rounds 1 {QUIET}")
    assert summary("Local-Digits/version_0")["final"]["test/acc"] > 0
    model = Local.load_from_checkpoint("runs/Local-Digits/version_0/checkpoints/last.ckpt", client=1, weights_only=True)
    assert [layer.out_features for layer in model.modules() if isinstance(layer, nn.Linear)] == [16, 8, 10]
