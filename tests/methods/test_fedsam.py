from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.nn import functional as F
from torch.optim import SGD

from federations import blobs, check_batches_of_one, equal, fit, make_client, noisy
from pfl_lightning.methods import FedAvg, FedSAM


def test_without_rho_it_is_fedavg_bit_for_bit_and_with_it_is_not():
    settings = {"net": noisy, "optimizer_lifetime": "run"}
    off, on, average = (
        fit(make_client(method, **settings)).weights for method in (partial(FedSAM, rho=0.0), FedSAM, FedAvg)
    )
    assert equal(off, average)
    assert not equal(on, average)


@pytest.mark.parametrize("adaptive", [False, True])
def test_three_steps_by_a_second_implementation(adaptive):
    """In float64, in the way of the official code: the parameters go up, and come back before the step."""
    rho, eta, lr, wd = 0.5, 0.2, 0.1, 0.05
    data = blobs(30, batch_size=100)
    client = make_client(FedSAM, rho=rho, adaptive=adaptive, eta=eta, optimizer=partial(SGD, lr=lr, weight_decay=wd))
    run = fit(client, data, local_epochs=3, max_rounds=1, precision="64-true")
    net = make_client().net.double()
    part = data.part(0, "train").to("cpu", torch.float64)
    named = dict(net.named_parameters())
    for _ in range(3):
        g = dict(
            zip(named, torch.autograd.grad(F.cross_entropy(net(part.x), part.y), list(named.values())), strict=True)
        )
        t = {n: p.detach().abs() + eta if adaptive and "weight" in n else 1.0 for n, p in named.items()}
        norm = sum(float((t[n] * g[n]).square().sum()) for n in g) ** 0.5
        start = {n: p.detach().clone() for n, p in named.items()}
        for n, p in named.items():
            p.data += rho * t[n] * t[n] * g[n] / norm
        steep = torch.autograd.grad(F.cross_entropy(net(part.x), part.y), list(named.values()))
        for (n, p), slope in zip(named.items(), steep, strict=True):
            p.data = start[n] - lr * (slope + wd * start[n])
    for name, tensor in net.state_dict().items():
        torch.testing.assert_close(run.weights[f"net.{name}"], tensor, rtol=0, atol=1e-12)


def test_the_way_up_is_as_long_as_rho_and_none_where_there_is_no_gradient():
    client = make_client(FedSAM, rho=0.3)
    w = dict(client.net.named_parameters())
    generator = torch.Generator().manual_seed(0)
    e = client.ascent(w, {name: torch.randn(p.shape, generator=generator) for name, p in w.items()})
    assert sum(float(entry.square().sum()) for entry in e.values()) ** 0.5 == pytest.approx(0.3)
    none = client.ascent(w, {name: torch.zeros_like(p) for name, p in w.items()})
    assert not any(entry.any() for entry in none.values())


def test_running_statistics_follow_one_pass_a_batch():
    run = fit(make_client(FedSAM, net=noisy), blobs(30), max_rounds=1)
    assert int(run.weights["net.features.1.num_batches_tracked"]) == len(run.data.part(0, "train")) // 5


def test_it_learns_from_batches_of_one_and_of_absent_classes():
    check_batches_of_one(make_client(FedSAM), max_rounds=4)


@pytest.mark.parametrize("name", ["rho", "eta"])
def test_what_is_negative_is_refused_by_name(name):
    with pytest.raises(MisconfigurationException, match=rf"model\.{name}=-1 must be"):
        make_client(FedSAM, **{name: -1})
