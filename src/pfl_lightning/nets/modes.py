"""Training and evaluation modes of layers."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def kept_modes(module: nn.Module) -> Iterator[None]:
    """Lets all layers change between training and evaluation; their modes are as before afterwards.

    Args:
        module: any module.
    """
    modes = {layer: layer.training for layer in module.modules()}
    try:
        yield
    finally:
        for layer, mode in modes.items():
            layer.training = mode
