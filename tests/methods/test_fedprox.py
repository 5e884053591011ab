from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.nn import functional as F
from torch.optim import SGD

from federations import blobs, equal, fit, make_client, noisy, same_end
from pfl_lightning.methods import FedAvg, FedProx


@pytest.mark.parametrize("net", [noisy])
def test_without_its_term_it_is_fedavg_bit_for_bit(net):
    settings = {"net": net, "optimizer_lifetime": "run"}
    prox, average = fit(make_client(partial(FedProx, mu=0.0), **settings)), fit(make_client(FedAvg, **settings))
    assert equal(prox.weights, average.weights)
    assert [row["val/loss"] for row in prox.rows] == [row["val/loss"] for row in average.rows]


def test_its_term_changes_the_weights_and_holds_them_near_the_received_ones():
    start = make_client().net.state_dict()

    def distance(mu):
        weights = fit(make_client(partial(FedProx, mu=mu)), max_rounds=1, local_epochs=3).weights
        return float(sum((weights[f"net.{name}"] - tensor).square().sum() for name, tensor in start.items()))

    far, near, nearer = distance(0.0), distance(0.5), distance(2.0)
    assert far > near > nearer > 0


def test_two_steps_by_hand():
    data = blobs(30, batch_size=100)
    run = fit(make_client(partial(FedProx, mu=0.5), optimizer=partial(SGD, lr=0.1)), data, local_epochs=2, max_rounds=1)
    net = make_client().net
    start = [p.detach().clone() for p in net.parameters()]
    part = data.part(0, "train")
    for _ in range(2):
        grads = torch.autograd.grad(F.cross_entropy(net(part.x), part.y), list(net.parameters()))
        for p, g, w in zip(net.parameters(), grads, start, strict=True):
            p.data -= 0.1 * (g + 0.5 * (p.data - w))
    for name, tensor in net.state_dict().items():
        torch.testing.assert_close(run.weights[f"net.{name}"], tensor)


def test_the_received_model_is_stored_nowhere():
    run = fit(make_client(FedProx))
    assert set(run.weights) == set(make_client(FedAvg).state_dict())
    assert not any(state.personal for state in run.federation.clients.values())
    assert same_end(run, fit(make_client(FedProx)))


def test_a_negative_weight_is_refused_by_name():
    with pytest.raises(MisconfigurationException, match=r"model\.mu=-1"):
        make_client(partial(FedProx, mu=-1))
