"""The optimizer of a server that learns."""

from functools import partial

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import nn
from torch.optim import Adam

from pfl_lightning.client.optimizers import checked_optimizer


def server_optimizer(given: OptimizerCallable | None, lr: float) -> OptimizerCallable:
    """The optimizer of a server that learns: the given one, or ``Adam(lr, betas=(0.5, 0.999))``.

    It is no default argument of anybody's, because the command line can't print a tuple in a lambda.

    Args:
        given: as configured; None takes Adam.
        lr: Adam's learning rate.

    Raises:
        MisconfigurationException: if the optimizer refuses its settings.
    """
    optimizer = given or partial(Adam, lr=lr, betas=(0.5, 0.999))
    checked_optimizer(optimizer, [nn.Parameter(torch.zeros(1))], "aggregator.optimizer")
    return optimizer
