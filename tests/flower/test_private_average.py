"""Differential privacy of clients, where they are at sites."""

import pytest

pytest.importorskip("flwr", reason="needs the extra flower, and Python 3.11 or newer")

from deployments import deploy, grid_of

from federations import Spy, equal, fit, make_client
from pfl_lightning.privacy import DPAverage


def test_sites_send_weights_alone_and_get_the_model_of_a_simulation(tmp_path):
    spy = Spy()
    grid = grid_of(make_client, tmp_path)
    seeded = {"noise_multiplier": 1.0, "noise": "seeded"}
    remote = deploy(grid, make_client, aggregator=DPAverage(**seeded), callbacks=[spy])
    here = fit(make_client(), aggregator=DPAverage(**seeded))
    assert equal(remote.weights, here.weights)
    assert all(set(update) == {"weights"} for updates in spy.updates for update in updates.values())
    for name in ("bytes/up", "privacy/epsilon"):
        assert [row[name] for row in remote.rows] == [row[name] for row in here.rows]


@pytest.mark.exhaustive
def test_noise_is_not_of_the_seed_that_sites_know(tmp_path):
    remote = deploy(grid_of(make_client, tmp_path), make_client, aggregator=DPAverage(noise_multiplier=1.0))
    here = fit(make_client(), aggregator=DPAverage(noise_multiplier=1.0))
    assert not equal(remote.weights, here.weights)
    assert [row["privacy/noise"] for row in remote.rows] == ["secure"] * len(remote.rows)
    for name in ("bytes/up", "privacy/epsilon"):
        assert [row[name] for row in remote.rows] == [row[name] for row in here.rows]
