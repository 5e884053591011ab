from copy import deepcopy
from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torchvision import models

from pfl_lightning.nets import CNN, MLP, CharGRU, CifarResNet, LeNet5, Narrow, Net, SmallCNN
from pfl_lightning.nets.narrow import Scaler, blocks_of, places_of, taken

IMAGE = (3, 20, 20)


def built(net, width, shape=IMAGE, scale=False):
    """The whole net, and a narrow one of the same initial weights."""
    torch.manual_seed(0)
    whole = Narrow(net, 1)(shape, 10).eval()
    torch.manual_seed(0)
    return whole, Narrow(net, width, scale)(shape, 10).eval()


def mobile(input_shape, num_classes):
    return models.mobilenet_v2(num_classes=num_classes)


def words(input_shape, num_classes):
    return Net(Mean(), nn.Linear(7, num_classes))


class Mean(nn.Module):
    """The mean of embedded words."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(9, 7)

    def forward(self, x):
        return self.words(x).mean(1)


def words_in_order(input_shape, num_classes):
    body = nn.Sequential(nn.Embedding(9, 7), nn.Flatten(), nn.Linear(7 * 4, 5), nn.ReLU())
    return Net(body, nn.Linear(5, num_classes))


class Joined(nn.Module):
    """Two layers' units behind one another."""

    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(12, 4), nn.Linear(12, 4)

    def forward(self, x):
        return torch.cat([self.one(x), self.other(x)], 1)


def joined(input_shape, num_classes):
    return Net(Joined(), nn.Linear(8, num_classes))


def in_groups(input_shape, num_classes):
    return Net(nn.Conv2d(4, 8, 1, groups=2), nn.Sequential(nn.Flatten(), nn.Linear(8, num_classes)))


def normed_in_groups(input_shape, num_classes):
    return Net(nn.Sequential(nn.Linear(4, 6), nn.GroupNorm(3, 6)), nn.Linear(6, num_classes))


def without_linear(input_shape, num_classes):
    return Net(nn.Linear(4, 6), nn.Sequential(nn.Unflatten(1, (6, 1)), nn.Conv1d(6, num_classes, 1), nn.Flatten()))


@pytest.mark.parametrize("width", [0.5, 0.3])
@pytest.mark.parametrize(
    "net, shape",
    [
        (partial(MLP, hidden=(16, 9)), (12,)),
        (CNN, IMAGE),
        (partial(SmallCNN, batch_norm=True, maps=8), IMAGE),
        (LeNet5, IMAGE),
        (CifarResNet, IMAGE),
        (mobile, (3, 32, 32)),
    ],
)
@pytest.mark.parametrize("turn", [0, 3])
@pytest.mark.by_default(but=["mobile"])
def test_a_narrow_net_is_the_whole_one_without_the_other_units(net, shape, width, turn):
    whole, narrow = built(net, width, shape)
    whole.double(), narrow.double()
    kinds = {name: entry.shape for name, entry in narrow.state_dict().items()}
    places = places_of(whole.state_dict(), kinds, blocks_of(narrow), turn)
    narrow.load_state_dict({name: taken(entry, places[name]) for name, entry in whole.state_dict().items()})
    silent = deepcopy(whole)
    for name, entry in silent.state_dict().items():
        if len(places[name]) > 1:
            others = torch.ones(entry.shape[1], dtype=torch.bool)
            others[places[name][1]] = False
            entry[:, others] = 0
    x = torch.randn(4, *shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    outputs, scale = narrow(x), narrow(x).abs().max()
    assert (silent(x) - outputs).abs().max() < 1e-9 * scale
    assert (whole(x) - outputs).abs().max() > 1e-2 * scale


def test_each_layer_has_its_share_rounded_up_and_ends_have_their_size():
    narrow = built(partial(MLP, hidden=(16, 9)), 0.3, (12,))[1]
    assert [tuple(p.shape) for p in narrow.parameters()] == [(5, 12), (5,), (3, 5), (3,), (10, 3), (10,)]


def test_initial_weights_are_the_first_ones_of_the_whole_net():
    whole, narrow = built(CNN, 0.5)
    for mine, its in zip(narrow.parameters(), whole.parameters(), strict=True):
        assert torch.equal(mine, its[tuple(slice(n) for n in mine.shape)])


def test_embeddings_become_narrow():
    torch.manual_seed(0)
    narrow = Narrow(words, 0.5)((4,), 3)
    assert narrow.features.words.weight.shape == (9, 4) and narrow(torch.zeros(2, 4, dtype=torch.int64)).shape == (2, 3)
    assert blocks_of(narrow) == {}


@pytest.mark.parametrize("width", [0, -0.5, 1.5, float("nan")])
def test_a_width_out_of_range_is_refused(width):
    with pytest.raises(MisconfigurationException, match="width"):
        Narrow(MLP, width)


@pytest.mark.parametrize(
    "net, shape, reason",
    [
        (joined, (12,), "joined"),
        (words_in_order, (4,), "order"),
        (CharGRU, (12,), "joined"),
        (in_groups, (4, 1, 1), "2 groups"),
        (normed_in_groups, (4,), "3 groups"),
        (without_linear, (4,), "no linear layer"),
    ],
)
def test_nets_without_a_narrow_copy_are_refused_with_the_reason(net, shape, reason):
    with pytest.raises(MisconfigurationException, match=reason):
        Narrow(net, 0.6 if net is normed_in_groups else 0.5)(shape, 3)


def test_the_scaler_divides_by_the_width_in_training_alone():
    scaled, plain = (built(partial(MLP, hidden=(16,)), 0.25, (12,), scale)[1] for scale in (True, False))
    x = torch.randn(3, 12, generator=torch.Generator().manual_seed(0))
    assert torch.equal(scaled(x), plain(x))
    hidden, in_training = plain.features[:2](x), scaled.train().features(x)
    assert torch.allclose(in_training, (hidden * 4).relu()) and not any(
        isinstance(hook, Scaler) for hook in scaled.classifier[-1]._forward_hooks.values()
    )


def test_a_width_of_one_is_the_net_itself():
    torch.manual_seed(0)
    whole = CNN(IMAGE, 10)
    torch.manual_seed(0)
    same = Narrow(CNN, 1)(IMAGE, 10)
    assert all(map(torch.equal, whole.parameters(), same.parameters())) and blocks_of(same) == {}
    assert not any(layer._forward_hooks for layer in same.modules())
