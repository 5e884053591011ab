"""Weights of classes in local training: the formula, each client's own, under all engines."""

from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.nn import functional as F
from torch.optim import SGD

from federations import CLASSES, MOMENTUM, Blobs, blobs, fit, make_client
from pfl_lightning.methods import APFL, ControlVariates, Ditto, FedAvg, FedRoD
from pfl_lightning.privacy import DPSGD
from pfl_lightning.tasks import Classification
from tasks_and_data import drawn, labels


class Weighed(Blobs):
    """Blobs whose task weighs classes."""

    def __init__(self, weights, **settings):
        self.weights = weights
        super().__init__(**settings)

    @property
    def task(self):
        return Classification(CLASSES, class_weights=self.weights)


def run_of(method, weights, engine="sequential", by_class=False, optimizer=MOMENTUM, **settings):
    data = blobs(20, 45, 55, by_class=by_class, data=Weighed, weights=weights)
    client = make_client(method, task=data.task, optimizer=optimizer)
    return fit(client, data, max_rounds=2, engine=engine, **settings)


def weights_after(run):
    return torch.cat([tensor.flatten() for tensor in run.federation.state_dict().values()])


def test_the_loss_is_the_mean_of_weighted_errors():
    outputs, y, weights = drawn(12, 3), labels(12, classes=3), torch.tensor([0.5, 2.0, 0.0])
    task = Classification(3)
    expected = (F.cross_entropy(outputs, y, reduction="none") * weights[y]).sum()
    assert torch.isclose(task.loss(outputs, y, "sum", weights), expected)
    assert torch.isclose(task.loss(outputs, y, "mean", weights), expected / 12)
    # samples of one class keep their weight
    assert torch.isclose(task.loss(outputs, y.fill_(1), weights=weights), 2 * F.cross_entropy(outputs, y))


def test_balanced_weights_are_those_of_scikit_learn():
    weights = Classification(4, class_weights="balanced").weights(torch.tensor([6, 3, 0, 1]))
    assert weights.tolist() == pytest.approx([10 / (3 * 6), 10 / (3 * 3), 0, 10 / 3])


@pytest.mark.parametrize("weights", ["balanced", (1.0, 5.0, 0.2)])
@pytest.mark.parametrize("method", [FedAvg, Ditto, ControlVariates, FedRoD])
@pytest.mark.by_default("FedAvg-weights1", "Ditto-balanced", "ControlVariates-weights1", "FedRoD-balanced")
def test_engines_agree(method, weights):
    still = partial(SGD, lr=0.1)
    alone = weights_after(run_of(method, weights, optimizer=still))
    at_once = weights_after(run_of(method, weights, "vectorised", optimizer=still))
    assert torch.allclose(alone, at_once, atol=1e-5)
    assert not torch.allclose(alone, weights_after(run_of(method, None, optimizer=still)), atol=1e-3)


def test_processes_have_the_same_bits():
    alone, apart = run_of(FedAvg, "balanced"), run_of(FedAvg, "balanced", "processes", workers=2)
    assert torch.equal(weights_after(alone), weights_after(apart))


def test_equal_weights_change_nothing():
    assert torch.allclose(weights_after(run_of(APFL, (1.0, 1.0, 1.0))), weights_after(run_of(APFL, None)), atol=1e-6)


def test_each_client_has_the_weights_of_its_own_training_samples():
    found = {}

    class Watched(FedAvg):
        def on_download(self, payload, data):
            super().on_download(payload, data)
            found[self.client_id] = self._class_weights.clone(), data.class_counts

    run_of(Watched, "balanced", by_class=True)
    task = Classification(CLASSES, class_weights="balanced")
    assert len(found) == 3 and len({tuple(own.tolist()) for own, _ in found.values()}) > 1
    for own, counts in found.values():
        assert torch.equal(own, task.weights(counts))


def test_evaluations_show_the_plain_loss():
    # with a rate of 0 only the loss that is shown could differ
    still = partial(SGD, lr=0.0)
    plain, weighed = (run_of(FedAvg, weights, optimizer=still).rows[-1] for weights in (None, (0, 0, 1)))
    assert weighed["val/loss"] == plain["val/loss"] and weighed["train/loss"] != plain["train/loss"]


def test_counts_without_noise_are_refused_under_sample_level_privacy():
    with pytest.raises(MisconfigurationException, match=r"task\.class_weights=balanced"):
        run_of(FedAvg, "balanced", example_privacy=DPSGD(noise_multiplier=1.0, clip=1.0))
    run_of(FedAvg, (1.0, 5.0, 0.2), example_privacy=DPSGD(noise_multiplier=1.0, clip=1.0))
