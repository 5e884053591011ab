from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import SGD

from federations import blobs, equal, fit, gradient, make_client, near, points
from pfl_lightning.data import Samples
from pfl_lightning.methods import ControlVariates, FedLESAM, FedSAM
from pfl_lightning.methods.functional import called, gradient_at, loss_at, mean_gradient
from pfl_lightning.nets import Net


def twice(input_shape, num_classes):
    """A layer that the net has twice."""
    layer = nn.Linear(input_shape[0], input_shape[0])
    body = nn.Sequential(layer, nn.BatchNorm1d(input_shape[0]), nn.Tanh(), layer)
    return Net(body, nn.Linear(input_shape[0], num_classes))


def across(input_shape, num_classes):
    """A parameter of two layers, of features and classifier."""
    body = nn.Sequential(nn.Linear(input_shape[0], num_classes, bias=False), nn.Tanh(), nn.Linear(num_classes, 6))
    made = Net(body, nn.Linear(6, num_classes, bias=False))
    made.classifier.weight = made.features[0].weight
    return made


@pytest.mark.parametrize("net", [twice, across])
def test_a_tied_parameter_is_replaced_under_all_of_its_names_and_then_put_back(net):
    client = make_client(net=net).double().eval()
    own = dict(client.net.named_parameters(remove_duplicate=False))
    x, y = points(9, seed=1)
    x = x.double()
    moved = {name: p.detach() + 0.3 for name, p in client.net.named_parameters()}
    assert len(moved) < len(own)
    other = make_client(net=net).double().eval()
    with torch.no_grad():
        for p in other.net.parameters():
            p += 0.3
    torch.testing.assert_close(called(client.net, "", moved, x), other.net(x))
    features = called(client.net, "features", moved, x)
    torch.testing.assert_close(called(client.net, "classifier", moved, features), other.net(x))
    torch.testing.assert_close(loss_at(client, client.net, moved, (x, y)), nn.functional.cross_entropy(other.net(x), y))
    expected = gradient(other.net, Samples(x, y))
    own_gradient = gradient_at(client, moved, (x, y))
    torch.testing.assert_close(torch.cat([g.flatten() for g in own_gradient.values()]), expected)
    of_all = mean_gradient(other, Samples(x, y))
    torch.testing.assert_close(torch.cat([g.flatten() for g in of_all.values()]), expected)
    after = dict(client.net.named_parameters(remove_duplicate=False))
    assert after.keys() == own.keys() and all(after[name] is p for name, p in own.items())


@pytest.mark.parametrize("method", [FedSAM, FedLESAM, partial(ControlVariates, option="I")])
def test_methods_train_a_net_that_has_a_layer_twice(method):
    make = partial(make_client, method, net=twice, optimizer=partial(SGD, lr=0.1))
    before = {name: t.clone() for name, t in make().state_dict().items()}
    runs = [fit(make(), engine=engine, accelerator="cpu", max_rounds=2) for engine in ("sequential", "vectorised")]
    assert near(runs[0].weights, runs[1].weights) and not near(
        runs[0].weights["net.features.0.weight"], before["net.features.0.weight"]
    )
    assert torch.equal(runs[0].weights["net.features.0.weight"], runs[0].weights["net.features.3.weight"])


def test_of_no_samples_the_mean_gradient_is_zero():
    client = make_client()
    x, y = points(0, seed=1)
    assert equal(
        mean_gradient(client, Samples(x, y)), {n: torch.zeros_like(p) for n, p in client.net.named_parameters()}
    )
    assert any(bool(g.any()) for g in mean_gradient(client, blobs().server_data()).values())
