import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.nets import CharGRU

TEXTS = torch.arange(24).view(2, 12) % 9


def made(seed=0, **settings):
    torch.manual_seed(seed)
    return CharGRU((12,), 9, **{"width": 8, "embedding": 4, **settings})


def test_states_are_those_of_torch_with_the_same_weights():
    units = made().features
    kernel = torch.nn.GRU(4, 8, batch_first=True)
    kernel.load_state_dict(
        {
            f"{name}_{of}_l0": getattr(layer, name)
            for of, layer in (("ih", units.of_input), ("hh", units.of_state))
            for name in ("weight", "bias")
        }
    )
    assert torch.allclose(units(TEXTS), kernel(units.letters(TEXTS))[0], atol=1e-6)


@pytest.mark.parametrize(
    ("shape", "settings", "says"),
    [
        ((3, 8, 8), {}, r"input_shape=\(3, 8, 8\)"),
        ((12,), {"width": 0}, "width=0"),
        ((12,), {"embedding": 0}, "embedding=0"),
    ],
)
def test_what_cannot_be_is_refused(shape, settings, says):
    with pytest.raises(MisconfigurationException, match=says):
        CharGRU(shape, 9, **settings)
    with pytest.raises(MisconfigurationException, match="int64"):
        made()(TEXTS.float())
