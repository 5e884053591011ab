import copy
from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.nn import functional as F
from torch.optim import Adam
from torch.optim.lr_scheduler import CosineAnnealingLR

from federations import FEATURES, HIDDEN, Blobs, blobs, drawn_update, equal, fit, make_client, noisy
from pfl_lightning import Server, WeightedAverage
from pfl_lightning.aggregators import FedDF
from pfl_lightning.nets import Net

SIZES = {0: 10, 2: 30, 3: 20}


def few(**settings):
    return FedDF(**{"server_steps": 4, "batch_size": 5, **settings})


class Alone(Blobs):
    def server_data(self):
        return None


def server(aggregator, **settings):
    model = make_client(**settings).double()
    shared = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    aggregator.setup(Server(4, shared, model, blobs(), seed=0))
    return aggregator, {k: drawn_update(model, k, size) for k, size in SIZES.items()}


@pytest.mark.parametrize("ensemble", ["logits", "probabilities"])
def test_two_rounds_by_a_second_implementation(ensemble):
    """With full batches, in which the order says nothing; the second ensemble as the mean of all divergences."""
    ours, updates = server(few(batch_size=9, ensemble=ensemble))
    x = blobs().server_data().x.double()
    student = make_client().double().net

    def answers(update):
        net = copy.deepcopy(student)
        net.load_state_dict({name.removeprefix("net."): t for name, t in update["weights"].items()})
        return net(x).detach()

    for number in range(2):
        log = ours.aggregate(updates, number)
        mean = {
            n: sum(s / 60 * updates[k]["weights"][f"net.{n}"] for k, s in SIZES.items()) for n in student.state_dict()
        }
        student.load_state_dict(mean)
        teachers = [answers(update) for update in updates.values()]
        optimizer = Adam(student.parameters(), lr=1e-3)
        scheduler = CosineAnnealingLR(optimizer, 4)
        for _ in range(4):
            z = student(x).log_softmax(1)
            if ensemble == "logits":
                loss = F.kl_div(z, (sum(teachers) / 3).softmax(1), reduction="batchmean")
            else:
                loss = sum(F.kl_div(z, teacher.softmax(1), reduction="batchmean") for teacher in teachers) / 3
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
        if ensemble == "logits":
            assert log["last_divergence"] == pytest.approx(loss.item())
        for name, tensor in student.state_dict().items():
            torch.testing.assert_close(ours.download(1)["weights"][f"net.{name}"], tensor)


def test_without_steps_or_of_one_client_it_is_the_average():
    still, updates = server(few(server_steps=0))
    ours, _ = server(few())
    average = WeightedAverage()
    for aggregator in (still, average):
        aggregator.aggregate(updates, 0)
    assert equal(still.download(0), average.download(0))
    before = copy.deepcopy(ours.state)
    assert ours.aggregate({}, 0) == {} and equal(ours.state, before)
    assert ours.aggregate({2: updates[2]}, 0) == {}
    assert equal(ours.download(0)["weights"], updates[2]["weights"])
    assert equal(fit(make_client(), aggregator=few(server_steps=0)).weights, fit(make_client()).weights)


def test_it_brings_the_mean_nearer_to_what_all_say_together():
    ours, updates = server(few(server_steps=200, batch_size=9))
    log = ours.aggregate(updates, 0)
    assert log["last_divergence"] < 0.5 * log["first_divergence"]


def test_uploads_stay_as_they_are_and_running_statistics_move_on():
    ours, updates = server(few(), net=noisy)
    before = copy.deepcopy(updates)
    ours.aggregate(updates, 0)
    assert equal(updates, before)
    average = WeightedAverage()
    average.aggregate(updates, 0)
    one, other = (a.download(0)["weights"]["net.features.1.running_mean"] for a in (ours, average))
    assert not torch.equal(one, other)


def test_a_tied_parameter_is_trained_once():
    def tied(input_shape, num_classes):
        layers = [nn.Linear(FEATURES, HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)]
        layers[2].weight = layers[1].weight
        return Net(nn.Sequential(*layers), nn.Linear(HIDDEN, num_classes))

    weights = fit(make_client(net=tied), aggregator=few()).weights
    assert torch.equal(weights["net.features.1.weight"], weights["net.features.2.weight"])
    assert not equal(weights, fit(make_client(net=tied)).weights)


def test_small_batches_are_drawn_by_seed_and_round():
    ends = []
    for round in (0, 0, 1):
        ours, updates = server(few(server_steps=1))
        ours.aggregate(updates, round)
        ends.append(ours.download(0))
    assert equal(ends[0], ends[1]) and not equal(ends[0], ends[2])


def test_clients_of_one_class_and_batches_of_one_end_finite():
    run = fit(make_client(), blobs(20, 20, 30, by_class=True, batch_size=1), aggregator=few(batch_size=1))
    assert all(row["clients_diverged"] == 0 for row in run.rows)


def test_a_server_without_samples_is_refused():
    with pytest.raises(MisconfigurationException, match=r"FedDF teaches by .* Alone gives it none; set data\.public"):
        fit(make_client(), blobs(data=Alone), aggregator=few())


@pytest.mark.parametrize(("name", "value"), [("server_steps", -1), ("batch_size", 0), ("ensemble", "losses")])
def test_what_is_out_of_range_is_refused_by_name(name, value):
    with pytest.raises(MisconfigurationException, match=rf"aggregator\.{name}={value!r} must be"):
        FedDF(**{name: value})


def test_one_sample_gives_batch_norm_no_statistics():
    with pytest.raises(MisconfigurationException, match="take 2 or more"):
        fit(make_client(net=noisy), aggregator=few(batch_size=1))


def test_other_optimizers_may_teach():
    plainly = few(optimizer=partial(torch.optim.SGD, lr=0.5))
    assert not equal(fit(make_client(), aggregator=plainly).weights, fit(make_client(), aggregator=few()).weights)
