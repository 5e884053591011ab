"""Sums as they come: weights are added to the round's mean when a client has trained, with the same bits."""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import ClassVar

import pytest
import torch

from federations import SIZES, Shuffled, Spy, blobs, fit, make_client, noisy, same_end
from pfl_lightning import Aggregator
from pfl_lightning.aggregators import FedAdam, FedAvgM, WeightedAverage
from pfl_lightning.engines import Job, Outcome, Sequential
from pfl_lightning.messages import RunningMean, Updates
from pfl_lightning.methods import ControlVariates, FedAvg, FedDyn, FedPer, FedProx


class Watched(WeightedAverage):
    """Counts the clients' different weights."""

    def aggregate(self, updates: Updates, round: int) -> dict[str, float]:
        return {"different": len({id(update["weights"]) for update in updates.values()})}


def losing(client: int) -> type[Sequential]:
    """An engine whose client diverges."""

    class Losing(Sequential):
        def run(self, jobs: Iterable[Job]) -> Iterator[Outcome]:
            for outcome in super().run(jobs):
                yield outcome._replace(finite=outcome.client != client)

    return Losing


@pytest.mark.parametrize("engine", ["sequential", Shuffled])
@pytest.mark.parametrize("method", [FedAvg, FedProx, FedPer, FedDyn, ControlVariates])
def test_a_callback_that_looks_at_updates_changes_no_bit(method, engine):
    """With a callback the server gets whole updates, and without one their mean."""
    make, settings = partial(make_client, method, net=noisy), {"clients_per_round": 3, "engine": engine}
    assert same_end(fit(make(), **settings), fit(make(), callbacks=[Spy()], **settings))


@pytest.mark.parametrize(
    "server", [FedAvgM, FedAdam, partial(WeightedAverage, server_lr=0.5), partial(WeightedAverage, weighting="uniform")]
)
def test_servers_have_the_same_bits_by_the_mean_as_by_updates(server):
    one = fit(make_client(), aggregator=server())
    assert same_end(one, fit(make_client(), aggregator=server(), callbacks=[Spy()]))


def test_weights_are_one_mean_in_memory():
    class Kept(WeightedAverage):
        means: ClassVar[list[RunningMean]] = []

        def running_mean(self, sizes):
            self.means.append(super().running_mean(sizes))
            return self.means[-1]

    run = fit(make_client(), aggregator=Kept(), max_rounds=2)
    sizes = run.federation.sizes(range(len(SIZES)), "train")
    assert [mean.counts for mean in Kept.means] == [sizes, sizes]
    assert all(tensor is Kept.means[-1][n] for n, tensor in run.federation.aggregator.global_model().items())


def test_a_server_that_looks_at_single_uploads_gets_them():
    run = fit(make_client(), aggregator=Watched(), max_rounds=1)
    assert run.rows[0]["server/different"] == len(SIZES)
    assert Aggregator().running_mean({0: 3}) is None


@pytest.mark.parametrize("client", [0, 1, 3])
def test_a_diverged_client_is_left_out_of_the_sum(client):
    engine = losing(client)
    plain = fit(make_client(), engine=engine, max_rounds=1)
    other = fit(make_client(), engine=engine, max_rounds=1, callbacks=[Spy()])
    assert plain.rows[0]["clients"] == len(SIZES) - 1
    assert all(torch.allclose(plain.weights[n], other.weights[n], atol=1e-6) for n in plain.weights)


def test_bytes_are_those_of_the_clients():
    with_updates = fit(make_client(), blobs(), max_rounds=1, callbacks=[Spy()])
    assert fit(make_client(), blobs(), max_rounds=1).rows[0]["bytes/up"] == with_updates.rows[0]["bytes/up"]
