import copy
from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.nn.utils import parameters_to_vector
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
from pfl_lightning import Server, WeightedAverage
from pfl_lightning.aggregators import FedACG, FedAvgM
from pfl_lightning.messages import weighted_mean
from pfl_lightning.methods import FedAvg, FedProx
from pfl_lightning.nets import Net
from pfl_lightning.privacy import DPAverage
from pfl_lightning.selection import Sampling
from pfl_lightning.server.means import CoordinateMedian


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_rounds_of_all_sizes_by_the_paper_s_formulas(weighting):
    """With the momentum as the paper writes it, from changes; one round has nobody."""
    model = make_client(net=noisy).double()
    server = set_up(FedACG(momentum=0.7, weighting=weighting), model)
    names = [name for name, _ in model.named_parameters()]
    theta = flat(server.global_model(), names).clone()
    m = torch.zeros_like(theta)
    for number, cohort in enumerate([[0, 1, 3], [2], [], [1, 2]]):
        updates = {k: drawn_update(model, seed=5 * number + k + 1, size=10 + 7 * k) for k in cohort}
        before = copy.deepcopy(server.state)
        server.aggregate(updates, number)
        if not updates:
            assert equal(server.state, before)
            continue
        x = theta + 0.7 * m
        p = [10 + 7 * k if weighting == "samples" else 1 for k in cohort]
        changes = [flat(update["weights"], names) - x for update in updates.values()]
        m = 0.7 * m + sum(n * change for n, change in zip(p, changes, strict=True)) / sum(p)
        theta = theta + m
        torch.testing.assert_close(flat(server.global_model(), names), theta, rtol=0, atol=1e-13)
        sent = server.download(0)["weights"]
        torch.testing.assert_close(flat(sent, names), theta + 0.7 * m, rtol=0, atol=1e-13)
        # running statistics are the mean's, for clients too
        mean = weighted_mean([update["weights"] for update in updates.values()], [n / sum(p) for n in p])
        for name in mean.keys() - set(names):
            assert torch.equal(sent[name], mean[name]) and torch.equal(server.global_model()[name], mean[name])


def test_without_momentum_it_is_fedprox_bit_for_bit_and_with_it_is_not():
    make, settings = partial(make_client, FedProx, mu=0.1, net=noisy), {"clients_per_round": 3}
    plain, off, on = (
        fit(make(), aggregator=aggregator, **settings)
        for aggregator in (WeightedAverage(weighting="uniform"), FedACG(momentum=0.0), FedACG())
    )
    assert equal(plain.weights, off.weights) and plain.test() == off.test()
    assert equal(off.federation.aggregator.download(0)["weights"], off.federation.aggregator.global_model())
    assert not equal(plain.weights, on.weights)


def test_the_first_round_has_no_momentum_and_clients_start_ahead_from_the_second_on():
    spies = Spy(), Spy()
    for spy, aggregator in zip(spies, (FedACG(), WeightedAverage(weighting="uniform")), strict=True):
        run = fit(make_client(FedProx), aggregator=aggregator, callbacks=[spy], max_rounds=2)
        if spy is spies[0]:
            theta, sent = run.federation.aggregator.global_model(), run.federation.aggregator.download(0)["weights"]
    assert equal(spies[0].updates[0], spies[1].updates[0])
    assert not equal(spies[0].updates[1], spies[1].updates[1])
    assert all(not torch.equal(theta[name], sent[name]) for name in theta)
    # what goes on in a straight line: the step of the last round, times lambda
    means = [weighted_mean([update["weights"] for update in of.values()], [0.25] * 4) for of in spies[0].updates]
    ahead = {name: means[1][name] + 0.85 * (means[1][name] - means[0][name]) for name in theta}
    assert near(dict(sent), ahead, atol=1e-6)


def test_four_rounds_of_three_clients_by_a_second_implementation():
    """In float64, as the official code has it: a weight of mu / 2 without the half, about the model ahead."""
    eta, steps, weight, momentum, spy = 0.1, 3, 0.2, 0.85, Spy()
    data = blobs(24, 16, 40, batch_size=100)
    run = fit(
        make_client(FedProx, mu=2 * weight, optimizer=partial(SGD, lr=eta)),
        data,
        aggregator=FedACG(momentum=momentum),
        local_epochs=steps,
        max_rounds=4,
        clients_per_round=2,
        callbacks=[spy],
        precision="64-true",
    )
    assert len({tuple(cohort) for cohort in spy.cohorts}) > 1
    net = make_client().net.double()
    parts = [data.part(k, "train").to("cpu", torch.float64) for k in range(3)]
    theta = parameters_to_vector(net.parameters()).detach()
    m = torch.zeros_like(theta)
    for cohort in spy.cohorts:
        x, changes = theta + momentum * m, []
        for k in cohort:
            w = x.clone()
            for _ in range(steps):
                w = w - eta * (gradient(net, parts[k], at=w) + 2 * weight * (w - x))
            changes.append(w - x)
        m = momentum * m + sum(changes) / len(changes)
        theta = theta + m
    names = [f"net.{name}" for name, _ in net.named_parameters()]
    sent = run.federation.aggregator.download(0)["weights"]
    assert torch.allclose(flat(run.weights, names), theta, rtol=0, atol=1e-14)
    assert torch.allclose(flat(sent, names), theta + momentum * m, rtol=0, atol=1e-14)


def test_a_server_whose_clients_stay_coasts_to_a_stop():
    """Clients that send what they got: the momentum shrinks by lambda a round, and the model goes 1 / (1 - lambda)."""
    model = make_client().double()
    server = set_up(FedACG(momentum=0.5), model)
    start = copy.deepcopy(server.global_model())
    server.aggregate({0: {"weights": {name: tensor + 1 for name, tensor in start.items()}}}, 0)
    for number in range(1, 60):
        server.aggregate({0: {"weights": server.download(0)["weights"]}}, number)
    for name, tensor in server.global_model().items():
        torch.testing.assert_close(tensor, start[name] + 2)


def test_it_differs_from_momentum_on_the_server_alone():
    """FedAvgM moves the model that it sends by all of its momentum; here clients' work counts from ahead."""
    runs = [
        fit(make_client(), aggregator=aggregator)
        for aggregator in (FedAvgM(beta=0.85, weighting="uniform"), FedACG(momentum=0.85))
    ]
    assert not near(runs[0].weights, runs[1].weights, atol=1e-2)


def test_a_rule_takes_the_place_of_the_mean():
    model = make_client().double()
    server = set_up(FedACG(momentum=0.5, mean=CoordinateMedian()), model)
    start = copy.deepcopy(server.global_model())
    updates = {k: {"weights": {n: t + far for n, t in start.items()}} for k, far in enumerate((1.0, 2.0, 1e9))}
    server.aggregate(updates, 0)
    for name, tensor in server.global_model().items():
        torch.testing.assert_close(tensor, start[name] + 2)
        torch.testing.assert_close(server.download(0)["weights"][name], start[name] + 3)


def test_order_and_a_pause_change_no_bit(tmp_path):
    make = partial(make_client, FedProx, net=noisy)
    settings = {"clients_per_round": 3, "max_rounds": 4}
    whole = fit(make(), aggregator=FedACG(), **settings)
    assert same_end(whole, fit(make(), aggregator=FedACG(), engine=Shuffled, **settings))
    fit(make(), root=tmp_path, aggregator=FedACG(), callbacks=[Pause(2)], **settings)
    assert same_end(whole, fit(make(), root=tmp_path, aggregator=FedACG(), ckpt_path="last", **settings))


def test_engines_agree():
    runs = [
        fit(make_client(FedProx), aggregator=FedACG(), engine=engine, clients_per_round=3, accelerator="cpu")
        for engine in ("sequential", "vectorised")
    ]
    assert near(runs[0].weights, runs[1].weights)
    assert near(*(dict(run.federation.aggregator.download(0)["weights"]) for run in runs))


def test_a_tied_parameter_makes_one_step():
    def net(input_shape, num_classes):
        layer = nn.Linear(input_shape[0], input_shape[0])
        return Net(nn.Sequential(layer, nn.Tanh(), layer), nn.Linear(input_shape[0], num_classes))

    run = fit(make_client(net=net), aggregator=FedACG(), max_rounds=2)
    sent = run.federation.aggregator.download(0)["weights"]
    assert torch.equal(sent["net.features.0.weight"], sent["net.features.2.weight"])
    assert not torch.equal(sent["net.features.0.weight"], run.weights["net.features.0.weight"])


def test_uploads_of_half_precision_keep_their_type():
    server = set_up(FedACG(), make_client(net=noisy))
    start = server.global_model()
    moved = {n: (t + 1).bfloat16() if t.is_floating_point() else t + 1 for n, t in start.items()}
    for number in range(2):
        server.aggregate({0: {"weights": moved}}, number)
    assert all(tensor.dtype == moved[name].dtype for name, tensor in server.download(0)["weights"].items())


def test_it_learns_from_batches_of_one_where_classes_are_absent():
    run = fit(
        make_client(FedProx, optimizer=partial(SGD, lr=0.02)),
        blobs(30, 60, by_class=True, batch_size=1),
        aggregator=FedACG(momentum=0.5),
        max_rounds=4,
    )
    assert run.rows[-1]["val/loss"] < run.rows[0]["val/loss"]
    check_batches_of_one(make_client(FedProx, optimizer=partial(SGD, lr=0.02)), max_rounds=4)


@pytest.mark.parametrize("momentum", [1.0, -0.1, float("nan")])
def test_a_momentum_out_of_range_is_refused_by_name(momentum):
    with pytest.raises(
        MisconfigurationException, match=rf"aggregator\.momentum={momentum} must be 0 or more and below"
    ):
        FedACG(momentum=momentum)


# Behind the noise of DPAverage


def private(clients=4, **settings):
    model = make_client().double()
    shared = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    aggregator = DPAverage(**{"noise_multiplier": 0.0} | settings)
    aggregator.setup(Server(clients, shared, model, None, 0, 10, Sampling(clients)))
    return aggregator, sorted(shared)


def test_behind_a_wide_bound_it_is_the_same_server():
    settings = {"clients_per_round": 1.0, "max_rounds": 4, "precision": "64-true"}
    alone = fit(make_client(), aggregator=FedACG(), **settings)
    behind = fit(make_client(), aggregator=DPAverage(noise_multiplier=0.0, clip=1e9, server=FedACG()), **settings)
    ours, theirs = (run.federation.aggregator for run in (behind, alone))
    assert near(dict(ours.download(0)["weights"]), dict(theirs.download(0)["weights"]), atol=1e-6)
    assert near(dict(ours.global_model()), dict(theirs.global_model()), atol=1e-6)
    assert not near(dict(ours.global_model()), dict(ours.download(0)["weights"]), atol=1e-3)


def test_changes_are_bounded_from_the_model_that_clients_received():
    """One client moves the model by the bound over all, and what it receives by that times 1 + lambda, in any round."""
    for length in (1e-3, 1e6):
        (with_it, names), (without, _) = (private(clip=0.5, server=FedACG(momentum=0.6)) for _ in range(2))
        for number in range(3):
            generator = torch.Generator().manual_seed(number)
            updates = {}
            for k in range(4):
                x = with_it.download(k)["weights"]
                step = {n: torch.randn(x[n].shape, generator=generator, dtype=torch.float64) for n in names}
                updates[k] = {"weights": {n: x[n] + step[n] * (length if k == 3 else 0.01) for n in names}}
            # the same model before the round, with client 3 and with nothing from it
            without.state = copy.deepcopy(with_it.state)
            with_it.aggregate(updates, number)
            without.aggregate({k: updates[k] for k in range(3)}, number)
            gaps = [
                float((flat(part(with_it), names) - flat(part(without), names)).norm())
                for part in (lambda a: a.global_model(), lambda a: a.download(0)["weights"])
            ]
            own = min(0.5, float(flat(updates[3]["weights"], names).sub(flat(x, names)).norm()))
            assert gaps[0] == pytest.approx(own / 4, rel=1e-6)
            assert gaps[1] == pytest.approx(1.6 * own / 4, rel=1e-6)
    assert with_it.privacy()["releases"] == 3


def test_its_models_follow_from_the_noisy_means():
    """Post-processing: noise once, in the mean from what clients received, and nothing else of the clients."""
    behind, names = private(noise_multiplier=1.0, clip=0.5, server=FedACG(momentum=0.6))
    mean, _ = private(noise_multiplier=1.0, clip=0.5)
    alone = set_up(FedACG(momentum=0.6), make_client().double())
    for number in range(3):
        x = behind.download(0)["weights"]
        updates = {k: {"weights": {n: x[n] + 0.1 * (k + 1) for n in names}} for k in range(4)}
        mean.state["weights"] = dict(x)
        mean.aggregate(updates, number)
        alone.move(dict(mean.state["weights"]))
        behind.aggregate(updates, number)
        assert equal(behind.download(0), alone.download(0)) and equal(behind.global_model(), alone.global_model())
    assert behind.privacy()["epsilon"] == mean.privacy()["epsilon"]


def test_behind_noise_a_run_resumes_bit_for_bit(tmp_path):
    def server():
        return DPAverage(noise_multiplier=0.5, server=FedACG())

    whole = fit(make_client(FedAvg), root=tmp_path / "whole", aggregator=server(), max_rounds=4)
    fit(make_client(FedAvg), root=tmp_path / "halves", aggregator=server(), callbacks=[Pause(2)], max_rounds=4)
    resumed = fit(make_client(FedAvg), root=tmp_path / "halves", aggregator=server(), ckpt_path="last", max_rounds=4)
    assert same_end(whole, resumed)
    assert not equal(
        dict(resumed.federation.aggregator.global_model()), dict(resumed.federation.aggregator.download(0)["weights"])
    )
