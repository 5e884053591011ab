"""A tiny net with adapters of peft, for tests of methods that read their names, scales and orientation."""

from typing import Any

import pytest
from torch import nn

from federations import HIDDEN
from pfl_lightning.nets import Net


def peft_net(input_shape: tuple[int, ...], num_classes: int) -> Any:
    """A Conv1D, whose weights are transposed, and a linear layer, both square, so that no shape tells the two apart."""
    peft = pytest.importorskip("peft", reason="needs the extra lora")
    from transformers.pytorch_utils import Conv1D

    width = input_shape[0]
    body = nn.Sequential(Conv1D(width, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, HIDDEN))
    lora = peft.LoraConfig(r=2, lora_alpha=3, target_modules=["0", "2"], fan_in_fan_out=False)
    adapted = peft.get_peft_model(body, lora)
    return Net(adapted.base_model.model, nn.Linear(HIDDEN, num_classes))
