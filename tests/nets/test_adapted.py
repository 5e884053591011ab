import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from pfl_lightning.nets import CNN, MLP, Adapted, Net, SmallCNN
from pfl_lightning.nets.adapted import LowRank


@pytest.mark.parametrize("net", [CNN, MLP, SmallCNN])
def test_it_begins_as_the_net_without_adapters_and_trains_them_and_the_classifier(net):
    torch.manual_seed(0)
    plain = net((1, 28, 28), 10).eval()
    torch.manual_seed(0)
    adapted = Adapted((1, 28, 28), 10, net=net, rank=3).eval()
    x = torch.rand(2, 1, 28, 28)
    assert torch.equal(plain(x), adapted(x))
    trained = {name for name, p in adapted.named_parameters() if p.requires_grad}
    assert trained == {n for n, _ in adapted.named_parameters() if "lora_" in n or n.startswith("classifier.")}


def test_an_adapter_adds_its_product_to_the_weights():
    torch.manual_seed(0)
    for layer in (nn.Linear(5, 4), nn.Conv2d(3, 4, 3, stride=2, padding=1, bias=False)):
        adapted = LowRank(layer, rank=2, alpha=3.0).double()
        a, b = adapted.lora_A["default"].weight, adapted.lora_B["default"].weight
        nn.init.normal_(b)
        x = torch.randn(2, *((5,) if layer.weight.dim() == 2 else (3, 6, 6))).double()
        found = adapted(x)
        with torch.no_grad():
            layer.weight += 1.5 * (b.flatten(1) @ a.flatten(1)).view_as(layer.weight)
        torch.testing.assert_close(layer(x), found)


def test_what_cannot_be_adapted_is_refused_by_name():
    for setting, value in (("rank", 0), ("alpha", 0)):
        with pytest.raises(MisconfigurationException, match=rf"model\.net\.{setting}={value}"):
            Adapted((1, 8, 8), 3, net=MLP, **{setting: value})
    with pytest.raises(MisconfigurationException, match=r"model\.net\.net=MLP has no linear layer"):
        Adapted((1, 8, 8), 3, net=lambda shape, classes: MLP(shape, classes, hidden=()))
    # a layer that is all of the features
    net = Adapted((4,), 3, net=lambda shape, classes: Net(nn.Linear(4, 4), nn.Linear(4, classes)), rank=1)
    assert isinstance(net.features, LowRank) and net(torch.rand(2, 4)).shape == (2, 3)
