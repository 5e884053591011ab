import copy
from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector
from torch.optim import SGD

from federations import Spy, blobs, check_batches_of_one, equal, fit, flat, gradient, make_client
from pfl_lightning import WeightedAverage
from pfl_lightning.aggregators import DynamicAverage
from pfl_lightning.methods import FedAvg, FedDyn
from pfl_lightning.nets import Net

PLAIN = partial(SGD, lr=0.1)


def remembered(run, clients):
    """g_k of each client, zero where it hasn't taken part."""
    personal = [run.federation.job(client).state.personal for client in range(clients)]
    return torch.stack([flat(entries, sorted(entries)) for entries in personal])


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_four_rounds_of_three_clients_by_a_second_implementation(weighting):
    """In float64, as the official code has it: a mean of models and of scaled memories, with two of three a round."""
    eta, steps, alpha, clients, spy = 0.1, 3, 0.2, 3, Spy()
    data = blobs(24, 16, 40, batch_size=100)
    run = fit(
        make_client(FedDyn, alpha=alpha, weighting=weighting, optimizer=PLAIN),
        data,
        local_epochs=steps,
        max_rounds=4,
        clients_per_round=2,
        callbacks=[spy],
        precision="64-true",
    )
    assert len({tuple(cohort) for cohort in spy.cohorts}) > 1
    net = make_client().net.double()
    parts = [data.part(k, "train").to("cpu", torch.float64) for k in range(clients)]
    sizes = torch.tensor([len(part) for part in parts])
    alphas = alpha * sizes.double().mean() / sizes if weighting == "samples" else torch.full((clients,), alpha)
    x = parameters_to_vector(net.parameters()).detach()
    h = [torch.zeros_like(x) for _ in range(clients)]  # -g_k / alpha_k
    for cohort in spy.cohorts:
        ends = []
        for k in cohort:
            y = x.clone()
            for _ in range(steps):
                y = y - eta * (gradient(net, parts[k], at=y) + alphas[k] * (h[k] + y - x))
            h[k] = h[k] + (y - x)
            ends.append(y)
        mean = sum(ends) / len(ends)
        x = mean + sum(h) / clients
    names = [f"net.{name}" for name, _ in net.named_parameters()]
    assert torch.allclose(flat(run.federation.aggregator.download(0)["weights"], names), x, rtol=0, atol=1e-13)
    assert torch.allclose(flat(run.weights, names), mean, rtol=0, atol=1e-13)
    g = [-a * memory for a, memory in zip(alphas, h, strict=True)]
    kept = [run.federation.job(k).state.personal for k in range(clients)]
    ours = [
        flat(entries, [f"gradient.{name.removeprefix('net.').replace('.', '/')}" for name in names]) for entries in kept
    ]
    assert torch.allclose(torch.stack(ours), torch.stack(g), rtol=0, atol=1e-13)


@pytest.mark.parametrize("clients_per_round", [1.0, 0.5])
def test_the_drift_is_the_mean_of_the_clients_memories(clients_per_round):
    """H = -s / alpha, and s is the mean of all g_k, whoever takes part."""
    model = make_client(FedDyn, alpha=0.5, weighting="uniform", optimizer=PLAIN)
    run = fit(model, clients_per_round=clients_per_round, max_rounds=3, precision="64-true")
    drift = run.federation.aggregator.state["drift"]
    mean = remembered(run, 4).mean(0)
    names = sorted(f"gradient.{name.removeprefix('net.').replace('.', '/')}" for name in drift)
    by_entry = {f"gradient.{name.removeprefix('net.').replace('.', '/')}": tensor for name, tensor in drift.items()}
    assert float(mean.norm()) > 1e-3
    assert torch.allclose(-0.5 * flat(by_entry, names), mean, rtol=0, atol=1e-14)
    assert run.rows[-1]["server/drift_norm"] == pytest.approx(float(flat(by_entry, names).norm()))


def linear(input_shape, num_classes):
    return Net(nn.Identity(), nn.Linear(input_shape[0], num_classes))


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
@pytest.mark.by_default("uniform")
def test_it_gets_where_the_mean_gradient_is_zero_and_fedavg_does_not(weighting):
    """Of clients of different classes and sizes; what all agree on is where their counted gradients sum to 0."""
    slopes = []
    for make in (partial(FedDyn, alpha=0.3, weighting=weighting), FedAvg):
        data = blobs(60, 30, by_class=True, batch_size=100)
        client = make_client(make, net=linear, optimizer=partial(SGD, lr=0.3, weight_decay=0.1))
        side = None if make is not FedAvg else WeightedAverage(weighting=weighting)
        net = fit(client, data, aggregator=side, local_epochs=25, max_rounds=25).model.net
        counts = [len(data.part(k, "train")) if weighting == "samples" else 1 for k in range(2)]
        mean = sum(n * gradient(net, data.part(k, "train")) for k, n in enumerate(counts)) / sum(counts)
        slopes.append((mean + 0.1 * parameters_to_vector(net.parameters())).norm().item())
    assert slopes[0] < 0.1 * slopes[1]


def test_gradients_are_those_of_the_regularised_loss():
    client = make_client(FedDyn, alpha=0.5)
    part = blobs().server_data()
    F.cross_entropy(client.net(part.x), part.y).backward()
    before = gradient(client.net, part)
    for name, tensor in client.gradient.tensors().items():
        tensor.copy_(torch.randn_like(tensor))
        client.received.tensors()[name].add_(torch.randn_like(tensor))
    w = parameters_to_vector(client.net.parameters())
    after = client.adjust_gradients(
        {f"net.{name}": parameter.grad for name, parameter in client.net.named_parameters()}
    )
    after = parameters_to_vector(after.values())
    g, x = (torch.cat([t.flatten() for t in kept.tensors().values()]) for kept in (client.gradient, client.received))
    torch.testing.assert_close(after, before - g + 0.5 * (w - x))


def test_only_the_memory_stays_and_one_number_more_than_fedavg_s_comes_down():
    run = fit(make_client(FedDyn, optimizer=PLAIN), max_rounds=1)
    assert all(name.startswith("gradient.") for state in run.federation.clients.values() for name in state.personal)
    assert run.rows[0]["bytes/down"] == fit(make_client(FedAvg), max_rounds=1).rows[0]["bytes/down"] + 4 * 8
    assert float(run.federation.aggregator.download(0)["mean_samples"]) == pytest.approx(
        sum(len(run.data.part(k, "train")) for k in range(4)) / 4
    )


def test_nobody_taking_part_changes_nothing():
    run = fit(make_client(FedDyn, optimizer=PLAIN), max_rounds=1)
    before = copy.deepcopy(run.federation.aggregator.state)
    assert run.federation.aggregator.aggregate({}, 1) == {}
    assert equal(run.federation.aggregator.state, before)


def test_it_learns_from_batches_of_one_where_classes_are_absent():
    check_batches_of_one(make_client(FedDyn, optimizer=partial(SGD, lr=0.02)), max_rounds=4)


def test_what_does_not_fit_is_refused():
    with pytest.raises(MisconfigurationException, match=r"model\.alpha=0 must be above 0"):
        make_client(FedDyn, alpha=0)
    with pytest.raises(MisconfigurationException, match=r"model\.weighting='size' must be one of samples, uniform"):
        make_client(FedDyn, weighting="size")
    with pytest.raises(MisconfigurationException, match="FedDyn needs mean_samples, which"):
        fit(make_client(FedDyn), aggregator=WeightedAverage())
    fit(make_client(FedAvg), aggregator=DynamicAverage(), max_rounds=1)
