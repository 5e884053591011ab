from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.nn import functional as F
from torch.optim import SGD

from federations import blobs, check_batches_of_one, equal, fit, make_client, noisy
from pfl_lightning.methods import FedAvg, FedNTD
from pfl_lightning.methods.fedntd import not_true_distillation


def drawn(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_it_is_the_divergence_of_softmaxes_with_the_true_class_masked(temperature):
    z, teacher, y = drawn(6, 4, seed=0), drawn(6, 4, seed=1), torch.tensor([0, 1, 2, 3, 3, 0])
    total = 0.0
    for i in range(6):
        keep = [c for c in range(4) if c != y[i]]
        p, q = (t[i, keep].div(temperature).softmax(0) for t in (teacher, z))
        total += float((p * (p / q).log()).sum())
    ours = not_true_distillation(z, teacher, y, temperature)
    assert float(ours) == pytest.approx(temperature**2 * total / 6, rel=1e-12)


def test_the_true_class_gets_no_gradient_and_of_two_classes_there_is_none():
    z, y = drawn(6, 4, seed=0).requires_grad_(), torch.tensor([0, 1, 2, 3, 3, 0])
    (slope,) = torch.autograd.grad(not_true_distillation(z, drawn(6, 4, seed=1), y), z)
    assert not slope.gather(1, y[:, None]).any() and slope.abs().sum() > 0.1
    assert float(not_true_distillation(drawn(5, 2, seed=0), drawn(5, 2, seed=1), y[:5] % 2)) == 0


def test_without_its_term_it_is_fedavg_bit_for_bit_and_with_it_is_not():
    settings = {"net": noisy, "optimizer_lifetime": "run"}
    off, on, average = (
        fit(make_client(method, **settings)).weights for method in (partial(FedNTD, beta=0.0), FedNTD, FedAvg)
    )
    assert equal(off, average)
    assert not equal(on, average)


def test_two_steps_by_hand():
    """The first one is FedAvg's, as the received model is the one under training."""
    data = blobs(30, batch_size=100)
    client = make_client(partial(FedNTD, beta=0.7, temperature=2.0), optimizer=partial(SGD, lr=0.5))
    run = fit(client, data, local_epochs=2, max_rounds=1)
    net, teacher = make_client().net, make_client().net
    part = data.part(0, "train")
    for _ in range(2):
        z = net(part.x)
        loss = F.cross_entropy(z, part.y) + 0.7 * not_true_distillation(z, teacher(part.x).detach(), part.y, 2.0)
        grads = torch.autograd.grad(loss, list(net.parameters()))
        for p, g in zip(net.parameters(), grads, strict=True):
            p.data -= 0.5 * g
    for name, tensor in net.state_dict().items():
        torch.testing.assert_close(run.weights[f"net.{name}"], tensor)
    assert run.rows[0]["train/distillation"] > 0


def test_the_teacher_stays_with_nobody():
    run = fit(make_client(FedNTD))
    assert not any(state.personal for state in run.federation.clients.values())
    assert set(run.weights) == set(make_client(FedAvg).state_dict())


def test_it_learns_from_batches_of_one_and_of_absent_classes():
    check_batches_of_one(make_client(FedNTD), max_rounds=4)


@pytest.mark.parametrize(("name", "value"), [("beta", -1), ("temperature", 0)])
def test_what_is_out_of_range_is_refused_by_name(name, value):
    with pytest.raises(MisconfigurationException, match=rf"model\.{name}={value} must be"):
        make_client(FedNTD, **{name: value})
