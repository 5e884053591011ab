import math
from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.nn import functional as F
from torch.optim import SGD

from federations import Spy, blobs, check_batches_of_one, equal, fit, make_client, noisy, points
from pfl_lightning.methods import FedAvg, FedLESAM

SETTINGS = {"net": noisy, "optimizer_lifetime": "run"}


def received(model, shift):
    """A payload whose parameters are the model's and a number."""
    return {"weights": {n: t + shift for n, t in model.state_dict().items() if model.is_shared(n)}}


def test_the_gradient_is_that_at_the_point_of_distance_rho_on_the_way_back():
    model = make_client(FedLESAM, rho=0.3).double()
    initial = {name: p.detach().clone() for name, p in model.net.named_parameters()}
    model.on_download(received(model, 0.5), None)
    x = {name: p.detach().clone() for name, p in model.net.named_parameters()}
    # the client has trained a little
    with torch.no_grad():
        for parameter in model.net.parameters():
            parameter += 0.1
    size = math.sqrt(sum(p.numel() for p in x.values()))
    batch = points(9, seed=1)
    batch = batch[0].double(), batch[1]
    gradients = torch.autograd.grad(model.training_step(batch, 0)["loss"], list(model.net.parameters()))
    there = make_client().double()
    there.net.load_state_dict({name: x[name] + 0.1 - 0.3 / size for name in x})
    assert all(torch.allclose(x[name] - 0.5, initial[name]) for name in x)
    expected = torch.autograd.grad(F.cross_entropy(there(batch[0]), batch[1]), list(there.net.parameters()))
    for mine, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(mine, other)


def test_a_first_round_is_fedavg_s_and_a_second_is_not():
    runs = {r: [fit(make_client(m, net=noisy), max_rounds=r) for m in (FedAvg, FedLESAM)] for r in (1, 2)}
    assert equal(*({n: run.weights[n] for n in runs[1][0].weights} for run in runs[1]))
    plain, ours = (run.weights["net.classifier.weight"] for run in runs[2])
    assert not torch.equal(plain, ours)


def test_without_a_distance_it_is_fedavg_bit_for_bit():
    runs = [fit(make_client(method, **SETTINGS)) for method in (FedAvg, partial(FedLESAM, rho=0.0))]
    assert equal(*({n: run.weights[n] for n in runs[0].weights} for run in runs))


def test_a_client_keeps_what_it_received_when_it_last_took_part():
    spy = Spy()
    run = fit(make_client(FedLESAM), callbacks=[spy], clients_per_round=2, max_rounds=5)
    # the model that a round begins with, and each client's last round
    starts = [fit(make_client(FedLESAM), clients_per_round=2, max_rounds=r).weights for r in range(1, 5)]
    for client in range(4):
        rounds = [r for r, cohort in enumerate(spy.cohorts) if client in cohort]
        if rounds and rounds[-1] > 0:
            kept = run.federation.clients[client].personal["last.classifier/weight"]
            assert torch.equal(kept, starts[rounds[-1] - 1]["net.classifier.weight"])
    assert not any(name.startswith("last") for name in spy.updates[-1][spy.cohorts[-1][0]]["weights"])


def test_it_learns():
    rows = fit(make_client(FedLESAM, optimizer=partial(SGD, lr=0.1)), blobs(30, 30, by_class=True), max_rounds=6).rows
    assert rows[-1]["val/loss"] < rows[0]["val/loss"]


def test_batches_of_one_learn():
    check_batches_of_one(make_client(FedLESAM), max_rounds=3)


@pytest.mark.parametrize("rho", [-0.1, math.nan])
def test_a_distance_out_of_range_is_refused_by_name(rho):
    with pytest.raises(MisconfigurationException, match=rf"model\.rho={rho}"):
        make_client(FedLESAM, rho=rho)
