import math

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from federations import drawn_update, equal, fit, flat, make_client, near, noisy, set_up
from pfl_lightning import WeightedAverage
from pfl_lightning.aggregators import FedExP
from pfl_lightning.nets import Net


def moved(model, start, **changes):
    """Updates of clients that moved a bias by the vectors that are given by name, as ``c0=[1, 0, 0]``."""
    updates = {}
    for name, change in changes.items():
        weights = {n: t.clone() for n, t in start.items()}
        weights["net.classifier.bias"] += torch.tensor(change, dtype=weights["net.classifier.bias"].dtype)
        updates[int(name[1:])] = {"weights": weights, "num_samples": torch.tensor(10)}
    return updates


@pytest.mark.parametrize(
    ("changes", "epsilon", "rate"),
    [
        # three orthogonal changes of length 1: the mean has the square 1 / 3
        ({"c0": [1.0, 0, 0], "c1": [0, 1.0, 0], "c3": [0, 0, 1.0]}, 0.0, 1.5),
        ({"c0": [1.0, 0, 0], "c1": [0, 1.0, 0], "c3": [0, 0, 1.0]}, 0.05, 1 / (2 * (1 / 3 + 0.05))),
        # nearly opposite ones: 1 over twice the small square of their mean
        ({"c0": [1.0, 0.1, 0], "c1": [-1.0, 0.1, 0]}, 0.0, 1.01 / (2 * 0.01)),
        # equal ones, one alone and none give the mean
        ({"c0": [1.0, 2.0, 0], "c1": [1.0, 2.0, 0]}, 0.0, 1.0),
        ({"c2": [1.0, 2.0, 0]}, 0.0, 1.0),
        ({"c0": [0.0, 0, 0], "c1": [0.0, 0, 0]}, 0.0, 1.0),
        # a large epsilon switches extrapolation off
        ({"c0": [1.0, 0, 0], "c1": [0, 1.0, 0], "c3": [0, 0, 1.0]}, 10.0, 1.0),
    ],
)
def test_the_rate_and_the_step_by_hand(changes, epsilon, rate):
    model = make_client().double()
    server = set_up(FedExP(epsilon=epsilon, average_last=False), model)
    start = server.global_model()
    logs = server.aggregate(moved(model, start, **changes), 0)
    assert logs["rate"] == pytest.approx(rate)
    mean = torch.tensor(list(changes.values()), dtype=torch.float64).mean(0)
    change = server.global_model()["net.classifier.bias"] - start["net.classifier.bias"]
    torch.testing.assert_close(change, rate * mean)


def test_clients_count_by_samples_over_all_parameters_together():
    model = make_client(net=noisy).double()
    updates = {1: drawn_update(model, 1, 30), 2: drawn_update(model, 2, 10)}
    server = set_up(FedExP(epsilon=0.3, average_last=False), model)
    names = [name for name, _ in model.named_parameters()]
    x = flat(server.global_model(), names)
    deltas = {k: flat(update["weights"], names) - x for k, update in updates.items()}
    mean = 0.75 * deltas[1] + 0.25 * deltas[2]
    spread = 0.75 * deltas[1].square().sum() + 0.25 * deltas[2].square().sum()
    rate = max(1.0, float(spread / (2 * (mean.square().sum() + 0.3))))
    server.aggregate(updates, 0)
    torch.testing.assert_close(flat(server.global_model(), names), x + rate * mean)
    # running statistics are averaged, and counters take the largest
    plain = set_up(WeightedAverage(), model)
    plain.aggregate(updates, 0)
    for name in server.global_model().keys() - set(names):
        assert torch.equal(server.global_model()[name], plain.global_model()[name])


def test_a_rate_of_one_is_fedavg_bit_for_bit():
    runs = [
        fit(make_client(net=noisy), aggregator=aggregator, clients_per_round=3)
        for aggregator in (WeightedAverage(), FedExP(epsilon=1e6, average_last=False), FedExP(epsilon=1e-9))
    ]
    assert equal(runs[0].weights, runs[1].weights)
    assert not equal(runs[0].weights, runs[2].weights)


def test_the_deployed_model_is_the_mean_of_the_last_two_and_ends_the_plan():
    model = make_client(net=noisy)
    server = set_up(FedExP(epsilon=0.0), model)
    server.rounds = 2
    names = [name for name, _ in model.named_parameters()]
    iterates = [flat(server.download(0)["weights"], names)]
    for number in range(2):
        server.aggregate({k: drawn_update(model, k + 2 * number) for k in (0, 1)}, number)
        iterates.append(flat(server.download(0)["weights"], names))
        deployed = flat(server.global_model(), names)
        if number == 0:
            torch.testing.assert_close(deployed, (iterates[0] + iterates[1]) / 2)
    assert torch.equal(iterates[2], deployed)
    # without it, the second iterate would be twice the deployed model less the first one
    other = set_up(FedExP(epsilon=0.0, average_last=False), model)
    for number in range(2):
        other.aggregate({k: drawn_update(model, k + 2 * number) for k in (0, 1)}, number)
    last = flat(other.global_model(), names)
    torch.testing.assert_close(deployed, (iterates[1] + last) / 2)


def test_a_round_without_updates_leaves_the_state():
    server = set_up(FedExP(), make_client())
    before = dict(server.state)
    assert server.aggregate({}, 0) == {} and equal(server.state, before)


def test_a_tied_parameter_counts_once_and_makes_one_step():
    def net(input_shape, num_classes):
        layer = nn.Linear(input_shape[0], input_shape[0], bias=False)
        return Net(nn.Sequential(layer, nn.Tanh(), layer), nn.Linear(input_shape[0], num_classes))

    model = make_client(net=net).double()
    server = set_up(FedExP(epsilon=0.0, average_last=False), model)
    start = {n: t.clone() for n, t in server.global_model().items()}
    updates = moved(model, start, c0=[0.0, 0, 0], c1=[1.0, 0, 0])
    for name in ("net.features.0.weight", "net.features.2.weight"):
        updates[0]["weights"][name] = start[name] + 1
    size = start["net.features.0.weight"].numel()
    # squares of size and 1, half of each, over twice a quarter of both
    assert server.aggregate(updates, 0)["rate"] == pytest.approx(((size + 1) / 2) / (2 * (size + 1) / 4))
    end = server.global_model()
    assert torch.equal(end["net.features.0.weight"], end["net.features.2.weight"])


def test_a_run_ends_at_its_deployed_model():
    run = fit(make_client(net=noisy), aggregator=FedExP(epsilon=0.0), max_rounds=2)
    assert near(run.federation.aggregator.download(0)["weights"], run.federation.aggregator.global_model())
    assert run.rows[-1]["server/rate"] >= 1


@pytest.mark.parametrize("epsilon", [-1.0, math.nan, math.inf])
def test_an_epsilon_out_of_range_is_refused_by_name(epsilon):
    with pytest.raises(MisconfigurationException, match=rf"aggregator\.epsilon={epsilon}"):
        FedExP(epsilon=epsilon)
