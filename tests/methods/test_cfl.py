import copy
import math
from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from federations import (
    Shuffled,
    Spy,
    TwoGroups,
    blobs,
    equal,
    fit,
    make_client,
    noisy,
    same_end,
)
from pfl_lightning import Server, WeightedAverage
from pfl_lightning.methods import FedAvg, FedPer
from pfl_lightning.methods.cfl import CFL, split

# splits whatever it may
EAGER = partial(CFL, eps1=1e9, eps2=0.0, warmup=0)


class Uniform(WeightedAverage):
    def aggregate(self, updates, round):
        self.average(updates, dict.fromkeys(updates, 1 / len(updates)))
        return {}


def losses(run):
    return [row["val/loss"] for row in run.rows]


def server(clients, **settings):
    aggregator = CFL(**settings)
    module = make_client().double()
    weights = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
    aggregator.setup(Server(clients, weights, module, None, seed=0))
    return aggregator


def direction(seed):
    """A vector of norm 1, entry by entry."""
    generator = torch.Generator().manual_seed(seed)
    entries = make_client().double().state_dict()
    noise = {n: torch.randn(t.shape, generator=generator, dtype=torch.float64) for n, t in entries.items()}
    norm = torch.cat([t.flatten() for t in noise.values()]).norm()
    return {name: tensor / norm for name, tensor in noise.items()}


def uploads(aggregator, steps, samples=None):
    """What clients send that went some length in some directions, ``{client: {seed: length}}``."""
    updates = {}
    for client, lengths in sorted(steps.items()):
        weights = dict(aggregator.download(client)["weights"])
        for seed, length in lengths.items():
            weights = {name: tensor + length * direction(seed)[name] for name, tensor in weights.items()}
        n = 10 if samples is None else samples[client]
        updates[client] = {"weights": weights, "num_samples": torch.tensor(n)}
    return updates


def opposite(ups, downs, length=1.0):
    """Two groups that go opposite ways, each client with some noise of its own."""
    signs = {**dict.fromkeys(ups, length), **dict.fromkeys(downs, -length)}
    return {client: {0: sign, client + 1: 0.1 * length} for client, sign in sorted(signs.items())}


@pytest.mark.parametrize("absent", ["last", "skip"])
@pytest.mark.by_default("skip")
def test_t12_with_eps1_0_it_never_splits_and_is_uniform_federated_averaging_bit_for_bit(absent):
    settings = {"net": noisy, "optimizer_lifetime": "run"}
    run = fit(make_client(FedAvg, **settings), aggregator=CFL(eps1=0.0, eps2=0.0, warmup=0, absent=absent))
    uniform = fit(make_client(FedAvg, **settings), aggregator=Uniform())
    assert equal(run.weights, uniform.weights) and losses(run) == losses(uniform)
    assert [row["server/clusters"] for row in run.rows] == [1, 1, 1]


def test_weighted_by_samples_one_cluster_is_fedavg_bit_for_bit():
    run, average = fit(make_client(), aggregator=CFL(weights="samples")), fit(make_client())
    assert equal(run.weights, average.weights) and losses(run) == losses(average)


def test_two_opposite_groups_are_split_exactly_and_each_takes_its_own_mean():
    aggregator = server(6, warmup=0)
    updates = uploads(aggregator, opposite(ups=[0, 2, 5], downs=[1, 3, 4]))
    logs = aggregator.aggregate(updates, round=0)
    assert aggregator.state["clusters"] == [[0, 2, 5], [1, 3, 4]]
    assert logs["clusters"] == 2 and logs["mean_norm"] < 0.1 and logs["max_norm"] == pytest.approx(1, abs=0.1)
    for group in ([0, 2, 5], [1, 3, 4]):
        for client in group:
            for name, tensor in aggregator.download(client)["weights"].items():
                mean = sum(updates[other]["weights"][name] for other in group) / 3
                torch.testing.assert_close(tensor, mean, rtol=0, atol=1e-12)
    assert aggregator.global_model() == {}


@pytest.mark.exhaustive
def test_clusters_split_further_and_never_merge():
    aggregator = server(7, warmup=0)
    aggregator.aggregate(uploads(aggregator, opposite([0, 1, 2, 3], [4, 5, 6])), round=0)
    aggregator.aggregate(uploads(aggregator, opposite([0, 3, 4], [1, 2, 5, 6])), round=1)
    # 4 against 5 and 6 has a mean of a third of a step, which is below eps1
    assert aggregator.state["clusters"] == [[0, 3], [1, 2], [4], [5, 6]]
    # clusters of two stay, and so do those that now agree
    aggregator.aggregate(uploads(aggregator, opposite([0, 1, 4, 5], [2, 3, 6])), round=2)
    assert aggregator.state["clusters"] == [[0, 3], [1, 2], [4], [5, 6]]


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"eps1": 0.01}, {}),
        ({"eps2": 1.5}, {}),
        ({"warmup": 6}, {}),
        ({}, {"ups": [0], "downs": [1]}),
        ({}, {"ups": [0, 1, 2], "downs": []}),
    ],
    ids=["mean not at rest", "no client moves", "too early", "two clients", "of one mind"],
)
@pytest.mark.by_default("two clients")
def test_each_condition_alone_keeps_a_cluster_whole(settings, steps):
    steps = {"ups": [0, 1], "downs": [2, 3]} | steps
    size = len(steps["ups"] + steps["downs"])
    aggregator = server(size, **{"warmup": 5, **settings})
    aggregator.aggregate(uploads(aggregator, opposite(**steps)), round=5)
    assert len(aggregator.state["clusters"]) == 1
    control = server(4, warmup=5)
    control.aggregate(uploads(control, opposite([0, 1], [2, 3])), round=5)
    assert len(control.state["clusters"]) == 2


def test_the_norms_are_of_the_mean_and_of_the_largest():
    for weights, mean in (("uniform", [0.5, 0.5]), ("samples", [0.25, 0.75])):
        aggregator = server(2, weights=weights)
        steps = {0: {0: 3.0}, 1: {0: -1.0}}
        logs = aggregator.aggregate(uploads(aggregator, steps, samples={0: 10, 1: 30}), round=0)
        assert logs["mean_norm"] == pytest.approx(abs(3 * mean[0] - mean[1]), abs=1e-7)
        assert logs["max_norm"] == pytest.approx(3)


def test_linkage_is_complete():
    # a chain: each is near the next, the ends are far apart; single linkage would part off the last one alone. No two
    # distances are equal, since rounding, which processors differ in, would then decide which are joined first
    angles = torch.tensor([0.0, 0.5, 1.0, 1.44, 1.9, 2.5], dtype=torch.float64)
    vectors = torch.stack([angles.cos(), angles.sin()], 1)
    assert split(list(range(6)), list(range(6)), vectors @ vectors.T) == [[0, 1, 2, 3], [4, 5]]


def test_updates_of_zero_are_no_nan():
    aggregator = server(4, eps2=0.5, warmup=0)
    logs = aggregator.aggregate(uploads(aggregator, {0: {0: 1.0}, 1: {}, 2: {}, 3: {0: -1.0}}), round=0)
    assert logs["clusters"] == 2 and all(math.isfinite(value) for value in logs.values())
    still = server(3, eps1=1.0, eps2=0.0, warmup=0)
    assert still.aggregate(uploads(still, {0: {}, 1: {}, 2: {}}), round=0)["max_norm"] == 0
    assert len(still.state["clusters"]) == 1


def test_who_stays_away_is_judged_by_its_last_update():
    steps = opposite([0, 2, 5], [1, 3, 4])
    aggregator = server(7, warmup=1)
    aggregator.aggregate(uploads(aggregator, {k: steps[k] for k in (0, 3, 5)}), round=0)
    updates = uploads(aggregator, {k: steps[k] for k in (1, 2, 4)})
    aggregator.aggregate(updates, round=1)
    # 6 has never sent anything, and follows the larger half, the first of equals
    assert aggregator.state["clusters"] == [[0, 2, 5, 6], [1, 3, 4]]
    # means are of those who are there
    assert equal(aggregator.download(0)["weights"], updates[2]["weights"])


def test_or_not_at_all_and_follows_the_larger_half():
    steps = opposite([0, 2, 5], [1, 3, 4])
    aggregator = server(7, warmup=1, absent="skip")
    aggregator.aggregate(uploads(aggregator, {k: steps[k] for k in (0, 3, 5)}), round=0)
    assert aggregator.state["updates"] == {}
    aggregator.aggregate(uploads(aggregator, {k: steps[k] for k in (1, 2, 4)}), round=1)
    assert aggregator.state["clusters"] == [[0, 1, 3, 4, 5, 6], [2]]


def test_a_cluster_of_which_nobody_takes_part_keeps_its_model():
    aggregator = server(6, warmup=0)
    aggregator.aggregate(uploads(aggregator, opposite([0, 1, 2], [3, 4, 5])), round=0)
    before = aggregator.download(5)["weights"]
    aggregator.aggregate(uploads(aggregator, {0: {7: 1.0}}), round=1)
    assert aggregator.download(5)["weights"] is before
    state = copy.deepcopy(aggregator.state)
    assert aggregator.aggregate({}, round=2) == {} and equal(aggregator.state, state)


@pytest.mark.exhaustive
def test_groups_are_found_in_training_and_better_off_apart():
    settings = {"max_rounds": 8, "local_epochs": 2}
    cfl = fit(make_client(), blobs(data=TwoGroups), aggregator=CFL(eps1=9.0, eps2=0.0, warmup=1), **settings)
    together = fit(make_client(), blobs(data=TwoGroups), **settings)
    assert cfl.federation.aggregator.state["clusters"] == [[0, 2], [1, 3]]
    assert cfl.rows[-1]["val/acc"] > together.rows[-1]["val/acc"] + 0.2
    assert [row["bytes/down"] for row in cfl.rows] == [row["bytes/down"] for row in together.rows]
    assert [row["bytes/up"] for row in cfl.rows] == [row["bytes/up"] for row in together.rows]


def test_payloads_are_the_clusters_models_themselves():
    aggregator = server(6, warmup=0)
    aggregator.aggregate(uploads(aggregator, opposite([0, 1, 2], [3, 4, 5])), round=0)
    for place, members in enumerate(aggregator.state["clusters"]):
        for client in members:
            for name, tensor in aggregator.download(client)["weights"].items():
                assert tensor.data_ptr() == aggregator.state["models"][place][name].data_ptr()


def test_one_client_and_clients_of_one_class_each_run():
    assert equal(fit(make_client(), blobs(30), aggregator=EAGER()).weights, fit(make_client(), blobs(30)).weights)
    run = fit(make_client(net=noisy), blobs(40, 40, 40, by_class=True), aggregator=EAGER())
    assert run.rows[-1]["clients_diverged"] == 0 and run.rows[-1]["server/clusters"] == 2


def test_under_a_client_that_shares_a_part_the_part_is_compared():
    run = fit(make_client(FedPer, net=noisy), aggregator=EAGER(), max_rounds=1)
    assert run.rows[-1]["server/clusters"] == 2
    (names,) = {tuple(update["delta"]) for update in run.federation.aggregator.state["updates"].values()}
    assert names == ("net.features.0.weight", "net.features.0.bias", "net.features.1.weight", "net.features.1.bias")


@pytest.mark.exhaustive
def test_the_order_of_clients_changes_nothing_and_resuming_goes_on_bit_for_bit(tmp_path):
    make = partial(make_client, net=noisy, optimizer_lifetime="run")
    settings = {"clients_per_round": 3, "max_rounds": 4}
    whole = fit(make(), root=tmp_path / "whole", aggregator=EAGER(), **settings)
    assert whole.rows[-1]["server/clusters"] > 1
    other = fit(make(), root=tmp_path / "other", aggregator=EAGER(), engine=Shuffled, **settings)
    assert same_end(whole, other)
    fit(make(), root=tmp_path, aggregator=EAGER(), **{**settings, "max_rounds": 2})
    assert same_end(whole, fit(make(), root=tmp_path, aggregator=EAGER(), ckpt_path="last", **settings))


def test_every_client_trains_the_model_of_its_cluster():
    spy = Spy()
    run = fit(make_client(), blobs(data=TwoGroups), aggregator=EAGER(), callbacks=[spy], max_rounds=3)
    clusters = run.federation.aggregator.state["clusters"]
    assert sorted(client for members in clusters for client in members) == [0, 1, 2, 3]
    for members in clusters:
        mean = {
            name: sum(spy.updates[-1][client]["weights"][name] for client in members) / len(members)
            for name in spy.updates[-1][0]["weights"]
        }
        for name, tensor in run.federation.aggregator.download(members[0])["weights"].items():
            torch.testing.assert_close(tensor, mean[name])


@pytest.mark.parametrize("settings", [{"eps1": -0.1}, {"eps2": -1.0}, {"warmup": -1}, {"eps1": math.nan}])
def test_settings_out_of_range_are_refused_by_name(settings):
    ((name, value),) = settings.items()
    with pytest.raises(MisconfigurationException, match=rf"aggregator\.{name}={value}"):
        CFL(**settings)


def test_clients_that_share_no_parameters_are_refused():
    class Nothing(FedAvg):
        def is_shared(self, name):
            return False

    with pytest.raises(MisconfigurationException, match="Nothing shares none; take aggregator WeightedAverage"):
        fit(make_client(Nothing), aggregator=CFL())
