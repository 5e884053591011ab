"""A warning where the first rounds of a run have learned nothing, and a refusal where no round could."""

import warnings
from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.optim import SGD

from federations import fit, make_client, noisy, plain
from pfl_lightning.aggregators import FedBuff, WeightedAverage
from pfl_lightning.compression import TopK
from pfl_lightning.methods import APPLE, Ditto, FedAvg, Local
from pfl_lightning.schedules import Asynchronous, Synchronous


class Zero(FedAvg):
    """A loss that is 0 for every batch."""

    def loss(self, features, logits, target):
        return 0 * super().loss(features, logits, target)


class Apart(FedAvg):
    """A loss that is above 0, and the same whatever the parameters are."""

    def loss(self, features, logits, target):
        return 0 * super().loss(features, logits, target) + 1


class Waiting(WeightedAverage):
    """A server that stands still for the first rounds."""

    def aggregate(self, updates, round):
        return super().aggregate(updates, round) if round > 3 else {}


def told(model, **settings):
    """The warnings of a run about what it learned."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(model, **{"max_rounds": 5, **settings})
    return [str(warning.message) for warning in caught if "nothing was learned" in str(warning.message)]


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
@pytest.mark.parametrize(
    ("make", "settings", "words"),
    [
        (partial(make_client), {"schedule": Synchronous(dropout=1 - 1e-9)}, ["no client's update", "dropout=0.99"]),
        (
            partial(make_client),
            {"schedule": Synchronous(dropout=1 - 1e-9, timeout=1e9), "min_clients": 2},
            ["timeout=1000000000.0", "dropout", "min_clients=2"],
        ),
        (partial(make_client, Zero), {}, ["train/loss was 0"]),
        (partial(make_client, Apart), {}, ["no trained parameter", "0.1"]),
        # BatchNorm's statistics move, and are no parameters
        (partial(make_client, net=noisy, optimizer=partial(SGD, lr=0.0)), {}, ["learning rate was 0"]),
        (partial(make_client, Ditto, optimizer=partial(SGD, lr=1e-30)), {}, ["no trained parameter", "1e-30"]),
        (partial(make_client, Local, optimizer=partial(SGD, lr=0.0)), {}, ["learning rate was 0"]),
    ],
)
def test_a_run_that_learns_nothing_is_told_once_with_the_reason(engine, make, settings, words):
    (line,) = told(make(), engine=engine, **settings)
    assert all(word in line for word in ["rounds 1 to 3", *words])


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (make_client, {}),
        (partial(make_client, net=noisy), {"engine": "vectorised"}),
        (partial(make_client, Local), {}),
        (partial(make_client, Ditto), {"clients_per_round": 1}),
        # its weights of other clients' models get their size at the first download
        (partial(make_client, APPLE, optimizer=partial(SGD, lr=0.0)), {}),
        (make_client, {"compression": TopK(0.1)}),
        (make_client, {"aggregator": Waiting()}),
        (make_client, {"aggregator": FedBuff(), "schedule": Asynchronous(buffer=3, dropout=0.5)}),
        (make_client, {"schedule": Synchronous(dropout=0.5)}),
        (partial(make_client, Zero), {"max_rounds": 2}),
    ],
)
def test_a_run_that_learns_is_told_nothing(make, settings):
    assert not told(make(), **settings)


def test_a_run_that_goes_on_is_told_nothing(tmp_path):
    still = partial(make_client, optimizer=partial(SGD, lr=0.0))
    fit(still(), root=tmp_path, max_rounds=2)
    assert not told(still(), root=tmp_path, max_rounds=4, ckpt_path="last")


@pytest.mark.parametrize("schedule", [Synchronous, partial(Asynchronous, buffer=2)])
def test_a_timeout_before_the_end_of_every_training_is_refused(schedule):
    slow = partial(schedule, distribution="constant", seconds=1.0)
    with pytest.raises(MisconfigurationException) as refused:
        fit(make_client(), schedule=slow(timeout=2.0))
    least = float(str(refused.value).split(" takes ")[1].split(" ")[0])
    # of the client with the fewest samples
    assert all(word in str(refused.value) for word in ("timeout=2.0", "client 1"))
    assert sum(row["clients"] for row in fit(make_client(), schedule=slow(timeout=least)).rows) > 0
    with pytest.raises(MisconfigurationException, match="timeout"):
        fit(make_client(), schedule=slow(timeout=least - 0.5))


def test_equal_parameters_are_told_from_others_in_the_type_and_on_the_device_of_the_start():
    run = fit(make_client(net=plain), precision="64-true")
    assert any(tensor.dtype == torch.float64 for tensor in run.weights.values())
    (line,) = told(make_client(optimizer=partial(SGD, lr=0.0)), precision="64-true")
    assert "learning rate was 0" in line
