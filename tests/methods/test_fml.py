from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.nn import functional as F
from torch.optim import SGD

from federations import blobs, check_batches_of_one, check_evaluated_by, equal, fit, make_client
from pfl_lightning import WeightedAverage
from pfl_lightning.methods import FML, FedAvg, Local
from pfl_lightning.methods.losses import divergence


def test_with_cross_entropy_alone_they_are_those_of_local_and_fedavg_bit_for_bit():
    mutual = fit(make_client(partial(FML, alpha=1.0, beta=1.0)), clients_per_round=3)
    average = fit(make_client(FedAvg), aggregator=WeightedAverage(weighting="uniform"), clients_per_round=3)
    local = fit(make_client(Local), clients_per_round=3)
    assert equal(
        {n: t for n, t in mutual.weights.items() if n.startswith("net.")},
        {n: t for n, t in average.weights.items() if n.startswith("net.")},
    )
    for client, state in local.federation.clients.items():
        own = mutual.federation.clients[client].personal
        assert all(torch.equal(own[name.replace("net.", "personal.")], t) for name, t in state.personal.items())


def test_two_rounds_of_one_client_by_hand():
    """The first divergences are 0, as both start alike, and so is one side's part of each later one."""
    lr, alpha, beta, data = 0.3, 0.3, 0.8, blobs(30, batch_size=100)
    client = make_client(FML, alpha=alpha, beta=beta, optimizer=partial(SGD, lr=lr))
    run = fit(client, data, local_epochs=2, max_rounds=2, precision="64-true")
    part = data.part(0, "train").to("cpu", torch.float64)
    w, v = make_client().net.double(), make_client().net.double()
    for _ in range(4):
        p_w, p_v = w(part.x).softmax(1), v(part.x).softmax(1)
        to_v = (p_w.detach() * (p_w.detach() / p_v).log()).sum(1).mean()
        to_w = (p_v.detach() * (p_v.detach() / p_w).log()).sum(1).mean()
        losses = {
            v: alpha * F.cross_entropy(v(part.x), part.y) + (1 - alpha) * to_v,
            w: beta * F.cross_entropy(w(part.x), part.y) + (1 - beta) * to_w,
        }
        slopes = {net: torch.autograd.grad(loss, list(net.parameters())) for net, loss in losses.items()}
        for net, gradients in slopes.items():
            for p, g in zip(net.parameters(), gradients, strict=True):
                p.data -= lr * g
    personal = run.federation.clients[0].personal
    for name, tensor in v.state_dict().items():
        torch.testing.assert_close(personal[f"personal.{name}"], tensor, rtol=0, atol=1e-12)
        torch.testing.assert_close(run.weights[f"net.{name}"], w.state_dict()[name], rtol=0, atol=1e-12)
    assert to_v.item() > 1e-4


def test_the_teacher_gets_no_gradient():
    a, b = torch.zeros(2, 3, requires_grad=True), torch.ones(2, 3).cumsum(1).requires_grad_()
    divergence(a, b).backward()
    assert a.grad is None and b.grad.any()


def test_clients_are_evaluated_by_their_own_models():
    check_evaluated_by(fit(make_client(FML)), "personal")


def test_it_learns_from_batches_of_one_and_of_absent_classes():
    check_batches_of_one(make_client(FML), max_rounds=4)


@pytest.mark.parametrize("name", ["alpha", "beta"])
def test_what_is_out_of_range_is_refused_by_name(name):
    with pytest.raises(MisconfigurationException, match=rf"model\.{name}=2 must be from 0 to 1"):
        make_client(FML, **{name: 2})
