import math
from functools import partial
from itertools import combinations

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD

from federations import HIDDEN, Shuffled, blobs, equal, fit, make_client, noisy, points, same_end
from pfl_lightning.methods import FedAvg
from pfl_lightning.methods.feduv import FedUV, uniformity_loss, variance_loss
from pfl_lightning.nets import Net


def draw(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("classes", [1, 2, 3, 10, 100])
def test_the_aim_of_the_variance_is_that_of_the_identity_matrix(classes):
    same = torch.zeros(4, classes, dtype=torch.float64)
    assert float(variance_loss(same)) == pytest.approx(1 / math.sqrt(classes))
    if classes > 1:
        identity = torch.eye(classes, dtype=torch.float64)
        assert float(identity.std(0).mean()) == pytest.approx(1 / math.sqrt(classes), abs=1e-15)
        assert float(variance_loss(1e4 * identity)) == pytest.approx(0, abs=1e-15)


def test_the_variance_by_hand():
    logits = draw(7, 3)
    p = logits.softmax(1)
    total = 0.0
    for j in range(3):
        mean = float(p[:, j].sum()) / 7
        std = math.sqrt(sum((float(value) - mean) ** 2 for value in p[:, j]) / 6)
        total += max(0.0, 1 / math.sqrt(3) - std)
    assert float(variance_loss(logits)) == pytest.approx(total / 3, rel=1e-12)


def test_the_uniformity_by_hand():
    """Four equal features: their distances are in the mean, and not in the median."""
    h = draw(6, 4, seed=3)
    h[1:4] = h[4]
    squares = [float((h[a] - h[b]).square().sum()) for a, b in combinations(range(6), 2)]
    apart = sorted(square for square in squares if square > 0)
    m = apart[4]
    assert len(squares) == 15 and len(apart) == 9 and m != sorted(squares)[7]
    assert float(uniformity_loss(h)) == pytest.approx(sum(math.exp(-s / m) for s in squares) / 15, rel=1e-12)


def test_their_gradients_are_right():
    assert torch.autograd.gradcheck(variance_loss, draw(6, 3).requires_grad_())
    assert torch.autograd.gradcheck(uniformity_loss, draw(6, 3).requires_grad_())


def test_the_uniformity_is_blind_to_scale_which_takes_the_median_s_gradient():
    h = draw(6, 4).requires_grad_()
    loss = uniformity_loss(h)
    (gradient,) = torch.autograd.grad(loss, h)
    assert torch.allclose(uniformity_loss(100 * h), loss, rtol=1e-12)
    assert float(gradient.norm()) > 1e-3
    assert abs((gradient * h).sum().item()) < 1e-15
    pair = draw(2, 4).requires_grad_()
    loss = uniformity_loss(pair)
    assert loss.item() == pytest.approx(math.exp(-1))
    (gradient,) = torch.autograd.grad(loss, pair)
    assert float(gradient.norm()) < 1e-15


@pytest.mark.parametrize("n", [1, 2, 5])
def test_one_sample_and_equal_samples_have_finite_terms_and_gradients(n):
    h = torch.ones(n, 4, requires_grad=True)
    z = torch.ones(n, 3, requires_grad=True)
    assert uniformity_loss(h).item() == 0
    assert variance_loss(z).item() == (0 if n == 1 else pytest.approx(1 / math.sqrt(3)))
    (h.sum() + z.sum() + uniformity_loss(h) + variance_loss(z)).backward()
    assert torch.equal(h.grad, torch.ones(n, 4)) and torch.equal(z.grad, torch.ones(n, 3))


@pytest.mark.parametrize("n", [1, 2, 5])
@pytest.mark.parametrize("term", [variance_loss, uniformity_loss])
def test_terms_of_many_clients_can_be_taken_at_once(term, n):
    values = draw(4, n, 3)
    assert torch.allclose(torch.vmap(term)(values), torch.stack([term(batch) for batch in values]), rtol=1e-12)


def test_terms_of_half_precision_are_taken_in_float32():
    h, z = draw(6, 4).bfloat16(), draw(6, 3).bfloat16()
    assert equal(uniformity_loss(h), uniformity_loss(h.float()))
    assert equal(variance_loss(z), variance_loss(z.float()))


def test_the_objective_is_the_sum():
    client = make_client(FedUV).double()
    x, y = points(9, seed=1)
    h = client.net.features(x.double())
    z = client.net.classifier(h)
    expected = F.cross_entropy(z, y) + 2.5 * variance_loss(z) + 0.5 * uniformity_loss(h)
    assert torch.allclose(client.loss(h, z, y), expected, rtol=0, atol=1e-15)


def test_without_its_terms_it_is_fedavg_bit_for_bit():
    settings = {"net": noisy, "optimizer_lifetime": "run"}
    off = partial(FedUV, variance_lambda=0.0, uniformity_mu=0.0)
    runs = [fit(make_client(method, **settings)) for method in (off, FedAvg)]
    assert equal(*(run.weights for run in runs))
    assert equal(*([row["val/loss"] for row in run.rows] for run in runs))


def test_each_term_changes_the_weights():
    ways = [(0.0, 0.0), (2.5, 0.0), (0.0, 0.5), (2.5, 0.5)]
    weights = [
        fit(make_client(FedUV, variance_lambda=v, uniformity_mu=u), max_rounds=1).weights["net.classifier.weight"]
        for v, u in ways
    ]
    assert all(not torch.equal(a, b) for a, b in combinations(weights, 2))


def test_its_terms_get_smaller():
    """At a client of one class, where nothing else keeps outputs and features apart."""

    def terms(**weights):
        data = blobs(40, by_class=True, batch_size=40)
        run = fit(make_client(FedUV, **weights, optimizer=partial(SGD, lr=0.1)), data, max_rounds=20)
        with torch.no_grad():
            h = run.model.eval().net.features(data.part(0, "train").x)
            return float(variance_loss(run.model.net.classifier(h))), float(uniformity_loss(h))

    neither = terms(variance_lambda=0.0, uniformity_mu=0.0)
    assert terms(variance_lambda=2.5, uniformity_mu=0.0)[0] < neither[0]
    assert terms(variance_lambda=0.0, uniformity_mu=2.5)[1] < neither[1]


def dead(input_shape, num_classes):
    """Features that are all zero: the bias keeps every unit off."""
    layer = nn.Linear(input_shape[0], HIDDEN)
    nn.init.constant_(layer.bias, -100.0)
    return Net(nn.Sequential(layer, nn.ReLU()), nn.Linear(HIDDEN, num_classes))


@pytest.mark.parametrize("settings", [{"batch_size": 1}, {"batch_size": 7}])
@pytest.mark.parametrize("net", [None, dead])
def test_batches_of_one_and_dead_features_do_no_harm(settings, net):
    given = {"optimizer": partial(SGD, lr=0.05)} | ({} if net is None else {"net": net})
    run = fit(make_client(FedUV, **given), blobs(15, 30, by_class=True, **settings), max_rounds=2)
    assert all(row["clients_diverged"] == 0 and math.isfinite(row["train/loss"]) for row in run.rows)
    assert all(tensor.isfinite().all() for tensor in run.weights.values())


@pytest.mark.exhaustive
def test_order_changes_nothing_and_resuming_goes_on_bit_for_bit(tmp_path):
    make = partial(make_client, FedUV, net=noisy, optimizer_lifetime="run")
    settings = {"clients_per_round": 3, "max_rounds": 4}
    whole = fit(make(), **settings)
    assert same_end(whole, fit(make(), engine=Shuffled, **settings))
    fit(make(), root=tmp_path, **{**settings, "max_rounds": 2})
    assert same_end(whole, fit(make(), root=tmp_path, ckpt_path="last", **settings))


@pytest.mark.parametrize("name", ["variance_lambda", "uniformity_mu"])
@pytest.mark.parametrize("value", [-1.0, float("nan")])
def test_a_weight_that_is_none_is_refused_by_name(name, value):
    with pytest.raises(MisconfigurationException, match=rf"model\.{name}={value}"):
        make_client(FedUV, **{name: value})
