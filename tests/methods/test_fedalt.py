from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.nn import functional as F

from federations import Spy, blobs, equal, fit, make_client, near, noisy, points, set_up
from peft_nets import peft_net
from pfl_lightning.methods import FedALT
from pfl_lightning.methods.fedalt import RestOfWorld
from pfl_lightning.methods.feddpa import key
from pfl_lightning.nets import Adapted, Net
from pfl_lightning.server.adapters import is_first, is_second, pairs


def filled(net=None, **settings):
    model = make_client(FedALT, **settings).double().eval()
    for tensor in (*model.parameters(), *model.rest.buffers()):
        nn.init.normal_(tensor)
    return model


def share(model, pair, x):
    return F.linear(x, model.routers[key(pair.a)]).softmax(-1)


def by_hand(model, x):
    """The outputs by the paper's formula."""
    (pair,) = model.pairs
    net, rest, g = model.net, model.rest.tensors(), share(model, pair, x)
    own = F.linear(F.linear(x, model.get_parameter(pair.a)), model.get_parameter(pair.b))
    others = F.linear(F.linear(x, rest[pair.a]), rest[pair.b])
    hidden = model.get_submodule(pair.layer).base_layer(x) + 1.5 * (g[:, :1] * own + g[:, 1:] * others)
    return net.classifier(net.features[1:](hidden))


def test_a_layer_adds_both_adapters_by_the_routers_shares():
    x, y = points(9, seed=1)
    model, x = filled(), x.double()
    torch.testing.assert_close(model(x), by_hand(model, x))
    torch.testing.assert_close(model.training_step((x, y), 0)["loss"], F.cross_entropy(by_hand(model, x), y))
    plain = model.net(x)
    assert not torch.allclose(model(x), plain) and equal(model.net(x), plain), "a router has stayed in the net"


def test_shares_of_a_convolution_are_by_place():
    torch.manual_seed(0)

    def net(shape, classes):
        return Net(nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Flatten()), nn.Linear(64, classes))

    model = FedALT(partial(Adapted, net=net, rank=2), (1, 4, 4), 3).double()
    for tensor in (*model.routers.values(), *model.rest.buffers(), *model.net.parameters()):
        nn.init.normal_(tensor)
    (pair,), x = model.pairs, torch.randn(5, 1, 4, 4, dtype=torch.float64)
    layer, rest = model.get_submodule(pair.layer), model.rest.tensors()

    def product(a, b):
        return F.conv2d(F.conv2d(x, a, padding=1), b)

    g = F.conv2d(x, model.routers[key(pair.a)], padding=1).softmax(1)
    own = product(model.get_parameter(pair.a), model.get_parameter(pair.b))
    hidden = layer.base_layer(x) + 8 * (g[:, :1] * own + g[:, 1:] * product(rest[pair.a], rest[pair.b]))
    torch.testing.assert_close(model(x), model.net.classifier(hidden.flatten(1)))


def test_the_others_adapters_are_received_and_the_clients_own_stay():
    spy = Spy()
    run = fit(make_client(FedALT), callbacks=[spy], max_rounds=2)
    assert all(is_first(n) or is_second(n) for u in spy.updates[0].values() for n in u["weights"])
    sent = spy.updates[-1]
    rest = run.federation.aggregator.download(1)["rest"]
    for name in rest:
        mean = sum(sent[k]["weights"][name] for k in (0, 2, 3)) / 3
        torch.testing.assert_close(rest[name], mean)
    own, other = (run.federation.clients[client].personal for client in (0, 1))
    assert all(torch.equal(own[name], tensor) for name, tensor in sent[0]["weights"].items())
    names = {n for n in own if n.startswith("routers.")} | {"net.classifier.weight"}
    assert all(not torch.equal(own[name], other[name]) for name in names)


def test_a_client_that_sat_out_counts_by_its_last_adapters_and_one_alone_meets_nobody():
    model = make_client(FedALT)
    server = set_up(RestOfWorld(), model, 3)
    names = list(server.state["sum"])
    zero = server.download(0)["rest"]
    assert list(zero) == names and not any(tensor.any() for tensor in zero.values())
    # no float32 has a third exactly, so that a sum without the own adapters leaves rounding
    first = {k: {"weights": {n: torch.full_like(zero[n], v) for n in names}} for k, v in ((0, 1 / 3), (1, 5.0))}
    server.aggregate({0: first[0]}, 0)
    assert not any(tensor.any() for tensor in server.download(0)["rest"].values())
    assert all(torch.equal(t, first[0]["weights"][n]) for n, t in server.download(1)["rest"].items())
    server.aggregate({1: first[1]}, 1)
    expected = {0: 5.0, 1: 1 / 3, 2: (1 / 3 + 5) / 2}
    for client, value in expected.items():
        rest = server.download(client)["rest"]
        assert all(torch.allclose(tensor, torch.tensor(value)) for tensor in rest.values())
    before = server.download(2)
    server.aggregate({}, 2)
    assert equal(before, server.download(2))


def test_the_engines_agree():
    make = partial(make_client, FedALT, net=noisy)
    alone, together = (fit(make(), engine=engine) for engine in ("sequential", "vectorised"))
    assert near(alone.test(), together.test())
    for client in (0, 1):
        one, other = (run.federation.clients[client].personal for run in (alone, together))
        assert near(dict(one), dict(other))


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_it_takes_adapters_of_peft(engine):
    torch.manual_seed(0)
    run = fit(FedALT(peft_net, (6,), 3), blobs(24, 16), engine=engine, max_rounds=2)
    model, x = run.model.eval(), points(5, seed=1)[0]
    model.receive(run.federation.clients[0].personal, run.federation.aggregator.download(0), None)
    first, second = pairs(model.state_dict())
    layers, rest = model.net.features, model.rest.tensors()

    def layer(pair, base, x):
        g = share(model, pair, x)
        own, other = ((w[pair.a], w[pair.b]) for w in (dict(model.named_parameters()), rest))
        mixed = [F.linear(F.linear(x, a), b) for a, b in (own, other)]
        return base.base_layer(x) + 1.5 * (g[:, :1] * mixed[0] + g[:, 1:] * mixed[1])

    hidden = torch.tanh(layer(second, layers[2], torch.tanh(layer(first, layers[0], x))))
    torch.testing.assert_close(model(x), model.net.classifier(layers[4](hidden)))


def test_adapters_that_are_no_product_of_plain_layers_are_refused_by_name():
    peft = pytest.importorskip("peft", reason="needs the extra lora")

    def net(shape, classes):
        body = peft.get_peft_model(nn.Sequential(nn.Linear(6, 5)), peft.LoraConfig(target_modules=["0"], use_dora=True))
        return Net(body.base_model.model, nn.Linear(5, classes))

    with pytest.raises(MisconfigurationException, match=r"lora_magnitude_vector.* FedALT"):
        FedALT(net, (6,), 3)
