from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD

from federations import Shuffled, Spy, blobs, equal, fit, fitting, make_client, near, noisy, plain, same_end
from peft_nets import peft_net
from pfl_lightning.messages import num_bytes
from pfl_lightning.methods import FedIT, FedSB
from pfl_lightning.methods.fedsb import core_of, factored
from pfl_lightning.nets import CNN, Adapted, Net
from pfl_lightning.server.adapters import is_first, is_second, pairs


def test_the_fixed_factors_are_the_nearest_product_to_the_frozen_weights():
    client = make_client(FedSB)
    (pair,) = client.pairs
    a, b = client.net.get_parameter(pair.a), client.net.get_parameter(pair.b)
    weight = client.net.get_submodule(pair.layer).base_layer.weight
    u, s, v = torch.linalg.svd(weight)
    torch.testing.assert_close(b @ a, u[:, :2] * s[:2] @ v[:2])
    torch.testing.assert_close(b.T @ b, torch.eye(2))
    torch.testing.assert_close(a @ a.T, torch.diag(s[:2] ** 2))
    assert (b.gather(0, b.abs().argmax(0, keepdim=True)) > 0).all()


def test_ranks_above_the_layer_s_own_have_factors_of_zeros():
    matrix = torch.randn(3, 5)
    a, b = factored(matrix, 4)
    assert a.shape == (4, 5) and b.shape == (3, 4) and not a[3].any() and not b[:, 3].any()
    torch.testing.assert_close(b @ a, matrix)


def test_it_begins_as_the_net_without_adapters_and_learns():
    client = make_client(FedSB, net=plain)
    x = torch.randn(7, 6)
    layer = client.net.features[0]
    expected = client.net.classifier(layer.base_layer(x).tanh())
    assert torch.equal(client(x), expected)
    run = fit(client)
    assert run.rows[-1]["val/loss"] < run.rows[0]["val/loss"]


def test_a_square_matrix_alone_travels_of_each_layer():
    spy = Spy()
    run = fit(make_client(FedSB), callbacks=[spy])
    first = make_client(FedSB).state_dict()
    sent = spy.updates[-1][0]["weights"]
    assert {name for name in sent if not name.startswith("net.classifier.")} == {
        f"cores.{core_of(pair)}" for pair in run.model.pairs
    }
    assert all(sent[f"cores.{core_of(pair)}"].shape == (2, 2) for pair in run.model.pairs)
    assert run.rows[0]["bytes/down"] == 4 * num_bytes(sent)
    for name, tensor in run.model.state_dict().items():
        if is_first(name) or is_second(name):
            assert torch.equal(tensor, first[name])


def test_a_round_is_that_of_the_formula_written_out():
    """Each client's steps on ``W_0 x + s B R A x``, and the mean of R with equal weights, in float64."""
    spy, settings = Spy(), {"precision": "64-true", "max_rounds": 1, "local_epochs": None, "local_steps": 1}
    make = partial(make_client, FedSB, optimizer=partial(SGD, lr=0.3))
    # one batch for all samples, so that no order counts
    data = blobs(12, 20, batch_size=64)
    run = fit(make(), data, callbacks=[spy], **settings)
    client = make().double()
    (pair,) = client.pairs
    a, b = (client.net.get_parameter(name).detach() for name in (pair.a, pair.b))
    base, head = client.net.get_submodule(pair.layer).base_layer, client.net.classifier
    cores = []
    for number in range(2):
        samples = run.data.client(number).train
        core = torch.zeros(2, 2, dtype=torch.float64, requires_grad=True)
        hidden = nn.functional.linear(samples.x.double(), base.weight + 1.5 * b @ core @ a, base.bias).tanh()
        [gradient] = torch.autograd.grad(cross_entropy(head(hidden), samples.y), [core])
        cores.append(-0.3 * gradient)
        sent = spy.updates[0][number]["weights"][f"cores.{core_of(pair)}"]
        torch.testing.assert_close(sent, cores[-1], rtol=1e-9, atol=1e-12)
    mean = sum(cores) / 2
    torch.testing.assert_close(run.weights[f"cores.{core_of(pair)}"], mean, rtol=1e-9, atol=1e-12)
    products = sum(b @ core @ a for core in cores) / 2
    torch.testing.assert_close(b @ mean @ a, products, rtol=1e-12, atol=1e-15)


def test_the_order_of_clients_changes_nothing():
    settings = {"clients_per_round": 3, "max_rounds": 2}
    make = partial(make_client, FedSB, net=noisy)
    assert same_end(fit(make(), **settings), fit(make(), engine=Shuffled, **settings))


def test_the_engines_agree():
    alone, together = (fit(make_client(FedSB, net=noisy), engine=engine) for engine in ("sequential", "vectorised"))
    assert near(dict(alone.weights), dict(together.weights)) and near(alone.test(), together.test())


def test_a_rate_of_b_has_no_effect():
    assert equal(fit(make_client(FedSB)).weights, fit(make_client(partial(FedSB, rate_ratio=16.0))).weights)


def test_it_takes_adapters_of_peft_of_either_orientation():
    torch.manual_seed(0)
    run = fit(FedSB(peft_net, (6,), 3), blobs(24, 16), max_rounds=2)
    for pair in run.model.pairs:
        weight = run.model.net.get_submodule(pair.layer).base_layer.weight
        weight = weight.T if pair.is_transposed(run.model.net) else weight
        u, s, v = torch.linalg.svd(weight)
        found = run.model.net.get_parameter(pair.b) @ run.model.net.get_parameter(pair.a)
        torch.testing.assert_close(found, u[:, :2] * s[:2] @ v[:2], atol=1e-5, rtol=1e-4)
    assert all(core.any() for core in run.model.cores.values())


def test_it_takes_convolutions():
    client = FedSB(partial(Adapted, net=CNN, rank=2), (1, 28, 28), 4)
    x = torch.randn(2, 1, 28, 28)
    before = client(x)
    for core in client.cores.values():
        nn.init.eye_(core)
    state = client.adapter_state()
    # the net's own B is another one, which R stands before
    assert not torch.equal(client(x), before) and set(state) == {
        name.removeprefix("net.") for pair in pairs(client.state_dict()) for name in (pair.a, pair.b)
    }
    client.net.load_state_dict(state, strict=False)
    torch.testing.assert_close(client.net(x), client(x))


def test_weights_in_whole_numbers_are_refused_by_name():
    def whole(input_shape, num_classes):
        net = fitting(FedIT, plain)(input_shape, num_classes)
        base = net.features[0].base_layer
        base.weight = nn.Parameter(base.weight.to(torch.int8), requires_grad=False)
        return Net(net.features, net.classifier)

    with pytest.raises(MisconfigurationException, match=r"FedSB decomposes .*torch\.int8"):
        FedSB(whole, (6,), 3)
