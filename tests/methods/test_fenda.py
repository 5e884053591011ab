from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD

from federations import FEATURES, Spy, blobs, equal, fit, make_client, noisy, plain, points
from pfl_lightning.methods import FENDA, FedPer
from pfl_lightning.nets import Net

STEP = partial(SGD, lr=0.1)


class Still(FENDA):
    """Its personal body is 0 and stays so."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, join="sum", **kwargs)
        for parameter in self.net.local.parameters():
            nn.init.zeros_(parameter)

    def adjust_gradients(self, gradients):
        return {name: 0 * g if name.startswith("net.local.") else g for name, g in gradients.items()}


def test_with_a_personal_body_of_zeros_it_is_fedper_bit_for_bit():
    still, per = fit(make_client(Still)), fit(make_client(FedPer))
    assert equal(still.federation.aggregator.global_model(), per.federation.aggregator.global_model())
    for client, state in per.federation.clients.items():
        own = still.federation.clients[client].personal
        assert all(torch.equal(own[name], tensor) for name, tensor in state.personal.items())


def test_a_step_by_hand():
    model = make_client(FENDA, net=plain).double()
    x, y = points(9, seed=1)
    model.training_step((x.double(), y), 0)["loss"].backward()
    p = {name: t.detach().clone().requires_grad_() for name, t in model.named_parameters()}
    own, shared = (
        torch.tanh(F.linear(x.double(), p[f"net.{part}.0.weight"], p[f"net.{part}.0.bias"]))
        for part in ("local", "features")
    )
    w, b = p["net.classifier.weight"], p["net.classifier.bias"]
    logits = own @ w[:, :5].T + shared @ w[:, 5:].T + b
    F.cross_entropy(logits, y).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, p[name].grad)
    torch.testing.assert_close(model(x.double()), logits)


@pytest.mark.parametrize("join", ["concatenate", "sum"])
def test_the_shared_body_alone_travels_and_all_three_parts_learn(join):
    spy = Spy()
    run = fit(make_client(FENDA, net=noisy, join=join), callbacks=[spy])
    assert all(name.startswith("net.features.") for u in spy.updates[-1].values() for name in u["weights"])
    start = make_client(FENDA, net=noisy, join=join).state_dict()
    first, second = (run.federation.clients[client].personal for client in (0, 1))
    for name in ("net.local.0.weight", "net.classifier.weight", "net.local.1.running_mean"):
        assert not torch.equal(first[name], start[name]) and not torch.equal(first[name], second[name])
    assert run.rows[-1]["val/loss"] < run.rows[0]["val/loss"]


def test_the_two_bodies_start_apart_and_the_shared_one_as_without_the_method():
    model, average = make_client(FENDA), make_client()
    assert torch.equal(model.net.features[0].weight, average.net.features[0].weight)
    assert not torch.equal(model.net.local[0].weight, average.net.features[0].weight)


def test_a_frozen_part_of_the_body_is_one_for_all():
    def frozen(input_shape, num_classes):
        body = nn.Sequential(nn.Linear(FEATURES, 4), nn.Linear(4, 4))
        body[0].requires_grad_(False)
        return Net(body, nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, num_classes)))

    model = make_client(FENDA, net=frozen)
    assert model.net.local[0].weight is model.net.features[0].weight
    assert (model.net.classifier[0].in_features, model.net.classifier[2].in_features) == (8, 4)
    assert fit(model).rows[-1]["clients_diverged"] == 0


@pytest.mark.parametrize("data", [blobs(30, 45, by_class=True), blobs(30, batch_size=1)])
def test_it_trains_where_there_is_little(data):
    assert fit(make_client(FENDA), data).rows[-1]["clients_diverged"] == 0


def test_another_join_is_refused_by_name():
    with pytest.raises(MisconfigurationException, match=r"model\.join='product'"):
        make_client(FENDA, join="product")
