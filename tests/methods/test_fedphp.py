from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.nn import functional as F
from torch.optim import SGD

from federations import Spy, blobs, check_batches_of_one, check_evaluated_by, equal, fit, make_client, noisy
from pfl_lightning.methods import FedAvg, FedPHP


def test_without_its_term_it_sends_what_fedavg_does_bit_for_bit_and_with_it_does_not():
    settings = {"net": noisy, "optimizer_lifetime": "run"}
    off, on, average = (
        fit(make_client(method, **settings)).federation.aggregator.global_model()
        for method in (partial(FedPHP, weight=0.0), FedPHP, FedAvg)
    )
    assert equal(off, average)
    assert not equal(on, average)


@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_the_history_is_that_of_the_sent_models(participation):
    """Of each client, by the rounds that it took part in; buffers are mixed too."""
    spy, rounds = Spy(), 4
    method = partial(FedPHP, participation=participation)
    run = fit(make_client(method, net=noisy), callbacks=[spy], clients_per_round=3, max_rounds=rounds)
    for client, state in run.federation.clients.items():
        models = [updates[client]["weights"] for updates in spy.updates if client in updates]
        history = models[0]
        for before, model in enumerate(models[1:], start=1):
            mu = min(0.9 * before / (participation * rounds), 0.9)
            history = {
                n: mu * h + (1 - mu) * model[n] if h.is_floating_point() else model[n] for n, h in history.items()
            }
        assert int(state.personal["taken_part"]) == len(models)
        for name, tensor in history.items():
            torch.testing.assert_close(state.personal[f"history.{name.removeprefix('net.').replace('.', '/')}"], tensor)


def test_two_rounds_of_one_client_by_hand():
    """The teacher is the received model in the first round, and the history, which is what was sent, in the second."""
    lr, weight, temperature, data = 0.3, 0.4, 4.0, blobs(30, batch_size=100)
    client = make_client(FedPHP, weight=weight, temperature=temperature, optimizer=partial(SGD, lr=lr))
    run = fit(client, data, local_epochs=2, max_rounds=2, precision="64-true")
    part = data.part(0, "train").to("cpu", torch.float64)
    net, history = make_client().net.double(), make_client().net.double()
    for _ in range(2):
        for _ in range(2):
            z, taught = net(part.x), (history(part.x) / temperature).softmax(1).detach()
            loss = (1 - weight) * F.cross_entropy(z, part.y) - weight * (taught * z.log_softmax(1)).sum(1).mean()
            gradients = torch.autograd.grad(loss, list(net.parameters()))
            for p, g in zip(net.parameters(), gradients, strict=True):
                p.data -= lr * g
        history.load_state_dict(net.state_dict())
    for name, tensor in net.state_dict().items():
        torch.testing.assert_close(run.weights[f"net.{name}"], tensor, rtol=0, atol=1e-12)


def test_clients_are_evaluated_by_their_histories():
    check_evaluated_by(fit(make_client(FedPHP)), "history")


def test_it_learns_from_batches_of_one_and_of_absent_classes():
    check_batches_of_one(make_client(FedPHP), max_rounds=4)


@pytest.mark.parametrize(
    ("name", "value"), [("weight", 2.0), ("temperature", 0.0), ("momentum", 1.0), ("participation", 0.0)]
)
def test_what_is_out_of_range_is_refused_by_name(name, value):
    with pytest.raises(MisconfigurationException, match=rf"model\.{name}={value} must be"):
        make_client(FedPHP, **{name: value})
