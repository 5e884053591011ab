"""Differential privacy of clients, where they are at sites."""

import pytest

pytest.importorskip("flwr", reason="needs the extra flower, and Python 3.11 or newer")

from deployments import deploy, grid_of

from federations import Spy, equal, fit, make_client
from pfl_lightning.flower.wire import unpack
from pfl_lightning.privacy import DPAverage
from pfl_lightning.selection import Poisson


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


def test_a_site_learns_of_no_cohort_but_that_it_is_asked(tmp_path):
    """It has the seed, the configuration and every message to its node, and may simulate the whole run."""
    settings = {"cohort": Poisson(0.5), "max_rounds": 12}
    spy, guess = Spy(), Spy()
    grid, received = grid_of(make_client, tmp_path), []
    before = grid._reply

    def reads(message):
        if message.metadata.dst_node_id == 11 and message.metadata.message_type == "train":
            received.append(unpack(message.content, "jobs"))
        return before(message)

    grid._reply = reads
    deploy(grid, make_client, aggregator=DPAverage(noise_multiplier=1.0), callbacks=[spy], **settings)
    fit(make_client(), aggregator=DPAverage(noise_multiplier=1.0, noise="secure"), callbacks=[guess], **settings)
    assert spy.cohorts != guess.cohorts and len(spy.cohorts) == len(guess.cohorts) == 12
    for jobs in received:
        # of its own clients alone
        assert jobs.keys() <= {0, 2} and all(row["sum"] == "" for row in jobs.values())
    asked = {(row["round"], client) for jobs in received for client, row in jobs.items()}
    assert asked == {
        (round, client) for round, cohort in enumerate(spy.cohorts) for client in cohort if client in (0, 2)
    }
