"""BatchNorm layers: what they ask of batches, and how to run on the statistics of a batch alone."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from pfl_lightning.nets.modes import kept_modes


def smallest_batch(module: nn.Module) -> int:
    """Samples that a batch of training needs at least: 2 where a BatchNorm layer takes their statistics, else 1.

    >>> smallest_batch(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))), smallest_batch(nn.Linear(3, 2))
    (2, 1)

    Args:
        module: any module.
    """
    return 2 if any(isinstance(layer, _BatchNorm) for layer in module.modules()) else 1


@contextmanager
def on_batch_statistics(module: nn.Module) -> Iterator[None]:
    """Evaluation mode, but for BatchNorm layers; the modes of all layers are as before afterwards.

    Args:
        module: any module.
    """
    with kept_modes(module):
        for layer in module.modules():
            layer.training = isinstance(layer, _BatchNorm)
        yield
