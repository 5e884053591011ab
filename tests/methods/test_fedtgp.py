import copy
import math
from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD

from federations import CLASSES, HIDDEN, NETS, blobs, equal, fit, make_client, set_up
from pfl_lightning.aggregators import TrainablePrototypes
from pfl_lightning.methods import FedProto, Local
from pfl_lightning.methods.fedtgp import margin
from pfl_lightning.nets import Net

CLIENT = partial(FedProto, align_lambda=10.0)


def sent(seed, classes=range(CLASSES), size=HIDDEN):
    generator = torch.Generator().manual_seed(seed)
    return {"prototypes": {c: 2 * torch.randn(size, generator=generator) for c in classes}}


def few(**settings):
    return TrainablePrototypes(**{"server_epochs": 3, **settings})


def test_the_margin_is_that_of_the_class_that_is_farthest_from_others():
    points = torch.tensor([[0.0, 0.0], [0.0, 2.0], [3.0, 1.0], [7.0, 1.0]])
    assert margin(points, torch.tensor([0, 0, 1, 2])) == pytest.approx(4.0)
    assert margin(points[[3, 1, 0, 2]], torch.tensor([2, 0, 0, 1])) == pytest.approx(4.0)
    assert margin(points, torch.tensor([1, 1, 1, 1])) == math.inf


@pytest.mark.parametrize("cap", [100.0, 0.5])
def test_two_rounds_of_the_server_by_a_second_implementation(cap):
    """With full batches, in which the order says nothing, and classes that are absent."""
    ours = set_up(few(batch_size=100, lr=0.1, cap=cap), make_client(CLIENT))
    table, one, two = nn.Embedding(CLASSES, HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
    net = nn.Sequential(table, one, nn.ReLU(), two)
    net.load_state_dict(ours.state["net"])
    for number in range(2):
        updates = {k: sent(10 * number + k, classes) for k, classes in ((0, [0, 1]), (2, [0]), (3, [0, 1]))}
        log = ours.aggregate(updates, number)
        x = torch.stack([v for u in updates.values() for v in u["prototypes"].values()])
        y = torch.tensor([c for u in updates.values() for c in u["prototypes"]])
        apart = float((x[y == 0].mean(0) - x[y == 1].mean(0)).norm())
        delta = min(apart, cap)
        assert log["margin"] == pytest.approx(delta)
        optimizer = SGD(net.parameters(), lr=0.1)
        for _ in range(3):
            g = two(F.relu(one(table.weight)))
            distances = torch.stack([(x - vector).norm(dim=1) for vector in g], 1)
            distances = distances + delta * F.one_hot(y, CLASSES)
            loss = F.cross_entropy(-distances, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        assert log["prototype_loss"] == pytest.approx(loss.item(), rel=1e-4)
    g = two(F.relu(one(table.weight)))
    for c, vector in ours.download(0)["prototypes"].items():
        torch.testing.assert_close(vector, g[c].detach(), rtol=1e-4, atol=1e-5)
    assert set(ours.download(0)["prototypes"]) == set(range(CLASSES))


def test_of_one_class_the_margin_is_the_cap():
    ours = set_up(few(cap=7.0), make_client(CLIENT))
    assert ours.aggregate({0: sent(0, [1])}, 0)["margin"] == 7.0


def test_before_the_first_round_there_are_none_and_without_clients_nothing_changes():
    ours = set_up(few(), make_client(CLIENT))
    before = copy.deepcopy(ours.state)
    assert ours.download(0) == {"prototypes": {}}
    assert ours.aggregate({}, 0) == {} and equal(ours.state, before)


def test_without_passes_prototypes_stay_as_they_were_drawn():
    ours = set_up(few(server_epochs=0), make_client(CLIENT))
    ours.aggregate({0: sent(0)}, 0)
    first = ours.download(0)
    ours.aggregate({0: sent(1)}, 1)
    assert equal(ours.download(0), first) and first["prototypes"]


def test_clients_without_the_term_train_as_local_ones():
    first, second, local = (
        fit(make_client(method), aggregator=aggregator).federation.clients
        for method, aggregator in (
            (partial(FedProto, align_lambda=0.0), few()),
            (CLIENT, few()),
            (Local, None),
        )
    )
    assert all(equal(first[k].personal, local[k].personal) for k in local)
    assert not equal(first[0].personal, second[0].personal)


def test_different_bodies_of_one_width_run_together_and_others_are_refused():
    fit(make_client(CLIENT, net=NETS), aggregator=few(), max_rounds=1)

    def narrow(input_shape, num_classes):
        return Net(nn.Linear(input_shape[0], 3), nn.Linear(3, num_classes))

    with pytest.raises(MisconfigurationException, match="prototypes of widths 3, 5"):
        fit(make_client(CLIENT, net=[NETS[0], narrow]), aggregator=few(), max_rounds=1)


def test_clients_of_one_class_and_batches_of_one_end_finite():
    client = make_client(CLIENT, optimizer=partial(SGD, lr=0.02))
    run = fit(client, blobs(20, 20, 30, by_class=True, batch_size=1), aggregator=few())
    assert all(row["clients_diverged"] == 0 and math.isfinite(row["val/loss"]) for row in run.rows)


@pytest.mark.parametrize(("name", "value"), [("server_epochs", -1), ("lr", -1.0), ("batch_size", 0), ("cap", -1.0)])
def test_what_is_out_of_range_is_refused_by_name(name, value):
    with pytest.raises(MisconfigurationException, match=rf"aggregator\.{name}={value} must be"):
        TrainablePrototypes(**{name: value})
