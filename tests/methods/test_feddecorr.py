import math
from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.nn import functional as F
from torch.optim import SGD

from federations import blobs, check_batches_of_one, equal, fit, make_client, noisy, points
from pfl_lightning.methods import FedAvg, FedDecorr, FedProx
from pfl_lightning.methods.feddecorr import decorrelation


def draw(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_it_is_the_mean_squared_correlation_times_the_official_factor():
    h = draw(9, 4)
    correlations = torch.corrcoef(h.T)
    off = [correlations[i, j] ** 2 for i in range(4) for j in range(4) if i != j]
    expected = (9 - 1) ** 2 / 9 * sum(off) / 12
    torch.testing.assert_close(decorrelation(h), expected, rtol=1e-6, atol=0)


def test_shift_and_scale_of_a_feature_do_not_matter():
    h = draw(9, 4)
    other = h * torch.tensor([1.0, 2.0, -5.0, 0.1]) + torch.tensor([3.0, 0, 0, -7.0])
    torch.testing.assert_close(decorrelation(other), decorrelation(h), rtol=1e-5, atol=0)


def test_its_gradient_is_right():
    assert torch.autograd.gradcheck(decorrelation, draw(6, 3).requires_grad_())


@pytest.mark.parametrize("shape", [(1, 4), (2, 4), (5, 4), (5, 1)])
def test_equal_samples_and_single_ones_have_no_penalty_and_a_finite_gradient(shape):
    h = torch.ones(shape, requires_grad=True)
    loss = decorrelation(h)
    (loss + h.sum()).backward()
    assert loss.item() == 0 and torch.equal(h.grad, torch.ones(shape))


def test_the_term_of_many_clients_can_be_taken_at_once_and_in_half_precision():
    h = draw(4, 6, 3)
    torch.testing.assert_close(torch.vmap(decorrelation)(h), torch.stack([decorrelation(batch) for batch in h]))
    half = h[0].bfloat16()
    assert equal(decorrelation(half), decorrelation(half.float()))


def test_the_objective_is_the_sum():
    client = make_client(FedDecorr, beta=0.3).double()
    x, y = points(9, seed=1)
    h = client.net.features(x.double())
    z = client.net.classifier(h)
    torch.testing.assert_close(client.loss(h, z, y), F.cross_entropy(z, y) + 0.3 * decorrelation(h))


def test_without_its_term_it_is_fedavg_bit_for_bit_and_with_it_is_not():
    settings = {"net": noisy, "optimizer_lifetime": "run"}
    runs = [fit(make_client(method, **settings)) for method in (partial(FedDecorr, beta=0.0), FedAvg, FedDecorr)]
    assert equal(runs[0].weights, runs[1].weights)
    assert not equal(runs[1].weights, runs[2].weights)


def test_features_of_a_client_of_one_class_are_less_correlated_with_it():
    def penalty(beta):
        data = blobs(40, by_class=True, batch_size=40)
        run = fit(make_client(FedDecorr, beta=beta, optimizer=partial(SGD, lr=0.1)), data, max_rounds=10)
        with torch.no_grad():
            return float(decorrelation(run.model.eval().net.features(data.part(0, "train").x)))

    assert penalty(0.0) > penalty(0.1) > penalty(1.0)


def test_the_term_joins_another_method_s():
    class Both(FedDecorr, FedProx):
        pass

    client = make_client(Both, beta=0.2, mu=0.5).double()
    x, y = points(9, seed=1)
    h = client.net.features(x.double())
    z = client.net.classifier(h)
    with torch.no_grad():
        client.net.classifier.bias += 1
    expected = F.cross_entropy(z, y) + 0.2 * decorrelation(h) + 0.5 / 2 * 3
    torch.testing.assert_close(client.loss(h, z, y), expected)


def test_batches_of_one_learn_without_the_term():
    check_batches_of_one(make_client(FedDecorr), max_rounds=3)


@pytest.mark.parametrize("beta", [-1.0, math.nan])
def test_a_weight_out_of_range_is_refused_by_name(beta):
    with pytest.raises(MisconfigurationException, match=rf"model\.beta={beta}"):
        make_client(FedDecorr, beta=beta)
