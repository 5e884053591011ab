"""Rules in place of the mean, where clients are at sites."""

import pytest

pytest.importorskip("flwr", reason="needs the extra flower, and Python 3.11 or newer")

from deployments import deploy, grid_of
from lightning.fabric.utilities.exceptions import MisconfigurationException

from federations import equal, fit, make_client
from pfl_lightning import WeightedAverage
from pfl_lightning.callbacks import SignFlip
from pfl_lightning.server.means import Bucketing, CoordinateMedian, TrimmedMean


@pytest.mark.parametrize("mean", [TrimmedMean(1), Bucketing(CoordinateMedian())], ids=lambda mean: mean.name)
@pytest.mark.by_default("Bucketing+CoordinateMedian")
def test_a_deployment_ends_as_its_simulation(mean, tmp_path):
    remote = deploy(grid_of(make_client, tmp_path), make_client, aggregator=WeightedAverage(mean=mean))
    assert equal(remote.weights, fit(make_client(), aggregator=WeightedAverage(mean=mean)).weights)


def test_attacks_are_of_simulations_alone(tmp_path):
    with pytest.raises(MisconfigurationException, match="SignFlip simulates bad clients in this process"):
        deploy(grid_of(make_client, tmp_path), make_client, callbacks=[SignFlip(0.25)])
