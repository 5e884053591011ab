import io
import warnings

import pytest
import torch
from jsonargparse import ArgumentError, ArgumentParser
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from pfl_lightning.nets import (
    CNN,
    MLP,
    AlexNet,
    AlexNetFeatures,
    CifarResNet,
    GoogLeNetFeatures,
    LeakyCNN,
    LeNet5,
    Net,
    NetFactory,
    ResNet18Features,
    ShuffleNetV2Features,
    SmallCNN,
    feature_size,
)

# nets and the width of their features for images of 32 pixels a side
PLAIN = {SmallCNN: 64, LeakyCNN: 128, LeNet5: 84, AlexNet: 2304}
DEEP = {CifarResNet: 64}
SHARED = {ResNet18Features: 512, ShuffleNetV2Features: 512, GoogLeNetFeatures: 512, AlexNetFeatures: 512}
NETS = PLAIN | DEEP | SHARED

IMAGES = (3, 32, 32)


def size(module):
    return sum(parameter.numel() for parameter in module.parameters())


def on_meta(net, *args, **options):
    """A net without memory for its weights, where only their shapes matter."""
    with torch.device("meta"):
        return net(*args, **options)


def images(shape, n=4):
    return torch.rand(n, *shape, generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize(
    ("net", "shape", "num_classes", "options", "parameters"),
    [
        (SmallCNN, IMAGES, 10, {}, 122_570),
        (SmallCNN, IMAGES, 100, {}, 128_420),
        # a norm of 32, 64 and 64 channels more, and a quarter of the width
        (SmallCNN, IMAGES, 10, {"batch_norm": True}, 122_570 + 2 * 160),
        (SmallCNN, IMAGES, 10, {"batch_norm": True, "maps": 8}, 224 + 1168 + 2320 + 4112 + 170 + 2 * 40),
        (LeakyCNN, IMAGES, 10, {}, 107_690),
        (LeakyCNN, (1, 28, 28), 10, {}, 117_066),
        (LeNet5, IMAGES, 10, {}, 62_006),
        (LeNet5, (1, 28, 28), 10, {}, 44_426),
        (AlexNet, IMAGES, 10, {}, 3_868_746),
        (CifarResNet, IMAGES, 10, {}, 272_474),
        (CifarResNet, IMAGES, 100, {}, 278_324),
        (CifarResNet, IMAGES, 10, {"depth": 32}, 466_906),
        (CifarResNet, IMAGES, 10, {"depth": 56}, 855_770),
        (CifarResNet, IMAGES, 10, {"depth": 110}, 1_730_714),
        (CifarResNet, IMAGES, 10, {"depth": 56, "width": 4}, 13_628_234),
    ],
)
def test_nets_have_the_sizes_of_the_papers(net, shape, num_classes, options, parameters):
    assert size(on_meta(net, shape, num_classes, **options)) == parameters


@pytest.mark.parametrize(
    ("net", "shape", "options", "extractor", "classifier"),
    [
        (CNN, (1, 28, 28), {"head": "all_fc"}, 52_096, 529_930),
        (AlexNet, IMAGES, {}, 978_496, 2_890_250),
        (ResNet18Features, IMAGES, {}, 11_439_168, 5_130),
        (ShuffleNetV2Features, IMAGES, {}, 1_778_404, 5_130),
        (GoogLeNetFeatures, IMAGES, {"aux": True}, 12_504_688, 5_130),
        # without the 1x1 convolutions and the two linear layers of the auxiliary classifiers
        (GoogLeNetFeatures, IMAGES, {}, 12_504_688 - 128 * (512 + 528) - 2 * (256 + 2_098_176 + 1_025_000), 5_130),
        (AlexNetFeatures, IMAGES, {}, 1_813_632, 5_130),
    ],
)
def test_the_parts_have_the_sizes_of_the_papers(net, shape, options, extractor, classifier):
    built = on_meta(net, shape, 10, **options)
    assert (size(built.features), size(built.classifier)) == (extractor, classifier)
    assert size(built) == extractor + classifier


@pytest.mark.parametrize("channels", [3, 1])
@pytest.mark.parametrize("net", NETS)
def test_a_net_is_features_and_a_classifier_and_trains(net, channels):
    shape = (channels, 28, 28) if net in PLAIN else (channels, 16, 16)
    built = net(shape, 5)
    x = images(shape)
    assert {name.split(".")[0] for name in built.state_dict()} == {"features", "classifier"}
    built.train()
    logits = built(x)
    assert logits.shape == (4, 5)
    nn.functional.cross_entropy(logits, torch.tensor([0, 1, 2, 3])).backward()
    assert all(parameter.grad.isfinite().all() for parameter in built.parameters())
    assert all(parameter.grad.any() for parameter in built.classifier.parameters())
    assert next(built.parameters()).grad.any()
    built.eval()
    with torch.no_grad():
        features = built.features(x)
        before = features.clone()
        assert torch.equal(built(x), built.classifier(features))
        assert torch.equal(features, before)
        assert built(x[:1]).shape == (1, 5)
    assert feature_size(built) == features.shape[1]
    assert features.ndim == 2


@pytest.mark.parametrize(("net", "d"), NETS.items())
def test_features_have_their_width(net, d):
    assert feature_size(on_meta(net, IMAGES, 10)) == d


@pytest.mark.parametrize("net", NETS)
def test_nets_are_reproducible(net):
    def weights():
        return net(IMAGES, 3).state_dict()

    torch.manual_seed(0)
    first, other = weights(), weights()
    torch.manual_seed(0)
    again = weights()
    assert all(torch.equal(first[name], again[name]) for name in first)
    drawn = {name for name, entry in first.items() if entry.ndim > 1 and entry.any()}
    assert drawn
    assert not any(torch.equal(first[name], other[name]) for name in drawn)


@pytest.mark.parametrize("net", NETS)
def test_channels_change_the_first_weights_only(net):
    colour, grey = ({name: p.shape for name, p in on_meta(net, (c, 32, 32), 3).named_parameters()} for c in (3, 1))
    assert list(colour) == list(grey)
    [(three, one)] = [(colour[name], grey[name]) for name in colour if colour[name] != grey[name]]
    assert (three[1], one[1]) == (3, 1)
    assert (three[0], *three[2:]) == (one[0], *one[2:])


@pytest.mark.parametrize("net", PLAIN)
def test_plain_nets_cut_at_either_head(net):
    last, all_fc = (on_meta(net, IMAGES, 10, head=head) for head in ("last", "all_fc"))
    linear = [sum(isinstance(m, nn.Linear) for m in built.classifier.modules()) for built in (last, all_fc)]
    assert linear == [1, 3 if net in (LeNet5, AlexNet) else 2]
    assert not any(isinstance(m, nn.Linear) for m in all_fc.features.modules())
    assert size(last) == size(all_fc)


@pytest.mark.parametrize(("net", "side"), [(SmallCNN, 18), (LeakyCNN, 12), (LeNet5, 16), (AlexNet, 12)])
def test_plain_nets_take_images_of_any_form(net, side):
    for height, width in [(side, side), (side, side + 1), (33, 47), (64, 30)]:
        assert net((2, height, width), 3)(images((2, height, width))).shape == (4, 3)


def test_a_small_cnn_may_normalise_behind_each_convolution():
    plain, normed = (on_meta(SmallCNN, IMAGES, 10, batch_norm=batch_norm) for batch_norm in (False, True))
    kinds = [type(layer).__name__ for layer in normed.features]
    assert [kinds[k + 1] for k, kind in enumerate(kinds) if kind == "Conv2d"] == ["BatchNorm2d"] * 3
    assert size(normed) - size(plain) == 2 * (32 + 64 + 64)
    assert [kind for kind in kinds if kind != "BatchNorm2d"] == [type(layer).__name__ for layer in plain.features]


@pytest.mark.parametrize(("net", "side"), [(CifarResNet, 4), (GoogLeNetFeatures, 15)])
def test_deep_nets_take_small_images(net, side):
    assert net((3, side, side + 1), 3)(images((3, side, side + 1))).shape == (4, 3)


@pytest.mark.parametrize(
    ("net", "side"),
    [
        *((SmallCNN, 18), (LeakyCNN, 12), (LeNet5, 16), (AlexNet, 12), (GoogLeNetFeatures, 15)),
        *((net, 1) for net in (CifarResNet, ResNet18Features, ShuffleNetV2Features, AlexNetFeatures)),
    ],
)
def test_other_data_are_refused(net, side):
    size_needed = rf" of at least {side} x {side} pixels" if side > 1 else ""
    for shape in [(200,), (3, 32), *([(3, side - 1, 32), (3, 32, side - 1)] if side > 1 else [])]:
        with pytest.raises(
            MisconfigurationException,
            match=rf"^net {net.__name__} takes images{size_needed}, not input_shape=\({shape[0]},.*; net MLP takes any",
        ):
            net(shape, 10)


# FedAWA, FedLAW


def test_resnet_20_has_43_layers_with_parameters_and_65_tensors():
    net = on_meta(CifarResNet, IMAGES, 10)
    layers = [module for module in net.modules() if any(True for _ in module.parameters(recurse=False))]
    assert len(layers) == 43
    assert not any(list(module.children()) for module in layers)
    assert len(list(net.parameters())) == 65


def test_resnet_halves_resolution_as_it_doubles_channels():
    net = CifarResNet(IMAGES, 10, depth=8, width=2).eval()
    shapes = []
    for name, layer in net.features.named_children():
        if name.startswith("layer"):
            layer.register_forward_hook(lambda _, __, maps: shapes.append(tuple(maps.shape[1:])))
    net(images(IMAGES, 1))
    assert shapes == [(32, 32, 32), (64, 16, 16), (128, 8, 8)]


@pytest.mark.parametrize("depth", [2, 18, 19, 0, -4])
def test_a_resnet_of_another_depth_is_refused(depth):
    with pytest.raises(MisconfigurationException, match=rf"^net CifarResNet: depth={depth} is not 6n \+ 2; 20, "):
        CifarResNet(IMAGES, 10, depth=depth)


def test_a_resnet_without_width_is_refused():
    with pytest.raises(MisconfigurationException, match=r"^net CifarResNet: width=0 must be at least 1"):
        CifarResNet(IMAGES, 10, width=0)
    with pytest.raises(MisconfigurationException, match=r"^net SmallCNN: maps=0 must be at least 1"):
        SmallCNN(IMAGES, 10, maps=0)


# FedReMa, FedPAC


def test_the_head_of_alexnet_is_an_affine_map():
    head = AlexNet((1, 12, 12), 3).classifier.double()
    a, b = torch.randn(2, 5, 256, dtype=torch.float64)
    assert torch.allclose(head(a + b), head(a) + head(b) - head(torch.zeros_like(a)))


def test_alexnet_has_no_activation_between_its_last_convolutions():
    net = on_meta(AlexNet, IMAGES, 10)
    kinds = [type(layer).__name__ for layer in net.features]
    stem = ["Conv2d", "MaxPool2d", "ReLU"]
    assert kinds == [*stem, *stem, "Conv2d", "Conv2d", *stem, "Flatten"]


@pytest.mark.parametrize(("shape", "convolutions", "flat"), [(IMAGES, 3, 576), ((1, 28, 28), 2, 800)])
def test_leaky_cnn_has_the_convolutions_of_its_data(shape, convolutions, flat):
    net = on_meta(LeakyCNN, shape, 10, head="all_fc")
    assert sum(isinstance(layer, nn.Conv2d) for layer in net.modules()) == convolutions
    assert feature_size(net) == flat
    # one after each convolution and one after the hidden layer
    assert sum(isinstance(layer, nn.LeakyReLU) for layer in net.modules()) == convolutions + 1


# FedClassAvg


def test_different_nets_have_one_classifier():
    classifiers = [
        {name: entry.shape for name, entry in on_meta(net, IMAGES, 10).state_dict().items() if "classifier" in name}
        for net in SHARED
    ]
    assert classifiers == [{"classifier.1.weight": (10, 512), "classifier.1.bias": (10,)}] * 4


@pytest.mark.parametrize("net", SHARED)
def test_shared_features_are_those_before_the_relu(net):
    torch.manual_seed(0)
    built = net(IMAGES, 10).eval()
    with torch.no_grad():
        features = built.features(images(IMAGES))
        expected = features.clamp(min=0) @ built.classifier[1].weight.T + built.classifier[1].bias
        assert (features < 0).any()
        assert torch.allclose(built(images(IMAGES)), expected, atol=1e-5)


@pytest.mark.parametrize("name", ["resnet18", "shufflenet_v2_x1_0", "googlenet"])
def test_backbones_are_those_of_torchvision(name):
    from torchvision import models

    net = dict(zip(("resnet18", "shufflenet_v2_x1_0", "googlenet"), SHARED, strict=False))[name]
    options = {"aux_logits": False, "init_weights": False} if name == "googlenet" else {}
    ours, theirs = net(IMAGES, 10).features.eval(), getattr(models, name)(num_classes=512, **options).eval()
    # ours has the same entries in the same order
    theirs.load_state_dict(dict(zip(theirs.state_dict(), ours.state_dict().values(), strict=True)))
    with torch.no_grad():
        assert torch.allclose(ours(images(IMAGES)), theirs(images(IMAGES)), atol=1e-6)


@pytest.mark.parametrize("aux", [False, True])
def test_googlenet_gives_tensors_in_training_and_says_nothing(aux):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net = GoogLeNetFeatures(IMAGES, 10, aux=aux).train()
    logits = net(images(IMAGES))
    assert isinstance(logits, torch.Tensor)
    logits.sum().backward()
    idle = {name for name, parameter in net.named_parameters() if parameter.grad is None}
    assert idle == {name for name, _ in net.named_parameters() if ".aux" in name}
    assert bool(idle) == aux


def test_a_whole_resnet_18_takes_the_megabytes_of_the_paper():
    file = io.BytesIO()
    torch.save(ResNet18Features(IMAGES, 10).state_dict(), file)
    assert file.getbuffer().nbytes == pytest.approx(45_854_855, rel=0.01)


# the width of features


def test_the_feature_size_is_that_of_the_first_linear_layer():
    assert feature_size(MLP((1, 8, 8), 10, hidden=(64, 32))) == 32
    assert feature_size(MLP((1, 8, 8), 10, hidden=(64, 32), head="all_fc")) == 64
    assert feature_size(Net(nn.Flatten(), nn.Linear(6, 2))) == 6
    assert (
        feature_size(Net(nn.Flatten(), nn.Sequential(nn.Sequential(nn.ReLU(), nn.Linear(5, 4)), nn.Linear(4, 2)))) == 5
    )


def test_a_classifier_without_linear_layers_has_no_feature_size():
    with pytest.raises(MisconfigurationException, match=r"^the net's classifier has no linear layer, .*nn.Linear"):
        feature_size(Net(nn.Linear(4, 3), nn.Sequential(nn.ReLU())))


# the command line


@pytest.mark.parametrize(
    ("net", "option", "value"),
    [
        *((net, "head", "last") for net in PLAIN),
        (CifarResNet, "depth", 32),
        (CifarResNet, "width", 2),
        (GoogLeNetFeatures, "aux", True),
    ],
)
def test_options_are_read_from_the_command_line(net, option, value):
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--net", type=NetFactory)
    config = parser.parse_args([f"--net={net.__name__}", f"--net.{option}={value}".lower()])
    build = parser.instantiate_classes(config).net
    built, expected = on_meta(build, IMAGES, 10), on_meta(net, IMAGES, 10, **{option: value})
    assert str(built) == str(expected)


@pytest.mark.parametrize("arguments", [("CifarResNet", "depth=deep"), ("AlexNet", "head=first")])
def test_other_options_are_refused(arguments):
    net, option = arguments
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--net", type=NetFactory)
    with pytest.raises(ArgumentError, match=option.split("=")[1]):
        parser.parse_args([f"--net={net}", f"--net.{option}"])
