import copy
from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, Adam

from federations import CLASSES, HIDDEN, blobs, drawn_update, equal, fit, make_client, set_up
from pfl_lightning.aggregators import FeatureGenerator
from pfl_lightning.messages import tree_map
from pfl_lightning.methods import FedAvg, FedGen
from pfl_lightning.methods.fedgen import alike, teacher_loss
from pfl_lightning.seeds import derive_seed

NOISE, WIDTH = 4, 6
SMALL = partial(FedGen, noise_size=NOISE, hidden=WIDTH)
COUNTS = {0: [4, 0, 2], 2: [0, 0, 5], 3: [1, 0, 3]}


def few(**settings):
    return FeatureGenerator(**{"server_steps": 3, "batch_size": 6, **settings})


def server(aggregator):
    made = set_up(aggregator, make_client(SMALL).double())
    made.state |= tree_map(lambda t: t.double() if t.is_floating_point() else t, made.state)
    return made


def updates(counts=COUNTS, seed=0):
    client = make_client(SMALL).double()
    return {k: drawn_update(client, seed + k, sum(n), class_counts=torch.tensor(n)) for k, n in sorted(counts.items())}


def layers(state):
    """The generator written down once more."""
    net = nn.ModuleList([nn.Linear(NOISE + CLASSES, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, HIDDEN)]).double()
    net.load_state_dict({name.replace("3.", "2."): t for name, t in state.items()})
    return net


def made_by(net, y, noise):
    one_hot = torch.stack([torch.eye(CLASSES, dtype=torch.float64)[c] for c in y])
    return net[2](net[1](net[0](torch.cat([noise, one_hot], 1))).relu())


@pytest.mark.parametrize("ensemble", ["samples", "official", "logits"])
def test_two_rounds_of_the_generator_by_a_second_implementation(ensemble):
    """Whose official form multiplies ``[n]`` by ``[n, 1]``, as the official code does."""
    ours = server(few(ensemble=ensemble, diversity=0.7))
    net = layers(ours.state["generator"])
    optimizer = Adam(net.parameters(), lr=3e-4, weight_decay=0.01)
    for number in range(2):
        sent = updates(seed=10 * number)
        log = ours.aggregate(sent, number)
        draws = torch.Generator().manual_seed(derive_seed(0, "fedgen", number))
        optimizer.param_groups[0]["lr"] = 3e-4 * 0.98**number
        net.train()
        for _ in range(3):
            y = torch.tensor([0, 2])[torch.randint(2, (6,), generator=draws)]
            noise = torch.rand(6, NOISE, generator=draws, dtype=torch.float64)
            z = made_by(net, y, noise)
            total, logits = 0.0, []
            for k, counts in COUNTS.items():
                head = sent[k]["weights"]
                logits.append(z @ head["net.classifier.weight"].T + head["net.classifier.bias"])
                losses = F.cross_entropy(logits[-1], y, reduction="none")
                share = torch.tensor([counts[c] / sum(n[c] for n in COUNTS.values()) for c in y]).double()
                total = total + (losses * (share[:, None] if ensemble == "official" else share)).mean()
            if ensemble == "logits":
                total = F.cross_entropy(sum(logits) / 3, y)
            products = [
                (noise[i] - noise[j]).square().mean() * (z[i] - z[j]).abs().mean() for i in range(6) for j in range(6)
            ]
            diversity = torch.exp(-torch.stack(products).mean())
            optimizer.zero_grad()
            (total + 0.7 * diversity).backward()
            optimizer.step()
        assert log == {"teacher_loss": pytest.approx(total.item()), "diversity": pytest.approx(diversity.item())}
    for one, other in zip(ours.state["generator"].values(), net.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other)


def test_shares_that_are_alike_make_the_official_loss_the_one_that_is_meant():
    logits = torch.randn(3, 8, CLASSES, dtype=torch.float64)
    y, even = torch.arange(8) % CLASSES, torch.full((3, 8), 1 / 3, dtype=torch.float64)
    torch.testing.assert_close(teacher_loss(logits, y, even, "samples"), teacher_loss(logits, y, even, "official"))
    uneven = even.clone()
    uneven[0, :4], uneven[1, :4] = 0.6, 1 / 15
    assert not torch.isclose(teacher_loss(logits, y, uneven, "samples"), teacher_loss(logits, y, uneven, "official"))


def test_features_are_at_most_wholly_alike():
    z, noise = torch.randn(5, 3), torch.rand(5, 2)
    assert 0 < alike(z, noise) < 1 and alike(z[:1], noise[:1]) == alike(z[:1].repeat(4, 1), noise[:4]) == 1


def test_classes_are_remembered_and_models_are_averaged():
    ours, average = server(few()), make_client().configure_aggregator()
    assert ours.download(0)["labels"].tolist() == []
    for number, counts in enumerate(({0: [0, 0, 2]}, {1: [3, 0, 0], 2: [0, 0, 1]})):
        sent = updates(counts)
        ours.aggregate(sent, number)
        average.aggregate(sent, number)
    assert ours.download(0)["labels"].tolist() == [0, 2]
    assert equal(ours.download(0)["weights"], average.download(0)["weights"])


def test_without_steps_or_clients_the_generator_stays():
    still, ours = server(few(server_steps=0)), server(few())
    before = copy.deepcopy(ours.state)
    assert still.aggregate(updates(), 0) == {} and equal(still.state["generator"], before["generator"])
    assert ours.aggregate({}, 0) == {} and equal(ours.state, before)
    ours.aggregate(updates(), 0)
    assert not equal(ours.state["generator"], before["generator"])


def test_a_clients_loss_by_hand():
    client, ours = make_client(SMALL, optimizer=partial(SGD, lr=0.1)).double(), server(few())
    ours.aggregate(updates(), 0)
    client.on_download(ours.download(0), None)
    client.train()
    client.round = 5
    x, y = torch.randn(7, 6, dtype=torch.float64), torch.arange(7) % CLASSES
    torch.manual_seed(4)
    value = client.training_step((x, y), 0)["loss"]
    torch.manual_seed(4)
    noise = torch.rand(2, 7, NOISE, dtype=torch.float64)
    drawn = torch.tensor([0, 2])[torch.randint(2, (7,))]
    net = layers(ours.state["generator"]).eval()
    h = client.net.features(x)
    head = client.net.classifier
    teacher = head(made_by(net, y, noise[0]).detach()).softmax(1).detach()
    taught = (teacher * (teacher.log() - head(h).log_softmax(1))).sum(1).mean()
    known = F.cross_entropy(head(made_by(net, drawn, noise[1]).detach()), drawn)
    expected = F.cross_entropy(head(h), y) + 10 * 0.98**5 * (taught + known)
    torch.testing.assert_close(value, expected)
    for one, other in zip(
        torch.autograd.grad(value, client.net.parameters()),
        torch.autograd.grad(expected, client.net.parameters()),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


def test_before_any_server_has_named_classes_the_loss_is_cross_entropy_alone():
    client = make_client(SMALL)
    x, y = torch.randn(7, 6), torch.arange(7) % CLASSES
    values = client.training_step((x, y), 0)
    assert set(values) == {"loss"} and torch.equal(values["loss"], F.cross_entropy(client(x), y))


def test_weights_fall_but_not_below_the_least_and_zero_stays_zero():
    client = make_client(SMALL)
    client.round = 3
    assert client.weight(10.0) == pytest.approx(10 * 0.98**3) and client.weight(0.0) == 0
    client.round = 10_000
    assert client.weight(10.0) == 1e-4


def test_without_the_terms_and_in_the_first_round_it_is_fedavg_bit_for_bit():
    off = partial(SMALL, alpha=0.0, beta=0.0)
    assert equal(fit(make_client(off), aggregator=few()).weights, fit(make_client()).weights)
    first = fit(make_client(SMALL), aggregator=few(), max_rounds=1)
    assert equal(first.weights, fit(make_client(), max_rounds=1).weights)
    ends = [
        fit(make_client(partial(SMALL, **terms)), aggregator=few(), max_rounds=2).weights
        for terms in ({}, {"alpha": 0.0}, {"beta": 0.0}, {"alpha": 0.0, "beta": 0.0})
    ]
    assert not any(equal(one, other) for i, one in enumerate(ends) for other in ends[:i])


def test_the_generator_comes_down_and_never_goes_up():
    run = fit(make_client(SMALL), aggregator=few())
    assert set(run.federation.aggregator.download(0)) == {"weights", "generator", "labels"}
    assert run.federation.clients[0].personal == {}
    assert all(name.startswith("net.") for name in run.weights)


def test_clients_without_a_generator_are_refused():
    with pytest.raises(
        MisconfigurationException, match=r"a generator that model FedAvg doesn't have; take model FedGen"
    ):
        fit(make_client(FedAvg), aggregator=few())


@pytest.mark.exhaustive
def test_clients_of_one_class_batches_of_one_and_one_client_alone_end_finite():
    for data in (blobs(20, 20, 30, by_class=True, batch_size=1), blobs(30), blobs(3, 20)):
        client = make_client(SMALL, optimizer=partial(SGD, lr=0.01))
        run = fit(client, data, aggregator=few())
        assert all(row["clients_diverged"] == 0 for row in run.rows)


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        *(("model", "alpha", -1.0), ("model", "beta", -1.0), ("model", "decay", 0.0), ("model", "noise_size", 0)),
        *(("model", "hidden", 0), ("aggregator", "server_steps", -1), ("aggregator", "batch_size", 1)),
        *(("aggregator", "diversity", -1.0), ("aggregator", "ensemble", "mean"), ("aggregator", "lr_decay", 2.0)),
    ],
)
def test_what_is_out_of_range_is_refused_by_name(owner, name, value):
    make = FeatureGenerator if owner == "aggregator" else partial(make_client, FedGen)
    with pytest.raises(MisconfigurationException, match=rf"{owner}\.{name}={value!r} must be"):
        make(**{name: value})
