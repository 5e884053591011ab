import math
from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from federations import CLASSES, Spy, blobs, check_batches_of_one, equal, fit, make_client, near, points
from pfl_lightning.methods import FedAvg
from pfl_lightning.methods.fedrs import FedRS


def with_counts(counts, **settings):
    client = make_client(FedRS, **settings)
    client.on_download({"weights": {}}, type("Data", (), {"class_counts": torch.tensor(counts)})())
    return client


@pytest.mark.parametrize(
    "settings, factors",
    [
        ({}, [1.0, 0.5, 1.0]),
        ({"alpha": 0.0}, [1.0, 0.0, 1.0]),
        ({"alpha": 1.0}, [1.0, 1.0, 1.0]),
        ({"alpha": 0.5, "factor": "counts"}, [0.625, 0.5, 1.0]),
    ],
)
def test_factors_by_hand(settings, factors):
    assert with_counts([4, 0, 16], **settings).factors.tolist() == factors


@pytest.mark.parametrize("factor", ["missing", "counts"])
def test_a_client_without_samples_has_the_factor_of_missing_classes(factor):
    assert with_counts([0, 0, 0], factor=factor).factors.tolist() == [0.5] * CLASSES


def test_the_loss_is_the_cross_entropy_of_the_restricted_softmax():
    client, y = with_counts([4, 0, 9]), points(9, seed=1)[1]
    y = torch.where(y == 1, 2, y)
    logits = torch.randn(9, CLASSES, generator=torch.Generator().manual_seed(0))
    scaled = (logits * torch.tensor([1.0, 0.5, 1.0])).exp()
    by_hand = -(scaled[torch.arange(9), y] / scaled.sum(1)).log().mean()
    assert torch.allclose(client.loss(torch.zeros(9, 5), logits, y), by_hand)


def slopes(**settings):
    """The gradient of each row of the classifier, of samples without class 1 and under equal logits."""
    client = with_counts([5, 0, 5], **settings)
    torch.nn.init.zeros_(client.net.classifier.weight)
    torch.nn.init.zeros_(client.net.classifier.bias)
    x, y = points(9, seed=1)
    features = client.net.features(x[y != 1])
    client.loss(features, client.net.classifier(features), y[y != 1]).backward()
    return client.net.classifier.weight.grad


def test_alpha_scales_the_gradient_of_a_missing_class_and_of_no_other():
    usual, half, none = (slopes(alpha=alpha) for alpha in (1.0, 0.5, 0.0))
    assert usual[1].any() and torch.allclose(half[1], usual[1] / 2) and not none[1].any()
    assert all(torch.allclose(usual[[0, 2]], other[[0, 2]]) for other in (half, none))


def test_evaluation_takes_the_logits_as_they_are():
    client, x = with_counts([4, 0, 9]), points(9, seed=1)[0]
    assert torch.equal(client(x), client.net(x))


@pytest.mark.parametrize("factor", ["missing", "counts"])
def test_with_alpha_one_it_is_fedavg_bit_for_bit(factor):
    data = blobs(20, 20, 30, by_class=True)
    runs = [fit(make_client(method), data) for method in (partial(FedRS, alpha=1.0, factor=factor), FedAvg)]
    assert equal(runs[0].weights, runs[1].weights)


def test_who_has_all_classes_trains_as_under_fedavg():
    assert equal(fit(make_client(FedRS, alpha=0.0)).weights, fit(make_client(FedAvg)).weights)


def test_it_changes_the_weights_and_nothing_more_travels_or_stays():
    spy, data = Spy(), blobs(20, 20, 30, by_class=True)
    restricted, average = fit(make_client(FedRS), data, callbacks=[spy]), fit(make_client(FedAvg), data)
    assert not equal(restricted.weights, average.weights)
    assert set(spy.updates[0][0]) == {"weights", "num_samples"}
    assert not any(state.personal for state in restricted.federation.clients.values())


def test_both_engines_train_alike():
    data = blobs(20, 20, 30, by_class=True)
    runs = [fit(make_client(FedRS), data, engine=engine).weights for engine in ("sequential", "vectorised")]
    assert near(*runs)


def test_batches_of_one_learn():
    check_batches_of_one(make_client(FedRS), max_rounds=4)


@pytest.mark.parametrize(
    "settings, name",
    [({"alpha": -0.1}, "alpha=-0.1"), ({"alpha": math.nan}, "alpha=nan"), ({"factor": "none"}, "factor")],
)
def test_wrong_settings_are_refused_by_name(settings, name):
    with pytest.raises(MisconfigurationException, match=rf"model\.{name}"):
        make_client(FedRS, **settings)
