from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.func import functional_call

from federations import Spy, blobs, drawn_update, fit, make_client, near, noisy, points, set_up
from peft_nets import peft_net
from pfl_lightning.aggregators import AdapterAverage, ResidualAverage
from pfl_lightning.methods import FedExLoRA, FedIT
from pfl_lightning.methods.fedex_lora import residual_of
from pfl_lightning.server.adapters import pairs

EQUAL = partial(AdapterAverage, weighting="uniform")


def layers(module, weights):
    """Each layer's effective weights, as the layer itself has them."""
    found = {}
    for pair in pairs(weights):
        delta = pair.scale(module) * weights[pair.b].flatten(1) @ weights[pair.a].flatten(1)
        delta = delta.T if pair.is_transposed(module) else delta
        base = module.get_parameter(f"{pair.layer}.base_layer.weight").detach()
        found[pair] = base + weights.get(residual_of(pair), 0) + delta.reshape(base.shape)
    return found


def test_the_first_round_has_fedits_adapters_and_the_residual_makes_the_mean_exact():
    spy = Spy()
    run = fit(make_client(FedExLoRA), callbacks=[spy], max_rounds=1, precision="64-true")
    fedit = fit(make_client(FedIT), aggregator=EQUAL(), max_rounds=1, precision="64-true")
    for pair in pairs(run.weights):
        assert torch.equal(run.weights[pair.a], fedit.weights[pair.a])
        each = [layers(run.model, u["weights"])[pair] for u in spy.updates[0].values()]
        torch.testing.assert_close(layers(run.model, run.weights)[pair], sum(each) / len(each), rtol=1e-14, atol=1e-14)
    assert run.rows[0]["server/product_error"] == pytest.approx(fedit.rows[0]["server/product_error"])


@pytest.mark.parametrize("make", [partial(make_client, FedExLoRA), lambda: FedExLoRA(peft_net, (6,), 3)])
def test_over_rounds_each_layer_moves_to_the_mean_of_the_clients_layers(make):
    """Also of peft, whose Conv1D has transposed weights, all square."""
    torch.manual_seed(0)
    spy, before = Spy(), {}

    class Keep(Spy):
        def on_round_start(self, trainer, federation, cohort):
            before[federation.round] = dict(federation.aggregator.download(0)["weights"])

    run = fit(make(), blobs(24, 16, 20), callbacks=[spy, Keep()], max_rounds=3)
    assert len(pairs(run.weights)) >= 1
    for number, updates in enumerate(spy.updates):
        received = {name: t for name, t in before[number].items() if name.startswith("residual.")}
        after = before.get(number + 1, run.weights)
        for pair, found in layers(run.model, after).items():
            each = [layers(run.model, u["weights"] | received)[pair] for u in updates.values()]
            torch.testing.assert_close(found, sum(each) / len(each), rtol=1e-5, atol=1e-6)
    assert any(run.weights[residual_of(pair)].any() for pair in pairs(run.weights))


def test_outputs_and_gradients_are_those_of_a_net_with_the_corrected_weights():
    model = make_client(FedExLoRA).double()
    (residual,) = model.residual.buffers()
    nn.init.normal_(residual)
    x, y = points(9, seed=1)
    x = x.double()
    name = model.bases["features.0"]
    weights = {name: model.net.get_parameter(name) + residual}
    torch.testing.assert_close(model(x), functional_call(model.net, weights, (x,)))
    assert not torch.allclose(model(x), model.net(x))
    model.training_step((x, y), 0)["loss"].backward()
    found = {n: p.grad for n, p in model.net.named_parameters() if p.requires_grad}
    moved = make_client(FedIT).double()
    with torch.no_grad():
        moved.net.get_parameter(name).add_(residual)
    moved.training_step((x, y), 0)["loss"].backward()
    for n, gradient in found.items():
        torch.testing.assert_close(gradient, moved.net.get_parameter(n).grad)


def test_equal_clients_and_one_client_have_no_residual():
    model = make_client(FedExLoRA)
    update = drawn_update(model, 0)
    for updates in ({0: update}, {0: update, 2: update}):
        server = set_up(ResidualAverage(), model)
        assert server.aggregate(updates, 0)["product_error"] < 1e-6
        assert all(server.state["weights"][residual_of(pair)].abs().max() < 1e-6 for pair in server.scales)
    before = dict(server.state)
    assert server.aggregate({}, 1) == {} and server.state == before


def test_residuals_come_down_and_never_go_up_and_the_engines_agree():
    spy = Spy()
    make = partial(make_client, FedExLoRA, net=noisy)
    alone = fit(make(), callbacks=[spy])
    assert not any("residual" in name for name in spy.updates[-1][0]["weights"])
    assert any("residual" in name for name in alone.federation.aggregator.download(0)["weights"])
    together = fit(make(), engine="vectorised")
    assert near(dict(alone.weights), dict(together.weights)) and near(alone.test(), together.test())


def test_under_another_server_it_is_fedit_and_its_server_wants_residuals():
    one, other = (fit(make_client(kind, net=noisy), aggregator=EQUAL()) for kind in (FedExLoRA, FedIT))
    assert all(torch.equal(one.weights[name], tensor) for name, tensor in other.weights.items())
    with pytest.raises(MisconfigurationException, match=r"model=FedIT has no residual of net\.features\.0"):
        fit(make_client(FedIT), aggregator=ResidualAverage())


def test_weights_of_no_floating_type_are_refused():
    def quantised(input_shape, num_classes):
        net = peft_net(input_shape, num_classes)
        layer = net.features[2].base_layer
        layer.weight = nn.Parameter(torch.zeros_like(layer.weight, dtype=torch.uint8), requires_grad=False)
        return net

    with pytest.raises(MisconfigurationException, match=r"the weights of features\.2, which are torch\.uint8"):
        FedExLoRA(quantised, (6,), 3)
