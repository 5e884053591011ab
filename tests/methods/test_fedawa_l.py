"""FedAWA-L against FedAWA: one group, groups apart, and what counts as a group."""

from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import nn

from federations import FEATURES, Shuffled, equal, fit, load, make_client, noisy, same_end
from pfl_lightning import Server
from pfl_lightning.messages import detached, weighted_mean
from pfl_lightning.methods import WDR, FedAvg, FedPer, FedProx
from pfl_lightning.methods.fedawa import FedAWA
from pfl_lightning.methods.fedawa_l import FedAWAL
from pfl_lightning.nets import Net
from pfl_lightning.nets.resnet import CifarResNet

K = 5
LINEAR, NORM, HEAD = "net.features.0", "net.features.1", "net.classifier"
GROUPS = ["module", "tensor", "block"]


def one_layer(shape, classes):
    return Net(nn.Identity(), nn.Linear(FEATURES, classes))


def set_up(aggregator, module):
    weights = {name: tensor.detach().clone() for name, tensor in module.state_dict().items() if module.is_shared(name)}
    aggregator.setup(Server(K, weights, module, None, seed=0))
    return aggregator


def server(net=noisy, cls=FedAWAL, method=FedAvg, **settings):
    """An aggregator before the first round; biases of normalisation are 0, as nets begin."""
    return set_up(cls(**settings), make_client(method, net=net).double())


def random_updates(aggregator, seed=0):
    """Uploads of which each client's moves each entry by another factor."""
    noise = torch.Generator().manual_seed(seed)
    updates = {}
    for client in range(K):
        weights = {}
        for name, tensor in aggregator.state["weights"].items():
            step = torch.randn(tensor.shape, generator=noise, dtype=torch.float64) * 0.3
            step = step * torch.rand((), generator=noise, dtype=torch.float64)
            weights[name] = tensor + step if tensor.is_floating_point() else tensor + client
        updates[client] = {"weights": weights, "num_samples": torch.tensor(10 + 7 * client)}
    return updates


def shares_of(aggregator, group):
    return list(aggregator.state["group_shares"][group].values())


def groups_of(net, group, **settings):
    return server(net, group=group, **settings).groups


class OneGroup(FedAWAL):
    """All of the net as its one group."""

    takes_gamma = True
    grouping = FedAWA.grouping


@pytest.mark.parametrize("settings", [{}, {"preset": "official", "server_steps": 3, "gamma": 0.9}])
@pytest.mark.parametrize(
    ("layer_wise", "net"),
    [(OneGroup, noisy), (partial(FedAWAL, "module"), one_layer), (partial(FedAWAL, "block"), one_layer)],
    ids=["rule", "module", "block"],
)
@pytest.mark.by_default("module-settings0")
def test_with_one_group_it_is_fedawa_bit_for_bit(layer_wise, net, settings):
    runs = [fit(make_client(net=net), aggregator=aggregator(**settings)) for aggregator in (FedAWA, layer_wise)]
    assert equal(*(run.weights for run in runs))
    states = [run.federation.aggregator.state for run in runs]
    assert all(equal(states[0][name], states[1][name]) for name in states[0])
    assert [row["server/sim"] for row in runs[0].rows] == [row["server/sim"] for row in runs[1].rows]


@pytest.mark.parametrize("group", GROUPS)
def test_groups_are_fitted_as_if_each_were_alone(group):
    together = server(group=group, server_steps=20)
    updates = random_updates(together)
    parts = {
        name: [entry for entry in names if entry in together.parameters] for name, names in together.groups.items()
    }
    start = detached(together.global_model())
    logs = together.aggregate(updates, round=0)
    sims = []
    for place, names in enumerate(parts.values()):
        alone = FedAWA(server_steps=20)
        alone.setup(Server(K, {name: start[name] for name in names}, make_client(net=noisy), None, seed=0))
        own = {
            client: {**update, "weights": {name: update["weights"][name] for name in names}}
            for client, update in updates.items()
        }
        sims.append(alone.aggregate(own, round=0)["sim"])
        for client, logit in alone.state["logits"].items():
            assert float(together.state["logits"][client][place]) == pytest.approx(float(logit), abs=1e-12)
        for name in names:
            assert torch.allclose(together.global_model()[name], alone.global_model()[name], rtol=0, atol=1e-12)
    assert logs["sim"] == pytest.approx(sum(sims), abs=1e-12)
    assert len({tuple(shares_of(together, name)) for name in parts}) == len(parts) > 1


def test_resnet20_has_43_modules_65_tensors_and_22_blocks():
    client = FedAvg(CifarResNet, (3, 32, 32), 10)
    groups = {group: set_up(FedAWAL(group), client).groups for group in GROUPS}
    assert [len(groups[group]) for group in GROUPS] == [43, 65, 22]
    first = [f"net.features.{name}.weight" for name in ("conv1", "bn1")]
    assert [name for name in groups["block"]["net.features.conv1"] if name.endswith("weight")] == first
    for each in groups.values():
        assert [name for names in each.values() for name in names] == list(client.state_dict())


def test_what_belongs_to_a_group():
    buffers = [f"{NORM}.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")]
    linear, norm, head = ([f"{layer}.weight", f"{layer}.bias"] for layer in (LINEAR, NORM, HEAD))
    assert groups_of(noisy, "module") == {LINEAR: linear, NORM: norm + buffers, HEAD: head}
    assert groups_of(noisy, "block") == {LINEAR: linear + norm + buffers, HEAD: head}
    single = {name: [name] for name in (*linear, *norm, *head)}
    assert groups_of(noisy, "tensor") == single | {norm[1]: [norm[1], *buffers]}
    assert groups_of(noisy, "module", method=FedPer).keys() == {LINEAR, NORM}


def test_statistics_without_parameters_of_their_own_go_with_the_layer_before_them():
    def net(shape, classes):
        body = nn.Sequential(
            nn.BatchNorm1d(FEATURES, affine=False),
            nn.Linear(FEATURES, 4),
            nn.BatchNorm1d(4, affine=False),
            nn.LayerNorm(4),
        )
        return Net(body, nn.Linear(4, classes))

    by_module, by_tensor, by_block = (groups_of(net, group) for group in GROUPS)
    assert "net.features.2.running_mean" in by_module["net.features.1"]
    assert "net.features.0.running_mean" in by_module["net.features.1"], "nothing is before it"
    assert "net.features.0.running_mean" in by_tensor["net.features.1.weight"]
    assert list(by_module) == ["net.features.1", "net.features.3", HEAD]
    assert list(by_block) == ["net.features.1", HEAD] and "net.features.3.bias" in by_block["net.features.1"]


def test_a_normalisation_before_the_first_layer_is_in_its_block():
    def net(shape, classes):
        return Net(nn.LayerNorm(FEATURES), nn.Linear(FEATURES, classes))

    assert list(groups_of(net, "block")) == [HEAD]


def test_a_net_of_vectors_alone_is_one_block():
    def net(shape, classes):
        return Net(nn.LayerNorm(FEATURES), nn.BatchNorm1d(FEATURES))

    assert [len(groups_of(net, group)) for group in GROUPS] == [2, 4, 1]


def test_entries_and_buffers_are_averaged_by_their_group_s_weights_and_counters_take_the_maximum():
    aggregator = server(server_steps=50, optimizer=partial(torch.optim.Adam, lr=0.05))
    updates = random_updates(aggregator)
    aggregator.aggregate(updates, round=0)
    uploads = [update["weights"] for update in updates.values()]
    for group, names in aggregator.groups.items():
        mean = weighted_mean(uploads, shares_of(aggregator, group))
        assert all(torch.equal(aggregator.global_model()[name], mean[name]) for name in names)
    other = weighted_mean(uploads, shares_of(aggregator, HEAD))[f"{NORM}.running_mean"]
    assert not torch.allclose(aggregator.global_model()[f"{NORM}.running_mean"], other, rtol=0, atol=1e-3)
    assert aggregator.global_model()[f"{NORM}.num_batches_tracked"] == K - 1


def test_shares_are_the_means_over_groups_weighted_by_parameters():
    aggregator = server(server_steps=50)
    aggregator.aggregate(random_updates(aggregator), round=0)
    sizes = {LINEAR: 35, NORM: 10, HEAD: 18}
    for client, share in aggregator.state["shares"].items():
        by_hand = sum(sizes[group] * aggregator.state["group_shares"][group][client] for group in sizes) / 63
        assert share == pytest.approx(by_hand, abs=1e-15)
    assert sum(aggregator.state["shares"].values()) == pytest.approx(1)


def test_a_group_that_nobody_moved_keeps_its_weights():
    aggregator = server()
    updates = random_updates(aggregator)
    for update in updates.values():
        update["weights"] |= {
            f"{LINEAR}.{name}": aggregator.state["weights"][f"{LINEAR}.{name}"] for name in ("weight", "bias")
        }
    logs = aggregator.aggregate(updates, round=0)
    start = torch.tensor([float(update["num_samples"]) for update in updates.values()], dtype=torch.float64).log()
    moved = torch.stack(list(aggregator.state["logits"].values())) - start[:, None]
    assert (moved[:, 0].abs() < 1e-10).all() and (moved[:, 1:].abs() > 0.9e-3).all()
    assert all(map(torch.isfinite, map(torch.tensor, logs.values())))


def test_biases_of_zero_have_the_distance_1_and_no_gradient_of_it():
    aggregator = server(group="tensor", reg_term="aggregate")
    place = list(aggregator.groups).index(f"{NORM}.bias")
    assert not aggregator.state["weights"][f"{NORM}.bias"].any()
    logits = torch.zeros(len(aggregator.groups), K, dtype=torch.float64, requires_grad=True)
    _, reg = aggregator.objective(logits.softmax(1), aggregator.grams(random_updates(aggregator)))
    slopes = torch.autograd.grad(reg.sum(), logits)[0]
    assert float(reg[place].detach()) == 1 and not slopes[place].any() and slopes[0].any()


def test_one_group_s_takeover_is_told():
    aggregator = server(server_steps=300, optimizer=partial(torch.optim.Adam, lr=0.1))
    with pytest.warns(UserWarning, match=r"round 1: one client has \d\.\d\d of the weight"):
        logs = aggregator.aggregate(random_updates(aggregator), round=0)
    assert logs["max_weight"] > 0.9


def test_absent_clients_keep_their_logits():
    aggregator = server()
    updates = random_updates(aggregator)
    aggregator.aggregate(updates, round=0)
    first = detached(aggregator.state["logits"])
    aggregator.aggregate({client: updates[client] for client in (1, 4)}, round=1)
    second = aggregator.state["logits"]
    assert [client for client in range(K) if not equal(first[client], second[client])] == [1, 4]
    assert all(list(shares) == [1, 4] for shares in aggregator.state["group_shares"].values())


def test_one_participant_is_the_model():
    aggregator = server()
    alone = random_updates(aggregator)[2]
    logs = aggregator.aggregate({2: alone}, round=0)
    assert equal(aggregator.global_model(), alone["weights"]) and logs["max_weight"] == 1


def test_layers_change_the_model():
    runs = [fit(make_client(net=noisy), aggregator=each) for each in (FedAWA(), FedAWAL(), FedAWAL("tensor"))]
    assert not any(equal(one.weights, other.weights) for one, other in pairwise(runs))
    assert list(runs[1].federation.aggregator.global_model()) == list(runs[0].federation.aggregator.global_model())


@pytest.mark.parametrize("method", [partial(FedProx, mu=0.1), partial(WDR, wdr_lambda=1.0), FedPer])
@pytest.mark.by_default("FedPer")
def test_it_runs_over_other_clients(method):
    run = fit(make_client(method, net=noisy), aggregator=FedAWAL())
    assert not equal(run.weights, fit(make_client(method, net=noisy), aggregator=FedAWA()).weights)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.by_default("tensor")
def test_the_order_of_uploads_changes_nothing(group):
    runs = [fit(make_client(net=noisy), aggregator=FedAWAL(group), engine=each) for each in ("sequential", Shuffled)]
    assert same_end(*runs)


@pytest.mark.exhaustive
def test_partial_participation_resumes_bit_for_bit(tmp_path):
    def run(root, rounds, ckpt_path=None):
        client = make_client(net=noisy)
        return fit(client, None, root, FedAWAL(), ckpt_path, max_rounds=rounds, clients_per_round=0.5)

    whole = run(tmp_path / "whole", 6)
    half = run(tmp_path / "half", 3)
    assert same_end(whole, run(tmp_path / "half", 6, half.last))
    state = load(whole.last)["federation"]["aggregator"]
    assert all(logits.shape == (3,) for logits in state["logits"].values())
    assert list(state["group_shares"]) == [LINEAR, NORM, HEAD]
