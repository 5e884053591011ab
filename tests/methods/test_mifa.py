import copy
import math
from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.nn.utils import parameters_to_vector
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR

from federations import (
    Spy,
    blobs,
    check_batches_of_one,
    check_order_and_resume,
    drawn_update,
    equal,
    fit,
    flat,
    gradient,
    make_client,
    near,
    noisy,
    set_up,
)
from pfl_lightning import WeightedAverage
from pfl_lightning.aggregators import LatestAverage
from pfl_lightning.engines import Sequential
from pfl_lightning.messages import weighted_mean
from pfl_lightning.methods import MIFA, FedAvg
from pfl_lightning.nets import Net


def decaying(optimizer):
    return LambdaLR(optimizer, lambda round: 1 / (round + 1))


def told(model, seed, rate, **entries):
    return drawn_update(model, seed, learning_rate=torch.tensor(rate, dtype=torch.float64), **entries)


@pytest.mark.parametrize("scheduled", [False, True])
def test_five_rounds_of_four_clients_by_a_second_implementation(scheduled):
    """In float64, as the official code has it: a table of changes over learning rates, of zeros at first."""
    lr, steps, clients, spy = 0.1, 3, 4, Spy()
    data = blobs(24, 16, 40, 20, batch_size=100)
    run = fit(
        make_client(MIFA, optimizer=partial(SGD, lr=lr), lr_scheduler=decaying if scheduled else None),
        data,
        local_epochs=steps,
        max_rounds=5,
        clients_per_round=2,
        callbacks=[spy],
        precision="64-true",
    )
    assert len({tuple(cohort) for cohort in spy.cohorts}) > 2
    net = make_client().net.double()
    parts = [data.part(k, "train").to("cpu", torch.float64) for k in range(clients)]
    x = parameters_to_vector(net.parameters()).detach()
    table, known = [torch.zeros_like(x) for _ in range(clients)], set()
    for number, cohort in enumerate(spy.cohorts):
        eta, ends = lr / (number + 1) if scheduled else lr, {}
        for k in cohort:
            w = x.clone()
            for _ in range(steps):
                w = w - eta * gradient(net, parts[k], at=w)
            ends[k] = w
        for k, w in ends.items():
            table[k] = (x - w) / eta
        x = x - eta * sum(table) / clients
        known |= set(cohort)
        assert run.rows[number]["server/remembered"] == len(known)
    names = [f"net.{name}" for name, _ in net.named_parameters()]
    assert torch.allclose(flat(run.weights, names), x, rtol=0, atol=1e-14)
    state = run.federation.aggregator.state
    assert state["changes"].keys() == state["rates"].keys() == known
    for k in known:
        kept = -flat(state["changes"][k], names) / state["rates"][k]
        assert torch.allclose(kept, table[k], rtol=0, atol=1e-13)


@pytest.mark.parametrize("clients", [1, 3, 4])
def test_where_all_come_it_is_the_plain_mean_bit_for_bit_also_while_learning_rates_fall(clients):
    """Three times 0.1 over 3 isn't 0.1 to the last bit, and yet no bit differs."""
    settings = {"net": noisy, "lr_scheduler": decaying, "optimizer": partial(SGD, lr=0.1, momentum=0.9)}
    data = partial(blobs, *(24, 16, 30, 20)[:clients])
    one = fit(make_client(MIFA, **settings), data(), max_rounds=4)
    other = fit(make_client(FedAvg, **settings), data(), aggregator=WeightedAverage(weighting="uniform"), max_rounds=4)
    assert equal(one.weights, other.weights) and one.test() == other.test()


def test_where_some_are_away_it_is_no_plain_mean():
    runs = [
        fit(make_client(method), aggregator=aggregator, clients_per_round=2)
        for method, aggregator in ((MIFA, None), (FedAvg, WeightedAverage(weighting="uniform")))
    ]
    assert not near(runs[0].weights, runs[1].weights, atol=1e-2)


def test_a_client_away_counts_by_its_latest_change_at_the_present_learning_rate():
    model = make_client().double()
    server = set_up(LatestAverage(), model, clients=4)
    names = [name for name, _ in model.named_parameters()]
    x = [flat(server.global_model(), names).clone()]
    rounds = [{0: 0.4, 2: 0.4}, {1: 0.1}, {0: 0.2, 1: 0.1}]
    changes, rates = {}, {}
    for number, cohort in enumerate(rounds):
        updates = {k: told(model, 10 * number + k, rate) for k, rate in cohort.items()}
        for k, update in updates.items():
            changes[k], rates[k] = flat(update["weights"], names) - x[-1], cohort[k]
        assert server.aggregate(updates, number) == {"remembered": float(len(changes))}
        eta = sum(cohort.values()) / len(cohort)
        x.append(x[-1] + sum(eta / rates[k] * changes[k] for k in changes) / 4)
        torch.testing.assert_close(flat(server.global_model(), names), x[-1], rtol=0, atol=1e-13)


def test_clients_that_come_often_don_t_pull_the_model_to_them():
    """Client 0 comes in nine rounds of ten; with both remembered, the model settles where their gradients sum to 0."""
    model = make_client(net=lambda shape, classes: Net(nn.Identity(), nn.Linear(shape[0], classes))).double()
    optima, lr, ends = (1.0, -1.0), 0.05, []
    for server in (LatestAverage(), WeightedAverage(weighting="uniform")):
        set_up(server, model, clients=2)
        for number in range(400):
            k = int(number % 10 == 9)
            x = server.global_model()
            # a step down (w - optimum)^2 / 2
            weights = {name: tensor - lr * (tensor - optima[k]) for name, tensor in x.items()}
            rate = torch.tensor(lr, dtype=torch.float64)
            server.aggregate({k: {"weights": weights, "num_samples": torch.tensor(1), "learning_rate": rate}}, number)
        ends.append(float(server.global_model()["net.classifier.bias"].mean()))
    assert abs(ends[0]) < 0.25 and ends[1] > 0.4


def test_a_client_without_a_learning_rate_counts_as_one_that_stays():
    model = make_client(net=noisy).double()
    server = set_up(LatestAverage(), model, clients=2)
    names = [name for name, _ in model.named_parameters()]
    x = copy.deepcopy(server.global_model())
    away = told(model, 1, 0.2)
    here = {"weights": copy.deepcopy(x), "learning_rate": torch.tensor(0.0, dtype=torch.float64)}
    server.aggregate({0: away, 1: here}, 0)
    half = flat(x, names) + 0.5 * (flat(away["weights"], names) - flat(x, names)) * 0.1 / 0.2
    torch.testing.assert_close(flat(server.global_model(), names), half, rtol=0, atol=1e-13)
    # where nobody has one, nothing moves
    before = flat(server.global_model(), names).clone()
    server.aggregate({1: {**here, "weights": copy.deepcopy(server.global_model())}}, 1)
    assert torch.equal(flat(server.global_model(), names), before)


def test_running_statistics_are_those_of_the_round():
    model = make_client(net=noisy)
    server = set_up(LatestAverage(), model)
    learnable = {name for name, _ in model.named_parameters()}
    server.aggregate({0: told(model, 1, 0.1), 3: told(model, 2, 0.1)}, 0)
    updates = {1: told(model, 3, 0.1), 2: told(model, 4, 0.1)}
    server.aggregate(updates, 1)
    mean = weighted_mean([update["weights"] for update in updates.values()], [0.5, 0.5])
    assert mean.keys() - learnable
    for name in mean.keys() - learnable:
        assert torch.equal(server.global_model()[name], mean[name])
    assert server.state["changes"][0].keys() == learnable


def test_nobody_taking_part_changes_nothing_and_nobody_is_forgotten():
    model = make_client()
    server = set_up(LatestAverage(), model)
    server.aggregate({1: told(model, 1, 0.1)}, 0)
    before = copy.deepcopy(server.state)
    assert server.aggregate({}, 1) == {} and equal(server.state, before)


def test_a_client_that_diverges_keeps_what_it_had():
    class Losing(Sequential):
        def run(self, jobs):
            for outcome in super().run(jobs):
                lost = outcome.client == 1 and self.module.round == 1
                if lost:
                    weights = {
                        n: t * math.nan if t.is_floating_point() else t for n, t in outcome.update["weights"].items()
                    }
                    outcome = outcome._replace(update=outcome.update | {"weights": weights}, finite=False)
                yield outcome

    states = []
    for rounds in (1, 2):
        run = fit(make_client(MIFA), engine=Losing, max_rounds=rounds)
        states.append(run.federation.aggregator.state)
    assert run.rows[1]["clients_diverged"] == 1 and run.rows[1]["server/remembered"] == 4
    assert equal(states[0]["changes"][1], states[1]["changes"][1])
    assert not equal(states[0]["changes"][0], states[1]["changes"][0])
    assert all(bool(tensor.isfinite().all()) for tensor in run.weights.values())


def test_the_order_of_earlier_rounds_changes_no_bit():
    """Memories are summed by client, whoever came first."""
    model, ends = make_client(), []
    for order in ([0, 3, 1], [1, 3, 0]):
        server = set_up(LatestAverage(), model)
        for number, k in enumerate(order):
            # all rounds from one model, so that a client's change is the same in either order
            server.state["weights"] = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            server.aggregate({k: told(model, k, 0.1)}, number)
        assert list(server.state["changes"]) == order
        ends.append(server.global_model())
    assert equal(*ends)


def test_order_and_a_pause_change_no_bit(tmp_path):
    check_order_and_resume(MIFA, tmp_path, clients_per_round=2, max_rounds=5)


@pytest.mark.parametrize("rates", [{}, {"lr_factors": [1.0, 0.5, 0.5, 2.0]}])
def test_engines_agree_also_where_clients_learn_at_rates_of_their_own(rates):
    runs = [
        fit(make_client(MIFA), engine=engine, clients_per_round=3, max_rounds=4, accelerator="cpu", **rates)
        for engine in ("sequential", "vectorised")
    ]
    one, other = (run.federation.aggregator.state["rates"] for run in runs)
    assert near(runs[0].weights, runs[1].weights) and one == other
    assert len(set(one.values())) == (3 if rates else 1)


def test_a_tied_parameter_makes_one_step():
    def net(input_shape, num_classes):
        layer = nn.Linear(input_shape[0], input_shape[0])
        return Net(nn.Sequential(layer, nn.Tanh(), layer), nn.Linear(input_shape[0], num_classes))

    weights = fit(make_client(MIFA, net=net), clients_per_round=2).weights
    assert torch.equal(weights["net.features.0.weight"], weights["net.features.2.weight"])
    assert not torch.equal(weights["net.features.0.weight"], make_client(net=net).net.features[0].weight)


def test_uploads_of_half_precision_are_remembered_in_single():
    model = make_client(net=noisy)
    server = set_up(LatestAverage(), model)
    half = {n: t.bfloat16() if t.is_floating_point() else t for n, t in told(model, 1, 0.1)["weights"].items()}
    server.aggregate({0: {"weights": half, "learning_rate": torch.tensor(0.1)}}, 0)
    assert {tensor.dtype for tensor in server.state["changes"][0].values()} == {torch.float32}
    assert all(tensor.dtype == half[name].dtype for name, tensor in server.global_model().items())


def test_it_learns_from_batches_of_one_where_classes_are_absent():
    check_batches_of_one(make_client(MIFA, optimizer=partial(SGD, lr=0.02)), max_rounds=4)


def test_clients_that_do_not_tell_the_learning_rate_are_refused():
    with pytest.raises(MisconfigurationException, match="LatestAverage needs learning_rate"):
        fit(make_client(FedAvg), aggregator=LatestAverage())
    fit(make_client(MIFA), aggregator=WeightedAverage(), max_rounds=1)
