import math
from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector
from torch.optim import SGD

from federations import (
    MOMENTUM,
    Spy,
    blobs,
    check_batches_of_one,
    check_order_and_resume,
    equal,
    fit,
    flat,
    gradient,
    make_client,
    near,
    noisy,
)
from pfl_lightning import WeightedAverage
from pfl_lightning.aggregators import PrimalDualAverage
from pfl_lightning.engines import Sequential
from pfl_lightning.methods import FedADMM, FedAvg, FedDyn, FedProx
from pfl_lightning.nets import Net
from pfl_lightning.privacy import DPAverage

PLAIN = partial(SGD, lr=0.1)
BOTH = pytest.mark.parametrize("previous", ["own", "received"])


def kept(run, entry, client):
    """A client's dual variable or last model, as one vector."""
    personal = run.federation.job(client).state.personal
    names = [name.removeprefix("net.").replace(".", "/") for name, _ in make_client().named_parameters()]
    return flat(personal, [f"{entry}.{name}" for name in names])


@BOTH
@pytest.mark.parametrize("step", [1.0, 0.7, None])
def test_five_rounds_of_three_clients_by_a_second_implementation(previous, step):
    """In float64, by the formulas of the paper or of the released code; uploads are theta plus the change."""
    eta, steps, rho, clients, spy = 0.1, 3, 0.2, 3, Spy()
    data = blobs(24, 16, 40, batch_size=100)
    run = fit(
        make_client(FedADMM, rho=rho, previous=previous, optimizer=PLAIN),
        data,
        aggregator=PrimalDualAverage(step),
        local_epochs=steps,
        max_rounds=5,
        clients_per_round=2,
        callbacks=[spy],
        precision="64-true",
    )
    assert len({tuple(cohort) for cohort in spy.cohorts}) > 1
    net = make_client().net.double()
    names = [f"net.{name}" for name, _ in net.named_parameters()]
    parts = [data.part(k, "train").to("cpu", torch.float64) for k in range(clients)]
    theta = parameters_to_vector(net.parameters()).detach()
    w, y = [theta] * clients, [torch.zeros_like(theta) for _ in range(clients)]
    for cohort, updates in zip(spy.cohorts, spy.updates, strict=True):
        changes = []
        for k in cohort:
            own = theta.clone()
            for _ in range(steps):
                own = own - eta * (gradient(net, parts[k], at=own) + y[k] + rho * (own - theta))
            dual = y[k] + rho * (own - theta)
            before = w[k] if previous == "own" else theta
            changes.append((own - before) + (dual - y[k]) / rho)
            w[k], y[k] = own, dual
            sent = flat(updates[k]["weights"], names)
            assert torch.allclose(sent, theta + changes[-1], rtol=0, atol=1e-14)
        theta = theta + (step or 2 / 3) * sum(changes) / len(changes)
    assert torch.allclose(flat(run.weights, names), theta, rtol=0, atol=1e-14)
    for k in set().union(*spy.cohorts):
        assert torch.allclose(kept(run, "dual", k), y[k], rtol=0, atol=1e-14)
        if previous == "own":
            assert torch.allclose(kept(run, "last", k), w[k], rtol=0, atol=1e-14)


def test_the_step_of_those_in_the_round_over_all_keeps_theta_the_mean_of_models_and_duals():
    """The sum telescopes, so that theta is what ADMM's server computes from all clients."""
    model = make_client(FedADMM, rho=0.5, optimizer=PLAIN)
    run = fit(model, clients_per_round=2, max_rounds=6, precision="64-true")
    names = [name for name, _ in make_client().named_parameters()]
    start = flat({n: t.double() for n, t in make_client().state_dict().items()}, names)
    took_part = [k for k in range(4) if "dual" in str(run.federation.clients.get(k))]
    assert len(took_part) > 2
    mean = sum(kept(run, "last", k) + kept(run, "dual", k) / 0.5 if k in took_part else start for k in range(4)) / 4
    assert torch.allclose(flat(run.weights, names), mean, rtol=0, atol=1e-13)


def test_of_all_clients_it_is_feddyn():
    runs = [
        fit(
            make_client(method, optimizer=PLAIN, **settings),
            max_rounds=4,
            precision="64-true",
        )
        for method, settings in (
            (FedADMM, {"rho": 0.25}),
            (FedDyn, {"alpha": 0.25, "weighting": "uniform"}),
        )
    ]
    sent = [dict(run.federation.aggregator.download(0)["weights"]) for run in runs]
    assert near(*sent, atol=1e-14)


# Without its term


@BOTH
def test_without_a_penalty_clients_train_as_under_fedavg_bit_for_bit(previous):
    """Also in later rounds, from whatever they receive; with all digits, the upload is twice the way."""
    spies = Spy(), Spy()
    make = partial(make_client, net=noisy, optimizer_lifetime="run")
    off = fit(make(FedADMM, rho=0, previous=previous), callbacks=[spies[0]], max_rounds=1)
    plain = fit(make(FedAvg), callbacks=[spies[1]], max_rounds=1)
    start = dict(make(FedAvg).named_parameters())
    for k in range(4):
        personal = off.federation.job(k).state.personal
        for name, parameter in start.items():
            entry, own = name.removeprefix("net.").replace(".", "/"), spies[1].updates[0][k]["weights"][name]
            assert previous == "received" or torch.equal(personal[f"last.{entry}"], own)
            assert torch.equal(spies[0].updates[0][k]["weights"][name], own + (own - parameter.detach()))
            assert not personal[f"dual.{entry}"].any()
    assert [row["train/loss"] for row in off.rows] == [row["train/loss"] for row in plain.rows]


def test_without_a_penalty_half_the_step_of_the_released_rule_is_fedavg():
    runs = [
        fit(make_client(method, net=noisy, **own), aggregator=server, clients_per_round=3, precision="64-true")
        for method, own, server in (
            (FedADMM, {"rho": 0, "previous": "received"}, PrimalDualAverage(0.5)),
            (FedAvg, {}, WeightedAverage(weighting="uniform")),
        )
    ]
    assert near(*(run.federation.aggregator.global_model() for run in runs), atol=1e-14)


@pytest.mark.parametrize("optimizer", [PLAIN, MOMENTUM])
def test_the_first_round_s_training_is_feddyn_s_bit_for_bit_and_fedprox_s_and_the_second_s_is_not(optimizer):
    spies = Spy(), Spy(), Spy()
    methods = (FedADMM, {"rho": 0.25}), (FedDyn, {"alpha": 0.25, "weighting": "uniform"}), (FedProx, {"mu": 0.25})
    for (method, own), spy in zip(methods, spies, strict=True):
        run = fit(make_client(method, optimizer=optimizer, **own), callbacks=[spy], max_rounds=1)
        if method is FedADMM:
            names = [name for name, _ in run.model.named_parameters()]
            ours = {k: kept(run, "last", k) for k in range(4)}
    assert all(torch.equal(ours[k], flat(spies[1].updates[0][k]["weights"], names)) for k in range(4))
    assert all(torch.allclose(ours[k], flat(spies[2].updates[0][k]["weights"], names), atol=1e-6) for k in range(4))
    run = fit(make_client(FedADMM, rho=0.25, optimizer=optimizer), max_rounds=2)
    assert not any(torch.allclose(kept(run, "last", k), ours[k], atol=1e-3) for k in range(4))


def test_gradients_are_those_of_the_augmented_lagrangian_and_the_record_has_the_loss_alone():
    client = make_client(FedADMM, rho=0.5)
    part = blobs().server_data()
    for name, tensor in client.dual.tensors().items():
        tensor.copy_(torch.randn_like(tensor))
        client.received.tensors()[name].add_(torch.randn_like(tensor))
    w = dict(client.net.named_parameters())
    theta, y = client.received.tensors(), client.dual.tensors()
    loss = client.training_step((part.x, part.y), 0)["loss"]
    assert torch.equal(loss, F.cross_entropy(client.net(part.x), part.y))
    lagrangian = loss + sum(
        (y[name] * (w[name] - theta[name])).sum() + 0.25 * (w[name] - theta[name]).square().sum() for name in w
    )
    plain = dict(zip(w, torch.autograd.grad(loss, list(w.values()), retain_graph=True), strict=True))
    expected = torch.autograd.grad(lagrangian, list(w.values()))
    ours = client.adjust_gradients({f"net.{name}": g for name, g in plain.items()})
    for found, known in zip(ours.values(), expected, strict=True):
        torch.testing.assert_close(found, known)


# Where it ends


def linear(input_shape, num_classes):
    return Net(nn.Identity(), nn.Linear(input_shape[0], num_classes))


def ending(previous, step=None, clients_per_round=1.0, rho=0.3):
    """The mean gradient at the end of a convex problem of unlike clients, and the way from the initial model."""
    data = blobs(40, 20, 35, 25, by_class=True, batch_size=100)
    client = make_client(
        FedADMM, rho=rho, previous=previous, net=linear, optimizer=partial(SGD, lr=0.5, weight_decay=0.1)
    )
    run = fit(
        client,
        data,
        aggregator=PrimalDualAverage(step),
        local_epochs=12,
        max_rounds=50,
        check_val_every_n_epoch=50,
        clients_per_round=clients_per_round,
        precision="64-true",
    )
    net = linear((6,), 3).double()
    net.load_state_dict({name.removeprefix("net."): t for name, t in run.weights.items() if name.startswith("net.")})
    w = parameters_to_vector(net.parameters())
    start = parameters_to_vector(make_client(net=linear).net.parameters())
    parts = [data.part(k, "train").to("cpu", torch.float64) for k in range(4)]
    return sum(gradient(net, part) for part in parts) / 4 + 0.1 * w, w - start


@pytest.mark.parametrize("clients_per_round", [1.0, 0.5])
def test_it_ends_where_the_mean_gradient_is_zero_whoever_takes_part(clients_per_round):
    slope, way = ending("own", clients_per_round=clients_per_round)
    assert float(slope.norm()) < 5e-3 and float(way.norm()) > 1


def test_a_step_of_one_is_too_long_where_half_take_part():
    _, way = ending("own", step=1.0, clients_per_round=0.5)
    assert float(way.norm()) > 100


@pytest.mark.exhaustive
def test_the_released_rule_ends_where_half_the_penalty_pulls_back_to_the_start():
    slope, way = ending("received")
    assert float(slope.norm()) > 0.05
    assert torch.allclose(slope, -0.15 * way, rtol=0, atol=2e-3)


# Clients and engines


@BOTH
def test_order_and_a_pause_change_no_bit(previous, tmp_path):
    check_order_and_resume(partial(FedADMM, rho=0.3, previous=previous), tmp_path, clients_per_round=2, max_rounds=4)


@BOTH
def test_engines_agree(previous):
    runs = [
        fit(
            make_client(FedADMM, rho=0.3, previous=previous),
            engine=engine,
            clients_per_round=3,
            max_rounds=4,
            accelerator="cpu",
        )
        for engine in ("sequential", "vectorised")
    ]
    assert near(runs[0].weights, runs[1].weights)
    for k in range(4):
        states = [dict(run.federation.job(k).state.personal) for run in runs]
        assert near(*states)
        assert any(name.startswith("last.") for name in states[0]) == (previous == "own")


def test_the_first_change_is_from_the_weights_at_the_federation_s_set_up():
    """Loaded after the client module was made, as pretrained ones are; else the first upload would hold both."""
    spies, models = (Spy(), Spy()), [make_client(FedADMM, rho=0, optimizer=PLAIN) for _ in range(2)]
    loaded = {name: tensor + 1 for name, tensor in models[0].net.state_dict().items()}
    for model, spy in zip(models, spies, strict=True):
        model.net.load_state_dict(loaded)
        fit(model, callbacks=[spy], max_rounds=1, local_epochs=1)
    plain = make_client(optimizer=PLAIN)
    plain.net.load_state_dict(loaded)
    other = Spy()
    fit(plain, callbacks=[other], max_rounds=1)
    for k, update in spies[0].updates[0].items():
        for name, own in other.updates[0][k]["weights"].items():
            assert torch.equal(update["weights"][name], own + (own - loaded[name.removeprefix("net.")]))


def test_a_client_that_makes_no_step_says_where_it_has_been_put():
    """Without a loss, theta is the minimum of the penalty: w = theta, and the dual variable stays."""
    run = fit(make_client(FedADMM, rho=0.5, optimizer=partial(SGD, lr=0.0)), max_rounds=2)
    start = make_client().state_dict()
    assert equal({n: run.weights[n] for n in start}, dict(start))
    assert not any(kept(run, "dual", k).any() for k in range(4))


def test_a_client_that_diverges_keeps_its_model_and_its_dual_variable():
    class Losing(Sequential):
        def run(self, jobs):
            for outcome in super().run(jobs):
                yield outcome._replace(finite=outcome.client != 1 or self.module.round != 1)

    states = []
    for rounds in (1, 2):
        run = fit(make_client(FedADMM, rho=0.5), engine=Losing, max_rounds=rounds)
        states.append([dict(run.federation.job(k).state.personal) for k in range(2)])
    assert run.rows[1]["clients_diverged"] == 1
    assert equal(states[0][1], states[1][1]) and not equal(states[0][0], states[1][0])
    assert all(bool(tensor.isfinite().all()) for tensor in run.weights.values())


def test_a_tied_parameter_is_sent_once_under_each_name():
    def net(input_shape, num_classes):
        layer = nn.Linear(input_shape[0], input_shape[0])
        return Net(nn.Sequential(layer, nn.Tanh(), layer), nn.Linear(input_shape[0], num_classes))

    spy = Spy()
    run = fit(make_client(FedADMM, net=net), callbacks=[spy], max_rounds=2)
    for update in spy.updates[1].values():
        sent = update["weights"]
        assert torch.equal(sent["net.features.0.weight"], sent["net.features.2.weight"])
    assert torch.equal(run.weights["net.features.0.weight"], run.weights["net.features.2.weight"])


def test_running_statistics_are_sent_as_they_are():
    spies = Spy(), Spy()
    for method, spy in zip((partial(FedADMM, rho=0), FedAvg), spies, strict=True):
        fit(make_client(method, net=noisy), callbacks=[spy], max_rounds=1)
    for k in range(4):
        ours, theirs = (spy.updates[0][k]["weights"] for spy in spies)
        assert torch.equal(ours["net.features.1.running_mean"], theirs["net.features.1.running_mean"])
        assert not torch.equal(ours["net.features.1.weight"], theirs["net.features.1.weight"])


def test_one_client_and_batches_of_one_where_classes_are_absent():
    check_batches_of_one(make_client(FedADMM, optimizer=partial(SGD, lr=0.02)), max_rounds=4)
    assert fit(make_client(FedADMM), blobs(40), max_rounds=2).rows[-1]["clients"] == 1


def test_behind_a_bound_the_whole_change_counts():
    """Of model and dual variable together: without noise and within the bound it is the plain mean."""
    behind = fit(make_client(FedADMM, rho=0.5), aggregator=DPAverage(noise_multiplier=0.0, clip=1e9))
    alone = fit(make_client(FedADMM, rho=0.5))
    assert near(behind.weights, alone.weights, atol=1e-4)
    bounded = fit(make_client(FedADMM, rho=0.5), aggregator=DPAverage(noise_multiplier=0.0, clip=0.1), max_rounds=1)
    names = [name for name, _ in make_client().named_parameters()]
    way = flat(bounded.weights, names) - flat(make_client().state_dict(), names)
    assert 0.05 < float(way.norm()) <= 0.1 + 1e-6


@pytest.mark.parametrize("value", [-0.1, math.nan])
def test_what_does_not_fit_is_refused(value):
    with pytest.raises(MisconfigurationException, match=rf"model\.rho={value} must be 0 or more"):
        make_client(FedADMM, rho=value)
    with pytest.raises(MisconfigurationException, match=rf"aggregator\.step={value} must be above 0"):
        PrimalDualAverage(value)
    with pytest.raises(MisconfigurationException, match=r"model\.previous='last' must be one of own, received"):
        make_client(FedADMM, previous="last")
