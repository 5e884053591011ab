"""BatchNorm layers: their smallest batch, and runs on a batch's own statistics."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from pfl_lightning.internals.of_torch import BatchNorm
from pfl_lightning.nets.modes import kept_modes


def smallest_batch(module: nn.Module) -> int:
    """Return the smallest batch for training: 2 samples with a BatchNorm layer, which needs a variance, else 1.

    >>> smallest_batch(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))), smallest_batch(nn.Linear(3, 2))
    (2, 1)

    Args:
        module: any module.
    """
    return 2 if any(isinstance(layer, BatchNorm) for layer in module.modules()) else 1


@contextmanager
def on_batch_statistics(module: nn.Module) -> Iterator[None]:
    """Run in evaluation mode, except BatchNorm layers, which normalise by the batch; restore all modes at the end.

    Args:
        module: any module.
    """
    with kept_modes(module):
        # layer by layer: `train()` of a container would set its BatchNorm layers and its dropout alike
        for layer in module.modules():
            layer.training = isinstance(layer, BatchNorm)
        yield
