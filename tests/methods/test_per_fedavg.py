import copy
from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.optim import SGD

from federations import FEATURES, blobs, equal, fit, make_client, near, noisy, plain, points
from pfl_lightning.data import epoch_order
from pfl_lightning.methods import FedAvg
from pfl_lightning.methods.per_fedavg import PerFedAvg
from pfl_lightning.nets import Net

HF = partial(PerFedAvg, alpha=0.3, variant="HF")
FO = partial(PerFedAvg, alpha=0.3)


class SecondHalves(FedAvg):
    """Learns from the second half of each batch."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        half = len(y) // 2
        return super().training_step((x[half:], y[half:]), batch_idx)


class Unadapted(PerFedAvg):
    """Is evaluated as received."""

    def evaluation_phases(self):
        return []


def normalised(input_shape, num_classes):
    """With BatchNorm, without randomness."""
    return Net(nn.Sequential(nn.Linear(input_shape[0], 5), nn.BatchNorm1d(5)), nn.Linear(5, num_classes))


def dropping(input_shape, num_classes):
    """With dropout, smooth."""
    body = nn.Sequential(nn.Linear(input_shape[0], 8), nn.Tanh(), nn.Dropout(0.5))
    return Net(body, nn.Linear(8, num_classes))


def training(cls, **settings):
    """In float64 and in training mode, as engines set it."""
    model = make_client(cls, **settings).double()
    for module in model.modules():
        module.training = True
    return model


def batch(n, seed=0):
    x, y = points(n, seed)
    return x.double(), y


def descent(model, data):
    """A training step's loss, and its gradient by name."""
    loss = model.training_step(data, 0)["loss"]
    model.zero_grad()
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.net.named_parameters()}


def loss_of(net, weights, x, y):
    return F.cross_entropy(functional_call(net, weights, (x,)), y)


def slope(net, weights, x, y):
    weights = {name: weight.detach().requires_grad_() for name, weight in weights.items()}
    grads = torch.autograd.grad(loss_of(net, weights, x, y), list(weights.values()))
    return dict(zip(weights, grads, strict=True))


def close(one, other, **tolerance):
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], **tolerance)


@pytest.mark.parametrize("net", [plain, normalised])
def test_without_adaptation_it_learns_from_second_halves_bit_for_bit(net):
    settings = {"net": net, "optimizer_lifetime": "run"}
    data = partial(blobs, batch_size=6, last_batch="drop")
    per, halves = (
        fit(make_client(method, **settings), data()) for method in (partial(PerFedAvg, alpha=0.0), SecondHalves)
    )
    assert equal(per.weights, halves.weights)
    assert near([row["val/loss"] for row in per.rows], [row["val/loss"] for row in halves.rows])
    assert not any("val_received/acc" in row for row in per.rows)


@pytest.mark.parametrize("n", [2, 7, 12])
def test_a_first_order_step_by_hand(n):
    model = training(FO)
    x, y = batch(n)
    net, half = copy.deepcopy(model.net), n // 2
    w = dict(net.named_parameters())
    inner = slope(net, w, x[:half], y[:half])
    adapted = {name: w[name].detach() - 0.3 * inner[name] for name in w}
    loss, direction = descent(model, (x, y))
    torch.testing.assert_close(loss, loss_of(net, adapted, x[half:], y[half:]).detach())
    close(direction, slope(net, adapted, x[half:], y[half:]))


def test_a_hessian_free_step_is_the_exact_one_with_a_hessian_of_its_own_batch():
    model = training(partial(HF, delta=1e-4))
    x, y = batch(13)
    net = copy.deepcopy(model.net)
    w = {name: parameter.detach() for name, parameter in net.named_parameters()}
    (x1, x2, x3), (y1, y2, y3) = x.split([4, 4, 5]), y.split([4, 4, 5])
    inner = slope(net, w, x1, y1)
    adapted = {name: w[name] - 0.3 * inner[name] for name in w}
    g = slope(net, adapted, x2, y2)
    v = {name: weight.clone().requires_grad_() for name, weight in w.items()}
    graph = torch.autograd.grad(loss_of(net, v, x3, y3), list(v.values()), create_graph=True)
    along = sum((first * g[name]).sum() for name, first in zip(v, graph, strict=True))
    product = dict(zip(v, torch.autograd.grad(along, list(v.values())), strict=True))
    loss, direction = descent(model, (x, y))
    torch.testing.assert_close(loss, loss_of(net, adapted, x2, y2))
    exact = {name: g[name] - 0.3 * product[name] for name in w}
    close(direction, exact, rtol=1e-6, atol=1e-8)
    assert max(product[name].abs().max() for name in w) > 1e-3


def test_a_hessian_free_step_is_the_paper_s_fraction():
    model = training(partial(HF, delta=0.5))
    x, y = batch(12)
    net = copy.deepcopy(model.net)
    w = {name: parameter.detach() for name, parameter in net.named_parameters()}
    inner = slope(net, w, x[:4], y[:4])
    g = slope(net, {name: w[name] - 0.3 * inner[name] for name in w}, x[4:8], y[4:8])
    above, below = (slope(net, {name: w[name] + d * g[name] for name in w}, x[8:], y[8:]) for d in (0.5, -0.5))
    _, direction = descent(model, (x, y))
    close(direction, {name: g[name] - 0.3 * (above[name] - below[name]) / (2 * 0.5) for name in w})


def test_both_sides_of_the_fraction_drop_the_same_units():
    model = training(HF, net=dropping)
    w = dict(model.net.named_parameters())
    direction = {name: torch.ones_like(weight) for name, weight in w.items()}
    products = []
    for model.delta in (1e-3, 1e-4):
        torch.manual_seed(1)
        products.append(model.curvature(w, direction, batch(20)))
    close(*products, rtol=1e-3, atol=1e-4)
    torch.manual_seed(2)
    assert not torch.allclose(
        model.curvature(w, direction, batch(20))["features.0.weight"], products[1]["features.0.weight"]
    )


def test_the_gradient_of_the_fraction_drops_the_units_that_the_loss_drops(monkeypatch):
    model = training(partial(PerFedAvg, alpha=1.0, variant="HF"), net=dropping)
    # were the Hessian the identity, a step of 1 would leave nothing of the gradient
    monkeypatch.setattr(model, "curvature", lambda weights, direction, batch: direction)
    _, direction = descent(model, batch(30))
    close(direction, {name: torch.zeros_like(tensor) for name, tensor in direction.items()}, rtol=0, atol=1e-15)


@pytest.mark.parametrize("method", [FO, HF])
def test_running_statistics_follow_the_adapted_model_alone(method):
    model = training(method, net=normalised)
    x, y = batch(12)
    net, parts = copy.deepcopy(model.net), 2 if method is FO else 3
    w = dict(net.named_parameters())
    size = 12 // parts
    inner = slope(copy.deepcopy(net), w, x[:size], y[:size])
    functional_call(net, {name: w[name] - 0.3 * inner[name] for name in w}, (x[size : 2 * size],))
    descent(model, (x, y))
    close(dict(model.net.named_buffers()), dict(net.named_buffers()))
    assert model.net.features[1].num_batches_tracked == 1
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize(
    ("method", "net", "n"), [(FO, plain, 1), (HF, plain, 2), (FO, normalised, 3), (HF, normalised, 5)]
)
def test_a_batch_too_small_to_be_split_is_learnt_from_as_it_is(method, net, n):
    model = training(method, net=net)
    twin = training(FedAvg, net=net)
    values, expected = descent(model, batch(n)), descent(twin, batch(n))
    assert equal(values, expected)
    assert equal(model.net.state_dict(), twin.net.state_dict())


def test_frozen_weights_are_not_adapted():
    model = training(FO)
    model.net.features[0].bias.requires_grad_(False)
    x, y = batch(8)
    w = dict(copy.deepcopy(model.net).named_parameters())
    inner = slope(model.net, w, x[:4], y[:4])
    adapted = {name: w[name] - 0.3 * inner[name] * (name != "features.0.bias") for name in w}
    loss, direction = descent(model, (x, y))
    torch.testing.assert_close(loss, loss_of(model.net, adapted, x[4:], y[4:]).detach())
    assert [name for name, gradient in direction.items() if gradient is None] == ["features.0.bias"]


@pytest.mark.exhaustive
def test_the_adaptation_and_second_derivatives_change_the_weights():
    ends = [fit(make_client(method)).weights["net.features.0.weight"] for method in (FedAvg, FO, HF)]
    ends.append(fit(make_client(partial(FO, alpha=0.1))).weights["net.features.0.weight"])
    for i, end in enumerate(ends):
        assert all((end - other).abs().max() > 1e-4 for other in ends[:i])


def test_it_is_evaluated_after_one_step_on_one_training_batch():
    data = blobs(30, 40, batch_size=8)
    run = fit(make_client(FO), data, max_rounds=2)
    received, test, train = run.weights, data.part(1, "test"), data.part(1, "train")
    seed = run.federation.job(1).seed
    rows = epoch_order(len(train), 8, "keep", torch.Generator().manual_seed(seed))[:8]
    net = make_client().net
    w = {name: received[f"net.{name}"] for name, _ in net.named_parameters()}
    inner = slope(net, w, train.x[rows], train.y[rows])
    adapted = {name: w[name] - 0.3 * inner[name] for name in w}
    evaluated = run.logger.clients[1]
    assert evaluated["test_received/loss"] == pytest.approx(float(loss_of(net, w, test.x, test.y)), rel=1e-5)
    assert evaluated["test/loss"] == pytest.approx(float(loss_of(net, adapted, test.x, test.y)), rel=1e-5)
    assert evaluated["test/loss"] != evaluated["test_received/loss"]


@pytest.mark.parametrize("optimizer_lifetime", ["round", "run"])
def test_evaluation_leaves_no_trace(optimizer_lifetime):
    settings = {"net": noisy, "optimizer_lifetime": optimizer_lifetime}
    adapted, received = (fit(make_client(method, **settings)) for method in (PerFedAvg, Unadapted))
    assert equal(adapted.weights, received.weights)
    assert near([row["val_received/loss"] for row in adapted.rows], [row["val/loss"] for row in received.rows])
    before = copy.deepcopy(adapted.federation.federation_state())
    first = adapted.test()
    assert equal(adapted.federation.federation_state(), before)
    assert adapted.test() == first


@pytest.mark.parametrize("batch_size", [1, 2, 100])
def test_one_client_of_any_batch_size_learns(batch_size):
    run = fit(make_client(FO, optimizer=partial(SGD, lr=0.05)), blobs(30, batch_size=batch_size), local_epochs=5)
    assert run.rows[-1]["train/loss"] < run.rows[0]["train/loss"]


@pytest.mark.parametrize("method", [FO, HF])
def test_bfloat16_trains(method):
    single, mixed = (fit(make_client(method, net=plain), precision=precision) for precision in (None, "bf16-mixed"))
    assert mixed.rows[-1]["train/loss"] == pytest.approx(single.rows[-1]["train/loss"], rel=0.1)
    assert mixed.weights["net.features.0.weight"].shape[1] == FEATURES


@pytest.mark.parametrize(("setting", "value"), [("alpha", -0.1), ("delta", 0), ("delta", -1)])
def test_settings_out_of_range_are_refused_by_name(setting, value):
    with pytest.raises(MisconfigurationException, match=rf"model\.{setting}={value}"):
        make_client(partial(PerFedAvg, **{setting: value}))
