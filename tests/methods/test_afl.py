import copy
import math
from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim import SGD

from federations import (
    Pause,
    Shuffled,
    Spy,
    blobs,
    check_batches_of_one,
    drawn_update,
    equal,
    fit,
    flat,
    gradient,
    make_client,
    near,
    noisy,
    same_end,
    set_up,
)
from pfl_lightning import WeightedAverage
from pfl_lightning.aggregators import AgnosticAverage
from pfl_lightning.messages import weighted_mean
from pfl_lightning.methods import AFL, FedAvg
from pfl_lightning.methods.afl import onto_simplex

PLAIN = partial(SGD, lr=0.1)


def told(model, seed, loss):
    return drawn_update(model, seed, received_loss=torch.tensor(loss))


@pytest.mark.parametrize("ascent", ["exponential", "projected"])
def test_rounds_of_four_clients_by_a_second_implementation(ascent):
    """In float64, half of them in a round: losses at x, training, the mean by the weights of before, then the step."""
    lr, steps, gamma, spy = 0.1, 3, 0.7, Spy()
    data = blobs(24, 16, 40, 20, batch_size=100)
    run = fit(
        make_client(AFL, optimizer=partial(SGD, lr=lr)),
        data,
        aggregator=AgnosticAverage(step=gamma, ascent=ascent),
        local_epochs=steps,
        max_rounds=5,
        clients_per_round=2,
        callbacks=[spy],
        precision="64-true",
    )
    assert len({tuple(cohort) for cohort in spy.cohorts}) > 2
    net = make_client().net.double()
    parts = [data.part(k, "train").to("cpu", torch.float64) for k in range(4)]
    x, own = parameters_to_vector(net.parameters()).detach(), torch.full((4,), 0.25).double()
    for cohort in spy.cohorts:
        losses, ends = [], []
        for k in cohort:
            vector_to_parameters(x.clone(), net.parameters())
            losses.append(F.cross_entropy(net(parts[k].x), parts[k].y).detach())
            w = x.clone()
            for _ in range(steps):
                w = w - lr * gradient(net, parts[k], at=w)
            ends.append(w)
        own_, losses = own[cohort], torch.stack(losses)
        x = (own_[:, None] * torch.stack(ends)).sum(0) / own_.sum()
        if ascent == "exponential":
            up = own_ * (gamma * losses).exp()
            own[cohort] = up * own_.sum() / up.sum()
        else:
            # by bisection of what all entries lose
            low, high = -10.0, 10.0
            for _ in range(200):
                middle = (low + high) / 2
                too_much = (own_ + gamma * losses - middle).clamp_min(0).sum() > own_.sum()
                low, high = (middle, high) if too_much else (low, middle)
            own[cohort] = (own_ + gamma * losses - low).clamp_min(0)
    names = [f"net.{name}" for name, _ in net.named_parameters()]
    assert torch.allclose(flat(run.weights, names), x, rtol=0, atol=1e-7)
    ours = torch.tensor(list(run.federation.aggregator.state["lambda"].values())).double()
    # a client's loss is sent in float32
    assert torch.allclose(ours, own, rtol=0, atol=1e-7)


@pytest.mark.parametrize("ascent", ["exponential", "projected"])
def test_without_a_step_it_is_the_plain_mean_bit_for_bit_and_with_one_it_is_not(ascent):
    settings = {"clients_per_round": 3, "max_rounds": 4}
    plain, off, on = (
        fit(make_client(method, net=noisy), aggregator=aggregator, **settings)
        for method, aggregator in (
            (FedAvg, WeightedAverage(weighting="uniform")),
            (AFL, AgnosticAverage(step=0.0, ascent=ascent)),
            (AFL, AgnosticAverage(step=1.0, ascent=ascent)),
        )
    )
    assert equal(plain.weights, off.weights) and plain.test() == off.test()
    assert not near(plain.weights, on.weights, atol=1e-3)


@pytest.mark.parametrize(("ascent", "step"), [("exponential", 0.5), ("projected", 0.1)])
def test_the_worst_client_fares_better_than_by_the_plain_mean(ascent, step):
    """One client alone has a class, which the mean of seven models forgets."""
    worst = []
    for method, aggregator in (
        (FedAvg, WeightedAverage(weighting="uniform")),
        (AFL, AgnosticAverage(step=step, ascent=ascent)),
    ):
        data = blobs(14, 13, 13, 14, 13, 13, 40, by_class=True, batch_size=100)
        run = fit(make_client(method, optimizer=PLAIN), data, aggregator=aggregator, local_epochs=2, max_rounds=15)
        net = run.model.net.cpu()
        losses = [float(F.cross_entropy(net(part.x), part.y)) for k in range(7) for part in [data.part(k, "train")]]
        worst.append(max(losses))
    assert worst[1] < 0.9 * worst[0]


def test_weights_count_in_the_round_after_and_running_statistics_by_them_too():
    model = make_client(net=noisy).double()
    server = set_up(AgnosticAverage(step=1.0), model)
    updates = {k: told(model, k, math.log(k + 1.0)) for k in (0, 1, 3)}
    first = server.aggregate(updates, 0)
    mean = weighted_mean([update["weights"] for update in updates.values()], [1 / 3] * 3)
    assert equal(dict(server.global_model()), dict(mean))
    assert first == {"largest": 1 / 3, "loss": pytest.approx(math.log(1 * 2 * 4) / 3)}
    # factors 1, 2 and 4, of a sum of 3 / 4
    assert list(server.state["lambda"].values()) == pytest.approx([0.75 / 7, 1.5 / 7, 0.25, 3 / 7])
    updates = {k: told(model, 5 + k, 1.0) for k in (0, 1, 2)}
    second = server.aggregate(updates, 1)
    shares = [0.75 / 7, 1.5 / 7, 0.25]
    mean = weighted_mean([update["weights"] for update in updates.values()], [s / sum(shares) for s in shares])
    assert near(dict(server.global_model()), dict(mean), atol=1e-6)
    assert second["largest"] == pytest.approx(0.25 / sum(shares))
    # equal losses move nothing
    assert list(server.state["lambda"].values()) == pytest.approx([0.75 / 7, 1.5 / 7, 0.25, 3 / 7])


@pytest.mark.parametrize("ascent", ["exponential", "projected"])
def test_the_weights_stay_a_mixture_whatever_the_losses(ascent):
    model = make_client()
    server = set_up(AgnosticAverage(step=2.0, ascent=ascent), model)
    for number, losses in enumerate([(0.0, 1e30, 0.5), (1e-30, 0.0, 3.0), (900.0, 1000.0, 1.0), (0.0, 0.0, 0.0)]):
        server.aggregate({k: told(model, k, loss) for k, loss in enumerate(losses)}, number)
        own = list(server.state["lambda"].values())
        assert sum(own) == pytest.approx(1.0) and min(own) >= 0
        assert all(bool(tensor.isfinite().all()) for tensor in server.global_model().values())


def test_by_sums_a_weight_of_zero_rises_again():
    model = make_client()
    server = set_up(AgnosticAverage(step=1.0, ascent="projected"), model, clients=2)
    server.aggregate({0: told(model, 0, 3.0), 1: told(model, 1, 0.0)}, 0)
    assert server.state["lambda"] == {0: 1.0, 1: 0.0}
    # alone, a client without weight is the mean of the round
    server.aggregate({1: told(model, 2, 0.5)}, 1)
    assert equal(dict(server.global_model()), dict(told(model, 2, 0.5)["weights"]))
    server.aggregate({0: told(model, 0, 0.0), 1: told(model, 1, 1.5)}, 2)
    assert server.state["lambda"] == {0: 0.25, 1: 0.75}


def test_losses_that_are_no_numbers_and_rounds_without_clients_change_no_weight():
    model = make_client()
    server = set_up(AgnosticAverage(step=1.0), model)
    before = copy.deepcopy(server.state["lambda"])
    server.aggregate({0: told(model, 0, math.inf)}, 0)
    assert server.state["lambda"] == before
    server.aggregate({0: told(model, 0, math.inf), 1: told(model, 1, 1.0), 2: told(model, 2, 2.0)}, 1)
    own = server.state["lambda"]
    assert own[0] == own[3] == 0.25 and own[1] + own[2] == pytest.approx(0.5) and own[2] > 0.25
    before = copy.deepcopy(server.state)
    assert server.aggregate({}, 2) == {} and equal(server.state, before)


@pytest.mark.parametrize("size", [1, 2, 9])
def test_the_projection_is_the_nearest_point_of_the_simplex(size):
    generator = torch.Generator().manual_seed(size)
    for total in (1.0, 0.3, 0.0):
        point = torch.randn(size, generator=generator, dtype=torch.float64)
        found = onto_simplex(point, total)
        assert float(found.min()) >= 0 and float(found.sum()) == pytest.approx(total, abs=1e-12)
        # no other point of the simplex is in front of it, as seen from the given one
        others = total * torch.distributions.Dirichlet(torch.ones(size).double()).sample((200,))
        assert float(((others - found) @ (point - found)).max()) <= 1e-12


@pytest.mark.parametrize("ascent", ["exponential", "projected"])
def test_order_and_a_pause_change_no_bit(ascent, tmp_path):
    make, server = partial(make_client, AFL, net=noisy), partial(AgnosticAverage, step=0.5, ascent=ascent)
    settings = {"clients_per_round": 3, "max_rounds": 4}
    whole = fit(make(), aggregator=server(), **settings)
    assert same_end(whole, fit(make(), aggregator=server(), engine=Shuffled, **settings))
    fit(make(), root=tmp_path, aggregator=server(), callbacks=[Pause(2)], **settings)
    assert same_end(whole, fit(make(), root=tmp_path, aggregator=server(), ckpt_path="last", **settings))


def test_engines_agree():
    runs = [
        fit(make_client(AFL), engine=engine, clients_per_round=3, max_rounds=4, accelerator="cpu")
        for engine in ("sequential", "vectorised")
    ]
    one, other = (run.federation.aggregator.state["lambda"] for run in runs)
    assert near(runs[0].weights, runs[1].weights) and near(one, other)
    assert len(set(one.values())) > 1


def test_one_client_is_fedavg_bit_for_bit():
    runs = [fit(make_client(method), blobs(60)) for method in (AFL, FedAvg)]
    assert equal(runs[0].weights, runs[1].weights)


def test_it_learns_from_batches_of_one_where_classes_are_absent():
    check_batches_of_one(make_client(AFL, optimizer=partial(SGD, lr=0.02)), max_rounds=4)


@pytest.mark.parametrize("step", [-0.1, math.nan, math.inf])
def test_a_step_out_of_range_is_refused_by_name(step):
    with pytest.raises(MisconfigurationException, match=rf"aggregator\.step={step} must be 0"):
        AgnosticAverage(step=step)


def test_other_mistakes_are_refused_by_name():
    with pytest.raises(MisconfigurationException, match=r"aggregator\.ascent='linear' must be one of"):
        AgnosticAverage(ascent="linear")
    with pytest.raises(MisconfigurationException, match="AgnosticAverage needs received_loss"):
        fit(make_client(FedAvg), aggregator=AgnosticAverage())
