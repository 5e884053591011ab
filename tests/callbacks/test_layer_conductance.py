"""Conductance adds up to what it explains, and is what can be computed by hand."""

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from pfl_lightning.callbacks.feature_pictures import layer_conductance
from pfl_lightning.methods import FedProto
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.nets import MLP, AlexNetFeatures, Net, ResNet18Features

D, K = 6, 4


class Power(nn.Module):
    """The sum of powers of features, times weights."""

    def __init__(self, power):
        super().__init__()
        self.power, self.weight = power, nn.Parameter(torch.randn(K, D))

    def forward(self, h):
        return h**self.power @ self.weight.T


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def body():
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, D), nn.GELU())


def explained(net, x, target, baseline=None):
    """F(x) - F(x_0) of each sample."""
    net.eval()
    ends = (net(end)[range(len(x)), target] for end in (x, torch.zeros_like(x) if baseline is None else baseline))
    return torch.sub(*ends).detach()


def test_of_a_linear_classifier_it_is_the_change_of_each_unit_times_its_weight():
    net = Net(body(), nn.Linear(D, K))
    x, target = torch.randn(5, 3), torch.tensor([0, 3, 1, 1, 2])
    found = layer_conductance(net, net.features, x, target)
    net.eval()
    change = (net.features(x) - net.features(torch.zeros(1, 3))).detach()
    torch.testing.assert_close(found, net.classifier.weight.detach()[target] * change, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.sum(1), explained(net, x, target), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("steps", [1, 7])
def test_of_squares_it_is_exact_with_any_number_of_steps(steps):
    net = Net(body(), Power(2)).double()
    x, target = torch.randn(4, 3).double(), torch.tensor([2, 0, 1, 3])
    found = layer_conductance(net, net.features, x, target, steps)
    net.eval()
    change = (net.features(x) ** 2 - net.features(torch.zeros(1, 3).double()) ** 2).detach()
    torch.testing.assert_close(found, net.classifier.weight.detach()[target] * change)


def test_more_steps_come_nearer_to_the_integral():
    net = Net(nn.Linear(3, D), Power(4)).double()
    x, target = torch.randn(4, 3).double(), torch.tensor([2, 0, 1, 3])
    change = (net.features(x) ** 4 - net.features(torch.zeros(1, 3).double()) ** 4).detach()
    exact = net.classifier.weight.detach()[target] * change
    few, many = (layer_conductance(net, net.features, x, target, steps) for steps in (5, 50))
    assert (many - exact).abs().max() < (few - exact).abs().max() / 50


@pytest.mark.parametrize("make", [ResNet18Features, AlexNetFeatures, MLP])
def test_it_adds_up_on_the_networks_of_the_library(make):
    net = make((3, 32, 32), 10) if make is not MLP else MLP((3, 32, 32), 10, (32, 16), head="all_fc")
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(std=0.1)
            module.running_var.uniform_(0.5, 2)
    x, target = torch.rand(2, 3, 32, 32) * 2 - 1, torch.tensor([4, 9])
    found = layer_conductance(net, net.features, x, target)
    total = explained(net, x, target)
    assert found.shape == (2, 3072 if make is MLP else 512)
    # a unit that crosses the ReLU within a step is counted by half of that step
    assert (found.sum(1) - total).abs().max() < 0.01 * found.abs().sum(1).max()
    assert total.abs().max() > 0.01


def test_units_behind_a_closed_relu_have_none():
    net = Net(nn.Identity(), nn.Sequential(nn.ReLU(), nn.Linear(D, K)))
    x = torch.linspace(-3, 2, D)[None]
    found = layer_conductance(net, net.features, x, torch.tensor([1]))
    expected = net.classifier[1].weight.detach()[1] * x.relu()
    # the ReLU's slope at the baseline, its kink, is 0
    torch.testing.assert_close(found, expected * (1 - 1 / 100))
    assert (found[x < 0] == 0).all() and (found[x > 0] != 0).all()


def test_a_baseline_of_ones_choice_is_where_the_path_begins():
    net = Net(body(), Power(2)).double()
    x, target = torch.randn(3, 3).double(), torch.tensor([2, 0, 1])
    for baseline in (torch.randn(3).double(), torch.randn(3, 3).double()):
        found = layer_conductance(net, net.features, x, target, baseline=baseline)
        torch.testing.assert_close(found.sum(1), explained(net, x, target, baseline.expand_as(x)))
    assert (layer_conductance(net, net.features, x, target, baseline=x) == 0).all()


def test_each_sample_is_on_its_own_and_the_model_is_left_as_it_was():
    net = Net(body(), nn.Linear(D, K))
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    x, target = torch.randn(5, 3), torch.tensor([0, 3, 1, 1, 2])
    with torch.no_grad():
        together = layer_conductance(net, net.features, x, target)
    alone = [layer_conductance(net, net.features, x[i : i + 1], target[i : i + 1]) for i in range(5)]
    torch.testing.assert_close(together, torch.cat(alone))
    assert net.training and net.features[3].training and not net.features._forward_hooks
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
    assert all(parameter.grad is None for parameter in net.parameters())


def test_features_that_are_maps_are_units_one_after_the_other():
    net = Net(nn.Conv2d(1, 2, 3, padding=1), nn.Sequential(nn.Flatten(), nn.Linear(32, K)))
    x = torch.randn(2, 1, 4, 4)
    found = layer_conductance(net, net.features, x, torch.tensor([0, 1]))
    change = (net.features(x) - net.features(torch.zeros_like(x))).flatten(1).detach()
    torch.testing.assert_close(found, net.classifier[1].weight.detach()[[0, 1]] * change)


def test_a_client_module_is_explained_by_the_logits_that_it_gives():
    client = FedProto(net=MLP, input_shape=(3,), num_classes=K).double()
    client.prototypes.take({c: torch.randn(64).double() for c in range(K)})
    x, target = torch.randn(2, 3).double(), torch.tensor([1, 2])
    found = layer_conductance(client, client.net.features, x, target)
    client.eval()
    # by prototypes: F = -|h - g|^2, and not what the classifier says
    g = client.prototypes.vectors[target]
    ends = ((client.net.features(end) - g).square() for end in (torch.zeros_like(x), x))
    torch.testing.assert_close(found, torch.sub(*ends).detach())


@pytest.mark.parametrize(
    ("x", "steps", "message"),
    [(torch.zeros(1, 3), 0, "steps=0"), (torch.zeros(1, 3, dtype=torch.long), 50, "type torch.int64")],
)
def test_what_has_no_path_is_refused(x, steps, message):
    client = FedAvg(net=MLP, input_shape=(3,), num_classes=K)
    with pytest.raises(MisconfigurationException, match=message):
        layer_conductance(client, client.net.features, x, torch.tensor([0]), steps)
