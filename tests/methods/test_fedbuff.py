import math

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from federations import blobs, drawn_update, equal, fit, make_client, near, noisy, set_up
from pfl_lightning import WeightedAverage
from pfl_lightning.aggregators import FedAsync, FedAvgM, FedBuff
from pfl_lightning.methods import FedProx
from pfl_lightning.schedules import Asynchronous


def arrived(model, seed, stale, place=0, start=None, **entries):
    """An update from a version of another seed."""
    start = drawn_update(model, 100 + seed)["weights"] if start is None else start
    arrival = {"place": torch.tensor(place), "staleness": torch.tensor(stale), "weights": start}
    return drawn_update(model, seed, arrival=arrival, **entries)


def parameters(model):
    return [name for name, _ in model.named_parameters()]


def test_each_change_is_from_its_own_version_and_discounted_by_the_root_of_its_staleness():
    model = make_client(net=noisy)
    server = set_up(FedBuff(server_lr=0.7), model)
    x = dict(server.state["weights"])
    updates = {1: arrived(model, 1, stale=3), 4: arrived(model, 4, stale=0), 7: arrived(model, 7, stale=8)}
    server.aggregate(updates, 0)
    for name in parameters(model):
        deltas = [updates[k]["weights"][name] - updates[k]["arrival"]["weights"][name] for k in (1, 4, 7)]
        step = (deltas[0] / 2 + deltas[1] + deltas[2] / 3) / 3
        torch.testing.assert_close(server.state["weights"][name], x[name] + 0.7 * step)
    # statistics are no changes, and are averaged
    name = "net.features.1.running_mean"
    mean = sum(update["weights"][name] for update in updates.values()) / 3
    torch.testing.assert_close(server.state["weights"][name], mean)
    assert server.state["weights"]["net.features.1.num_batches_tracked"] == 7
    assert server.state["shares"] == pytest.approx({1: 1 / 6, 4: 1 / 3, 7: 1 / 9})


def test_exponent_0_is_no_discount_and_weights_may_go_by_samples():
    model = make_client()
    updates = {0: arrived(model, 1, stale=5, size=30), 1: arrived(model, 2, stale=1, size=10)}
    server = set_up(FedBuff(exponent=0.0, weighting="samples"), model)
    x = dict(server.state["weights"])
    server.aggregate(updates, 0)
    for name in x:
        one, two = (update["weights"][name] - update["arrival"]["weights"][name] for update in updates.values())
        torch.testing.assert_close(server.state["weights"][name], x[name] + 0.75 * one + 0.25 * two)


def test_without_stale_updates_it_is_the_parent_bit_for_bit():
    plain = fit(make_client(net=noisy), aggregator=WeightedAverage(weighting="uniform"))
    assert equal(plain.weights, fit(make_client(net=noisy), aggregator=FedBuff()).weights)
    momentum = [fit(make_client(), aggregator=server) for server in (FedAvgM(weighting="uniform"), FedBuff(beta=0.9))]
    assert equal(momentum[0].weights, momentum[1].weights)


def test_order_of_updates_changes_nothing():
    model = make_client()
    updates = {k: arrived(model, k, stale=k, place=3 - k) for k in range(4)}
    for make in (FedBuff, FedAsync):
        ends = []
        for order in (sorted(updates), sorted(updates, reverse=True)):
            server = set_up(make(), model)
            server.aggregate({k: updates[k] for k in order}, 0)
            ends.append(server.state["weights"])
        assert near(*ends)


@pytest.mark.parametrize(
    "settings, shares",
    [
        ({"rule": "constant"}, [0.6, 0.6, 0.6, 0.6]),
        ({"rule": "polynomial", "a": 0.5}, [0.6, 0.6 / math.sqrt(2), 0.6 / math.sqrt(5), 0.6 / math.sqrt(11)]),
        ({"rule": "hinge", "a": 10, "b": 4}, [0.6, 0.6, 0.6, 0.6 / 61]),
        ({"rule": "polynomial", "a": 0}, [0.6, 0.6, 0.6, 0.6]),
    ],
)
def test_shares_follow_the_rules(settings, shares):
    server = FedAsync(alpha=0.6, **settings)
    assert [server.share(stale) for stale in (0, 1, 4, 10)] == pytest.approx(shares)


def test_updates_are_mixed_in_by_their_time_of_arrival():
    model = make_client(net=noisy)
    updates = {1: arrived(model, 1, stale=3, place=1), 2: arrived(model, 2, stale=0, place=0)}
    server = set_up(FedAsync(alpha=0.5, a=1), model)
    x = dict(server.state["weights"])
    assert server.aggregate(updates, 0) == {"alpha": (0.125 + 0.5) / 2}
    for name in [*parameters(model), "net.features.1.running_var"]:
        first = 0.5 * x[name] + 0.5 * updates[2]["weights"][name]
        expected = 0.875 * first + 0.125 * updates[1]["weights"][name]
        torch.testing.assert_close(server.state["weights"][name], expected)
    assert server.state["weights"]["net.features.1.num_batches_tracked"] == 2


def test_one_client_mixed_in_whole_trains_alone():
    settings = {"max_rounds": 4}
    alone = fit(make_client(FedProx, mu=0.1), blobs(40), **settings)
    schedule = Asynchronous(buffer=1)
    mixed = fit(
        make_client(FedProx, mu=0.1),
        blobs(40),
        aggregator=FedAsync(alpha=1.0, rule="constant"),
        schedule=schedule,
        **settings,
    )
    assert equal(alone.weights, mixed.weights)


def test_without_updates_nothing_moves():
    for server in (set_up(FedBuff(), make_client()), set_up(FedAsync(), make_client())):
        before = dict(server.state["weights"])
        assert server.aggregate({}, 0) == {} and equal(before, server.state["weights"])


@pytest.mark.parametrize("precision", ["64-true", "bf16-true"])
def test_types_are_kept(precision):
    for server in (FedBuff(), FedAsync()):
        run = fit(make_client(), aggregator=server, schedule=Asynchronous(buffer=2), precision=precision)
        kinds = {tensor.dtype for tensor in server.state["weights"].values()}
        assert kinds == {torch.float64 if precision == "64-true" else torch.bfloat16}
        assert all(tensor.isfinite().all() for tensor in run.weights.values())


@pytest.mark.parametrize(
    "make, setting",
    [
        (lambda: FedBuff(exponent=-0.5), "exponent"),
        (lambda: FedBuff(server_lr=0.0), "server_lr"),
        (lambda: FedBuff(beta=1.0), "beta"),
        (lambda: FedAsync(alpha=0.0), "alpha"),
        (lambda: FedAsync(alpha=1.5), "alpha"),
        (lambda: FedAsync(rule="linear"), "rule"),
        (lambda: FedAsync(a=-1.0), "a"),
        (lambda: FedAsync(b=-1), "b"),
    ],
)
def test_settings_out_of_range_are_refused(make, setting):
    with pytest.raises(MisconfigurationException, match=rf"aggregator\.{setting}="):
        make()
