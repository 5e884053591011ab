from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.nn import functional as F
from torch.optim import SGD

from federations import (
    CLASSES,
    HIDDEN,
    OneClient,
    Spy,
    blobs,
    equal,
    fit,
    load_client,
    make_client,
    near,
    noisy,
    points,
)
from pfl_lightning.data import ClientData, Samples
from pfl_lightning.messages import num_bytes
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.methods.fedprox import FedProx
from pfl_lightning.methods.fedrod import FedRoD

STEP = partial(SGD, lr=0.1)


class Both(FedRoD, FedProx):
    """Holds the generic model near the received one too."""


def generic(run):
    return {name: tensor for name, tensor in run.weights.items() if name.startswith("net.")}


def heads(run):
    return {client: state.personal["personal.weight"] for client, state in sorted(run.federation.clients.items())}


def holding(model, y, x=None):
    """The client after a download, with training samples of these classes."""
    part = Samples(torch.zeros(len(y), 1) if x is None else x, torch.tensor(y))
    model.on_download({"weights": {}}, ClientData(OneClient(part), 0))
    return model


def gradients(model, batch):
    model.training_step(batch, 0)["loss"].backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("lifetime", ["round", "run"])
def test_without_class_frequencies_the_generic_model_is_fedavg_s_bit_for_bit(lifetime):
    settings = {"net": noisy, "optimizer_lifetime": lifetime}
    rod = fit(make_client(partial(FedRoD, gamma=0.0), **settings), blobs(30, 45, by_class=True))
    average = fit(make_client(FedAvg, **settings), blobs(30, 45, by_class=True))
    assert equal(generic(rod), average.weights)
    rod = fit(make_client(partial(FedRoD, gamma=0.0, predict="generic"), **settings))
    assert near(
        [row["val/loss"] for row in rod.rows], [row["val/loss"] for row in fit(make_client(FedAvg, **settings)).rows]
    )


def test_class_frequencies_change_the_generic_model():
    biases = [fit(make_client(partial(FedRoD, gamma=g))).weights["net.classifier.bias"] for g in (0.0, 0.5, 1.0)]
    assert len({tuple(bias.tolist()) for bias in biases}) == 3


def test_of_equal_frequencies_balanced_softmax_is_cross_entropy():
    model = holding(make_client(FedRoD), [0, 1, 2] * 7)
    x, y = points(12, seed=1)
    z = model.net.features(x)
    logits = model.net.classifier(z)
    personal = F.cross_entropy(logits + model.personal(z), y)
    torch.testing.assert_close(model.loss(z, logits, y), F.cross_entropy(logits, y) + personal)


@pytest.mark.parametrize("gamma", [0.5, 1.0])
def test_the_loss_is_the_paper_s(gamma):
    counts = torch.tensor([1.0, 4.0, 2.0])
    model = holding(make_client(partial(FedRoD, gamma=gamma)), [0, 1, 1, 1, 1, 2, 2])
    z = torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(0))
    y = torch.arange(9) % CLASSES
    logits = model.net.classifier(z)
    odds = counts**gamma * logits.exp()
    balanced = -(odds[torch.arange(9), y] / odds.sum(1)).log().mean()
    both = (logits + model.personal(z)).exp()
    personal = -(both[torch.arange(9), y] / both.sum(1)).log().mean()
    torch.testing.assert_close(model.loss(z, logits, y), balanced + personal)


def test_the_generic_model_learns_from_the_first_term_and_the_personal_head_from_the_second():
    model = holding(make_client(FedRoD), [0, 0, 1, 2, 2, 2])
    x, y = points(9, seed=2)
    mine = gradients(model, (x, y))
    twin = make_client(FedRoD)
    z = twin.net.features(x)
    logits = twin.net.classifier(z)
    F.cross_entropy(logits + torch.tensor([2.0, 1.0, 3.0]).log(), y).backward()
    F.cross_entropy(logits.detach() + twin.personal(z.detach()), y).backward()
    for name, parameter in twin.named_parameters():
        torch.testing.assert_close(mine[name], parameter.grad)


def test_a_class_that_a_client_does_not_hold_has_no_part_in_its_generic_term():
    model = holding(make_client(FedRoD), [0, 0, 2])
    x, y = points(9, seed=2)
    mine = gradients(model, (x[y != 1], y[y != 1]))
    assert torch.equal(mine["net.classifier.weight"][1], torch.zeros(HIDDEN))
    assert mine["net.classifier.bias"][1] == 0 < mine["personal.bias"][1]
    assert all(gradient.isfinite().all() for gradient in mine.values())


def test_two_rounds_by_hand():
    data = blobs(30, batch_size=100)
    run = fit(make_client(FedRoD, optimizer=STEP), data, precision="64-true", max_rounds=2, local_epochs=3)
    net, part = make_client().net.double(), data.part(0, "train")
    head = make_client().net.double().classifier
    prior = torch.bincount(part.y, minlength=CLASSES).double().log()
    for _ in range(6):
        z = net.features(part.x.double())
        logits = net.classifier(z)
        own = F.cross_entropy(logits.detach() + head(z.detach()), part.y)
        slopes = torch.autograd.grad(own, list(head.parameters()))
        for parameter, slope in zip(head.parameters(), slopes, strict=True):
            parameter.data -= 0.1 * slope
        slopes = torch.autograd.grad(F.cross_entropy(logits + prior, part.y), list(net.parameters()))
        for parameter, slope in zip(net.parameters(), slopes, strict=True):
            parameter.data -= 0.1 * slope
    for name, tensor in net.state_dict().items():
        torch.testing.assert_close(run.weights[f"net.{name}"], tensor)
    torch.testing.assert_close(heads(run)[0], head.weight.detach())


def test_clients_are_evaluated_by_both_heads_and_those_without_by_the_generic_one():
    spy = Spy()
    runs = {}
    for predict in ("personal", "generic"):
        model = make_client(partial(FedRoD, predict=predict))
        runs[predict] = fit(model, callbacks=[spy], clients_per_round=2, max_rounds=2)
    assert equal(generic(runs["personal"]), generic(runs["generic"]))
    net, head = make_client().net, make_client().net.classifier
    net.load_state_dict({name.removeprefix("net."): t for name, t in generic(runs["personal"]).items()})
    states = runs["personal"].federation.clients
    assert 2 <= len(states) < 4
    for client in range(4):
        part = runs["personal"].data.part(client, "test")
        z = net.features(part.x)
        logits = net.classifier(z)
        losses = {name: run.federation.evaluations.results["test"][client]["loss"] for name, run in runs.items()}
        assert losses["generic"] == pytest.approx(float(F.cross_entropy(logits, part.y).detach()))
        if client in states:
            head.load_state_dict({name: states[client].personal[f"personal.{name}"] for name in ("weight", "bias")})
            logits = logits + head(z)
        assert losses["personal"] == pytest.approx(float(F.cross_entropy(logits, part.y).detach()))


def test_the_server_s_model_is_tested_as_the_generic_one():
    data = blobs(central_test=0.2)
    run = fit(make_client(FedRoD), data, test_every_round=True)
    net = make_client().net
    net.load_state_dict({name.removeprefix("net."): tensor for name, tensor in generic(run).items()})
    part = data.central_data()
    hits = (net(part.x).argmax(1) == part.y).float().mean()
    assert run.rows[-1]["test/global_acc"] == pytest.approx(float(hits))


def test_only_the_generic_model_travels_and_only_the_personal_head_stays():
    spy = Spy()
    rod, average = fit(make_client(FedRoD, net=noisy), callbacks=[spy]), fit(make_client(net=noisy))
    for direction in ("bytes/up", "bytes/down"):
        assert [row[direction] for row in rod.rows] == [row[direction] for row in average.rows]
    assert all(set(u) == {"weights", "num_samples"} for updates in spy.updates for u in updates.values())
    for state in rod.federation.clients.values():
        assert set(state.personal) == {"personal.weight", "personal.bias", "has_personal"}
        assert num_bytes(state.personal) == 4 * (HIDDEN + 1) * CLASSES + 1


def test_heads_grow_apart_and_wait_for_their_clients():
    runs = [fit(make_client(FedRoD), clients_per_round=2, max_rounds=rounds) for rounds in (1, 2, 3)]
    drawn = [set(map(int, row["cohort"].split())) for row in runs[-1].rows]
    assert drawn[0] - drawn[1] and drawn[1] & drawn[2]
    for client in drawn[0] - drawn[1]:
        assert torch.equal(heads(runs[0])[client], heads(runs[1])[client])
    for client in drawn[1] & drawn[2]:
        assert not torch.equal(heads(runs[1])[client], heads(runs[2])[client])
    assert len({tuple(head.flatten().tolist()) for head in heads(runs[-1]).values()}) == len(heads(runs[-1]))


@pytest.mark.parametrize(
    ("data", "settings"),
    [
        (blobs(30, 45, by_class=True), {}),  # classes that a client, and one that nobody, holds
        (blobs(30), {}),
        (blobs(8, 8, batch_size=1), {}),
        (blobs(30, 24), {"precision": "bf16-mixed"}),
    ],
)
def test_it_trains_where_there_is_little(data, settings):
    run = fit(make_client(FedRoD), data, **settings)
    assert run.rows[-1]["clients_diverged"] == 0
    assert run.rows[-1]["train/loss"] < run.rows[0]["train/loss"]
    assert all(head.isfinite().all() for head in heads(run).values())


def test_a_client_without_a_batch_has_no_personal_head():
    run = fit(make_client(FedRoD, net=noisy), blobs(40, 3), max_rounds=1)
    states = run.federation.clients
    assert states[0].personal["has_personal"] and not states[1].personal["has_personal"]


def test_its_loss_goes_together_with_another_one():
    settings = {"mu": 1.0, "gamma": 1.0}
    both = fit(make_client(partial(Both, **settings)))
    assert not equal(generic(both), generic(fit(make_client(FedRoD))))
    assert equal(generic(fit(make_client(partial(Both, **{**settings, "mu": 0.0})))), generic(fit(make_client(FedRoD))))


def test_a_client_is_loaded_from_a_checkpoint_with_its_personal_head(tmp_path):
    run = fit(make_client(FedRoD), root=tmp_path)
    x = run.data.part(1, "test").x
    client, server = (load_client(FedRoD, run.last, client=client) for client in (1, None))
    assert torch.equal(client.personal.weight, heads(run)[1])
    torch.testing.assert_close(client(x), client.net(x) + client.personal(client.net.features(x)))
    assert torch.equal(server(x), client.net(x))


@pytest.mark.parametrize("gamma", [-1, float("nan")])
def test_a_negative_exponent_is_refused_by_name(gamma):
    with pytest.raises(MisconfigurationException, match=rf"model\.gamma={gamma}"):
        make_client(partial(FedRoD, gamma=gamma))
