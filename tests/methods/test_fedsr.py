import math

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.distributions import Independent, Normal, kl_divergence
from torch.nn import functional as F

from federations import Spy, blobs, fit, make_client, noisy, points
from pfl_lightning.methods import FedSR
from pfl_lightning.methods.fedsr import normal_divergence

SHARED = "net.distribution.weight"


def test_the_divergence_is_that_of_torch():
    generator = torch.Generator().manual_seed(0)
    means = torch.randn(2, 4, 5, generator=generator)
    deviations = torch.rand(2, 4, 5, generator=generator) + 0.1
    one, other = (Independent(Normal(*each), 1) for each in zip(means, deviations, strict=True))
    mine = normal_divergence(means[0], deviations[0], means[1], deviations[1])
    torch.testing.assert_close(mine, kl_divergence(one, other))


@pytest.mark.parametrize("kappa", [1.3, -0.7])
def test_the_loss_by_hand(kappa):
    model = make_client(FedSR, alpha=0.2, beta=0.3).double()
    torch.nn.init.normal_(model.means)
    torch.nn.init.normal_(model.deviations)
    torch.nn.init.constant_(model.kappa, kappa)
    x, y = points(9, seed=1)
    h = model.net.features(x.double()) @ model.net.distribution.weight.T + model.net.distribution.bias
    mu, sigma = h[:, :5], F.softplus(h[:, 5:])
    torch.manual_seed(4)
    z = mu + sigma * torch.randn(9, 5, dtype=torch.float64)
    of_class = Normal(model.means[y], F.softplus(model.deviations[y]))
    expected = F.cross_entropy(z @ model.net.classifier.weight.T + model.net.classifier.bias, y)
    expected = expected + 0.2 * z.square().sum(1).sqrt().mean()
    expected = expected + 0.3 * kl_divergence(Normal(kappa * mu, abs(kappa) * sigma), of_class).sum(1).mean()
    torch.manual_seed(4)
    torch.testing.assert_close(model.training_step((x.double(), y), 0)["loss"], expected)


def test_predictions_are_the_mean_over_draws_and_do_not_depend_on_neighbours():
    model = make_client(FedSR, draws=7).eval()
    x, _ = points(9, seed=1)
    outputs = model(x)
    mu, sigma = model.distribution(x)
    by_draw = [model.net.classifier(mu + sigma * noise).softmax(1) for noise in model.noise]
    torch.testing.assert_close(outputs, torch.stack(by_draw).mean(0).log())
    torch.testing.assert_close(model(x[3:4]), outputs[3:4])


def test_the_distributions_of_classes_stay_and_all_else_travels():
    spy = Spy()
    run = fit(make_client(FedSR, net=noisy, beta=1.0), callbacks=[spy])
    sent = spy.updates[0][0]["weights"]
    assert SHARED in sent and not any(name in sent for name in ("means", "deviations", "kappa"))
    first, second = (run.federation.clients[client].personal for client in (0, 1))
    assert set(first) == {"means", "deviations", "kappa"}
    for name in first:
        assert not torch.equal(first[name], second[name]) and (first[name] != (name != "means")).any()
    assert not torch.equal(run.weights[SHARED], make_client(FedSR, net=noisy).state_dict()[SHARED])


def test_without_regularisers_the_classes_distributions_stand_still():
    run = fit(make_client(FedSR, alpha=0.0, beta=0.0))
    assert not run.federation.clients[0].personal["means"].any()
    assert run.rows[-1]["val/loss"] < run.rows[0]["val/loss"]


def test_a_longer_penalty_makes_features_shorter():
    def length(alpha):
        model = fit(make_client(FedSR, alpha=alpha)).model
        return float(model.eval().distribution(points(30, seed=1)[0])[0].detach().norm(dim=1).mean())

    assert length(0.0) > length(0.3) > length(1.0)


def test_clients_of_one_class_and_batches_of_one_end_finite():
    run = fit(make_client(FedSR), blobs(20, 20, 30, by_class=True, batch_size=1))
    assert all(row["clients_diverged"] == 0 for row in run.rows)


@pytest.mark.parametrize("setting, value", [("alpha", -1), ("beta", math.nan), ("draws", 0)])
def test_settings_out_of_range_are_refused_by_name(setting, value):
    with pytest.raises(MisconfigurationException, match=rf"model\.{setting}={value}"):
        make_client(FedSR, **{setting: value})
