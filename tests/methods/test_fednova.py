import copy
from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.nn.utils import parameters_to_vector
from torch.optim import SGD, Adam, RMSprop

from federations import Spy, blobs, equal, fit, flat, make_client, noisy, set_up
from pfl_lightning.aggregators import FedAvgM, NormalizedAverage
from pfl_lightning.methods import FedAvg, FedNova, FedProx

NESTEROV = partial(SGD, lr=0.05, momentum=0.9, nesterov=True)
EVEN = (24, 24, 24)


def client(**settings):
    return make_client(FedNova, **{"optimizer": partial(SGD, lr=0.05), **settings})


def test_the_number_of_gradients_is_that_of_the_closed_forms():
    """Of seven steps, of which the proximal term undoes some."""
    rho, eta, mu, tau = 0.9, 0.05, 0.3, 7
    buffers = [sum(rho**i for i in range(step)) for step in range(1, tau + 1)]
    expected = {
        "plain": (client(), tau),
        "decayed": (client(optimizer=partial(SGD, lr=eta, weight_decay=0.1)), tau),
        "momentum": (client(optimizer=partial(SGD, lr=eta, momentum=rho)), sum(buffers)),
        "nesterov": (client(optimizer=NESTEROV), sum(1 + rho * b for b in buffers)),
        "proximal": (client(mu=mu), (1 - (1 - eta * mu) ** tau) / (eta * mu)),
    }
    ways = {name: model.way(tau, lr=eta) / eta for name, (model, _) in expected.items()}
    assert ways == {name: pytest.approx(count, rel=1e-12) for name, (_, count) in expected.items()}
    assert ways["momentum"] == pytest.approx(23.0467, abs=1e-4) and ways["nesterov"] == pytest.approx(27.742, abs=1e-4)
    assert ways["proximal"] == pytest.approx(6.6928, abs=1e-4)
    both = client(mu=mu, optimizer=partial(SGD, lr=eta, momentum=rho))
    assert both.way(tau, lr=eta) / eta == pytest.approx(21.54, abs=0.005)


@pytest.mark.parametrize("optimizer", [Adam, RMSprop])
def test_optimizers_that_are_not_linear_are_refused(optimizer):
    with pytest.raises(MisconfigurationException, match=r"model\.optimizer makes steps that aren't linear"):
        client(optimizer=partial(optimizer, lr=0.01))


def test_momentum_that_lives_on_is_refused():
    with pytest.raises(MisconfigurationException, match=r"model\.optimizer_lifetime='run' brings gradients"):
        client(optimizer_lifetime="run")


@pytest.mark.parametrize("mu", [0.0, 0.5])
def test_the_model_that_it_sends_is_that_of_fedprox(mu):
    spies = Spy(), Spy()
    for method, spy in zip((FedNova, FedProx), spies, strict=True):
        fit(make_client(partial(method, mu=mu), net=noisy), callbacks=[spy], max_rounds=1)
    for k, update in spies[0].updates[0].items():
        assert equal(update["weights"], spies[1].updates[0][k]["weights"])
        assert int(update["steps"]) > 0


@pytest.mark.parametrize("effective", ["norm", "steps"])
def test_two_rounds_by_a_second_implementation(effective):
    """In float64, under momentum, with clients of different numbers of steps of which one can't make any."""
    rho, lr, spy = 0.9, 0.05, Spy()
    model = client(net=noisy, optimizer=partial(SGD, lr=lr, momentum=rho))
    data = blobs(30, 12, 1, 20, batch_size=4, test_fraction=0.0, val_fraction=0.0)
    run = fit(model, data, aggregator=NormalizedAverage(effective), callbacks=[spy], precision="64-true", max_rounds=2)
    names = [name for name, _ in model.named_parameters()]
    start = make_client(net=noisy).double()
    x = parameters_to_vector(start.parameters()).detach()
    for updates in spy.updates:
        parts = []
        for update in updates.values():
            tau = int(update["steps"])
            if tau:
                counted = (tau - rho * (1 - rho**tau) / (1 - rho)) / (1 - rho)
                y = flat(update["weights"], names)
                parts.append((int(update["num_samples"]), tau, counted, y - x))
        assert len(parts) == 3 and len({tau for _, tau, _, _ in parts}) == 3
        n = sum(part[0] for part in parts)
        far = sum(p[0] / n * (p[2] if effective == "norm" else p[1]) for p in parts)
        x = x + far * sum(p[0] / n * p[3] / p[2] for p in parts)
    ours = flat(run.weights, names)
    torch.testing.assert_close(ours, x, rtol=0, atol=1e-12)


def test_of_equal_steps_it_is_fedavg_and_by_steps_under_momentum_less_far():
    runs = [
        fit(make_client(method), blobs(*EVEN), aggregator=aggregator, max_rounds=1, precision="64-true").weights
        for method, aggregator in (
            (FedAvg, None),
            (FedNova, None),
            (FedNova, NormalizedAverage(effective="steps")),
            (FedNova, NormalizedAverage(beta=0.5)),
        )
    ]
    torch.testing.assert_close(runs[1], runs[0], rtol=0, atol=1e-13)
    torch.testing.assert_close(runs[3], runs[0], rtol=0, atol=1e-13)
    start = make_client().double().state_dict()
    tau, counted = 4, make_client(FedNova).way(4, lr=1.0)
    for name, tensor in start.items():
        torch.testing.assert_close(runs[2][name] - tensor, (runs[0][name] - tensor) * tau / counted)


def test_momentum_at_the_server_is_fedavgm_s():
    settings = {"max_rounds": 3, "precision": "64-true"}
    ours = fit(make_client(FedNova), blobs(*EVEN), aggregator=NormalizedAverage(beta=0.7), **settings)
    theirs = fit(make_client(FedAvg), blobs(*EVEN), aggregator=FedAvgM(beta=0.7), **settings)
    torch.testing.assert_close(ours.weights, theirs.weights, rtol=0, atol=1e-12)


@pytest.mark.exhaustive
def test_it_settles_nearer_to_the_optimum_of_all_than_fedavg():
    """Of (x - 0)^2 / 2 in one step and (x - 10)^2 / 2 in thirty, by exact gradients."""
    eta, taus, aims = 0.001, (1, 30), (0.0, 10.0)
    model = client()
    aggregator = set_up(NormalizedAverage(), model)
    names = [name for name, _ in model.named_parameters()]
    for number in range(3000):
        x = aggregator.global_model()
        updates = {}
        for k, (tau, aim) in enumerate(zip(taus, aims, strict=True)):
            shrink = (1 - eta) ** tau
            weights = {name: aim + (x[name].double() - aim) * shrink for name in names}
            counts = {"normalizer": torch.tensor(float(tau)), "steps": torch.tensor(tau)}
            updates[k] = {"weights": weights, "num_samples": torch.tensor(5), **counts}
        aggregator.aggregate(updates, number)
    assert float(aggregator.global_model()[names[0]].mean()) == pytest.approx(4.96, abs=0.01)


def test_nobody_stepping_moves_nothing():
    run = fit(client(optimizer=partial(SGD, lr=0.0)), max_rounds=1)
    assert equal(run.weights, make_client().state_dict())
    aggregator = set_up(NormalizedAverage(), client())
    before = copy.deepcopy(aggregator.state)
    assert aggregator.aggregate({}, 0) == {} and equal(aggregator.state, before)


def test_either_side_alone_is_refused():
    with pytest.raises(MisconfigurationException, match="needs normalizer and steps, which FedAvg does not send"):
        fit(make_client(), aggregator=NormalizedAverage())
    with pytest.raises(MisconfigurationException, match=r"aggregator\.effective='all' must be one of norm, steps"):
        NormalizedAverage(effective="all")
