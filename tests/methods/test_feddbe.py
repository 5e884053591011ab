import copy
from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.nn import functional as F
from torch.optim import SGD

from federations import (
    HIDDEN,
    Spy,
    blobs,
    check_batches_of_one,
    drawn_update,
    equal,
    fit,
    make_client,
    noisy,
    points,
    set_up,
)
from pfl_lightning.aggregators import DomainConsensus
from pfl_lightning.methods import FedAvg, FedDBE
from pfl_lightning.server.means import CoordinateMedian

PLAIN = partial(SGD, lr=0.2)


@pytest.mark.parametrize("mu", [1.0, 0.3])
def test_three_rounds_by_a_second_implementation(mu):
    """In float64, with two clients of different sizes and two steps a round; the first round only reports."""
    lr, kappa, data = 0.2, 5.0, blobs(24, 36, batch_size=100)
    client = make_client(FedDBE, kappa=kappa, mu=mu, optimizer=PLAIN)
    run = fit(client, data, max_rounds=3, local_epochs=2, precision="64-true")
    parts = [run.data.part(k, "train").to("cpu", torch.float64) for k in range(2)]
    sizes = [len(part) for part in parts]
    net = make_client().net.double()
    start, bias, consensus = copy.deepcopy(net.state_dict()), [torch.zeros(HIDDEN).double() for _ in range(2)], None
    for number in range(3):
        ends, means = [], []
        for k, part in enumerate(parts):
            net.load_state_dict(start)
            z, r = bias[k].clone().requires_grad_(), torch.zeros(HIDDEN).double()
            for _ in range(2):
                h = net.features(part.x)
                r = (1 - mu) * r.detach() + mu * h.mean(0)
                loss = F.cross_entropy(net.classifier(h + z if number else h), part.y)
                if number:
                    loss = loss + kappa * 0.5 * (r - consensus).square().mean()
                trained = [*net.parameters(), *([z] if number else [])]
                for p, g in zip(trained, torch.autograd.grad(loss, trained), strict=True):
                    p.data -= lr * g
            bias[k] = z.detach()
            ends.append(copy.deepcopy(net.state_dict()))
            means.append(r.detach())
        p = [size / sum(sizes) for size in sizes]
        if number == 0:
            consensus = p[0] * means[0] + p[1] * means[1]
        else:
            start = {name: p[0] * ends[0][name] + p[1] * ends[1][name] for name in start}
    ours = run.federation.aggregator
    torch.testing.assert_close(ours.state["consensus"]["mean"], consensus, rtol=0, atol=1e-12)
    for name, tensor in start.items():
        torch.testing.assert_close(ours.global_model()[f"net.{name}"], tensor, rtol=0, atol=1e-12)
    for k in range(2):
        torch.testing.assert_close(run.federation.clients[k].personal["bias"], bias[k], rtol=0, atol=1e-12)


def test_the_first_round_only_reports():
    spy = Spy()
    run = fit(make_client(FedDBE, net=noisy), max_rounds=1, callbacks=[spy])
    start = make_client(net=noisy).state_dict()
    assert all(torch.equal(run.federation.aggregator.global_model()[name], t) for name, t in start.items())
    assert not any(state.personal["bias"].any() for state in run.federation.clients.values())
    assert all(update["feature_mean"].any() for update in spy.updates[0].values())


def test_the_consensus_is_that_of_the_first_round_for_ever():
    first, last = (fit(make_client(FedDBE), max_rounds=rounds).federation.aggregator.state for rounds in (1, 3))
    assert equal(first["consensus"], last["consensus"])


def test_clients_report_when_they_first_take_part_and_the_consensus_is_the_mean_over_them():
    spy = Spy()
    run = fit(make_client(FedDBE), max_rounds=8, clients_per_round=1, callbacks=[spy])
    assert len(set(map(tuple, spy.cohorts[:3]))) > 1
    reports = {}
    for updates in spy.updates:
        for client, update in updates.items():
            reports.setdefault(client, update)
    total = sum(int(update["num_samples"]) for update in reports.values())
    mean = sum(int(update["num_samples"]) / total * update["feature_mean"] for update in reports.values())
    torch.testing.assert_close(run.federation.aggregator.state["consensus"]["mean"], mean)


def aggregator_of(model, **settings):
    return set_up(DomainConsensus(**settings), model)


def report(model, client, size=10):
    mean = torch.full((HIDDEN,), float(client))
    return drawn_update(model, client, size, feature_mean=mean)


@pytest.mark.parametrize("weighting, second", [("samples", (1 * 10 + 4 * 30) / 40), ("uniform", 2.5)])
def test_a_late_client_is_sent_the_consensus_once_it_has_reported(weighting, second):
    model = make_client(FedDBE)
    ours, plain = aggregator_of(model, weighting=weighting), aggregator_of(model, weighting=weighting)
    ours.aggregate({1: report(model, 1)}, 0)
    assert ours.download(1)["consensus"] and not ours.download(3)["consensus"]
    ours.aggregate({1: report(model, 7), 3: report(model, 4, size=30)}, 1)
    for client in (1, 3):
        torch.testing.assert_close(ours.download(client)["consensus"]["mean"], torch.full((HIDDEN,), second))
    # the model of a late client counts
    plain.state |= {"consensus": {"mean": torch.zeros(HIDDEN)}, "reported": {1: 1.0, 3: 1.0}}
    plain.aggregate({1: report(model, 7), 3: report(model, 4, size=30)}, 1)
    assert equal(ours.global_model(), plain.global_model())
    assert equal(ours.welcome(4, None), ours.download(1)) and not ours.download(0)["consensus"]


def test_a_rule_sees_what_all_have_reported():
    model = make_client(FedDBE)
    ours = aggregator_of(model, mean=CoordinateMedian())
    ours.aggregate({0: report(model, 5), 1: report(model, 1)}, 0)
    ours.aggregate({1: report(model, 8), 2: report(model, 90)}, 1)
    assert ours.state["consensus"]["mean"].tolist() == [5.0] * HIDDEN


def test_the_gradient_of_the_regulariser_is_kappa_mu_times_the_distance():
    client, (x, y) = make_client(FedDBE, kappa=7.0, mu=0.4), points(9, seed=1)
    client.reached.fill_(1.0)
    client.consensus.copy_(torch.arange(HIDDEN))
    caught = []
    client.net.features.register_forward_hook(lambda module, inputs, h: caught.append(h))
    total = client.training_step((x, y), 0)["loss"]
    (slope,) = torch.autograd.grad(total - F.cross_entropy(client.net.classifier(caught[0]), y), caught[0])
    r = 0.4 * caught[0].mean(0)
    torch.testing.assert_close(slope, (7.0 * 0.4 * (r - client.consensus) / (HIDDEN * 9)).expand(9, HIDDEN))


def test_the_bias_is_a_personal_bias_of_a_linear_classifier():
    run = fit(make_client(FedDBE))
    model, (x, _) = run.model, points(9, seed=1)
    model.receive(run.federation.clients[1].personal, run.federation.aggregator.download(1), None)
    head = model.net.classifier
    expected = F.linear(model.net.features(x), head.weight, head.bias + head.weight @ model.bias)
    torch.testing.assert_close(model(x), expected)
    assert model.bias.any()


def test_the_bias_never_travels_and_differs_between_clients():
    spy = Spy()
    run = fit(make_client(FedDBE), callbacks=[spy])
    assert all(set(state.personal) == {"bias"} for state in run.federation.clients.values())
    assert all(set(u["weights"]) == set(make_client(FedAvg).state_dict()) for us in spy.updates for u in us.values())
    own = [run.federation.clients[k].personal["bias"] for k in range(2)]
    assert not torch.equal(*own)


def test_it_learns_from_batches_of_one_and_of_absent_classes():
    check_batches_of_one(make_client(FedDBE, kappa=1.0, optimizer=partial(SGD, lr=0.05)), max_rounds=5)


@pytest.mark.parametrize(("name", "value"), [("kappa", -1.0), ("mu", 0.0), ("mu", 1.5)])
def test_what_is_out_of_range_is_refused_by_name(name, value):
    with pytest.raises(MisconfigurationException, match=rf"model\.{name}={value} must be"):
        make_client(FedDBE, **{name: value})
