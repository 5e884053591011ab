import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.nets import Transformer

TEXTS = torch.arange(24).view(2, 12) % 9


def made(seed=0, **settings):
    torch.manual_seed(seed)
    return Transformer((12,), 9, **{"width": 8, "heads": 2, **settings})


def test_a_position_sees_those_before_it_alone():
    net, changed = made(), TEXTS.clone()
    changed[:, 7:] = 0
    one, other = net(TEXTS), net(changed)
    assert one.shape == (2, 12, 9)
    assert one[:, :7].equal(other[:, :7]) and not torch.isclose(one[:, 7:], other[:, 7:]).all()
    # and does see them
    changed = TEXTS.clone()
    changed[:, 0] = 8
    assert not torch.isclose(net(changed)[:, -1], one[:, -1]).all()


def test_positions_matter():
    same = torch.full((1, 12), 3)
    assert not torch.isclose(made()(same)[0, 0], made()(same)[0, 5]).all()


@pytest.mark.parametrize(
    ("shape", "settings", "says"),
    [
        ((3, 8, 8), {}, r"takes texts as rows of token numbers, not input_shape=\(3, 8, 8\)"),
        ((12,), {"width": 9}, "width=9, depth=2 and heads=4 must be at least 1, and width a multiple of heads"),
        ((12,), {"depth": 0}, "depth=0"),
    ],
)
def test_what_cannot_be_is_refused(shape, settings, says):
    with pytest.raises(MisconfigurationException, match=says):
        Transformer(shape, 9, **settings)


def test_quantities_are_refused():
    with pytest.raises(MisconfigurationException, match="net Transformer takes token numbers"):
        made()(torch.rand(2, 12))
