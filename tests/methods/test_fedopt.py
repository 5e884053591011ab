import copy
from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.optim import SGD, Adagrad

from federations import drawn_update, equal, fit, flat, make_client, noisy, set_up
from pfl_lightning import WeightedAverage
from pfl_lightning.aggregators import FedAdagrad, FedAdam, FedAvgM, FedYogi
from pfl_lightning.messages import weighted_mean
from pfl_lightning.nets import Net

ALL = [FedAvgM, FedAdagrad, FedAdam, FedYogi]


def rounds(model):
    """Updates of rounds in which not everybody takes part, one of them without anybody."""
    cohorts = [[0, 1, 3], [2], [], [1, 2]]
    return [
        {k: drawn_update(model, seed=5 * r + k + 1, size=10 + 7 * k) for k in cohort}
        for r, cohort in enumerate(cohorts)
    ]


def second(kind, v, square, beta2):
    if kind is FedAdagrad:
        return v + square
    if kind is FedAdam:
        return beta2 * v + (1 - beta2) * square
    return torch.where(v > square, v - (1 - beta2) * square, torch.where(v < square, v + (1 - beta2) * square, v))


@pytest.mark.parametrize("initial", ["tau2", "zero"])
@pytest.mark.parametrize("kind", [FedAdagrad, FedAdam, FedYogi])
def test_adaptive_steps_by_a_second_implementation(kind, initial):
    """On one long vector in float64, with cohorts of all sizes; buffers are averaged."""
    model = make_client(net=noisy).double()
    lr, beta1, beta2, tau = 0.3, 0.8, 0.95, 0.02
    decays = {} if kind is FedAdagrad else {"beta2": beta2}
    ours = set_up(kind(server_lr=lr, beta1=beta1, tau=tau, initial=initial, **decays), model)
    names = [name for name, _ in model.named_parameters()]

    x = flat(ours.state["weights"], names).clone()
    m, v = torch.zeros_like(x), torch.full_like(x, tau * tau if initial == "tau2" else 0.0)
    for number, updates in enumerate(rounds(model)):
        before = copy.deepcopy(ours.state)
        assert ours.aggregate(updates, number) == {}
        if not updates:
            assert equal(ours.state, before)
            continue
        sizes = [int(u["num_samples"]) for u in updates.values()]
        changes = [flat(u["weights"], names) - x for u in updates.values()]
        delta = sum(n * change for n, change in zip(sizes, changes, strict=True)) / sum(sizes)
        m = beta1 * m + (1 - beta1) * delta
        v = second(kind, v, delta * delta, beta2)
        assert (v >= 0).all()
        x = x + lr * m / (torch.sqrt(v) + tau)
        torch.testing.assert_close(flat(ours.global_model(), names), x, rtol=0, atol=1e-12)
        mean = weighted_mean([u["weights"] for u in updates.values()], [n / sum(sizes) for n in sizes])
        for name in mean.keys() - set(names):
            assert torch.equal(ours.global_model()[name], mean[name])


def descend(optimizer, targets, ours, model):
    """Both go through rounds of one client; the optimizer is fed with what lies between it and the target."""
    for number, target in enumerate(targets):
        ours.aggregate({0: target}, number)
        for name, parameter in model.named_parameters():
            parameter.grad = parameter.detach() - target["weights"][name]
        optimizer.step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(ours.global_model()[name], parameter.detach(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_is_torch_s_sgd(nesterov):
    model = make_client().double()
    ours = set_up(FedAvgM(server_lr=0.7, beta=0.9, nesterov=nesterov), model)
    optimizer = SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=nesterov)
    descend(optimizer, [drawn_update(model, seed) for seed in (1, 2, 3)], ours, model)


def test_adagrad_without_a_first_moment_is_torch_s():
    model = make_client().double()
    ours = set_up(FedAdagrad(server_lr=0.2, tau=0.1), model)
    optimizer = Adagrad(model.parameters(), lr=0.2, eps=0.1, initial_accumulator_value=0.01)
    descend(optimizer, [drawn_update(model, seed) for seed in (1, 2, 3)], ours, model)


def test_without_momentum_it_is_fedavg_bit_for_bit_and_with_it_is_not():
    runs = [
        fit(make_client(net=noisy), aggregator=aggregator, clients_per_round=3)
        for aggregator in (WeightedAverage(), FedAvgM(beta=0.0), FedAvgM())
    ]
    assert equal(runs[0].weights, runs[1].weights)
    assert not equal(runs[0].weights, runs[2].weights)


def test_a_steady_change_goes_ten_times_as_far():
    model = make_client().double()
    ours = set_up(FedAvgM(beta=0.9), model)
    for number in range(300):
        x = ours.global_model()
        ours.aggregate({0: {"weights": {n: t + 0.01 for n, t in x.items()}, "num_samples": torch.tensor(1)}}, number)
    for name, before in x.items():
        torch.testing.assert_close(ours.global_model()[name] - before, torch.full_like(before, 0.1))


@pytest.mark.parametrize("kind", ALL)
def test_clients_that_stay_where_they_are_move_nothing(kind):
    ours = set_up(kind(), make_client(net=noisy))
    before = ours.global_model()
    for number in range(2):
        ours.aggregate({0: {"weights": before, "num_samples": torch.tensor(5)}}, number)
    assert equal(ours.global_model(), before)


def test_the_first_step_of_adam_does_not_depend_on_the_size_of_large_changes():
    model = make_client().double()
    steps = []
    for scale in (1.0, 100.0):
        ours = set_up(FedAdam(initial="zero", tau=1e-9), model)
        start = ours.global_model()
        weights = {n: t + scale * drawn_update(model, 1)["weights"][n] for n, t in start.items()}
        ours.aggregate({0: {"weights": weights, "num_samples": torch.tensor(5)}}, 0)
        steps.append(torch.cat([(ours.global_model()[n] - t).flatten() for n, t in start.items()]))
    torch.testing.assert_close(*steps, rtol=1e-5, atol=1e-9)


def test_the_first_second_moment_is_tau_squared():
    """Of a change of tau, a first step of Adam is (1 - beta1) / (sqrt(beta2 + 1 - beta2) + 1)."""
    model = make_client().double()
    steps = {}
    for initial in ("tau2", "zero"):
        ours = set_up(FedAdam(server_lr=1.0, initial=initial), model)
        start = ours.global_model()
        ours.aggregate({0: {"weights": {n: t + 1e-3 for n, t in start.items()}, "num_samples": torch.tensor(1)}}, 0)
        name = next(iter(start))
        steps[initial] = float((ours.global_model()[name] - start[name]).flatten()[0])
    assert steps == {"tau2": pytest.approx(0.05), "zero": pytest.approx(0.1 / 1.1)}


def test_a_tied_parameter_makes_one_step():
    def net(input_shape, num_classes):
        layer = nn.Linear(input_shape[0], input_shape[0])
        return Net(nn.Sequential(layer, nn.Tanh(), layer), nn.Linear(input_shape[0], num_classes))

    weights = fit(make_client(net=net), aggregator=FedAdam(), max_rounds=2).weights
    assert torch.equal(weights["net.features.0.weight"], weights["net.features.2.weight"])
    assert not torch.equal(weights["net.features.0.weight"], make_client(net=net).net.features[0].weight)


def test_uploads_of_half_precision_keep_moments_in_single():
    ours = set_up(FedAdam(), make_client(net=noisy))
    half = {n: t.bfloat16() if t.is_floating_point() else t for n, t in ours.global_model().items()}
    moved = {n: t + 1 for n, t in half.items()}
    for number in range(2):
        ours.aggregate({0: {"weights": moved, "num_samples": torch.tensor(5)}}, number)
    assert {t.dtype for t in ours.state["m"].values()} == {t.dtype for t in ours.state["v"].values()} == {torch.float32}
    assert all(t.dtype == half[n].dtype for n, t in ours.global_model().items())


@pytest.mark.parametrize(
    ("kind", "settings", "words"),
    [
        (FedAvgM, {"beta": 1.0}, r"aggregator\.beta=1\.0 must be 0 or more and below 1"),
        (FedAdagrad, {"tau": 0.0}, r"aggregator\.tau=0\.0 must be above 0"),
        (FedAdam, {"beta1": -0.1}, r"aggregator\.beta1=-0\.1 must be"),
        (FedYogi, {"beta2": float("nan")}, r"aggregator\.beta2=nan must be"),
        (FedYogi, {"initial": "one"}, r"aggregator\.initial='one' must be one of tau2, zero"),
        (FedAdam, {"server_lr": 0.0}, r"aggregator\.server_lr=0\.0 must be above 0"),
    ],
)
def test_what_is_out_of_range_is_refused_by_name(kind, settings, words):
    with pytest.raises(MisconfigurationException, match=words):
        partial(kind, **settings)()
