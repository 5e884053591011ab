import math

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.nn import functional as F

from federations import CLASSES, OneClient, Spy, blobs, equal, fit, load_client, make_client, noisy, points
from pfl_lightning.data import ClientData, Samples
from pfl_lightning.methods import FedETF
from pfl_lightning.methods.fedetf import simplex


@pytest.mark.parametrize("size, classes", [(2, 2), (10, 10), (64, 10), (100, 100)])
def test_the_class_vectors_have_equal_and_largest_angles(size, classes):
    m = simplex(size, classes)
    angles = torch.eye(classes) + (1 - torch.eye(classes)) * -1 / (classes - 1)
    torch.testing.assert_close(m.T @ m, angles, rtol=0, atol=1e-5)
    assert torch.equal(m, simplex(size, classes)) and not m.sum(1).abs().gt(1e-4).any()


def test_the_loss_by_hand_with_an_absent_class():
    x, y = points(9, seed=1)
    part = Samples(x[y != 1], y[y != 1])
    model = make_client(FedETF, scale=3.0)
    model.receive({}, {"weights": model.state_dict()}, ClientData(OneClient(part), 0))
    h = model.net.features(part.x)
    projected = h @ model.net.classifier.projection.weight.T + model.net.classifier.projection.bias
    f = projected / projected.norm(dim=1, keepdim=True)
    counts = torch.tensor([3.0, 1.0, 3.0])  # an absent class counts as one
    expected = F.cross_entropy(3.0 * f @ simplex(CLASSES, CLASSES) + counts.log(), part.y)
    torch.testing.assert_close(model.training_step((part.x, part.y), 0)["loss"], expected)
    torch.testing.assert_close(model(part.x), 3.0 * f @ simplex(CLASSES, CLASSES))


@pytest.mark.parametrize("classes, least", [(10, 1.377), (100, 3.612)])
def test_the_least_loss_of_a_scale_of_one(classes, least):
    m = simplex(classes, classes)
    assert float(F.cross_entropy(m.T @ m, torch.arange(classes))) == pytest.approx(least, abs=1e-3)
    assert least == pytest.approx(math.log(math.e + (classes - 1) * math.exp(-1 / (classes - 1))) - 1, abs=1e-3)


def test_all_but_the_class_vectors_travels_and_learns():
    spy = Spy()
    run = fit(make_client(FedETF, net=noisy), callbacks=[spy])
    sent = set(spy.updates[0][0]["weights"])
    assert "net.classifier.simplex" not in sent and {"net.classifier.scale", "net.classifier.projection.bias"} <= sent
    assert torch.equal(run.model.net.classifier.simplex, simplex(CLASSES, CLASSES))
    assert run.weights["net.classifier.scale"] != 1
    assert not any(state.personal for state in run.federation.clients.values())
    assert run.rows[-1]["val/loss"] < run.rows[0]["val/loss"]


def test_a_client_from_a_checkpoint_predicts_the_same(tmp_path):
    run = fit(make_client(FedETF), root=tmp_path)
    x = run.data.part(1, "test").x
    loaded = load_client(FedETF, run.last, client=1)
    run.model.receive({}, run.federation.aggregator.download(1), None)
    assert torch.equal(loaded.eval()(x), run.model.eval()(x))


def test_the_seed_of_the_nets_is_not_that_of_the_class_vectors():
    assert equal(*(make_client(FedETF, seed=seed).net.classifier.simplex.data for seed in (1, 2)))


def test_clients_of_one_class_and_batches_of_one_end_finite():
    run = fit(make_client(FedETF), blobs(20, 20, 30, by_class=True, batch_size=1))
    assert all(row["clients_diverged"] == 0 for row in run.rows)


@pytest.mark.parametrize("setting, value", [("scale", 0), ("width", 2)])
def test_settings_out_of_range_are_refused_by_name(setting, value):
    with pytest.raises(MisconfigurationException, match=rf"model\.{setting}={value}"):
        make_client(FedETF, **{setting: value})
