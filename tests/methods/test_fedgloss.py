import copy
import math
from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.nn.utils import parameters_to_vector
from torch.optim import SGD

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
)
from pfl_lightning import Server
from pfl_lightning.aggregators import DynamicAverage, GlobalSharpness
from pfl_lightning.messages import weighted_mean
from pfl_lightning.methods import FedDyn, FedGloSS, FedSAM
from pfl_lightning.nets import Net


def set_up(aggregator, model, data):
    """An aggregator before its first round, for the clients of some data."""
    shared = {name: tensor.clone() for name, tensor in model.state_dict().items() if model.is_shared(name)}
    data.prepare_data()
    data.setup("fit")
    aggregator.setup(Server(data.num_clients, shared, model, data, seed=0))
    return aggregator


def test_rounds_of_all_sizes_by_the_paper_s_formulas():
    """With the dual variable as the paper writes it; one round has nobody, and running statistics are the mean's."""
    beta, rho = 3.0, 0.7
    model = make_client(net=noisy).double()
    server = set_up(GlobalSharpness(rho), model, blobs(10, 20, 30, 40))
    names = [name for name, _ in model.named_parameters()]
    w = flat(server.global_model(), names).clone()
    x, sigma = w, torch.zeros_like(w)
    for number, cohort in enumerate([[0, 1, 3], [2], [], [1, 2]]):
        updates = {k: drawn_update(model, seed=5 * number + k + 1, size=10 + 7 * k) for k in cohort}
        before = copy.deepcopy(server.state)
        logs = server.aggregate(updates, number)
        if not updates:
            assert logs == {} and equal(server.state, before)
            continue
        ends = [flat(update["weights"], names) for update in updates.values()]
        sigma = sigma - sum(end - x for end in ends) / (beta * 4)
        delta = x - sum(ends) / len(ends)
        w = w - delta - beta * sigma
        x = w + rho * delta / delta.norm()
        torch.testing.assert_close(flat(server.global_model(), names), w, rtol=0, atol=1e-13)
        sent = server.download(0)["weights"]
        torch.testing.assert_close(flat(sent, names), x, rtol=0, atol=1e-13)
        assert logs["change_norm"] == pytest.approx(float(delta.norm()))
        assert logs["drift_norm"] == pytest.approx(beta * float(sigma.norm()))
        mean = weighted_mean([update["weights"] for update in updates.values()], [1 / len(cohort)] * len(cohort))
        for name in mean.keys() - set(names):
            assert torch.equal(sent[name], mean[name]) and torch.equal(server.global_model()[name], mean[name])


def test_without_distances_it_is_feddyn_bit_for_bit_and_each_distance_changes_the_weights():
    alone = partial(FedDyn, alpha=0.25, weighting="uniform")
    cases = [
        (alone, DynamicAverage()),
        (partial(FedGloSS, rho=0.0, alpha=0.25), GlobalSharpness(rho=0.0)),
        (partial(FedGloSS, rho=0.1, alpha=0.25), GlobalSharpness(rho=0.0)),
        (partial(FedGloSS, rho=0.0, alpha=0.25), GlobalSharpness(rho=0.1)),
    ]
    runs = [fit(make_client(make, net=noisy), aggregator=server, clients_per_round=3) for make, server in cases]
    sent = [dict(run.federation.aggregator.download(0)["weights"]) for run in runs]
    own = [{k: state.personal for k, state in run.federation.clients.items()} for run in runs]
    assert equal(sent[0], sent[1]) and equal(own[0], own[1])
    assert not equal(sent[0], sent[2]) and not equal(sent[0], sent[3])
    # without a distance the model that clients receive is the global one
    assert equal(sent[1], dict(runs[1].federation.aggregator.global_model()))


def test_a_client_far_from_its_dual_variable_s_pull_trains_as_fedsam_s():
    """A small alpha takes the weight from the distance, and the dual variable is 0 in a first round."""
    runs = [
        fit(make_client(make, net=noisy), callbacks=[spy := Spy()], max_rounds=1) and spy
        for make in (
            partial(FedSAM, rho=0.3),
            partial(FedGloSS, rho=0.3, alpha=1e-9),
            partial(FedGloSS, rho=0.3, alpha=1.0),
        )
    ]
    plain, free, held = ({k: update["weights"] for k, update in spy.updates[0].items()} for spy in runs)
    assert near(plain, free, atol=1e-6)
    assert not near(plain, held, atol=1e-4)


def test_the_first_round_starts_from_w_and_later_ones_from_the_distance_above_it():
    run = fit(make_client(FedGloSS), aggregator=GlobalSharpness(rho=0.2), max_rounds=1)
    plain = fit(make_client(FedGloSS), aggregator=GlobalSharpness(rho=0.0), max_rounds=1)
    server, names = run.federation.aggregator, run.federation.aggregator.parameters
    assert equal(run.weights, plain.weights)
    up = flat(server.download(0)["weights"], names) - flat(server.global_model(), names)
    assert float(up.norm()) == pytest.approx(0.2, rel=1e-5)
    # the way up is the way back from the mean of the uploads
    back = parameters_to_vector(make_client().net.parameters()).detach() - flat(server.state["mean"], names)
    assert float(torch.cosine_similarity(up, back, dim=0)) == pytest.approx(1, abs=1e-5)


def test_clients_that_send_what_they_got_move_nothing_and_make_no_direction():
    model = make_client().double()
    server = set_up(GlobalSharpness(), model, blobs(9, 9))
    start = copy.deepcopy(server.global_model())
    for number in range(2):
        assert server.aggregate({0: {"weights": server.download(0)["weights"]}}, number)["change_norm"] == 0
        assert equal(server.download(0)["weights"], start) and equal(server.global_model(), start)


def test_four_rounds_of_three_clients_by_a_second_implementation():
    """In float64, with two of three clients a round."""
    eta, steps, rho_l, rho, beta, spy = 0.1, 3, 0.2, 0.3, 4.0, Spy()
    data = blobs(24, 16, 40, batch_size=100)
    run = fit(
        make_client(FedGloSS, rho=rho_l, alpha=1 / beta, optimizer=partial(SGD, lr=eta)),
        data,
        aggregator=GlobalSharpness(rho=rho),
        local_epochs=steps,
        max_rounds=4,
        clients_per_round=2,
        callbacks=[spy],
        precision="64-true",
    )
    assert len({tuple(cohort) for cohort in spy.cohorts}) > 1
    net = make_client().net.double()
    parts = [data.part(k, "train").to("cpu", torch.float64) for k in range(3)]
    w = parameters_to_vector(net.parameters()).detach()
    sigma, own, x = torch.zeros_like(w), [torch.zeros_like(w) for _ in parts], w
    for cohort in spy.cohorts:
        ends = []
        for k in cohort:
            y = x.clone()
            for _ in range(steps):
                g = gradient(net, parts[k], at=y)
                g = gradient(net, parts[k], at=y + rho_l * g / g.norm())
                y = y - eta * (g - own[k] + (y - x) / beta)
            own[k] = own[k] - (y - x) / beta
            ends.append(y)
        sigma = sigma - sum(y - x for y in ends) / (beta * 3)
        delta = x - sum(ends) / len(ends)
        w = w - delta - beta * sigma
        x = w + rho * delta / delta.norm()
    names = [f"net.{name}" for name, _ in net.named_parameters()]
    assert torch.allclose(flat(run.weights, names), w, rtol=0, atol=1e-13)
    sent = run.federation.aggregator.download(0)["weights"]
    assert torch.allclose(flat(sent, names), x, rtol=0, atol=1e-13)
    # the server's dual variable is the mean of the clients', of those too that never took part
    assert torch.allclose(sigma, sum(own) / 3, rtol=0, atol=1e-13)


def test_a_tied_parameter_is_moved_once_and_counts_once():
    def net(input_shape, num_classes):
        layer = nn.Linear(input_shape[0], input_shape[0])
        return Net(nn.Sequential(layer, nn.Tanh(), layer), nn.Linear(input_shape[0], num_classes))

    run = fit(make_client(FedGloSS, net=net), aggregator=GlobalSharpness(rho=0.5), max_rounds=2)
    sent, w = run.federation.aggregator.download(0)["weights"], run.weights
    assert torch.equal(sent["net.features.0.weight"], sent["net.features.2.weight"])
    up = [sent[f"net.{name}"] - w[f"net.{name}"] for name, _ in run.model.net.named_parameters()]
    assert float(parameters_to_vector(up).norm()) == pytest.approx(0.5, rel=1e-5)


def test_engines_agree():
    runs = [
        fit(make_client(FedGloSS), engine=engine, clients_per_round=3, accelerator="cpu")
        for engine in ("sequential", "vectorised")
    ]
    assert near(runs[0].weights, runs[1].weights)
    assert near(*(dict(run.federation.aggregator.download(0)["weights"]) for run in runs))


def test_order_and_a_pause_change_no_bit(tmp_path):
    check_order_and_resume(FedGloSS, tmp_path)


def test_one_client_and_batches_of_one_learn():
    fit(make_client(FedGloSS), blobs(12, batch_size=5), max_rounds=2)
    check_batches_of_one(make_client(FedGloSS, rho=0.05, optimizer=partial(SGD, lr=0.02)), max_rounds=4)


def test_what_comes_down_is_feddyn_s():
    rows = [fit(make_client(method), max_rounds=2).rows for method in (FedDyn, FedGloSS)]
    assert [row["bytes/down"] for row in rows[0]] == [row["bytes/down"] for row in rows[1]]


@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf])
def test_a_distance_out_of_range_is_refused_by_name(value):
    with pytest.raises(MisconfigurationException, match=rf"model\.rho={value} must be 0 \(which is FedDyn\) or more"):
        make_client(FedGloSS, rho=value)
    with pytest.raises(MisconfigurationException, match=rf"aggregator\.rho={value} must be 0"):
        GlobalSharpness(rho=value)
    with pytest.raises(MisconfigurationException, match=r"model\.alpha=0 must be above 0"):
        make_client(FedGloSS, alpha=0)
