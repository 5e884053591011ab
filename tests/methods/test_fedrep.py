import copy
from functools import partial

import jsonargparse
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.nn import functional as F
from torch.optim import SGD

from federations import Spy, blobs, equal, fit, make_client, noisy, plain
from pfl_lightning.messages import weighted_mean
from pfl_lightning.methods import FedPer
from pfl_lightning.methods.alternate_training import AlternateTraining
from pfl_lightning.methods.fedrep import FedRep

HEAD = {"net.classifier.weight", "net.classifier.bias"}
QUICK = partial(FedRep, head_epochs=2)


def descend(net, parameters, part, steps, rate=0.1):
    """Gradient descent on all of a part, by hand."""
    for _ in range(steps):
        grads = torch.autograd.grad(F.cross_entropy(net(part.x), part.y), parameters)
        for parameter, gradient in zip(parameters, grads, strict=True):
            parameter.data -= rate * gradient


def test_two_rounds_by_hand():
    data = blobs(30, 50, batch_size=100)
    make = partial(make_client, partial(FedRep, head_epochs=3), optimizer=partial(SGD, lr=0.1))
    run = fit(make(), data, local_epochs=2, max_rounds=2)
    net = make_client().net
    body = copy.deepcopy(net.features.state_dict())
    heads = [copy.deepcopy(net.classifier.state_dict()) for _ in range(2)]
    sizes = [data.size(client, "train") for client in range(2)]
    for _ in range(2):
        bodies = []
        for client in range(2):
            net.features.load_state_dict(body)
            net.classifier.load_state_dict(heads[client])
            descend(net, list(net.classifier.parameters()), data.part(client, "train"), 3)
            descend(net, list(net.features.parameters()), data.part(client, "train"), 2)
            heads[client] = copy.deepcopy(net.classifier.state_dict())
            bodies.append(copy.deepcopy(net.features.state_dict()))
        body = weighted_mean(bodies, [size / sum(sizes) for size in sizes])
    for name, tensor in body.items():
        torch.testing.assert_close(run.weights[f"net.features.{name}"], tensor)
    for client, head in enumerate(heads):
        for name, tensor in head.items():
            torch.testing.assert_close(run.federation.clients[client].personal[f"net.classifier.{name}"], tensor)


@pytest.mark.parametrize("net", [plain, noisy])
def test_of_one_client_it_is_alternate_training_bit_for_bit(net):
    settings = {"net": net, "optimizer_lifetime": "run", "head_epochs": 2}
    rep, alternate = (fit(make_client(method, **settings), blobs(40)) for method in (FedRep, AlternateTraining))
    own = {**rep.federation.aggregator.download(0)["weights"], **rep.federation.clients[0].personal}
    assert equal(dict(sorted(own.items())), dict(sorted(alternate.weights.items())))


def test_classifiers_stay_and_bodies_travel():
    spy = Spy()
    run = fit(make_client(QUICK), callbacks=[spy])
    assert all(set(state.personal) == HEAD for state in run.federation.clients.values())
    assert all(not HEAD & set(update["weights"]) for updates in spy.updates for update in updates.values())
    assert not equal(run.federation.clients[0].personal, run.federation.clients[1].personal)
    assert not equal(run.weights, fit(make_client(FedPer)).weights)


@pytest.mark.parametrize(("head_epochs", "steps"), [(None, 2 * 3 * 4), (10, (10 + 3) * 4)])
def test_the_classifier_trains_ten_epochs_or_as_many_as_it_is_told(head_epochs, steps):
    counted = []

    class Counting(FedRep):
        def upload(self, data):
            counted.append(self.steps_done)
            return super().upload(data)

    given = {} if head_epochs == 10 else {"head_epochs": head_epochs}
    fit(make_client(Counting, **given), blobs(28, batch_size=5), local_epochs=3, max_rounds=1)  # 19 training samples
    assert counted == [steps]


def test_a_client_comes_back_with_the_classifier_that_it_left_with():
    heads, spy = {}, Spy()

    class Watching(FedRep):
        def on_download(self, payload, data):
            super().on_download(payload, data)
            if data is not None and self.client_id in heads:
                mine = {name: tensor for name, tensor in self.state_dict().items() if name in HEAD}
                assert equal(mine, heads[self.client_id])

        def upload(self, data):
            heads[self.client_id] = {n: t.clone() for n, t in self.state_dict().items() if n in HEAD}
            return super().upload(data)

    fit(make_client(Watching, head_epochs=1), callbacks=[spy], clients_per_round=2, max_rounds=6)
    there = [[client in cohort for cohort in spy.cohorts] for client in heads]
    assert any([True, False, True] == rounds[i : i + 3] for rounds in there for i in range(4)), "choose another seed"


@pytest.mark.parametrize(("buffers", "travel"), [("average", True), ("local", False)])
def test_running_statistics_follow_their_setting(buffers, travel):
    spy = Spy()
    run = fit(make_client(QUICK, net=noisy, buffers=buffers), callbacks=[spy], max_rounds=1)
    name = "net.features.1.running_mean"
    assert (name in spy.updates[0][0]["weights"]) == travel
    assert (name in run.federation.clients[0].personal) != travel


def test_it_learns_from_batches_of_one_and_of_absent_classes():
    make = partial(make_client, QUICK, optimizer=partial(SGD, lr=0.05))
    run = fit(make(), blobs(20, 30, by_class=True, batch_size=1), max_rounds=4)
    assert run.rows[-1]["val/loss"] < run.rows[0]["val/loss"]


def test_the_command_line_knows_its_arguments():
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(FedRep, "model")
    model = parser.instantiate_classes(parser.parse_args(["--model.num_classes=3"])).model
    assert model.head_epochs == 10 and model.num_classes == 3
    assert parser.instantiate_classes(parser.parse_args(["--model.head_epochs=null"])).model.head_epochs is None


def test_a_phase_without_an_epoch_is_refused_by_name():
    with pytest.raises(MisconfigurationException, match=r"model\.head_epochs=0 must be 1 or more"):
        make_client(partial(FedRep, head_epochs=0))
