"""Federations whose server learns sums alone, in a simulation."""

from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from federations import Spy, blobs, check_order_and_resume, equal, fit, make_client, noisy
from pfl_lightning import WeightedAverage
from pfl_lightning.aggregators import CFL, AggregatorList, FedAdam
from pfl_lightning.callbacks import SignFlip
from pfl_lightning.compression import TopK
from pfl_lightning.methods import FedAvg, FedBN, FedDBE, FedMD, FedPer, Local
from pfl_lightning.methods.fedmd import Consensus
from pfl_lightning.methods.registry import METHODS
from pfl_lightning.privacy import DPFTRL, DPAverage, SecureSum
from pfl_lightning.server.means import CoordinateMedian
from sweeps import servers

SUMS = [
    method.name
    for method in METHODS
    if servers()[method.name].sums_only and "weights" in method.client.sends and not method.client.pools
]


def distance(one, other):
    return max(float((one.weights[name].double() - other.weights[name].double()).abs().max()) for name in one.weights)


@pytest.mark.parametrize("name", ["FedAvg", "SCAFFOLD", "FedDyn", "FedDBE", "FedAdam", "FedPer", "Ditto"])
def test_a_method_ends_where_it_does_with_updates(name):
    method = next(method for method in METHODS if method.name == name)
    ends = [
        fit(make_client(method.client), aggregator=method.new_aggregator(), clients_per_round=3, **secure)
        for secure in ({}, {"secure_sum": SecureSum(bits=30)})
    ]
    assert name in SUMS and 0 < distance(*ends) < 1e-4
    assert [row["bytes/up"] for row in ends[0].rows] != [row["bytes/up"] for row in ends[1].rows]


def test_public_answers_are_summed_too():
    make = partial(make_client, FedMD, initial_epochs=1)
    plain, summed = fit(make()), fit(make(), secure_sum=SecureSum(bits=30, range=64))
    for one, other in zip(
        *(run.federation.aggregator.state["consensus"].values() for run in (plain, summed)), strict=True
    ):
        assert torch.allclose(one, other, atol=1e-4)
    # which a sum doesn't tell
    assert "server/disagreement" in plain.rows[-1] and "server/disagreement" not in summed.rows[-1]


@pytest.mark.parametrize("method", [FedAvg, FedBN])
def test_order_resuming_and_buffers(method, tmp_path):
    check_order_and_resume(method, tmp_path, secure_sum=SecureSum())


def test_engines_agree_and_the_server_sees_one_mean():
    spy = Spy()
    one = fit(make_client(net=noisy), secure_sum=SecureSum(), callbacks=[spy])
    other = fit(make_client(net=noisy), secure_sum=SecureSum(), engine="vectorised")
    assert distance(one, other) < 1e-3
    for updates in spy.updates:
        first, *others = (update["weights"] for update in updates.values())
        assert len(updates) == 4 and all(equal(first, weights) for weights in others)
        assert [int(update["num_samples"]) for update in updates.values()] == [16, 11, 20, 13]


def test_uniform_means_count_all_alike():
    run, plain = (
        fit(make_client(), aggregator=WeightedAverage(weighting="uniform"), **secure)
        for secure in ({"secure_sum": SecureSum(bits=30)}, {})
    )
    assert distance(run, plain) < 1e-5 < distance(plain, fit(make_client()))


class Large(FedAvg):
    """A client whose update is far out of any range."""

    def upload(self, data):
        update = super().upload(data)
        if self.client_id == 1:
            update["weights"]["net.classifier.bias"] = update["weights"]["net.classifier.bias"] + 100
        return update


def test_an_update_outside_of_the_range_is_left_out_or_bounded():
    with pytest.warns(UserWarning, match="client 1 is left out .* 3 entries outside of trainer.secure_sum.range=8"):
        run = fit(make_client(Large), secure_sum=SecureSum())
    assert [row["clients_refused"] for row in run.rows] == [1, 1, 1]
    without = fit(make_client(), blobs(24, 30, 20), secure_sum=SecureSum())
    assert run.weights.keys() == without.weights.keys()
    clipped = fit(make_client(Large), secure_sum=SecureSum(overflow="clip"))
    assert [row["secure_sum/clipped"] for row in clipped.rows] == [3, 3, 3]
    assert float(clipped.weights["net.classifier.bias"].max()) < 8


def test_without_enough_clients_a_round_leaves_everything_as_it_is():
    make = partial(make_client, Large)
    with pytest.warns(UserWarning, match="round 1 has no sum: 3 of 4 clients are left, and .*threshold=0.9 asks for 4"):
        run = fit(make(), secure_sum=SecureSum(threshold=0.9))
    assert equal(run.weights, make().state_dict())
    assert [row["clients"] for row in run.rows] == [0, 0, 0]


@pytest.mark.parametrize(
    ("client", "settings", "named"),
    [
        (FedAvg, {"aggregator": WeightedAverage(mean=CoordinateMedian())}, "aggregator.mean=CoordinateMedian"),
        (FedAvg, {"aggregator": CFL()}, "aggregator=CFL"),
        (FedMD, {"aggregator": AggregatorList([WeightedAverage(), Consensus()])}, "same weighting"),
        (Local, {}, "model=Local"),
        (FedAvg, {"callbacks": [SignFlip(0.25)]}, "trainer.callbacks=SignFlip"),
        (FedAvg, {"clients_per_round": 1}, "clients_per_round=1 of data.num_clients=4"),
        (FedAvg, {"aggregator": DPAverage(epsilon=8)}, "aggregator.epsilon=8"),
        (FedAvg, {"aggregator": DPAverage(noise_multiplier=1, sample_cap=9)}, "aggregator.sample_cap=9"),
        (FedAvg, {"aggregator": DPAverage(noise_multiplier=1, clip_by="entry")}, "aggregator.clip_by=entry"),
        (FedAvg, {"aggregator": DPAverage(noise_multiplier=1, quantile=0.5)}, "aggregator.quantile=0.5"),
        (FedAvg, {"aggregator": DPFTRL(3, noise_multiplier=1.0)}, "aggregator=DPFTRL"),
        (FedAvg, {"compression": TopK()}, "trainer.compression=TopK"),
    ],
)
def test_what_needs_more_than_sums_is_refused(client, settings, named):
    with pytest.raises(MisconfigurationException, match=named):
        fit(make_client(client), secure_sum=SecureSum(), **settings)


def test_a_late_report_of_features_is_taken_out_of_the_sum():
    ends = [
        fit(make_client(FedDBE), clients_per_round=2, max_rounds=5, **secure).federation.aggregator.state["consensus"]
        for secure in ({}, {"secure_sum": SecureSum(bits=30)})
    ]
    assert torch.allclose(ends[0]["mean"], ends[1]["mean"], atol=1e-5)


# Noise that clients add


def test_without_noise_and_bound_it_is_the_plain_mean():
    aggregator = DPAverage(noise_multiplier=0, clip=1e3)
    run = fit(make_client(), aggregator=aggregator, secure_sum=SecureSum(bits=30))
    plain = fit(make_client(), aggregator=WeightedAverage(weighting="uniform"))
    assert distance(run, plain) < 1e-5


def test_a_server_behind_the_noise_steps_by_the_sum():
    def ended(server, **secure):
        aggregator = DPAverage(noise_multiplier=0.0, clip=1e3, server=server)
        return fit(make_client(), aggregator=aggregator, **secure)

    plain, summed = ended(FedAdam()), ended(FedAdam(), secure_sum=SecureSum(bits=30))
    assert distance(plain, summed) < 1e-3
    assert summed.federation.aggregator.state["server"].keys() == plain.federation.aggregator.state["server"].keys()
    assert distance(summed, ended(None, secure_sum=SecureSum(bits=30))) > 1e-2


def test_shares_add_up_to_the_noise_that_is_accounted_for():
    size = 4000
    make = partial(make_client, FedPer, net=partial(wide, size))
    secure = {"secure_sum": SecureSum(bits=24, honest=0.5), "max_rounds": 1}
    run = fit(make(), aggregator=DPAverage(noise_multiplier=2.0, clip=0.5, noise="seeded"), **secure)
    still = fit(make(), aggregator=DPAverage(noise_multiplier=0.0, clip=0.5), **secure)
    apart = torch.cat([(run.weights[name] - still.weights[name]).flatten() for name in run.federation.shared])
    # two of four shares make z C = 1, and all four came: over four clients it is the root of two, divided by four
    assert abs(float(apart.std()) / (2**0.5 / 4) - 1) < 0.03
    row = run.rows[-1]
    assert row["privacy/noise_multiplier"] == 2.0 and row["privacy/releases"] == 1
    assert "0.5 of the clients" in row["privacy/assumes"] and row["server/noise_std"] == 0.25


def wide(size, input_shape, num_classes):
    from torch import nn

    from pfl_lightning.nets import Net

    return Net(nn.Linear(input_shape[0], size // 5), nn.Linear(size // 5, num_classes))


def test_a_server_that_is_not_trusted_knows_who_was_drawn():
    from pfl_lightning.selection import Poisson

    settings = {"cohort": Poisson(0.5), "max_rounds": 4}
    aggregator = DPAverage(noise_multiplier=1.0, clip=0.5)
    run = fit(make_client(), aggregator=aggregator, secure_sum=SecureSum(bits=24), **settings)
    assert run.rows[-1]["privacy/sampling"] == "no amplification"
    # rounds of too few clients count too, of which a server might know more than it says
    assert 0 in [row["clients"] for row in run.rows] and run.rows[-1]["privacy/releases"] == 4


def test_secure_noise_of_clients_is_never_the_same():
    aggregators = [DPAverage(noise_multiplier=1.0, clip=0.5, noise="secure") for _ in range(2)]
    runs = [fit(make_client(), aggregator=own, secure_sum=SecureSum(bits=24), max_rounds=1) for own in aggregators]
    assert not equal(runs[0].weights, runs[1].weights)
    assert "privacy/assumes" in runs[0].rows[0]
