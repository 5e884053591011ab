import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.nn import functional as F

from federations import CLASSES, Spy, blobs, equal, fit, make_client, points
from pfl_lightning.methods import FedAvg, FedLC


def with_counts(counts, **settings):
    client = make_client(FedLC, **settings)
    counts = torch.tensor(counts)
    client.on_download({"weights": {}}, type("Data", (), {"class_counts": counts})())
    return client


def test_margins_by_hand():
    assert torch.allclose(with_counts([16, 1, 81], tau=2.0).margins, torch.tensor([1.0, 2.0, 2 / 3]))


@pytest.mark.parametrize(
    "absent, tau, margins",
    [
        ("one", 1.0, [0.5, 1.0, 1.0]),
        ("one", 3.0, [1.5, 3.0, 3.0]),
        ("one", 0.0, [0.0, 0.0, 0.0]),
        ("out", 1.0, [0.5, float("inf"), 1.0]),
        ("out", 0.0, [0.0, float("inf"), 0.0]),
    ],
)
def test_margin_of_an_absent_class(absent, tau, margins):
    assert with_counts([16, 0, 1], tau=tau, absent=absent).margins.tolist() == margins


def test_an_absent_class_counts_as_one_sample_by_default():
    assert equal(with_counts([16, 0, 81]).margins, with_counts([16, 1, 81]).margins)


def test_the_loss_is_the_cross_entropy_of_calibrated_logits():
    client, y = with_counts([4, 30, 100]), points(9, seed=1)[1]
    features, logits = torch.zeros(9, 5), torch.randn(9, CLASSES, generator=torch.Generator().manual_seed(0))
    n = torch.tensor([4.0, 30.0, 100.0])
    assert torch.allclose(client.loss(features, logits, y), F.cross_entropy(logits - n**-0.25, y))


def test_of_equal_counts_it_is_cross_entropy():
    client, y = with_counts([7, 7, 7]), points(9, seed=1)[1]
    logits = torch.randn(9, CLASSES)
    assert torch.allclose(client.loss(logits, logits, y), F.cross_entropy(logits, y))


@pytest.mark.parametrize("absent", ["one", "out"])
def test_rows_of_absent_classes_get_a_gradient_unless_they_are_out(absent):
    client = with_counts([5, 0, 5], absent=absent)
    x, y = points(9, seed=1)
    x, y = x[y != 1], y[y != 1]
    features = client.net.features(x)
    loss = client.loss(features, client.net.classifier(features), y)
    loss.backward()
    assert loss.isfinite()
    slope = client.net.classifier.weight.grad
    assert slope[1].all() if absent == "one" else not slope[1].any()
    assert slope[0].all() and slope[2].all()
    assert all(p.grad.isfinite().all() for p in client.net.parameters())


def test_without_margins_it_is_fedavg_bit_for_bit():
    classes = blobs(20, 20, 30, by_class=True)
    assert equal(fit(make_client(FedLC, tau=0.0), classes).weights, fit(make_client(FedAvg), classes).weights)


def test_it_changes_the_weights_and_nothing_more_travels_or_stays():
    spy = Spy()
    calibrated, average = fit(make_client(FedLC), callbacks=[spy]), fit(make_client(FedAvg))
    assert not equal(calibrated.weights, average.weights)
    assert set(spy.updates[0][0]) == {"weights", "num_samples"}
    assert not any(state.personal for state in calibrated.federation.clients.values())


@pytest.mark.parametrize("absent", ["one", "out"])
def test_clients_of_one_class_and_batches_of_one_end_finite(absent):
    run = fit(make_client(FedLC, absent=absent), blobs(20, 20, 30, by_class=True, batch_size=1))
    assert all(row["clients_diverged"] == 0 for row in run.rows)


@pytest.mark.parametrize("settings, name", [({"tau": -1}, r"model\.tau=-1"), ({"absent": "none"}, r"model\.absent")])
def test_wrong_settings_are_refused_by_name(settings, name):
    with pytest.raises(MisconfigurationException, match=name):
        make_client(FedLC, **settings)
