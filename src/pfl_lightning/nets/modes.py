"""Training and evaluation modes of layers."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def kept_modes(module: nn.Module) -> Iterator[None]:
    """Restore the training or evaluation mode of all layers at the end of the context.

    Args:
        module: any module.
    """
    # layer by layer: users freeze single layers by their `eval()`, which `module.train()` would undo
    modes = {layer: layer.training for layer in module.modules()}
    try:
        yield
    finally:
        for layer, mode in modes.items():
            layer.training = mode
