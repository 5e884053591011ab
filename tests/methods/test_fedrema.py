"""Identities of FedReMa, in float64 where they are exact, and its edge cases."""

import copy
import itertools
import re
from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from federations import (
    FEATURES,
    Blobs,
    Shuffled,
    Spy,
    blobs,
    equal,
    fit,
    load,
    load_client,
    make_client,
    near,
    same_end,
)
from pfl_lightning import AggregatorList, Server, WeightedAverage
from pfl_lightning.aggregators import Aggregator, client_weights
from pfl_lightning.messages import weighted_mean
from pfl_lightning.methods import FedAvg, FedPer, FedProx, Local
from pfl_lightning.methods.fedrema import FedReMa, is_over, probe_similarity, segment
from pfl_lightning.nets import CNN, Net

C, D = 4, 6
HEAD, BIAS, BODY = "net.classifier.weight", "net.classifier.bias", "net.features.weight"
GROUPS = (0, 0, 1, 1, 1, 2, 2, 2, 2)
CLIENTS = range(len(GROUPS))


class Client(FedAvg):
    """A net with the names of the uploads."""

    def __init__(self):
        super().__init__(lambda shape, k: Net(nn.Linear(2, D), nn.Linear(D, k)), (2,), C)
        self.double()


def draw(*shape, seed):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def upload(head, n=10, body=0, scale=1.0):
    """An upload with the classifier of a seed; a small scale makes all classifiers alike."""
    weights = {BODY: draw(D, 2, seed=body), HEAD: scale * draw(C, D, seed=head), BIAS: scale * draw(C, seed=head + 500)}
    return {"weights": weights, "num_samples": torch.tensor(n)}


def distinct(clients=9, seed=0, **settings):
    return {k: upload(seed + k, 10 + 7 * k, body=900 + seed + k, **settings) for k in range(clients)}


def grouped(groups=GROUPS, noise=0.0):
    """Each group is sure of a class of its own; with noise, clients of a group differ a little."""
    updates = distinct(len(groups), scale=noise)
    for k, group in enumerate(groups):
        updates[k]["weights"][BIAS][group] += 3
    return updates


def server(clients=9, seed=0, **settings):
    aggregator, module = FedReMa(**settings), Client()
    entries = module.state_dict()
    weights = {name: torch.ones_like(entries[name]) for name in (BODY, HEAD, BIAS)}
    aggregator.setup(Server(clients, weights, module, None, seed))
    return aggregator


def after(*rounds, clients=9, **settings):
    """A server after rounds of updates, and what it logged."""
    aggregator = server(clients, **settings)
    logs = [aggregator.aggregate(updates, round) for round, updates in enumerate(rounds)]
    return aggregator, logs


def classifier(weights):
    return {name: weights[name] for name in (HEAD, BIAS)}


def classifiers(aggregator):
    return {k: classifier(aggregator.download(k)["weights"]) for k in CLIENTS}


def average(updates, members=None, shares=None):
    """FedAvg of some clients' uploads."""
    some = {k: updates[k] for k in members or updates}
    shares = shares or list(client_weights(some, "samples").values())
    return weighted_mean([update["weights"] for update in some.values()], shares)


def block(k):
    return [i for i in CLIENTS if GROUPS[i] == GROUPS[k]]


# Similarity


@pytest.mark.parametrize("shared", [True, False])
def test_similarities_are_cosines_of_probabilities(shared):
    updates = distinct()
    similarity, _, _ = server(shared_probe=shared).relevance.compare(updates, 0)
    assert torch.equal(similarity.diagonal(), torch.ones(9, dtype=torch.float64))
    assert ((similarity > 0) & (similarity <= 1)).all()
    assert torch.equal(similarity, similarity.T) is shared
    assert (similarity[~torch.eye(9, dtype=torch.bool)] < 1).all()


def test_the_noise_is_uniform_and_the_judges_are_the_classifiers():
    aggregator, updates = server(temperature=0.7, probe_max=0.5), distinct(3)
    noise = aggregator.relevance.probe(4)
    assert noise.shape == (D,) and 0 <= noise.min() and 0.25 < noise.max() < 0.5
    p = [torch.softmax((u["weights"][HEAD] @ noise + u["weights"][BIAS]) / 0.7, 0) for u in updates.values()]
    by_hand = torch.stack([torch.stack([(a @ b) / (a.norm() * b.norm()) for a in p]) for b in p])
    torch.testing.assert_close(aggregator.relevance.compare(updates, 4)[0], by_hand, rtol=0, atol=1e-14)


def test_noise_is_a_function_of_seed_and_round():
    updates = distinct()
    one, same, other, later = (
        server(seed=seed).relevance.compare(updates, round)[0] for seed, round in ((1, 3), (1, 3), (2, 3), (1, 4))
    )
    assert torch.equal(one, same) and not torch.equal(one, other) and not torch.equal(one, later)


def test_a_row_s_own_noise_goes_with_its_client():
    updates = distinct()
    relevance = server(shared_probe=False).relevance
    every, few = relevance.compare(updates, 0)[0], relevance.compare({k: updates[k] for k in (2, 5)}, 0)[0]
    # a matrix product of more rows may round otherwise
    torch.testing.assert_close(few, every[[2, 5]][:, [2, 5]], rtol=0, atol=1e-12)
    assert not torch.equal(every, server().relevance.compare(updates, 0)[0])


def test_a_high_temperature_makes_all_alike():
    similarity, _, _ = server(temperature=1e9).relevance.compare(distinct(), 0)
    assert (1 - similarity).abs().max() < 1e-12
    assert (1 - server(temperature=0.1).relevance.compare(distinct(), 0)[0]).max() > 0.1


def test_equal_probabilities_are_never_above_the_client_s_own():
    p = torch.softmax(draw(50, 10, seed=1).repeat_interleave(2, 0), 1)
    assert all(float(probe_similarity(p, own).max()) == 1 for own in range(100))


# Maximum difference segmentation

S = torch.tensor([0.5, 0.52, 0.51, 0.9, 0.91, 0.92, 1.0, 0.53], dtype=torch.float64)


def test_the_rules_differ_in_whom_the_gap_parts():
    assert segment(S, "above_excl_top") == ([3, 4, 5, 6], pytest.approx(0.37))
    assert segment(S, "algorithm1") == ([3, 4, 5, 6, 7], pytest.approx(0.37))
    assert segment(S, "above_all") == ([3, 4, 5, 6], pytest.approx(0.37))


def test_the_rules_differ_where_the_client_itself_stands_apart():
    far = S - 0.45
    far[6] = 1
    assert segment(far, "above_excl_top") == ([3, 4, 5, 6], pytest.approx(0.37))
    assert segment(far, "algorithm1") == ([5, 6], pytest.approx(0.53))
    assert segment(far, "above_all") == ([6], pytest.approx(0.53))


def test_everybody_is_its_own_peer_and_has_another():
    for seed in range(200):
        similarities = torch.rand(3 + seed % 9, generator=torch.Generator().manual_seed(seed))
        own = seed % 3
        similarities[own] = 1
        for rule in ("above_excl_top", "algorithm1", "above_all"):
            members, gap = segment(similarities, rule)
            assert own in members and members == sorted(members) and 0 < gap < 1
            assert len(members) >= (1 if rule == "above_all" else 2)


@pytest.mark.parametrize("rule", ["above_excl_top", "algorithm1", "above_all"])
def test_without_a_gap_all_are_peers(rule):
    assert segment(torch.full((5,), 0.7), rule) == ([0, 1, 2, 3, 4], 0.0)
    assert segment(torch.tensor([1.0]), rule) == ([0], 0.0)
    assert segment(torch.tensor([0.2, 1.0]), rule) == ([0, 1], 0.0)


def test_of_equal_gaps_the_lowest_counts():
    assert segment(torch.tensor([0.25, 0.5, 0.75, 1.0]), "above_all") == ([1, 2, 3], 0.25)


@pytest.mark.parametrize("shared", [True, False])
def test_equal_classifiers_find_exactly_their_block(shared):
    for rule, noise in itertools.product(("above_excl_top", "above_all"), (0.0, 0.01)):
        _, peers, _ = server(segmentation=rule, shared_probe=shared).relevance.compare(grouped(noise=noise), 0)
        assert peers == {k: block(k) for k in CLIENTS}
    _, peers, _ = server(segmentation="algorithm1", shared_probe=shared).relevance.compare(grouped(), 0)
    assert all(set(block(k)) < set(peers[k]) and len(peers[k]) == len(block(k)) + 1 for k in CLIENTS)


def test_equal_classifiers_are_never_parted():
    for seed in range(20):
        updates = {k: upload(50 * seed + group) for k, group in enumerate(GROUPS)}
        _, peers, _ = server().relevance.compare(updates, 0)
        assert all(set(block(i)) <= set(members) for k, members in peers.items() for i in (*members, k))


# A round of the period


def test_bodies_are_averaged_over_all_and_classifiers_over_peers():
    updates = distinct(9, seed=20)
    aggregator, (logs,) = after(updates)
    peers = aggregator.state["peers"]
    assert len(set(map(tuple, peers.values()))) > 1 and any(len(members) < 9 for members in peers.values())
    for k, members in peers.items():
        received = aggregator.download(k)["weights"]
        assert equal(received[BODY], average(updates)[BODY])
        # of what was uploaded, whoever's turn came before
        assert equal(classifier(received), classifier(average(updates, members)))
    sizes = [len(members) for members in peers.values()]
    assert logs == {"in_period": 1.0, "peers": sum(sizes) / 9, "gap": aggregator.state["mean_gaps"][0]}


def test_the_global_model_is_that_of_fedavg():
    aggregator, _ = after(distinct(9))
    assert equal(aggregator.global_model(), average(distinct(9)))


def test_uniform_weights_ignore_sizes():
    updates = grouped(noise=0.01)
    aggregator, _ = after(updates, weights="uniform")
    for k, mine in classifiers(aggregator).items():
        members = block(k)
        assert equal(mine, classifier(average(updates, members, [1 / len(members)] * len(members))))
    updates = distinct(9)
    assert not equal(*(classifiers(after(updates, weights=weights)[0]) for weights in ("samples", "uniform")))
    for update in updates.values():
        update["num_samples"] = torch.tensor(30)
    both = [classifiers(after(updates, weights=weights)[0]) for weights in ("samples", "uniform")]
    for k in both[0]:
        torch.testing.assert_close(both[0][k], both[1][k], rtol=0, atol=1e-15)


def test_equal_classifiers_give_fedavg_and_end_the_period():
    updates = {k: upload(1, 10 + k, body=k) for k in CLIENTS}
    aggregator, (logs,) = after(updates)
    assert all(equal(aggregator.download(k)["weights"], average(updates)) for k in updates)
    assert logs["gap"] == 0 and logs["peers"] == 9 and not aggregator.state["in_period"]


def test_peers_are_counted_by_client():
    rounds = [distinct(9, seed=100 * t) for t in range(4)]
    rounds[2] = {k: rounds[2][k] for k in (1, 3, 4, 6, 8)}
    aggregator = server(delta=0)
    members = torch.zeros(9, 9, dtype=torch.int64)
    for t, updates in enumerate(rounds):
        aggregator.aggregate(updates, t)
        for k, peers in aggregator.state["peers"].items():
            members[k, peers] += 1
    counts = aggregator.state["peer_counts"]
    assert torch.equal(counts, members)
    assert counts.diagonal().tolist() == [3, 4, 3, 4, 4, 3, 4, 3, 4]
    assert (counts <= counts.diagonal()[:, None]).all() and (counts < 3).any()


def test_relabelling_clients_relabels_everything():
    order = [3, 0, 8, 4, 1, 2, 7, 5, 6]
    rounds = [distinct(9), distinct(9, seed=60), distinct(9, seed=80)]
    relabelled = [{new: updates[old] for new, old in enumerate(order)} for updates in rounds]
    one, other = after(*rounds, delta=0.9)[0], after(*relabelled, delta=0.9)[0]
    assert one.state["in_period"] == other.state["in_period"]
    assert torch.equal(other.state["peer_counts"], one.state["peer_counts"][order][:, order])
    torch.testing.assert_close(other.state["similarity"], one.state["similarity"][order][:, order])
    torch.testing.assert_close(other.state["mean_gaps"], one.state["mean_gaps"])
    for new, old in enumerate(order):
        assert {order[i] for i in other.state["peers"][new]} == set(one.state["peers"][old])
        torch.testing.assert_close(other.download(new), one.download(old), rtol=0, atol=1e-14)


def test_comparing_changes_nothing():
    aggregator, module = FedReMa(), Client().train()
    weights = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
    aggregator.setup(Server(7, weights, module, None, 0))
    before, stream = copy.deepcopy(aggregator.state), torch.get_rng_state()
    similarity, _, _ = aggregator.relevance.compare(distinct(), 0)
    assert equal(aggregator.state, before) and torch.equal(torch.get_rng_state(), stream)
    assert equal(dict(module.state_dict()), weights) and module.net.classifier.training
    with torch.no_grad():
        module.net.classifier.weight.zero_()
    assert torch.equal(aggregator.relevance.compare(distinct(), 0)[0], similarity)


# The end of the period

ALIKE = 0.05
"""Scale of classifiers whose gaps are far below half of those at scale 1."""


def test_the_mean_gap_is_over_all_clients_of_the_round():
    aggregator, (logs,) = after(distinct(9))
    gaps = list(aggregator.state["gaps"].values())
    assert len(gaps) == 9 and logs["gap"] == pytest.approx(sum(gaps) / 9, abs=1e-16)


def test_the_period_ends_for_good_with_the_first_round_of_small_gaps():
    rounds = [distinct(9, seed=100 * t, scale=scale) for t, scale in enumerate((1, 1, ALIKE, 1, 1))]
    aggregator, logs = after(*rounds)
    assert [log["in_period"] for log in logs] == [1, 1, 1, 0, 0]
    assert len(aggregator.state["mean_gaps"]) == 3 and "gap" not in logs[3]
    gaps = aggregator.state["mean_gaps"]
    assert gaps[1] > 0.5 * max(gaps[:2]) and gaps[2] <= 0.5 * max(gaps)
    assert not aggregator.state["in_period"]
    assert (aggregator.state["peer_counts"].diagonal() == 3).all()


def test_delta_zero_never_ends_it_and_one_ends_it_at_once():
    rounds = [distinct(9, seed=100 * t, scale=scale) for t, scale in enumerate((1, ALIKE, 1e-3))]
    assert [log["in_period"] for log in after(*rounds, delta=0)[1]] == [1, 1, 1]
    assert [log["in_period"] for log in after(*rounds[::-1], delta=1)[1]] == [1, 0, 0]


def test_a_sum_of_gaps_would_decide_alike():
    for seed in range(100):
        gaps = torch.rand(1 + seed % 7, generator=torch.Generator().manual_seed(seed)).tolist()
        assert is_over(gaps, 0.5) == is_over([16 * gap for gap in gaps], 0.5)
    assert not is_over([0.2, 0.4, 0.3], 0.5) and is_over([0.2, 0.4, 0.15], 0.5)
    assert is_over([0.0], 0.5) and not is_over([0.3], 0.9) and is_over([0.3], 1.0)


def test_after_the_period_how_often_they_were_peers_decides():
    rounds = [grouped((0, 0, 0, 1, 1, 2, 2, 2, 2)), grouped()]
    rounds += [distinct(9, scale=ALIKE), distinct(9, seed=300)]
    aggregator, logs = after(*rounds)
    assert [log["in_period"] for log in logs] == [1, 1, 1, 0]
    counts = aggregator.state["peer_counts"].double()
    assert len(counts.unique()) > 2
    for k, mine in classifiers(aggregator).items():
        by_hand = sum(counts[k, i] / counts[k].sum() * rounds[3][i]["weights"][HEAD] for i in CLIENTS)
        torch.testing.assert_close(mine[HEAD], by_hand, rtol=0, atol=1e-14)
    assert equal(aggregator.download(0)["weights"][BODY], average(rounds[3])[BODY])
    assert logs[3]["peers"] == float((counts > 0).sum()) / 9


# Who takes part


def test_before_the_first_round_and_without_updates_everybody_has_the_initial_model():
    aggregator = server()
    before = copy.deepcopy(aggregator.state)
    assert aggregator.aggregate({}, 0) == {} and equal(aggregator.state, before)
    assert all(float(tensor.sub(1).abs().max()) == 0 for tensor in aggregator.download(3)["weights"].values())


def test_absent_clients_receive_the_new_body_and_keep_their_classifier():
    first, second = grouped(), {k: update for k, update in distinct(9, seed=40).items() if k in (1, 2, 4, 7)}
    aggregator, _ = after({k: u for k, u in first.items() if k != 8})
    before = classifiers(aggregator)
    aggregator.aggregate(second, 1)
    now = classifiers(aggregator)
    assert all(equal(now[k], before[k]) is (k not in second) for k in now)
    assert all(float(tensor.sub(1).abs().max()) == 0 for tensor in now[8].values()), "never took part"
    body = average(second)[BODY]
    assert all(equal(aggregator.download(k)["weights"][BODY], body) for k in CLIENTS)
    assert aggregator.state["peers"].keys() == aggregator.state["gaps"].keys() == set(second)
    assert all(set(members) <= set(second) for members in aggregator.state["peers"].values())
    assert aggregator.state["similarity"].shape == (4, 4)


def test_after_the_period_rows_are_cut_to_who_is_there():
    aggregator, _ = after(grouped(noise=0.01), delta=1)
    here = {k: update for k, update in distinct(9, seed=40).items() if k in (0, 2, 4, 5)}
    logs = aggregator.aggregate(here, 1)
    now = classifiers(aggregator)
    assert equal(now[0], classifier(here[0]["weights"])), "its one peer is away"
    for k in (2, 4):
        assert equal(now[k], classifier(average(here, (2, 4), [0.5, 0.5])))
    assert logs == {"in_period": 0.0, "peers": 1.5}


def test_a_client_that_was_never_there_in_the_period_keeps_its_own_classifier():
    aggregator, _ = after({k: update for k, update in grouped().items() if k != 8}, delta=1)
    newcomer = distinct(9, seed=40)
    aggregator.aggregate(newcomer, 1)
    assert equal(classifiers(aggregator)[8], classifier(newcomer[8]["weights"]))
    assert all(torch.isfinite(mine[HEAD]).all() for mine in classifiers(aggregator).values())


@pytest.mark.parametrize("delta", [0.5, 1.0])
def test_rounds_of_one_or_two_clients_do_not_end_the_period(delta):
    updates = distinct(9)
    aggregator = server(delta=delta)
    assert aggregator.aggregate({4: updates[4]}, 0) == {"in_period": 1.0, "peers": 1.0}
    assert equal(classifiers(aggregator)[4], classifier(updates[4]["weights"]))
    aggregator.aggregate({k: updates[k] for k in (4, 6)}, 1)
    assert aggregator.state["in_period"] and aggregator.state["mean_gaps"] == []
    assert equal(classifiers(aggregator)[6], classifier(average(updates, (4, 6))))


@pytest.mark.parametrize("sizes", [(40,), (40, 30)])
def test_one_or_two_clients_alone_are_fedavg_bit_for_bit(sizes):
    mine, theirs = fit(make_client(), blobs(*sizes), aggregator=FedReMa()), fit(make_client(), blobs(*sizes))
    assert equal(mine.weights, theirs.weights)
    assert near([row["val/loss"] for row in mine.rows], [row["val/loss"] for row in theirs.rows])


# In a federation

SKEWED = (20, 20, 22, 18, 20, 20)


def skewed(**settings):
    """Three pairs of clients, each mostly of one class."""
    return blobs(*SKEWED, by_class=True, **settings)


def run(root="unused", rounds=6, model=None, **settings):
    settings = {"aggregator": FedReMa(delta=0.9), "clients_per_round": 0.7, **settings}
    return fit(model or make_client(), skewed(), root, max_rounds=rounds, local_epochs=2, **settings)


@pytest.fixture(scope="module")
def whole():
    return run()


def test_clients_of_a_class_share_a_classifier_that_others_have_not():
    once = run(rounds=1, aggregator=FedReMa(), clients_per_round=1.0)
    aggregator = once.federation.aggregator
    assert aggregator.state["peers"] == {k: [k - k % 2, k - k % 2 + 1] for k in range(6)}
    models = [aggregator.download(k)["weights"] for k in range(6)]
    assert all(equal(models[k], models[k + 1]) for k in (0, 2, 4))
    assert not equal(models[0], models[2]) and equal(
        models[0]["net.features.0.weight"], once.weights["net.features.0.weight"]
    )
    assert once.rows[0]["val/acc"] > fit(make_client(), skewed(), max_rounds=1, local_epochs=2).rows[0]["val/acc"]
    assert {"server/gap", "server/peers", "server/in_period"} <= once.rows[0].keys()


def test_the_order_of_uploads_changes_nothing(whole):
    assert same_end(whole, run(engine=Shuffled))


@pytest.mark.parametrize("done", [1, 2, 4])
def test_it_resumes_bit_for_bit_before_and_after_the_end_of_the_period(whole, done, tmp_path):
    assert [row["server/in_period"] for row in whole.rows] == [1, 1, 0, 0, 0, 0], "choose another delta"
    half = run(tmp_path, done)
    resumed = run(tmp_path, ckpt_path=half.last)
    assert same_end(whole, resumed)
    state = load(resumed.last)["federation"]["aggregator"]
    assert equal(state, whole.federation.aggregator.state) and state["in_period"] is False


def test_a_client_s_model_comes_out_of_a_checkpoint(tmp_path):
    whole = run(tmp_path, rounds=2, clients_per_round=1.0)
    aggregator = whole.federation.aggregator
    mine, common = load_client(FedAvg, whole.last, client=2), load_client(FedAvg, whole.last)
    assert equal(dict(mine.state_dict()), aggregator.download(2)["weights"])
    assert equal(dict(common.state_dict()), aggregator.global_model()) and not equal(
        dict(mine.state_dict()), dict(common.state_dict())
    )


def test_it_is_another_method_than_fedavg_also_under_fedprox(whole):
    assert not equal(whole.weights, run(aggregator=WeightedAverage()).weights)
    proximal = run(model=make_client(FedProx, mu=0.5))
    assert not equal(proximal.weights, whole.weights) and proximal.federation.method == "FedProx+FedReMa"


def test_beside_other_servers_it_does_the_same(whole):
    class Nothing(Aggregator):
        sends = frozenset({"nothing"})

    together = run(aggregator=AggregatorList([Nothing(), FedReMa(delta=0.9)]))
    assert equal(together.weights, whole.weights)
    assert equal(together.federation.aggregator.state["1"], whole.federation.aggregator.state)


@pytest.mark.parametrize("settings", [{}, {"buffers": "local"}], ids=["shared buffers", "local buffers"])
def test_a_classifier_of_many_layers_is_judged_in_evaluation_mode(settings):
    def net(shape, classes):
        head = [nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, classes)]
        return Net(nn.Identity(), nn.Sequential(*head))

    spy = Spy()
    done = run(model=make_client(net=net, **settings), rounds=2, callbacks=[spy])
    aggregator = done.federation.aggregator
    assert equal(aggregator.state["similarity"], aggregator.relevance.compare(spy.updates[1], 1)[0])
    assert any(name.endswith("num_batches_tracked") for name in aggregator.relevance.names) is (not settings)


class Pictures(Blobs):
    input_shape = (1, 16, 16)

    def load(self):
        x, y = super().load()
        return x.repeat(1, 43)[:, :256].view(-1, 1, 16, 16), y


@pytest.mark.parametrize(("head", "size"), [("all_fc", 64), ("last", 512)])
def test_the_net_says_what_the_classifier_is(head, size):
    torch.manual_seed(0)
    model = FedAvg(net=partial(CNN, head=head), input_shape=(1, 16, 16), num_classes=3)
    done = fit(model, skewed(data=Pictures), aggregator=FedReMa(), max_rounds=1, local_steps=1)
    aggregator = done.federation.aggregator
    assert aggregator.relevance.probe_size == size
    own = set(aggregator.state["classifiers"][0])
    assert own == {name for name in done.weights if name.startswith("net.classifier.")}
    assert len(own) == (4 if head == "all_fc" else 2)


# Mistakes


@pytest.mark.parametrize(
    ("method", "sentence"),
    [
        (FedPer, "FedPer keeps net.classifier.weight to itself; take model FedAvg"),
        (Local, "FedReMa needs num_samples and weights, which Local does not send"),
    ],
)
def test_clients_that_keep_their_classifier_are_refused(method, sentence):
    with pytest.raises(MisconfigurationException, match=re.escape(sentence)):
        fit(make_client(method), aggregator=FedReMa())


def test_a_classifier_without_a_linear_layer_is_refused():
    def net(shape, classes):
        return Net(nn.Linear(FEATURES, classes), nn.BatchNorm1d(classes))

    with pytest.raises(MisconfigurationException, match="has no linear layer"):
        fit(make_client(net=net), aggregator=FedReMa())


@pytest.mark.parametrize(
    "setting", [{"delta": 2}, {"delta": -0.1}, {"delta": float("nan")}, {"temperature": 0.0}, {"probe_max": -1.0}]
)
def test_numbers_out_of_range_are_refused_by_name(setting):
    ((name, value),) = setting.items()
    with pytest.raises(MisconfigurationException, match=re.escape(f"aggregator.{name}={value}")):
        FedReMa(**setting)
