"""Ensemble: the mean of probabilities by hand, and the models of Local."""

import pytest
import torch
from torch.nn import functional as F

from federations import SIZES, equal, fit, load_client, make_client, noisy
from pfl_lightning.methods import Ensemble, Local


def models_of(run):
    """All clients' nets in evaluation mode, from the server's pool."""
    nets = []
    for _, model in sorted(run.federation.aggregator.state["models"].items()):
        net = make_client(Ensemble, net=noisy).net.eval()
        net.load_state_dict({name.removeprefix("net."): t for name, t in model.items()})
        nets.append(net)
    return nets


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_each_client_is_evaluated_by_the_mean_of_all_probabilities(engine):
    run = fit(make_client(Ensemble, net=noisy, buffers="local"), engine=engine)
    nets, values = models_of(run), run.test()
    assert len(nets) == len(SIZES)
    for client in range(4):
        part = run.data.part(client, "test")
        with torch.no_grad():
            p = torch.stack([net(part.x).softmax(1) for net in nets]).mean(0)
        assert values[client]["acc"] == pytest.approx(float((p.argmax(1) == part.y).float().mean()))
        assert values[client]["loss"] == pytest.approx(float(F.nll_loss(p.log(), part.y)), rel=1e-4)


def test_own_models_are_those_of_local():
    alone, together = (fit(make_client(method), engine="sequential") for method in (Local, Ensemble))
    for client, state in alone.federation.clients.items():
        own = {name: t for name, t in together.federation.clients[client].personal.items() if name != "trained"}
        assert equal(own, state.personal)


def test_clients_that_never_trained_do_not_count():
    run = fit(make_client(Ensemble, net=noisy), clients_per_round=2, max_rounds=1)
    nets = models_of(run)
    assert len(nets) == 2
    (absent, *_) = set(range(4)) - set(run.federation.clients)
    part = run.data.part(absent, "test")
    with torch.no_grad():
        p = torch.stack([net(part.x).softmax(1) for net in nets]).mean(0)
    assert run.test()[absent]["loss"] == pytest.approx(float(F.nll_loss(p.log(), part.y)), rel=1e-4)


def test_a_client_s_model_of_a_checkpoint_is_the_ensemble(tmp_path):
    run = fit(make_client(Ensemble), root=tmp_path)
    x = run.data.part(2, "test").x
    model = load_client(Ensemble, run.last, client=2).eval()
    p = torch.stack([F.softmax(net(x), 1) for net in plain_nets(run)]).mean(0)
    assert torch.allclose(model(x).softmax(1), p, atol=1e-6)


def plain_nets(run):
    nets = []
    for _, model in sorted(run.federation.aggregator.state["models"].items()):
        net = make_client(Ensemble).net
        net.load_state_dict({name.removeprefix("net."): t for name, t in model.items()})
        nets.append(net)
    return nets
