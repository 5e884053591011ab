import copy

import torch
from torch import nn

from federations import FEATURES, equal, make_client, noisy
from pfl_lightning.methods.frozen import Frozen, FrozenModule


def body(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Dropout(0.5), nn.Linear(5, 3))


def test_copies_have_the_names_and_the_order_of_their_originals():
    net = body(0)
    frozen = Frozen(net.named_parameters())
    assert equal(frozen.tensors(), {name: parameter.detach() for name, parameter in net.named_parameters()})
    assert list(frozen.tensors()) == [name for name, _ in net.named_parameters()]
    assert all(a is b for a, b in zip(frozen.buffers(), frozen.tensors().values(), strict=True))


def test_copies_stand_still_until_they_are_taken_anew():
    net, frozen = body(0), Frozen(body(0).named_parameters())
    before = copy.deepcopy(frozen.tensors())
    nn.init.constant_(net[0].weight, 7.0)
    assert equal(frozen.tensors(), before) and not list(frozen.parameters())
    frozen.take(net.named_parameters())
    assert frozen.tensors()["0.weight"].eq(7).all() and not frozen.tensors()["0.weight"].requires_grad


def test_what_there_is_no_copy_of_is_left_out():
    net, frozen = body(1), Frozen([("4.bias", torch.zeros(3))])
    frozen.take(net.named_parameters())
    assert equal(frozen.tensors(), {"4.bias": net[4].bias.detach()})


def test_only_persistent_copies_are_entries_of_the_state():
    assert not Frozen(body(0).named_parameters()).state_dict()
    kept = Frozen(body(0).named_parameters(), persistent=True).state_dict()
    assert list(kept) == [name.replace(".", "/") for name, _ in body(0).named_parameters()]


def test_a_frozen_module_answers_as_its_original_in_evaluation_mode_without_a_gradient():
    first, second = body(0), body(1)
    frozen = FrozenModule(first).train()
    x = torch.randn(6, 4, requires_grad=True)
    assert torch.equal(frozen(x), first.eval()(x)) and not frozen(x).requires_grad
    second[1].running_mean.fill_(0.3)
    frozen.take_from(second)
    assert torch.equal(frozen(x), second.eval()(x)) and frozen.training


def test_a_frozen_module_runs_a_client_s_features_where_they_are():
    net = make_client(net=noisy).net
    x = torch.randn(3, FEATURES)
    frozen = FrozenModule(net.features, persistent=True).double()
    torch.testing.assert_close(frozen(x.double()), net.features.eval()(x).double().detach())
