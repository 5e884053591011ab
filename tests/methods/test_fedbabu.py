import copy
from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.nn import functional as F
from torch.optim import SGD

from federations import Spy, blobs, equal, fit, make_client, noisy
from pfl_lightning.messages import weighted_mean
from pfl_lightning.methods import FedPer
from pfl_lightning.methods.fedbabu import FedBABU

HEAD = {"net.classifier.weight", "net.classifier.bias"}
DECAY = partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.01)


def untuned(**settings):
    return make_client(partial(FedBABU, finetune_epochs=0), **settings)


def descend(net, parameters, part, steps, rate=0.1):
    """Gradient descent on all of a part, by hand."""
    for _ in range(steps):
        grads = torch.autograd.grad(F.cross_entropy(net(part.x), part.y), parameters)
        for parameter, gradient in zip(parameters, grads, strict=True):
            parameter.data -= rate * gradient


@pytest.mark.exhaustive
def test_classifiers_are_the_common_initial_one_bit_for_bit():
    settings = {"net": noisy, "optimizer": DECAY, "optimizer_lifetime": "run"}
    spy = Spy()
    run = fit(make_client(FedBABU, **settings), callbacks=[spy], evaluate="both", local_epochs=2)
    start = {name: tensor for name, tensor in make_client(FedBABU, **settings).state_dict().items() if name in HEAD}
    assert all(equal(state.personal, start) for state in run.federation.clients.values())
    assert equal({name: run.weights[name] for name in start}, start)
    for updates in spy.updates:
        assert all(not HEAD & set(update["weights"]) for update in updates.values())
    body = "net.features.0.weight"
    assert not torch.equal(run.weights[body], make_client(FedBABU, **settings).state_dict()[body])


def test_the_body_learns_under_the_fixed_classifier():
    data = blobs(30, batch_size=100)
    run = fit(untuned(optimizer=partial(SGD, lr=0.1)), data, local_epochs=2, max_rounds=1)
    net = make_client().net
    descend(net, list(net.features.parameters()), data.part(0, "train"), 2)
    for name, tensor in net.state_dict().items():
        torch.testing.assert_close(run.weights[f"net.{name}"], tensor)
    per = fit(make_client(FedPer, optimizer=partial(SGD, lr=0.1)), data, local_epochs=2, max_rounds=1)
    assert not torch.allclose(per.weights["net.features.0.weight"], run.weights["net.features.0.weight"])


def test_bodies_count_by_their_samples():
    spy = Spy()
    run = fit(make_client(FedBABU), callbacks=[spy], max_rounds=1)
    sizes = {client: run.data.size(client, "train") for client in range(4)}
    bodies = [update["weights"] for update in spy.updates[0].values()]
    shares = [sizes[client] / sum(sizes.values()) for client in spy.updates[0]]
    assert len(set(shares)) > 1
    assert equal(run.federation.aggregator.global_model(), weighted_mean(bodies, shares))


def test_it_is_evaluated_after_tuning_all_of_a_copy_by_hand():
    data = blobs(30, 40, batch_size=100)
    make = partial(make_client, partial(FedBABU, finetune_epochs=3), optimizer=partial(SGD, lr=0.1))
    run = fit(make(), data, max_rounds=2)
    net, test = copy.deepcopy(make_client().net), data.part(1, "test")
    net.load_state_dict({name.removeprefix("net."): tensor for name, tensor in run.weights.items()})
    evaluated = run.logger.clients[1]
    assert evaluated["test_received/loss"] == pytest.approx(float(F.cross_entropy(net(test.x), test.y).detach()))
    before = [parameter.detach().clone() for parameter in net.parameters()]
    descend(net, list(net.parameters()), data.part(1, "train"), 3)
    assert evaluated["test/loss"] == pytest.approx(float(F.cross_entropy(net(test.x), test.y).detach()), rel=1e-5)
    assert not any(map(torch.equal, before, net.parameters()))


def test_without_tuning_it_is_evaluated_as_received():
    tuned, received = fit(make_client(FedBABU, net=noisy)), fit(untuned(net=noisy))
    assert equal(tuned.weights, received.weights)
    assert [row["val/loss"] for row in received.rows] == [row["val_received/loss"] for row in tuned.rows]
    assert all(row["val/loss"] < row["val_received/loss"] for row in tuned.rows)
    assert not any("val_received/acc" in row for row in received.rows)


@pytest.mark.parametrize("buffers", ["average", "local"])
@pytest.mark.by_default("local")
def test_evaluation_leaves_no_trace(buffers):
    run = fit(make_client(FedBABU, net=noisy, buffers=buffers, optimizer_lifetime="run"))
    before = copy.deepcopy(run.federation.federation_state())
    first = run.test()
    assert equal(run.federation.federation_state(), before)
    assert run.test() == first


@pytest.mark.parametrize(("buffers", "travel"), [("average", True), ("local", False)])
def test_running_statistics_follow_their_setting(buffers, travel):
    spy = Spy()
    run = fit(make_client(FedBABU, net=noisy, buffers=buffers), callbacks=[spy], max_rounds=1)
    name = "net.features.1.running_mean"
    assert (name in spy.updates[0][0]["weights"]) == travel
    assert (name in run.federation.clients[0].personal) != travel


def test_one_client_with_batches_of_one_is_tuned_too():
    run = fit(make_client(FedBABU, optimizer=partial(SGD, lr=0.01)), blobs(12, batch_size=1), max_rounds=2)
    assert run.rows[-1]["val/loss"] != run.rows[-1]["val_received/loss"]


def test_a_negative_number_of_epochs_is_refused_by_name():
    with pytest.raises(MisconfigurationException, match=r"model\.finetune_epochs=-1"):
        make_client(partial(FedBABU, finetune_epochs=-1))
