import math
import re

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from federations import Shuffled, Spy, blobs, equal, fit, make_client, noisy, same_end
from pfl_lightning import Server, WeightedAverage
from pfl_lightning.aggregators import client_weights
from pfl_lightning.methods import WDR, FedPer, FedProx, Local
from pfl_lightning.methods.feddisco import FedDisco, disco_shares

METRICS = ["kl", "cosine", "l1", "l2"]


def updates_of(*counts, n=None):
    """Updates of clients 3, 4, ... with given class counts."""
    n = [sum(row) for row in counts] if n is None else n
    return {
        client: {
            "weights": {"w": torch.full((2,), float(client))},
            "num_samples": torch.tensor(samples),
            "class_counts": torch.tensor(row),
        }
        for client, (row, samples) in enumerate(zip(counts, n, strict=True), start=3)
    }


def shares_of(updates, a=0.5, b=0.1, metric="kl"):
    return list(disco_shares(updates, a, b, metric).values())


def random_counts(clients, classes=4, seed=0):
    return np.random.default_rng(seed).integers(0, 30, (clients, classes)).tolist()


def test_the_example_by_hand():
    updates = updates_of([10, 10], [6, 6], [8, 0])
    for metric in METRICS:
        assert shares_of(updates, metric=metric) == pytest.approx([0.6, 0.4, 0], abs=1e-12)


@pytest.mark.parametrize("metric", METRICS)
def test_the_formula_step_by_step(metric):
    counts = [[12, 0, 5, 0], *random_counts(5)]
    p = np.array([sum(row) for row in counts]) / np.sum(counts)
    u = np.full(4, 0.25)
    distance = {
        "kl": lambda q: sum(share * math.log(4 * share) for share in q if share),
        "cosine": lambda q: 1 - q @ u / math.sqrt((q @ q) * (u @ u)),
        "l1": lambda q: abs(q - u).sum(),
        "l2": lambda q: math.sqrt(((q - u) ** 2).sum()),
    }[metric]
    d = np.array([distance(np.array(row) / sum(row)) for row in counts])
    arguments = np.maximum(p - 0.8 * d / d.sum() + 0.02, 0)
    assert 0 < (arguments == 0).sum() < 6
    assert shares_of(updates_of(*counts), 0.8, 0.02, metric) == pytest.approx(arguments / arguments.sum(), abs=1e-12)


@pytest.mark.parametrize("metric", METRICS)
def test_weights_lie_on_the_simplex_and_go_with_their_clients(metric):
    counts = random_counts(8, seed=1)
    shares = shares_of(updates_of(*counts), 1.0, 0.05, metric)
    assert min(shares) == 0 < max(shares) and sum(shares) == pytest.approx(1, abs=1e-12)
    order = [5, 2, 7, 0, 1, 6, 3, 4]
    permuted = shares_of(updates_of(*(counts[k] for k in order)), 1.0, 0.05, metric)
    assert permuted == pytest.approx([shares[k] for k in order], abs=1e-12)


@pytest.mark.parametrize("metric", METRICS)
def test_equal_sizes_and_discrepancies_give_equal_weights(metric):
    assert shares_of(updates_of([9, 1, 0], [0, 9, 1], [1, 0, 9]), metric=metric) == pytest.approx([1 / 3] * 3)


@pytest.mark.parametrize("metric", METRICS)
def test_balanced_clients_have_no_discrepancy_and_b_alone_evens_them_out(metric):
    updates = updates_of([7] * 10, [11] * 10, [3] * 10)
    p = np.array(list(client_weights(updates, "samples").values()))
    assert shares_of(updates, a=5.0, metric=metric) == pytest.approx((p + 0.1) / 1.3, abs=1e-12)
    assert shares_of(updates, a=5.0, b=0.0, metric=metric) == pytest.approx(p, abs=1e-12)


def test_a_client_that_counted_nothing_gets_no_weight():
    updates = updates_of([4, 2], [0, 0], [5, 9], n=[6, 50, 14])
    without = {client: update for client, update in updates.items() if client != 4}
    assert shares_of(updates) == [shares_of(without)[0], 0.0, shares_of(without)[1]]
    with pytest.warns(UserWarning, match="no client a weight"):
        assert disco_shares(updates_of([0, 0], [0, 0], n=[3, 1]), 0.5, 0.1, "kl") == {3: 0.75, 4: 0.25}


def test_where_nobody_would_get_a_weight_it_is_the_share_of_samples_and_a_warning():
    updates = updates_of([4, 0], [0, 8], [0, 0], n=[4, 8, 2])
    with pytest.warns(UserWarning, match=re.escape("aggregator.a=9.0")):
        assert shares_of(updates, a=9.0) == pytest.approx([1 / 3, 2 / 3, 0])


def test_the_global_model_is_the_mean_by_these_weights():
    aggregator = FedDisco()
    aggregator.setup(Server(9, {"w": torch.zeros(2)}, None, None, seed=0))
    logs = aggregator.aggregate(updates_of([10, 10], [6, 6], [8, 0]), round=0)
    assert aggregator.download(0)["weights"]["w"].tolist() == pytest.approx([0.6 * 3 + 0.4 * 4] * 2)
    assert aggregator.state["shares"] == pytest.approx({3: 0.6, 4: 0.4, 5: 0})
    assert logs == {"excluded": 1.0}
    before = dict(aggregator.state)
    assert aggregator.aggregate({}, round=1) == {} and equal(before, aggregator.state)
    alone = updates_of([1, 0])
    aggregator.aggregate(alone, round=2)
    assert equal(aggregator.global_model(), alone[3]["weights"])


def test_switched_off_it_is_fedavg_bit_for_bit():
    off = fit(make_client(net=noisy), aggregator=FedDisco(a=0, b=0))
    average = fit(make_client(net=noisy))
    assert equal(off.weights, average.weights)
    assert equal(off.federation.aggregator.state, average.federation.aggregator.state)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.by_default("kl")
def test_discrepancies_change_the_weights(metric):
    on, off = (fit(make_client(), blobs(by_class=True), aggregator=FedDisco(a, 0.0, metric)) for a in (0.5, 0))
    assert not equal(on.weights, off.weights)


def test_counts_travel_only_where_they_are_asked_for():
    spies = Spy(), Spy()
    fit(make_client(), aggregator=FedDisco(), callbacks=[spies[0]], max_rounds=1)
    fit(make_client(), aggregator=WeightedAverage(), callbacks=[spies[1]], max_rounds=1)
    assert all("class_counts" in update for update in spies[0].updates[0].values())
    assert not any("class_counts" in update for update in spies[1].updates[0].values())


def test_the_order_of_uploads_changes_nothing():
    runs = [
        fit(make_client(), blobs(by_class=True), aggregator=FedDisco(), engine=engine)
        for engine in ("sequential", Shuffled)
    ]
    assert equal(*(run.federation.federation_state() for run in runs))


@pytest.mark.exhaustive
def test_partial_participation_resumes_bit_for_bit(tmp_path):
    def run(root, rounds, ckpt_path=None):
        settings = {"max_rounds": rounds, "clients_per_round": 0.5, "ckpt_path": ckpt_path}
        return fit(make_client(), blobs(by_class=True), root, FedDisco(), **settings)

    whole = run(tmp_path / "whole", 4)
    assert same_end(whole, run(tmp_path / "half", 4, run(tmp_path / "half", 2).last))
    assert len(whole.federation.aggregator.state["shares"]) == 2


@pytest.mark.parametrize(("method", "settings"), [(FedProx, {"mu": 0.1}), (WDR, {}), (FedPer, {})])
@pytest.mark.by_default("FedPer-settings2")
def test_other_clients_under_it(method, settings):
    client, plain = (make_client(method, net=noisy, **settings) for _ in range(2))
    data = [blobs(by_class=True) for _ in range(2)]
    ours = fit(client, data[0], aggregator=FedDisco())
    assert not equal(ours.weights, fit(plain, data[1], aggregator=WeightedAverage()).weights)
    assert set(ours.federation.aggregator.state["weights"]) == {n for n in ours.weights if client.is_shared(n)}


def test_a_client_without_weights_is_refused():
    with pytest.raises(MisconfigurationException, match="FedDisco needs class_counts and num_samples and weights"):
        fit(make_client(Local), aggregator=FedDisco())


@pytest.mark.parametrize("settings", [{"a": -1}, {"a": math.nan}, {"a": math.inf}, {"b": math.nan}, {"b": -math.inf}])
def test_bad_settings_are_refused_by_name(settings):
    ((name, value),) = settings.items()
    with pytest.raises(MisconfigurationException, match=re.escape(f"aggregator.{name}={value}")):
        FedDisco(**settings)
