"""The U-Net of images and of volumes."""

import re

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from pfl_lightning.nets import UNet


@pytest.mark.parametrize("shape", [(1, 8, 8), (2, 7, 9), (1, 4, 6, 5), (3, 5, 4, 7)])
@pytest.mark.parametrize("norm", ["batch", "instance"])
def test_each_pixel_has_outputs_whatever_the_size(shape, norm):
    net = UNet(shape, 3, width=4, levels=2 if norm == "instance" else 3, norm=norm).eval()
    x = torch.randn(2, *shape)
    assert net(x).shape == (2, 3, *shape[1:])
    assert torch.equal(net(x), net.classifier(net.features(x)))
    assert net.features(x).shape == (2, 4, *shape[1:])


def test_one_level_is_two_convolutions_of_the_near_pixels():
    net = UNet((1, 9, 9), 2, width=4, levels=1).eval()
    x = torch.randn(1, 1, 9, 9)
    other = x.clone()
    other[..., 0, 0] += 5
    changed = (net(x) != net(other)).any(1)[0].nonzero()
    # two convolutions of 3 pixels see 2 pixels far
    assert changed.max() == 2
    # coarse levels see further
    deep = UNet((1, 9, 9), 2, width=4, levels=3).eval()
    assert (deep(x) != deep(other)).any(1)[0].nonzero().max() > 4


def test_a_volume_of_equal_slices_is_an_image_where_convolutions_see_the_image():
    flat, deep = UNet((1, 8, 8), 2, width=4).eval(), UNet((1, 4, 8, 8), 2, width=4).eval()
    weights = {}
    for name, entry in flat.state_dict().items():
        if entry.dim() == 4:
            # an image's weights in the middle slice alone
            wide = torch.zeros(*entry.shape[:2], entry.shape[2], *entry.shape[2:])
            wide[:, :, entry.shape[2] // 2] = entry
            entry = wide
        weights[name] = entry
    deep.load_state_dict(weights)
    x = torch.randn(2, 1, 8, 8)
    outputs = deep(x[:, :, None].expand(-1, -1, 4, -1, -1))
    assert torch.allclose(outputs, flat(x)[:, :, None].expand_as(outputs), atol=1e-5)


def test_instance_norm_treats_each_image_by_itself_in_training_too():
    torch.manual_seed(0)
    x = torch.randn(3, 1, 8, 8)
    for norm, alone in (("instance", True), ("batch", False)):
        net = UNet((1, 8, 8), 2, width=4, norm=norm).train()
        assert torch.allclose(net(x)[:1], net(x[:1]), atol=1e-5) == alone
    assert not any(isinstance(layer, nn.BatchNorm2d) for layer in UNet((1, 8, 8), 2, norm="instance").modules())


@pytest.mark.parametrize(
    ("shape", "settings", "sentence"),
    [
        ((64,), {}, r"net UNet takes images .* not input_shape=\(64,\); net MLP takes any shape"),
        ((1, 3, 8), {}, r"at least 4 pixels a side, not input_shape=\(1, 3, 8\); take fewer model.net.levels"),
        ((1, 3, 8, 8), {}, r"at least 4 pixels a side, not input_shape=\(1, 3, 8, 8\)"),
        ((1, 7, 8), {"norm": "instance"}, r"at least 8 pixels a side, not input_shape=\(1, 7, 8\)"),
        ((1, 8, 8), {"width": 0}, "width=0 and levels=3 must be 1 or more"),
        ((1, 8, 8), {"levels": 0}, "width=16 and levels=0 must be 1 or more"),
        ((1, 8, 8), {"norm": "layer"}, re.escape("norm='layer' one of batch, instance")),
    ],
)
def test_other_shapes_and_settings_are_refused(shape, settings, sentence):
    with pytest.raises(MisconfigurationException, match=sentence):
        UNet(shape, 3, **settings)
