from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.nn import functional as F

from federations import Spy, blobs, equal, fit, make_client, near, noisy, points
from peft_nets import peft_net
from pfl_lightning.aggregators import AdapterAverage
from pfl_lightning.client import Phase
from pfl_lightning.methods import FedDPA, FedIT
from pfl_lightning.methods.feddpa import key
from pfl_lightning.server.adapters import pairs

EQUAL = partial(AdapterAverage, weighting="uniform")


def test_with_weight_0_it_is_fedit_bit_for_bit():
    run, fedit = (
        fit(make_client(FedDPA, net=noisy, local_weight=0)),
        fit(make_client(FedIT, net=noisy), aggregator=EQUAL()),
    )
    assert all(torch.equal(run.weights[name], tensor) for name, tensor in fedit.weights.items())
    assert near(run.test(), fedit.test())


def filled(**settings):
    model = make_client(FedDPA, **settings).double().eval()
    for parameter in (*model.own.values(), *(p for n, p in model.net.named_parameters() if "lora_" in n)):
        nn.init.normal_(parameter)
    return model


def by_hand(model, x, a):
    """The outputs by the paper's formula."""
    (pair,) = model.pairs
    layer, net = model.get_submodule(pair.layer), model.net
    common = F.linear(F.linear(x, model.get_parameter(pair.a)), model.get_parameter(pair.b))
    own = F.linear(F.linear(x, model.own[key(pair.a)]), model.own[key(pair.b)])
    hidden = layer.base_layer(x) + 1.5 * ((1 - a) * common + a * own)
    return net.classifier(net.features[1:](hidden))


def test_a_layer_adds_both_adapters_by_their_weights():
    x, y = points(9, seed=1)
    x = x.double()
    for weight in (0.3, 1.0):
        model = filled(local_weight=weight)
        torch.testing.assert_close(model(x), model.net(x))
        model.has_own.fill_(True)
        torch.testing.assert_close(model(x), by_hand(model, x, weight))
        model.phase = Phase("own")
        loss = model.training_step((x, y), 0)["loss"]
        torch.testing.assert_close(loss, F.cross_entropy(by_hand(model, x, weight), y))
        model.phase = Phase("common")
        torch.testing.assert_close(model.training_step((x, y), 0)["loss"], F.cross_entropy(model.net(x), y))


def test_its_own_adapters_train_from_the_second_round_on_and_never_travel():
    spy = Spy()
    run = fit(make_client(FedDPA), callbacks=[spy], max_rounds=1)
    start = make_client(FedDPA).state_dict()
    own = run.federation.clients[0].personal
    assert own.keys() == {n for n in start if n.startswith("own.")} | {"has_own"} and not own["has_own"]
    assert all(torch.equal(tensor, start[name]) for name, tensor in own.items())
    run = fit(make_client(FedDPA), callbacks=[spy], max_rounds=3)
    first, second = (run.federation.clients[client].personal for client in (0, 1))
    assert first["has_own"] and not any("own" in name for u in spy.updates[-1].values() for name in u["weights"])
    for name in (n for n in first if n.startswith("own.")):
        assert not torch.equal(first[name], start[name]) and not torch.equal(first[name], second[name])


def test_the_common_adapters_are_those_of_fedit_on_the_batches_that_follow():
    # one batch of all samples, whose order changes nothing but rounding
    data = blobs(24, 16, batch_size=100)
    run, fedit = fit(make_client(FedDPA), data), fit(make_client(FedIT), data, aggregator=EQUAL())
    for name, tensor in fedit.weights.items():
        torch.testing.assert_close(run.weights[name], tensor, atol=1e-5, rtol=1e-4)
    assert run.test() != fedit.test()


def test_the_engines_agree():
    make = partial(make_client, FedDPA, net=noisy)
    alone, together = (fit(make(), engine=engine) for engine in ("sequential", "vectorised"))
    assert near(dict(alone.weights), dict(together.weights)) and near(alone.test(), together.test())
    one, other = (run.federation.clients[1].personal for run in (alone, together))
    assert near(dict(one), dict(other))


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_it_takes_adapters_of_peft(engine):
    torch.manual_seed(0)
    run = fit(FedDPA(peft_net, (6,), 3), blobs(24, 16), engine=engine, max_rounds=2)
    model, x = run.model.eval(), points(5, seed=1)[0]
    run.model.receive(run.federation.clients[0].personal, run.federation.aggregator.download(0), None)
    assert len(pairs(model.state_dict())) == 2 and not equal(model(x), model.net(x))
    model.has_own.fill_(False)
    torch.testing.assert_close(model(x), model.net(x))


@pytest.mark.parametrize("value", [-0.1, 1.5, float("nan")])
def test_a_weight_out_of_range_is_refused_by_name(value):
    with pytest.raises(MisconfigurationException, match=rf"model\.local_weight={value}"):
        make_client(FedDPA, local_weight=value)
