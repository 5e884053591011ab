import copy
from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.optim import SGD

from federations import (
    FEATURES,
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
from pfl_lightning.aggregators import HyperNetwork
from pfl_lightning.messages import tree_map
from pfl_lightning.methods import PFedHN
from pfl_lightning.nets import Net

SMALL = partial(HyperNetwork, hidden=7, layers=2)


def server(aggregator=None, **settings):
    """A hypernetwork in float64 for four clients."""
    made = set_up(aggregator or SMALL(**settings), make_client(PFedHN))
    made.state = tree_map(torch.Tensor.double, made.state)
    return made


def trained(seed, scale=1.0):
    update = drawn_update(make_client(PFedHN).double(), seed)
    return update | {"weights": {name: scale * tensor for name, tensor in update["weights"].items()}}


class Plain(nn.Module):
    """The hypernetwork written down once more."""

    def __init__(self, like):
        super().__init__()
        phi = like.state["phi"]
        self.table = nn.Parameter(phi["embeddings"].clone())
        self.first, self.second, self.third = nn.Linear(2, 7), nn.Linear(7, 7), nn.Linear(7, 7)
        self.outputs = nn.ModuleList(nn.Linear(7, shape.numel()) for shape in like._net[0].shapes.values())
        self.double()
        ours = [t for name, t in phi.items() if name != "embeddings"]
        theirs = [p for name, p in self.named_parameters() if name != "table"]
        for parameter, tensor in zip(theirs, ours, strict=True):
            parameter.data = tensor.clone()

    def forward(self, k):
        h = self.third(F.relu(self.second(F.relu(self.first(self.table[k])))))
        return torch.cat([layer(h) for layer in self.outputs])


def flat(weights):
    return torch.cat([tensor.flatten() for tensor in weights.values()])


@pytest.mark.parametrize("clip", [50.0, 0.5])
def test_rounds_of_one_client_by_a_second_implementation(clip):
    """As the gradient of half the squared distance, by torch's optimizer and clipping."""
    ours = server(clip=clip, lr=0.02, embedding_lr=0.3)
    net = Plain(ours)
    rest = [p for name, p in net.named_parameters() if name != "table"]
    groups = [{"params": [net.table], "lr": 0.3}, {"params": rest}]
    optimizer = SGD(groups, lr=0.02, momentum=0.9, weight_decay=1e-3)
    for number, client in enumerate((1, 3, 1)):
        update = trained(number)
        log = ours.aggregate({client: update}, number)
        loss = 0.5 * (net(client) - flat(update["weights"])).square().sum()
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(net.parameters(), clip)
        assert log["gradient_norm"] == pytest.approx(float(norm))
        optimizer.step()
    for client in range(4):
        torch.testing.assert_close(flat(ours.download(client)["weights"]), net(client).detach())
    torch.testing.assert_close(ours.state["phi"]["embeddings"], net.table.detach())


def test_one_plain_local_step_gives_the_gradient_of_its_loss_through_the_hypernetwork():
    ours, client = server(), make_client(PFedHN).double()
    x, y = points(12, seed=1)
    phi = {name: t.clone().requires_grad_() for name, t in ours.state["phi"].items()}
    made = ours.made(phi, phi["embeddings"][2])
    loss = F.cross_entropy(functional_call(client, made, (x.double(),)), y)
    slopes = torch.autograd.grad(loss, list(made.values()), retain_graph=True)
    expected = torch.autograd.grad(0.1 * loss, list(phi.values()))
    start = ours.download(2)["weights"]
    after = {name: tensor - 0.1 * slope for (name, tensor), slope in zip(start.items(), slopes, strict=True)}
    for g, e in zip(ours.gradient(phi, 2, after).values(), expected, strict=True):
        torch.testing.assert_close(g, e)


def test_several_clients_are_steps_in_the_order_of_ids_from_gradients_at_the_rounds_start():
    updates = {client: trained(client) for client in (0, 2, 3)}
    ours, mean = server(), server(step="round")
    net = Plain(ours)
    by_hand, start = {}, list(net.parameters())
    for client, update in updates.items():
        loss = 0.5 * (net(client) - flat(update["weights"])).square().sum()
        by_hand[client] = torch.autograd.grad(loss, start)
    for steps, aggregator in ((list(by_hand.values()), ours), ([], mean)):
        steps = steps or [[sum(parts) / 3 for parts in zip(*by_hand.values(), strict=True)]]
        other = copy.deepcopy(net)
        optimizer = SGD(other.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-3)
        for gradients in steps:
            for parameter, gradient in zip(other.parameters(), gradients, strict=True):
                parameter.grad = gradient.clone()
            nn.utils.clip_grad_norm_(other.parameters(), 50.0)
            optimizer.step()
        aggregator.aggregate(updates, 0)
        for client in range(4):
            torch.testing.assert_close(flat(aggregator.download(client)["weights"]), other(client).detach())


def test_clients_who_return_what_they_received_leave_decay_and_momentum_alone():
    still, decayed = server(weight_decay=0.0), server(weight_decay=0.5)
    for ours in (still, decayed):
        before = copy.deepcopy(ours.state["phi"])
        ours.aggregate({k: {"weights": ours.download(k)["weights"]} for k in (1,)}, 0)
        factor = 1 - 0.01 * ours.weight_decay
        for name, tensor in ours.state["phi"].items():
            torch.testing.assert_close(tensor, factor * before[name])
    assert still.aggregate({}, 1) == {}


def test_embeddings_of_absent_clients_drift_by_decay_unless_they_are_sparse():
    rounds = [{1: trained(5)}, {1: trained(6)}]
    for sparse in (False, True):
        ours = server(sparse_embeddings=sparse, lr=0.1)
        before = ours.state["phi"]["embeddings"].clone()
        for number, updates in enumerate(rounds):
            ours.aggregate(updates, number)
        moved = (ours.state["phi"]["embeddings"] != before).any(1)
        assert moved.tolist() == [not sparse, True, not sparse, not sparse]
        assert bool(ours.state["momentum"]["embeddings"][0].any()) is not sparse


def test_each_client_has_a_model_of_its_own_and_keeps_its_running_statistics():
    spy = Spy()
    run = fit(make_client(PFedHN, net=noisy), aggregator=SMALL(), callbacks=[spy])
    models = [flat(run.federation.aggregator.download(k)["weights"]) for k in range(4)]
    assert all(not torch.equal(models[0], other) for other in models[1:])
    personal = run.federation.clients[0].personal
    assert set(personal) == {
        f"net.features.1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")
    }
    assert not personal.keys() & spy.updates[0][0]["weights"].keys()


def test_with_a_personal_classifier_the_body_alone_is_made():
    run = fit(make_client(partial(PFedHN, personal_classifier=True)), aggregator=SMALL())
    assert set(run.federation.aggregator.download(0)["weights"]) == {"net.features.0.weight", "net.features.0.bias"}
    assert set(run.federation.clients[0].personal) == {"net.classifier.weight", "net.classifier.bias"}


def test_a_tied_parameter_is_made_once():
    def tied(input_shape, num_classes):
        layers = [nn.Linear(FEATURES, HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)]
        layers[2].weight = layers[1].weight
        return Net(nn.Sequential(*layers), nn.Linear(HIDDEN, num_classes))

    run = fit(make_client(PFedHN, net=tied), aggregator=SMALL())
    weights = run.federation.aggregator.download(1)["weights"]
    assert torch.equal(weights["net.features.1.weight"], weights["net.features.2.weight"])
    assert len(run.federation.aggregator._net[0].heads) == len(weights) - 1


@pytest.mark.exhaustive
def test_it_learns_from_what_clients_learned():
    optimizer = partial(SGD, lr=0.1)
    client = make_client(PFedHN, optimizer=optimizer)
    run = fit(client, aggregator=SMALL(lr=0.05), max_rounds=12, local_epochs=4)
    assert run.rows[-1]["val/loss"] < 0.9 * run.rows[0]["val/loss"]


def test_newcomers_get_the_model_that_is_nearest_to_what_they_sent():
    ours = server()
    v = ours.state["phi"]["embeddings"].mean(0)
    assert equal(ours.welcome(9, None), ours.model(v))
    sent = ours.model(v + torch.tensor([0.3, -0.2]))
    received = flat(ours.welcome(9, sent)["weights"])
    torch.testing.assert_close(received, flat(sent["weights"]), atol=1e-4, rtol=1e-3)
    far = trained(3)["weights"]
    nearer, first = flat(ours.welcome(9, {"weights": far})["weights"]), flat(ours.model(v)["weights"])
    assert (nearer - flat(far)).norm() < (first - flat(far)).norm()


def test_batches_of_one_and_one_client_alone():
    check_batches_of_one(make_client(PFedHN, optimizer=partial(SGD, lr=0.05)), max_rounds=4)
    run = fit(make_client(PFedHN), blobs(30), aggregator=SMALL())
    assert run.rows[-1]["clients_diverged"] == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("lr", -1.0), ("embedding_lr", -1.0), ("momentum", 1.0), ("weight_decay", -1.0), ("clip", 0.0)),
        *(("embedding_size", 0), ("hidden", 0), ("layers", -1), ("step", "epoch")),
    ],
)
def test_what_is_out_of_range_is_refused_by_name(name, value):
    with pytest.raises(MisconfigurationException, match=rf"aggregator\.{name}={value!r} must be"):
        HyperNetwork(**{name: value})
