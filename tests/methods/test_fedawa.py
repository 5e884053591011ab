"""Identities of FedAWA's objective, in float64 against its explicit form, its edge cases, and FedAWA-L's groups."""

import re
import warnings
from functools import partial
from itertools import pairwise

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, Adam

from federations import FEATURES, Shuffled, Spy, equal, fit, load, make_client, noisy, plain, same_end
from pfl_lightning import Server, WeightedAverage, messages
from pfl_lightning.aggregators import client_weights
from pfl_lightning.messages import detached, weighted_mean
from pfl_lightning.methods import WDR, FedAvg, FedPer, FedProx, Local, fedawa
from pfl_lightning.methods.fedawa import FedAWA
from pfl_lightning.methods.feddisco import disco_shares
from pfl_lightning.nets import Net
from pfl_lightning.nets.resnet import CifarResNet

K, RATE = 5, 0.001
OBJECTIVES = [(term, distance) for term in ("aggregate", "per_client") for distance in ("cosine", "euclidean")]
LINEAR, NORM, HEAD = "net.features.0", "net.features.1", "net.classifier"
GROUPS = ["module", "tensor", "block"]
MEAN, COUNTER = "net.features.1.running_mean", "net.features.1.num_batches_tracked"


def server(cls=FedAWA, net=noisy, dtype=torch.float64, method=FedAvg, clients=K, **settings):
    """An aggregator before the first round, of a net with BatchNorm; every parameter is random."""
    aggregator, module = cls(**settings), make_client(method, net=net)
    noise = torch.Generator().manual_seed(1)
    for parameter in module.parameters():
        parameter.data += 0.3 * torch.randn(parameter.shape, generator=noise)
    weights = {name: t.detach().clone() for name, t in module.to(dtype).state_dict().items() if module.is_shared(name)}
    aggregator.setup(Server(clients, weights, module, None, seed=0))
    return aggregator


def random_updates(aggregator, clients=K, scale=0.1, seed=0):
    """Uploads at random distances from the global model, of clients with other numbers of samples and classes."""
    noise = torch.Generator().manual_seed(seed)
    updates = {}
    for client in range(clients):
        weights = {}
        for name, tensor in aggregator.state["weights"].items():
            step = torch.randn(tensor.shape, generator=noise, dtype=torch.float64) * scale * (1 + client)
            weights[name] = (tensor + step).to(tensor.dtype) if tensor.is_floating_point() else tensor + client
        counts = torch.tensor([10 + 7 * client, 12, 3 * client])
        updates[client] = {"weights": weights, "num_samples": counts.sum(), "class_counts": counts}
    return updates


def flat(aggregator, weights):
    return torch.cat([weights[name].flatten().double() for name in weights if name in aggregator.parameters])


def explicit(aggregator, updates, logits):
    """The objective as the paper writes it, on the vectors themselves."""
    theta_g = flat(aggregator, aggregator.state["weights"])
    theta = torch.stack([flat(aggregator, update["weights"]) for update in updates.values()])
    tau, weights = theta - theta_g, logits.softmax(0)
    sim = (weights * (tau - weights @ tau).norm(dim=1)).sum()

    def distance(models):
        if aggregator.reg_distance == "euclidean":
            return (models - theta_g).square().mean(1)
        return 1 - F.cosine_similarity(models, theta_g[None])

    reg = (weights * distance(theta)).sum()
    return sim, distance((weights @ theta)[None])[0] if aggregator.reg_term == "aggregate" else reg


def loss(aggregator, grams, logits):
    return torch.cat(aggregator.objective(logits[None].softmax(1), grams)).sum()


def gradient(aggregator, grams, logits):
    logits = logits.clone().requires_grad_()
    return torch.autograd.grad(loss(aggregator, grams, logits), logits)[0]


def some_logits(clients=K, seed=4):
    return torch.randn(clients, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def group_shares(aggregator, group):
    return list(aggregator.state["group_shares"][group].values())


def logits_of(aggregator):
    return torch.tensor([float(logit) for logit in aggregator.state["logits"].values()], dtype=torch.float64)


def shares_of(aggregator):
    return torch.tensor(list(aggregator.state["shares"].values()), dtype=torch.float64)


def close(one, other, tolerance=1e-12):
    return all(torch.allclose(one[name], other[name], rtol=0, atol=tolerance) for name in one)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("term", "distance"), OBJECTIVES)
def test_the_gram_form_equals_the_explicit_one_in_value_and_gradient(term, distance, dtype):
    aggregator = server(dtype=dtype, reg_term=term, reg_distance=distance)
    updates, logits = random_updates(aggregator), some_logits().requires_grad_()
    grams = aggregator.grams(updates)
    sim, reg = aggregator.objective(logits[None].softmax(1), grams)
    for mine, reference in zip((sim, reg), explicit(aggregator, updates, logits), strict=True):
        assert torch.allclose(mine, reference, rtol=0, atol=1e-10)
        one, other = (torch.autograd.grad(term.sum(), logits, retain_graph=True)[0] for term in (mine, reference))
        assert torch.allclose(one, other, rtol=0, atol=1e-10) and other.abs().max() > 1e-6


def test_small_updates_of_float32_models_don_t_cancel():
    aggregator = server(dtype=torch.float32)
    updates = random_updates(aggregator, scale=1e-5)
    sim, _ = aggregator.objective(some_logits()[None].softmax(1), aggregator.grams(updates))
    assert float(sim) == pytest.approx(float(explicit(aggregator, updates, some_logits())[0]), rel=1e-10)


def test_gram_matrices_are_of_parameters_alone_and_don_t_depend_on_how_they_are_cut(monkeypatch):
    aggregator = server()
    updates = random_updates(aggregator)
    whole = aggregator.grams(updates)
    theta = flat(aggregator, aggregator.state["weights"])
    rows = torch.stack([*(flat(aggregator, u["weights"]) - theta for u in updates.values()), theta])
    assert torch.allclose(whole[0], rows @ rows.T, rtol=0, atol=1e-12)
    monkeypatch.setattr(messages, "COLUMNS", 7)
    assert torch.allclose(aggregator.grams(updates), whole, rtol=0, atol=1e-12)
    updates[2]["weights"][MEAN] += 1
    assert torch.allclose(aggregator.grams(updates), whole, rtol=0, atol=1e-12)


def test_a_parameter_without_dimensions_counts():
    def net(shape, classes):
        made = plain(shape, classes)
        made.temperature = nn.Parameter(torch.tensor(2.0))
        return made

    aggregator = server(net=net)
    updates = random_updates(aggregator)
    parts = aggregator.objective(some_logits()[None].softmax(1), aggregator.grams(updates))
    assert "net.temperature" in aggregator.parameters
    assert torch.allclose(torch.cat(parts), torch.stack(explicit(aggregator, updates, some_logits())), atol=1e-12)


def test_the_layout_of_uploads_in_memory_changes_nothing():
    def net(shape, classes):
        return Net(
            nn.Sequential(nn.Unflatten(1, (2, 3, 1)), nn.Conv2d(2, 4, (3, 1)), nn.Flatten()), nn.Linear(4, classes)
        )

    aggregator = server(net=net)
    updates = random_updates(aggregator)
    grams, kernel = aggregator.grams(updates), "net.features.1.weight"
    for weights in (aggregator.state["weights"], *(update["weights"] for update in updates.values())):
        weights[kernel] = weights[kernel].to(memory_format=torch.channels_last)
        assert not weights[kernel].is_contiguous()
    assert torch.equal(aggregator.grams(updates), grams)


@pytest.mark.parametrize(("term", "distance"), OBJECTIVES)
def test_the_gradient_is_that_of_finite_differences_through_the_mean_vector_too(term, distance):
    aggregator = server(reg_term=term, reg_distance=distance)
    updates, logits, step = random_updates(aggregator), some_logits(), 1e-6
    mine = gradient(aggregator, aggregator.grams(updates), logits)
    for k, unit in enumerate(torch.eye(K, dtype=torch.float64)):
        up, down = (sum(explicit(aggregator, updates, logits + sign * step * unit)) for sign in (1, -1))
        assert float(mine[k]) == pytest.approx(float(up - down) / (2 * step), abs=1e-8)


@pytest.mark.parametrize(("term", "distance"), OBJECTIVES)
def test_gradients_sum_to_0_and_a_shift_of_all_logits_changes_nothing(term, distance):
    aggregator = server(reg_term=term, reg_distance=distance)
    grams = aggregator.grams(random_updates(aggregator))
    slopes = gradient(aggregator, grams, some_logits())
    assert abs(float(slopes.sum())) < 1e-14 < 1e-4 < float(slopes.abs().max())
    values = [float(loss(aggregator, grams, some_logits() + shift)) for shift in (0, 3.7)]
    assert values[0] == pytest.approx(values[1], abs=1e-13)


def test_the_first_term_is_0_where_one_client_has_all_and_grows_with_the_vectors():
    aggregator = server()
    grams = aggregator.grams(random_updates(aggregator))
    for alone in torch.eye(K, dtype=torch.float64):
        assert float(aggregator.objective(alone[None], grams)[0]) < 1e-12
    weights = some_logits()[None].softmax(1)
    larger = grams.clone()
    larger[:, :-1] *= 3
    larger[:, :, :-1] *= 3
    one, three = (float(aggregator.objective(weights, each)[0]) for each in (grams, larger))
    assert three == pytest.approx(3 * one, rel=1e-12) and one > 0.1


@pytest.mark.parametrize("steps", [1, 30])
def test_a_round_by_hand(steps):
    aggregator = server(server_steps=steps)
    updates = random_updates(aggregator)
    logits = torch.tensor([float(u["num_samples"]) for u in updates.values()], dtype=torch.float64).log()
    logits.requires_grad_()
    optimizer = Adam([logits], lr=0.001, betas=(0.5, 0.999))
    for _ in range(steps):
        optimizer.zero_grad()
        sum(explicit(aggregator, updates, logits)).backward()
        optimizer.step()
    weights = logits.detach().softmax(0)
    terms = explicit(aggregator, updates, logits.detach())
    logs = aggregator.aggregate(updates, round=0)
    assert torch.allclose(shares_of(aggregator), weights, rtol=0, atol=1e-12)
    assert close(aggregator.global_model(), weighted_mean([u["weights"] for u in updates.values()], weights.tolist()))
    assert [logs["sim"], logs["reg"]] == pytest.approx([float(term) for term in terms], abs=1e-12)
    assert logs["max_weight"] == pytest.approx(float(weights.max()), abs=1e-12)


def test_each_round_s_new_optimizer_moves_every_logit_by_its_rate():
    aggregator = server(init="uniform")
    previous = torch.zeros(K, dtype=torch.float64)
    for number in range(3):
        aggregator.aggregate(random_updates(aggregator, seed=number), round=number)
        moved, previous = (logits_of(aggregator) - previous).abs(), logits_of(aggregator)
        assert torch.allclose(moved, torch.full_like(moved, RATE), rtol=1e-4, atol=0)


def test_the_optimizer_is_the_one_that_is_given():
    aggregator = server(init="uniform", optimizer=partial(SGD, lr=0.5))
    updates = random_updates(aggregator)
    slopes = gradient(aggregator, aggregator.grams(updates), torch.zeros(K, dtype=torch.float64))
    aggregator.aggregate(updates, round=0)
    assert torch.allclose(logits_of(aggregator), -0.5 * slopes, rtol=0, atol=1e-15)


def test_weights_go_from_sizes_towards_a_smaller_objective():
    few, many = (server(server_steps=steps) for steps in (0, 200))
    logs = [aggregator.aggregate(random_updates(aggregator), round=0) for aggregator in (few, many)]
    assert logs[1]["sim"] + logs[1]["reg"] < 0.95 * (logs[0]["sim"] + logs[0]["reg"])
    assert not close(few.global_model(), many.global_model(), 1e-3)


@pytest.mark.exhaustive
def test_a_long_optimisation_ends_with_one_client_and_says_so():
    aggregator = server(server_steps=400, optimizer=partial(Adam, lr=0.1))
    with pytest.warns(UserWarning, match=r"round 8: one client has \d\.\d\d of the weight"):
        logs = aggregator.aggregate(random_updates(aggregator), round=7)
    assert logs["max_weight"] > 0.99 and logs["sim"] < 0.05


def test_relabelling_clients_relabels_their_weights():
    one, other = server(), server()
    updates, order = random_updates(one), [3, 0, 4, 1, 2]
    for number in range(3):
        one.aggregate(updates, number)
        other.aggregate({new: updates[old] for new, old in enumerate(order)}, number)
    assert torch.allclose(logits_of(other), logits_of(one)[order], rtol=0, atol=1e-12)
    assert close(one.global_model(), other.global_model())


def test_without_steps_it_is_the_average_by_samples():
    aggregator, average = server(server_steps=0), server(WeightedAverage)
    updates = random_updates(aggregator)
    for each in (aggregator, average):
        each.aggregate(updates, round=0)
    assert close(aggregator.global_model(), average.global_model(), 1e-15)
    runs = [fit(make_client(net=noisy), aggregator=each) for each in (FedAWA(server_steps=0), WeightedAverage())]
    assert close(runs[0].weights, runs[1].weights, 1e-6)
    assert not close(fit(make_client(net=noisy), aggregator=FedAWA()).weights, runs[1].weights, 1e-6)


@pytest.mark.parametrize("init", ["log_size", "raw_size", "uniform", "disco"])
def test_where_weights_begin(init):
    aggregator = server(init=init, server_steps=0)
    updates = random_updates(aggregator)
    aggregator.aggregate(updates, round=0)
    p = torch.tensor(list(client_weights(updates, "samples").values()), dtype=torch.float64)
    disco = torch.tensor(list(disco_shares(updates, 0.5, 0.1, "kl").values()), dtype=torch.float64)
    expected = {"log_size": p, "raw_size": p.softmax(0), "uniform": torch.full_like(p, 1 / K), "disco": disco}
    assert torch.allclose(shares_of(aggregator), expected[init], rtol=0, atol=1e-15)
    assert ("class_counts" in aggregator.needs) == (init == "disco")


def test_a_client_that_feddisco_leaves_out_has_a_small_weight_and_a_finite_logit():
    aggregator = server(init="disco")
    updates = random_updates(aggregator)
    updates[1]["num_samples"], updates[1]["class_counts"] = torch.tensor(2), torch.tensor([2, 0, 0])
    for client in (0, 2, 3, 4):
        updates[client]["class_counts"] = torch.tensor([9, 9, 9])
    assert disco_shares(updates, 0.5, 0.1, "kl")[1] == 0
    aggregator.aggregate(updates, round=0)
    assert torch.isfinite(logits_of(aggregator)).all() and 5e-7 < aggregator.state["shares"][1] < 2e-6


def test_a_preset_sets_what_isn_t_given():
    switches = ("init", "reg_term", "apply")
    paper, official, mixed = FedAWA(), FedAWA("official"), FedAWA("official", init="uniform", apply="post")
    assert [getattr(paper, name) for name in switches] == ["log_size", "aggregate", "post"]
    assert [getattr(official, name) for name in switches] == ["raw_size", "per_client", "pre"]
    assert [getattr(mixed, name) for name in switches] == ["uniform", "per_client", "post"]


@pytest.mark.parametrize("steps", [1, 3])
def test_weights_of_before_the_last_step_lag_behind_it(steps):
    pre, post = server(apply="pre", server_steps=steps), server(server_steps=steps - 1)
    for aggregator in (pre, post):
        aggregator.aggregate(random_updates(aggregator), round=0)
    assert torch.allclose(shares_of(pre), shares_of(post), rtol=0, atol=1e-15)
    assert not torch.allclose(logits_of(pre), logits_of(post), rtol=0, atol=RATE / 2)


def test_gamma_scales_the_average_and_not_the_weights():
    plain_one, scaled = server(), server(gamma=0.9)
    logs = [aggregator.aggregate(random_updates(aggregator), round=0) for aggregator in (plain_one, scaled)]
    model = {name: t for name, t in plain_one.global_model().items() if t.is_floating_point()}
    assert close({name: 0.9 * tensor for name, tensor in model.items()}, scaled.global_model())
    assert logs[0] == logs[1] and equal(shares_of(plain_one), shares_of(scaled))


def released(start, rounds, sizes, parameters, gamma):
    """The released code's `fedawa` in a round after another: float32, on flat vectors, by autograd.

    Logits begin as shares of the samples, and one step of a new Adam moves them; the average takes the weights of
    before the step, times gamma.

    Args:
        start: the initial model.
        rounds: what clients add to the model they receive, by round and client.
        sizes: numbers of samples by client.
        parameters: names of the entries that the objective looks at.
        gamma: the factor of the average.
    """

    def one(model):
        return torch.cat([model[name].flatten() for name in parameters])

    model, logits = start, torch.tensor(sizes, dtype=torch.float32) / sum(sizes)
    for added in rounds:
        uploads = [{name: model[name] + own[name] for name in model} for own in added]
        theta_g, theta = one(model), torch.stack([one(upload) for upload in uploads])
        logits = logits.clone().requires_grad_()
        optimizer = Adam([logits], lr=0.001, betas=(0.5, 0.999))
        weights = logits.softmax(0)
        tau = theta - theta_g
        loss = (weights * (tau - weights @ tau).norm(dim=1)).sum()
        loss = loss + (weights * (1 - F.cosine_similarity(theta, theta_g[None], eps=1e-8))).sum()
        loss.backward()
        optimizer.step()
        logits, used = logits.detach(), weights.detach()
        model = {
            name: sum(gamma * share * upload[name] for share, upload in zip(used, uploads, strict=True))
            for name in model
        }
    return model, used


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_the_official_preset_ends_where_the_released_rule_does_after_40_rounds(gamma):
    sizes = [60, 25, 10, 45]
    ours, papers = server(dtype=torch.float32, preset="official", gamma=gamma), server(dtype=torch.float32, gamma=gamma)
    start = {name: t for name, t in ours.global_model().items() if t.is_floating_point()}
    noise = torch.Generator().manual_seed(5)
    rounds = [
        [{name: 0.02 * (1 + k) * torch.randn(t.shape, generator=noise) for name, t in start.items()} for k in range(4)]
        for _ in range(40)
    ]
    model, shares = released(start, rounds, sizes, sorted(ours.parameters), gamma)
    for number, added in enumerate(rounds):
        for aggregator in (ours, papers):
            received = aggregator.global_model()
            aggregator.aggregate(
                {
                    k: {
                        "weights": {name: received[name] + own.get(name, 0) for name in received},
                        "num_samples": torch.tensor(sizes[k]),
                    }
                    for k, own in enumerate(added)
                },
                round=number,
            )
    end, other = ours.global_model(), papers.global_model()
    apart = {name: float((end[name] - tensor).abs().max()) for name, tensor in model.items()}
    assert max(apart.values()) < 2e-6 and float((shares_of(ours) - shares.double()).abs().max()) < 1e-6
    # 39 steps of 0.001 have moved the weights, and the other preset is elsewhere
    assert float((shares - torch.tensor(sizes).div(140.0).softmax(0)).abs().max()) > 2e-3
    assert max(float((other[name] - tensor).abs().max()) for name, tensor in model.items()) > 1e-2


def test_buffers_take_the_weights_and_counters_the_maximum():
    aggregator = server()
    updates = random_updates(aggregator)
    aggregator.aggregate(updates, round=0)
    means = torch.stack([update["weights"][MEAN] for update in updates.values()])
    assert torch.allclose(aggregator.global_model()[MEAN], shares_of(aggregator) @ means, rtol=0, atol=1e-12)
    assert aggregator.global_model()[COUNTER] == max(update["weights"][COUNTER] for update in updates.values())


@pytest.mark.parametrize("clients", [2, 5, 20])
def test_identical_clients_leave_the_weights_alone(clients):
    aggregator = server(clients=clients)
    updates = random_updates(aggregator, clients)
    same = {client: {**update, "weights": updates[0]["weights"]} for client, update in updates.items()}
    logs = aggregator.aggregate(same, round=0)
    sizes = torch.tensor(list(client_weights(updates, "samples").values()), dtype=torch.float64)
    assert torch.allclose(shares_of(aggregator), sizes, rtol=0, atol=1e-9)
    assert logs["sim"] == 0 and logs["reg"] > 1e-6


def test_what_rounding_leaves_of_0_is_0_without_a_gradient():
    squares = torch.tensor([2e-16, -2e-16, 0.0, 0.25], dtype=torch.float64, requires_grad=True)
    roots = fedawa.root(squares, torch.ones(4, dtype=torch.float64))
    (slopes,) = torch.autograd.grad(roots.sum(), squares)
    assert roots.tolist() == [0, 0, 0, 0.5] and slopes.tolist() == [0, 0, 0, 1]


@pytest.mark.parametrize(("term", "distance"), OBJECTIVES)
def test_clients_that_didn_t_move_leave_everything_alone(term, distance):
    aggregator = server(reg_term=term, reg_distance=distance)
    before = detached(aggregator.global_model())
    still = {client: {**u, "weights": before} for client, u in random_updates(aggregator).items()}
    logs = aggregator.aggregate(still, round=0)
    sizes = torch.tensor(list(client_weights(still, "samples").values()), dtype=torch.float64)
    assert torch.allclose(shares_of(aggregator), sizes, rtol=0, atol=1e-12)
    assert logs["sim"] == 0 and abs(logs["reg"]) < 1e-15
    assert close(aggregator.global_model(), before)


@pytest.mark.parametrize(("term", "distance"), OBJECTIVES)
def test_a_global_model_of_zeros_has_finite_gradients(term, distance):
    aggregator = server(reg_term=term, reg_distance=distance)
    aggregator.state["weights"] = {name: torch.zeros_like(t) for name, t in aggregator.state["weights"].items()}
    updates = random_updates(aggregator)
    slopes = gradient(aggregator, aggregator.grams(updates), some_logits())
    assert torch.isfinite(slopes).all()
    logs = aggregator.aggregate(updates, round=0)
    assert logs["reg"] == 1 or distance == "euclidean"


@pytest.mark.parametrize("group", ["model", "module"])
def test_one_participant_is_the_model_and_nobody_is_warned(group):
    aggregator = server(group=group)
    updates = random_updates(aggregator)
    aggregator.aggregate(updates, round=0)
    before = detached(aggregator.state["logits"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        logs = aggregator.aggregate({3: updates[3]}, round=1)
    assert logs["max_weight"] == 1 and aggregator.state["shares"] == {3: 1.0}
    assert equal(aggregator.global_model(), updates[3]["weights"])
    assert equal(aggregator.state["logits"], before)


@pytest.mark.parametrize("group", ["model", "module"])
def test_absent_clients_keep_their_logits_and_new_ones_join(group):
    aggregator = server(group=group)
    updates = random_updates(aggregator)
    aggregator.aggregate({client: updates[client] for client in (1, 3)}, round=0)
    first = detached(aggregator.state["logits"])
    aggregator.aggregate({client: updates[client] for client in (0, 3, 4)}, round=1)
    second = aggregator.state["logits"]
    assert set(first) == {1, 3} and set(second) == {0, 1, 3, 4}
    assert equal(second[1], first[1]) and not equal(second[3], first[3])
    assert list(aggregator.state["shares"]) == [0, 3, 4]
    assert all(list(shares) == [0, 3, 4] for shares in aggregator.state["group_shares"].values())
    assert all(logit.untyped_storage().nbytes() == 8 * len(aggregator.groups) for logit in second.values()), (
        "a checkpoint stores all of it"
    )
    sizes = torch.tensor([float(updates[client]["num_samples"]) for client in (0, 4)], dtype=torch.float64)
    assert torch.allclose(torch.stack([second[0], second[4]]), sizes.log()[:, None], rtol=0, atol=1.01 * RATE)


def test_nobody_takes_part():
    aggregator = server()
    aggregator.aggregate(random_updates(aggregator), round=0)
    before = detached(aggregator.state)
    assert aggregator.aggregate({}, round=1) == {}
    assert equal(aggregator.state, before)


def test_only_what_clients_share_is_weighed():
    aggregator = server(method=FedPer)
    assert aggregator.parameters and not any("classifier" in name for name in aggregator.parameters)
    run = fit(make_client(FedPer, net=noisy), aggregator=FedAWA())
    assert not close(run.weights, fit(make_client(FedPer, net=noisy)).weights, 1e-6)
    assert not any("classifier" in name for name in run.federation.aggregator.global_model())


@pytest.mark.parametrize("group", ["model", "module"])
@pytest.mark.parametrize("method", [partial(FedProx, mu=0.1), partial(WDR, wdr_lambda=1.0)])
@pytest.mark.by_default("method0-model")
def test_it_runs_over_other_clients(method, group):
    run = fit(make_client(method), aggregator=FedAWA(group=group))
    assert not equal(run.weights, fit(make_client(method), aggregator=WeightedAverage()).weights)
    assert not equal(run.weights, fit(make_client(), aggregator=FedAWA(group=group)).weights)
    assert {"server/sim", "server/reg", "server/max_weight"} <= run.rows[-1].keys()


def test_counts_travel_only_where_weights_begin_by_them():
    spies = Spy(), Spy()
    fit(make_client(), aggregator=FedAWA(init="disco"), callbacks=[spies[0]])
    fit(make_client(), aggregator=FedAWA(), callbacks=[spies[1]])
    assert ["class_counts" in spy.updates[0][0] for spy in spies] == [True, False]


@pytest.mark.parametrize("group", ["model", *GROUPS])
@pytest.mark.by_default("model", "tensor")
def test_the_order_of_uploads_changes_nothing(group):
    rule = partial(FedAWA, group=group)
    runs = [fit(make_client(net=noisy), aggregator=rule(), engine=engine) for engine in ("sequential", Shuffled)]
    assert same_end(*runs)


@pytest.mark.parametrize("settings", [{}, {"preset": "official"}, {"group": "module"}])
@pytest.mark.by_default("settings1")
def test_partial_participation_resumes_bit_for_bit(tmp_path, settings):
    def run(root, rounds, ckpt_path=None):
        client = make_client(net=noisy)
        aggregator = FedAWA(**settings)
        return fit(client, None, root, aggregator, ckpt_path, max_rounds=rounds, clients_per_round=0.5)

    whole = run(tmp_path / "whole", 6)
    half = run(tmp_path / "half", 3)
    saved = load(half.last)["federation"]["aggregator"]["logits"]
    assert same_end(whole, run(tmp_path / "half", 6, half.last))
    logits = load(whole.last)["federation"]["aggregator"]["logits"]
    assert set(logits) <= {0, 1, 2, 3} and all(logit.dtype == torch.float64 for logit in logits.values())
    assert not equal(logits, saved)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"server_steps": -1}, "aggregator.server_steps=-1"),
        ({"gamma": 0.0}, "aggregator.gamma=0.0"),
        ({"gamma": float("nan")}, "aggregator.gamma=nan"),
        ({"gamma": 1.5}, "aggregator.gamma=1.5"),
        ({"group": "layer"}, "aggregator.group='layer' must be one of model, module, tensor, block"),
        ({"optimizer": partial(Adam, lr=-1.0)}, "aggregator.optimizer: Invalid learning rate: -1.0."),
    ],
)
def test_settings_out_of_range_are_refused(settings, sentence):
    with pytest.raises(MisconfigurationException, match=re.escape(sentence)):
        FedAWA(**settings)


def test_clients_without_shared_parameters_are_refused():
    class Statistics(FedAvg):
        def is_shared(self, name):
            return "running" in name

    with pytest.raises(MisconfigurationException, match=r"FedAWA weighs .* Statistics shares none"):
        fit(make_client(Statistics, net=noisy), aggregator=FedAWA())
    with pytest.raises(MisconfigurationException, match="Local does not send"):
        fit(make_client(Local), aggregator=FedAWA())


def one_layer(shape, classes):
    return Net(nn.Identity(), nn.Linear(FEATURES, classes))


@pytest.mark.parametrize("settings", [{}, {"preset": "official", "server_steps": 3, "gamma": 0.9}])
@pytest.mark.parametrize("group", ["module", "block"])
@pytest.mark.by_default("module-settings0")
def test_one_layer_is_the_model_bit_for_bit(group, settings):
    runs = [fit(make_client(net=one_layer), aggregator=FedAWA(group=each, **settings)) for each in ("model", group)]
    assert equal(*(run.weights for run in runs))
    states = [run.federation.aggregator.state for run in runs]
    assert all(equal(states[0][name], states[1][name]) for name in states[0].keys() - {"group_shares"})
    assert [row["server/sim"] for row in runs[0].rows] == [row["server/sim"] for row in runs[1].rows]


def groups_of(net, group, **settings):
    return server(net=net, group=group, **settings).groups


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
    assert len({tuple(group_shares(together, name)) for name in parts}) == len(parts) > 1


def test_resnet20_has_43_modules_65_tensors_and_22_blocks():
    client = FedAvg(CifarResNet, (3, 32, 32), 10)
    groups = {}
    for group in GROUPS:
        aggregator = FedAWA(group=group)
        aggregator.setup(Server(K, detached(client.state_dict()), client, None, seed=0))
        groups[group] = aggregator.groups
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
    aggregator = server(group="module", server_steps=50, optimizer=partial(Adam, lr=0.05))
    updates = random_updates(aggregator)
    aggregator.aggregate(updates, round=0)
    uploads = [update["weights"] for update in updates.values()]
    for group, names in aggregator.groups.items():
        mean = weighted_mean(uploads, group_shares(aggregator, group))
        assert all(torch.equal(aggregator.global_model()[name], mean[name]) for name in names)
    other = weighted_mean(uploads, group_shares(aggregator, HEAD))[f"{NORM}.running_mean"]
    assert not torch.allclose(aggregator.global_model()[f"{NORM}.running_mean"], other, rtol=0, atol=1e-3)
    assert aggregator.global_model()[f"{NORM}.num_batches_tracked"] == K - 1


def test_shares_are_the_means_over_groups_weighted_by_parameters():
    aggregator = server(group="module", server_steps=50)
    aggregator.aggregate(random_updates(aggregator), round=0)
    sizes = {LINEAR: 35, NORM: 10, HEAD: 18}
    for client, share in aggregator.state["shares"].items():
        by_hand = sum(sizes[group] * aggregator.state["group_shares"][group][client] for group in sizes) / 63
        assert share == pytest.approx(by_hand, abs=1e-15)
    assert sum(aggregator.state["shares"].values()) == pytest.approx(1)


def test_a_group_that_nobody_moved_keeps_its_weights():
    aggregator = server(group="module")
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
    aggregator.state["weights"][f"{NORM}.bias"].zero_()
    logits = torch.zeros(len(aggregator.groups), K, dtype=torch.float64, requires_grad=True)
    _, reg = aggregator.objective(logits.softmax(1), aggregator.grams(random_updates(aggregator)))
    slopes = torch.autograd.grad(reg.sum(), logits)[0]
    assert float(reg[place].detach()) == 1 and not slopes[place].any() and slopes[0].any()


def test_layers_change_the_model():
    runs = [
        fit(make_client(net=noisy), aggregator=each)
        for each in (FedAWA(), *(FedAWA(group=group) for group in ("module", "tensor")))
    ]
    assert not any(equal(one.weights, other.weights) for one, other in pairwise(runs))
    assert list(runs[1].federation.aggregator.global_model()) == list(runs[0].federation.aggregator.global_model())
