"""What a net is given as, and its parts: the builders, both modules, the output layer, BatchNorm's mode."""

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.nets import MLP, Net, find_output_layer
from pfl_lightning.nets.base import checked_list, checked_net
from pfl_lightning.nets.batch_norm import on_batch_statistics


def client(classifier):
    return FedAvg(Net(nn.Linear(4, 3), classifier), (4,), 3)


def test_the_output_layer_is_the_classifier_s_only_layer_with_a_row_a_class():
    assert find_output_layer(client(nn.Linear(3, 3)), 3) == "net.classifier"
    last = client(nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 3)))
    assert find_output_layer(last, 3) == "net.classifier.2"
    two = client(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    assert find_output_layer(two, 3, "net.classifier.1") == "net.classifier.1"
    with pytest.raises(MisconfigurationException, match=r"^the net's classifier has 2 linear layers with 3 outputs"):
        find_output_layer(two, 3)
    with pytest.raises(MisconfigurationException, match=r"^output_layer='net\.head' .* choose from 'net\.features'"):
        find_output_layer(two, 3, "net.head")


@pytest.mark.parametrize(
    ("net", "sentence"),
    [
        ([], r"^model\.net=\[\] has no network"),
        (3, r"^model\.net=3 builds no network"),
        ([MLP, "CNN"], r"^model\.net='CNN' builds no network"),
        (lambda: MLP((4,), 3), r"is called with input_shape and num_classes, and takes <lambda>\(\)"),
    ],
)
def test_what_builds_no_network_is_refused(net, sentence):
    with pytest.raises(MisconfigurationException, match=sentence):
        checked_list(net)


def test_a_net_has_both_parts_and_something_to_train():
    net = MLP((4,), 3)
    assert checked_net(net) is net
    with pytest.raises(MisconfigurationException, match=r"^model\.net=MLP has no parameter to train"):
        checked_net(net.requires_grad_(False))
    with pytest.raises(MisconfigurationException, match=r"^model\.net=Linear has no modules for features"):
        checked_net(nn.Linear(4, 3))


def test_a_batch_s_statistics_are_batchnorm_s_alone():
    layers = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.5)).eval()
    layers[2].train()
    with on_batch_statistics(layers):
        assert [layer.training for layer in layers] == [False, True, False]
        x = torch.randn(8, 4)
        torch.testing.assert_close(layers(x).mean(0), torch.zeros(3))
    assert [layer.training for layer in layers] == [False, False, True] and not layers.training
