"""Identities T1 to T9 of cwFedAvg, in float64, and its edge cases; T10, the partition, is in tests/data."""

import itertools
import re

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from federations import FEATURES, Shuffled, Spy, blobs, equal, fit, load, make_client, plain, same_end
from pfl_lightning import Server, WeightedAverage
from pfl_lightning.aggregators import CwFedAvg
from pfl_lightning.messages import weighted_mean
from pfl_lightning.methods import WDR, FedAvg, FedPer, FedProx, Local
from pfl_lightning.methods.cwfedavg import row_distribution
from pfl_lightning.nets import Net, find_output_layer

M, K, D = 5, 3, 4
HEAD, BIAS, BODY = "net.classifier.weight", "net.classifier.bias", "net.features.weight"


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def head_with(norms, seed=0):
    """A head [K, D] whose rows have given norms, in random directions."""
    rows = torch.randn(len(norms), D, dtype=torch.float64, generator=generator(seed))
    return rows / rows.norm(dim=1, keepdim=True) * torch.as_tensor(norms, dtype=torch.float64)[:, None]


def upload(head, n, counts=None, seed=0):
    weights = {
        BODY: torch.randn(D, 2, dtype=torch.float64, generator=generator(seed + 100)),
        HEAD: head,
        BIAS: torch.randn(len(head), dtype=torch.float64, generator=generator(seed + 200)),
    }
    counts = torch.ones(len(head), dtype=torch.int64) if counts is None else torch.as_tensor(counts)
    return {"weights": weights, "num_samples": torch.tensor(n), "class_counts": counts}


def random_updates(clients=M, classes=K, seed=0):
    """Uploads of distinct sizes and distributions."""
    draws = torch.rand(clients, classes, generator=generator(seed), dtype=torch.float64) + 0.05
    return {i: upload(head_with(draws[i], i), 10 + 7 * i, (100 * draws[i]).long(), seed=i) for i in range(clients)}


class Client(FedAvg):
    """A net with the names of the uploads."""

    def __init__(self, classes=K):
        super().__init__(lambda shape, k: Net(nn.Linear(2, D), nn.Linear(D, k)), (2,), classes)
        self.double()


def server(updates, clients=None, classes=K, **settings):
    aggregator = CwFedAvg(**settings)
    module = Client(classes)
    weights = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
    if updates:
        weights = {name: torch.zeros_like(tensor) + 1 for name, tensor in updates[min(updates)]["weights"].items()}
    aggregator.setup(Server(clients or len(updates), weights, module, None, seed=0))
    if updates:
        aggregator.aggregate(updates, round=0)
    return aggregator


def starts(aggregator):
    return [aggregator.download(client)["weights"] for client in range(aggregator.num_clients)]


def by_the_paper(updates, p_rows):
    """Equations of the paper, step by step: class models first, then each client's mix of them."""
    n = torch.tensor([float(u["num_samples"]) for u in updates.values()], dtype=torch.float64)
    p = n / n.sum()
    class_models = []
    for j in range(p_rows.shape[1]):
        q = p * p_rows[:, j] / sum(p[m] * p_rows[m, j] for m in range(len(p)))
        class_models.append(weighted_mean([u["weights"] for u in updates.values()], q.tolist()))
    mixes = [weighted_mean(class_models, row.tolist()) for row in p_rows]
    return class_models, mixes


def close(one, other, tolerance=1e-12):
    return all(torch.allclose(one[name], other[name], rtol=0, atol=tolerance) for name in one)


def fedavg(updates):
    aggregator = WeightedAverage()
    aggregator.state["weights"] = {}
    aggregator.aggregate(updates, round=0)
    return aggregator.global_model()


@pytest.mark.parametrize("layers", ["output", "all", ["net.features"]])
@pytest.mark.parametrize("distribution", ["norms", "counts"])
def test_one_matrix_equals_class_models_and_mixes(layers, distribution):
    updates = random_updates()
    aggregator = server(updates, layers=layers, distribution=distribution)
    class_models, mixes = by_the_paper(updates, aggregator.distributions())
    mine = aggregator.class_models()
    for name in aggregator.names:
        for j in range(K):
            assert torch.allclose(mine[name][j], class_models[j][name], rtol=0, atol=1e-12)
    common = fedavg(updates)
    for start, mix in zip(starts(aggregator), mixes, strict=True):
        assert close(start, {name: mix[name] if name in aggregator.names else common[name] for name in start})


def test_t1_equal_distributions_give_fedavg():
    norms = torch.tensor([0.2, 0.5, 0.3])
    for head in (norms, torch.ones(K)):
        updates = {i: upload(head_with(head * (i + 1), i), 10 + i, seed=i) for i in range(M)}
        aggregator = server(updates, layers="all")
        assert all(close(start, fedavg(updates)) for start in starts(aggregator))
        n = torch.arange(10, 10 + M, dtype=torch.float64)
        assert torch.allclose(aggregator.mixing_matrix(), (n / n.sum()).expand(M, M), atol=1e-15)


def test_t2_one_class_a_client_averages_within_the_class():
    classes, n = [0, 1, 0, 2, 1], [10, 20, 30, 40, 60]
    updates = {i: upload(head_with([1.0] * K, i), n[i], n[i] * torch.eye(K)[classes[i]].long(), i) for i in range(M)}
    mixing = server(updates, distribution="counts").mixing_matrix()
    for i, m in itertools.product(range(M), range(M)):
        same = sum(n[k] for k in range(M) if classes[k] == classes[i])
        assert float(mixing[i, m]) == pytest.approx(n[m] / same if classes[i] == classes[m] else 0, abs=1e-15)


def test_t3_mixes_are_convex_and_equal_models_stay():
    aggregator = server(random_updates())
    mixing = aggregator.mixing_matrix()
    assert (mixing >= 0).all() and torch.allclose(mixing.sum(1), torch.ones(M, dtype=torch.float64))
    assert torch.allclose(aggregator.state["mix"].sum(1), torch.ones(K, dtype=torch.float64))
    same = {i: {**random_updates()[i], "weights": random_updates()[0]["weights"]} for i in range(M)}
    assert all(close(start, same[0]["weights"]) for start in starts(server(same, layers="all", distribution="counts")))


def test_t4_the_weighted_sum_of_starts_is_fedavg():
    for layers in ("output", "all"):
        updates = random_updates()
        aggregator = server(updates, layers=layers)
        n = torch.tensor([float(u["num_samples"]) for u in updates.values()], dtype=torch.float64)
        assert close(weighted_mean(starts(aggregator), (n / n.sum()).tolist()), fedavg(updates))
        flow = (n / n.sum())[:, None] * aggregator.mixing_matrix()
        assert torch.allclose(flow, flow.T, atol=1e-15)


def test_t5_eigenvalues_are_real_and_variance_never_grows():
    updates = random_updates(clients=6)
    aggregator = server(updates, layers="all")
    values = torch.linalg.eigvals(aggregator.mixing_matrix())
    assert values.imag.abs().max() < 1e-12
    assert -1e-12 < values.real.min() and values.real.max() < 1 + 1e-12
    assert torch.linalg.matrix_rank(aggregator.mixing_matrix()) <= K
    n = torch.tensor([float(u["num_samples"]) for u in updates.values()], dtype=torch.float64)
    p = (n / n.sum())[:, None]
    before, after = (
        torch.stack([w[HEAD].flatten() for w in ws])
        for ws in ([u["weights"] for u in updates.values()], starts(aggregator))
    )
    variance = [(p * (models - (p * models).sum(0)).square()).sum() for models in (before, after)]
    assert variance[1] < variance[0]


def test_t6_relabelling_clients_and_classes_and_cloning():
    updates = random_updates()
    aggregator = server(updates, distribution="counts")
    order = [3, 0, 4, 1, 2]
    permuted = server({new: updates[old] for new, old in enumerate(order)}, distribution="counts")
    assert all(
        close(permuted.download(new)["weights"], aggregator.download(old)["weights"]) for new, old in enumerate(order)
    )
    classes = [2, 0, 1]
    relabelled = {i: {**u, "class_counts": u["class_counts"][classes]} for i, u in updates.items()}
    other = server(relabelled, distribution="counts")
    assert all(close(a, b) for a, b in zip(starts(other), starts(aggregator), strict=True))
    assert torch.allclose(other.class_models()[HEAD], aggregator.class_models()[HEAD][classes])
    halves = {**updates, 0: {**updates[0], "num_samples": torch.tensor(5)}}
    halves[M] = halves[0]
    cloned = starts(server(halves, distribution="counts"))
    assert all(close(cloned[i], starts(aggregator)[i]) for i in range(M)) and close(cloned[0], cloned[M])


def test_t7_output_is_all_on_the_head_and_fedavg_elsewhere():
    updates = random_updates()
    output, every = (starts(server(updates, layers=layers)) for layers in ("output", "all"))
    for one, other in zip(output, every, strict=True):
        assert torch.equal(one[HEAD], other[HEAD]) and torch.equal(one[BIAS], other[BIAS])
        assert torch.equal(one[BODY], fedavg(updates)[BODY])


def test_t7_one_class_is_fedavg_and_one_client_keeps_its_model():
    one_class = random_updates(classes=1)
    assert all(close(start, fedavg(one_class)) for start in starts(server(one_class, classes=1, layers="all")))
    alone = random_updates(clients=1)
    assert close(starts(server(alone, layers="all"))[0], alone[0]["weights"])


def test_t8_the_estimate_is_a_distribution_that_scale_and_rotation_leave_alone():
    head = head_with([0.5, 2.0, 1.0])
    estimate = row_distribution(head)
    rotation = torch.linalg.qr(torch.randn(D, D, dtype=torch.float64, generator=generator())).Q
    assert torch.allclose(estimate, torch.tensor([0.5, 2.0, 1.0], dtype=torch.float64) / 3.5)
    assert torch.allclose(row_distribution(7 * head), estimate) and torch.allclose(
        row_distribution(head @ rotation), estimate
    )


def wdr(**settings):
    client = make_client(WDR, **settings).double()
    client.distribution.copy_(torch.tensor([0.7, 0.3, 0.0]))
    return client


def test_t8_the_regulariser_s_gradient():
    client = wdr()
    distance = client.distance()
    distance.backward()
    rows = client.net.classifier.weight
    s = rows.detach().norm(dim=1)
    u = (s / s.sum() - client.distribution) / distance.detach()
    by_hand = ((u - (u * s / s.sum()).sum()) / s.sum() / s)[:, None] * rows.detach()
    assert torch.allclose(rows.grad, by_hand, atol=1e-14)
    assert abs(float((rows.detach() * rows.grad).sum())) < 1e-15
    assert all(p.grad is None for name, p in client.named_parameters() if name != "net.classifier.weight")
    assert (rows.detach() - 0.1 * rows.grad).norm() >= rows.detach().norm()
    assert 0 <= float(distance) < 2**0.5


def test_t8_the_regulariser_doesn_t_see_scale_or_a_joint_relabelling():
    client, distance = wdr(), float(wdr().distance())
    with torch.no_grad():
        client.net.classifier.weight.mul_(3)
    assert float(client.distance()) == pytest.approx(distance, abs=1e-15)
    with torch.no_grad():
        client.net.classifier.weight.copy_(client.net.classifier.weight[[2, 0, 1]])
        client.distribution.copy_(client.distribution[[2, 0, 1]])
    assert float(client.distance()) == pytest.approx(distance, abs=1e-15)


def test_t9_by_hand():
    heads = {0: head_with([1.0, 0.0], 0), 1: head_with([0.5, 0.5], 1)}
    updates = {0: upload(heads[0], 1, [1, 0], 0), 1: upload(heads[1], 3, [1, 1], 1)}
    for distribution in ("norms", "counts"):
        aggregator = server(updates, classes=2, distribution=distribution)
        first, second = aggregator.class_models()[HEAD]
        assert torch.allclose(first, 0.4 * heads[0] + 0.6 * heads[1], rtol=0, atol=1e-16)
        assert torch.allclose(second, heads[1], rtol=0, atol=1e-16)
        one, two = (start[HEAD] for start in starts(aggregator))
        by_hand = torch.tensor([[0.4, 0.6], [0.2, 0.8]], dtype=torch.float64)
        assert torch.allclose(aggregator.mixing_matrix(), by_hand, rtol=0, atol=2.3e-16)
        assert torch.allclose(one, 0.4 * heads[0] + 0.6 * heads[1], rtol=0, atol=2.3e-16)
        assert torch.allclose(two, 0.2 * heads[0] + 0.8 * heads[1], rtol=0, atol=2.3e-16)


def test_the_regulariser_moves_the_rows_towards_the_distribution():
    spies = {}
    for weight in (0.0, 5.0):
        spies[weight] = Spy()
        fit(make_client(WDR, wdr_lambda=weight), blobs(40, 40, by_class=True), callbacks=[spies[weight]])
    counts = blobs(40, 40, by_class=True)
    counts.setup()
    p = counts.counts / counts.counts.sum(1, keepdim=True)
    gaps = {
        weight: max(float((row_distribution(u["weights"][HEAD]) - p[i]).norm()) for i, u in spy.updates[-1].items())
        for weight, spy in spies.items()
    }
    assert gaps[5.0] < 0.15 < 0.4 < gaps[0.0]


@pytest.mark.exhaustive
def test_switched_off_it_is_fedavg_bit_for_bit():
    average = {"aggregator": WeightedAverage()}
    assert equal(fit(make_client(WDR, wdr_lambda=0), **average).weights, fit(make_client(FedAvg)).weights)
    assert not equal(fit(make_client(WDR), aggregator=WeightedAverage()).weights, fit(make_client(FedAvg)).weights)
    assert not equal(fit(make_client(WDR, wdr_scale=1.0)).weights, fit(make_client(WDR)).weights)


def test_the_order_of_uploads_changes_nothing(tmp_path):
    runs = [fit(make_client(WDR), engine=engine) for engine in ("sequential", Shuffled)]
    assert equal(*(run.federation.federation_state() for run in runs))


@pytest.mark.parametrize("settings", [{"layers": "all"}, {"distribution": "counts"}, {}])
@pytest.mark.by_default("settings0")
def test_partial_participation_resumes_bit_for_bit(tmp_path, settings):
    def run(root, rounds, ckpt_path=None):
        return fit(
            make_client(WDR),
            root=root,
            aggregator=CwFedAvg(**settings),
            max_rounds=rounds,
            clients_per_round=0.3,
            ckpt_path=ckpt_path,
        )

    whole = run(tmp_path / "whole", 6)
    half = run(tmp_path / "half", 3)
    assert same_end(whole, run(tmp_path / "half", 6, half.last))
    assert load(whole.last)["federation"]["aggregator"]["distributions"].keys() <= {0, 1, 2, 3}


def test_a_class_that_nobody_holds_keeps_its_model_and_enters_no_mix():
    updates = {
        0: upload(head_with([1.0] * K, 0), 10, [5, 5, 0], 0),
        1: upload(head_with([1.0] * K, 1), 20, [20, 0, 0], 1),
    }
    aggregator = server(updates, distribution="counts")
    assert torch.equal(aggregator.class_models()[HEAD][2], torch.ones(K, D, dtype=torch.float64))
    assert all(torch.isfinite(start[HEAD]).all() for start in starts(aggregator))
    _, mixes = by_the_paper(updates, torch.tensor([[0.5, 0.5, 0], [1, 0, 0]], dtype=torch.float64)[:, :2])
    assert all(torch.allclose(a[HEAD], b[HEAD]) for a, b in zip(starts(aggregator), mixes, strict=True))


def test_a_class_model_that_nobody_fed_this_round_is_kept():
    first, second = random_updates(2), random_updates(2, seed=7)
    first[0]["class_counts"], first[1]["class_counts"] = torch.tensor([5, 5, 0]), torch.tensor([0, 5, 5])
    second[0]["class_counts"] = first[0]["class_counts"]
    aggregator = server(first, distribution="counts")
    kept = aggregator.class_models()[HEAD][2].clone()
    aggregator.aggregate({0: second[0]}, round=1)
    assert torch.equal(aggregator.class_models()[HEAD][2], kept)
    half = 0.5 * aggregator.class_models()[HEAD][1] + 0.5 * kept
    assert torch.allclose(aggregator.download(1)["weights"][HEAD], half)


def test_clients_that_never_took_part_are_mixed_by_the_initial_distribution():
    updates = random_updates()
    few = server({client: updates[client] for client in (1, 3)}, clients=M)
    many = server({client: updates[client] for client in (1, 2, 3, 4)}, clients=M)
    for aggregator in (few, many):  # one computes rows when they are asked for, one all at once
        for client in range(M):
            by_row = aggregator._mixed(aggregator.distributions()[[client]])[HEAD][0]
            assert torch.allclose(aggregator.download(client)["weights"][HEAD], by_row, rtol=0, atol=1e-14)
        assert torch.equal(aggregator.distributions()[0], aggregator.state["prior"])


def test_a_newcomer_receives_what_a_client_with_its_update_does():
    updates = random_updates()
    ours = server(updates, clients=M + 1)
    for twin, update in [*updates.items(), (M, None)]:
        expected = ours.download(twin)["weights"]
        for name, tensor in ours.welcome(99, update)["weights"].items():
            torch.testing.assert_close(tensor, expected[name])


def test_with_fewer_classes_than_uploads_the_class_models_alone_are_kept(monkeypatch):
    aggregator = server(random_updates(), layers="all")
    assert len(aggregator.state["sources"]) == K
    few = server(random_updates(clients=2), layers="all")
    assert len(few.state["sources"]) == 2
    together = starts(aggregator)
    monkeypatch.setattr("pfl_lightning.methods.cwfedavg.MOST", 1)
    aggregator.state["mix"] = aggregator.state["mix"].clone()
    assert all(close(one, other) for one, other in zip(starts(aggregator), together, strict=True))


def test_nobody_takes_part():
    aggregator = server(random_updates())
    before = starts(aggregator)
    aggregator.aggregate({}, round=1)
    assert equal(starts(aggregator), before)


def test_before_the_first_round_everybody_has_the_initial_model():
    aggregator = server({}, clients=3)
    # a distribution adds up to 1 to rounding
    assert all(torch.allclose(start[HEAD], aggregator.state["weights"][HEAD]) for start in starts(aggregator))


def test_an_all_zero_head_shows_the_uniform_distribution_and_has_no_gradient():
    head = torch.zeros(K, D, requires_grad=True)
    estimate = row_distribution(head)
    assert estimate.tolist() == pytest.approx([1 / 3] * 3)
    (estimate - torch.tensor([1.0, 0.0, 0.0])).norm().backward()
    assert torch.equal(head.grad, torch.zeros(K, D))


def test_a_zero_row_and_a_met_distribution_have_no_gradient():
    client = wdr()
    with torch.no_grad():
        client.net.classifier.weight[1] = 0
    client.distance().backward()
    assert torch.equal(client.net.classifier.weight.grad[1], torch.zeros(client.net.classifier.in_features).double())
    client.zero_grad()
    client.distribution.copy_(row_distribution(client.net.classifier.weight).detach())
    client.distance().backward()
    assert torch.isfinite(client.net.classifier.weight.grad).all()


def test_one_client_and_a_client_of_one_class_run():
    assert fit(make_client(WDR), blobs(40)).rows[-1]["clients"] == 1
    assert fit(make_client(WDR), blobs(40, 40, by_class=True)).rows[-1]["clients_diverged"] == 0


def test_other_clients_under_it_and_it_under_other_clients():
    proximal = fit(make_client(FedProx, mu=0.1), aggregator=CwFedAvg())
    assert not equal(proximal.weights, fit(make_client(FedProx, mu=0.1)).weights)
    split = fit(make_client(FedPer), aggregator=CwFedAvg(layers="all", distribution="counts"))
    assert not equal(split.federation.clients[0].personal, split.federation.clients[1].personal)
    bodies = [split.federation.aggregator.download(client)["weights"] for client in range(2)]
    assert not equal(*bodies)


def test_counts_travel_only_where_they_are_asked_for():
    spies = Spy(), Spy()
    fit(make_client(FedAvg), aggregator=CwFedAvg(distribution="counts"), callbacks=[spies[0]])
    fit(make_client(FedAvg), aggregator=CwFedAvg(), callbacks=[spies[1]])
    assert all("class_counts" in update for update in spies[0].updates[0].values())
    assert not any("class_counts" in update for update in spies[1].updates[0].values())


@pytest.mark.parametrize(
    ("method", "settings", "sentence"),
    [
        (FedPer, {}, "'net.classifier' has no shared weights"),
        (FedPer, {"layers": "all"}, "take distribution=counts"),
        (
            FedAvg,
            {"layers": ["net.body"]},
            "has no shared weights; choose from net.features.0, net.classifier",
        ),
        (FedAvg, {"output_layer": "net.head"}, "output_layer='net.head' is no linear layer with 3 outputs"),
        (Local, {}, "CwFedAvg needs num_samples and weights, which Local does not send"),
    ],
)
def test_what_doesn_t_fit_is_refused(method, settings, sentence):
    with pytest.raises(MisconfigurationException, match=re.escape(sentence)):
        fit(make_client(method), aggregator=CwFedAvg(**settings))


def test_a_classifier_without_one_output_layer_is_refused_with_the_way_to_name_it():
    def net(shape, classes):
        return Net(nn.Identity(), nn.Sequential(nn.Linear(FEATURES, classes), nn.Linear(classes, classes)))

    with pytest.raises(MisconfigurationException, match=re.escape("name it by output_layer, such as")):
        make_client(WDR, net=net)
    assert make_client(WDR, net=net, output_layer="net.classifier.1").output_layer == "net.classifier.1"
    assert find_output_layer(make_client(net=plain), 3) == "net.classifier"


def test_a_lambda_that_jumps_over_its_aim_is_told_with_the_measured_distance():
    with pytest.warns(UserWarning, match=r"client \d, round 1: .* grew from 0\.\d\d to \d\.\d\d"):
        fit(make_client(WDR, wdr_lambda=1000.0), max_rounds=1)


@pytest.mark.parametrize("name", ["wdr_lambda", "wdr_scale"])
def test_negative_weights_are_refused(name):
    with pytest.raises(MisconfigurationException, match=f"model.{name}=-1"):
        make_client(WDR, **{name: -1})
