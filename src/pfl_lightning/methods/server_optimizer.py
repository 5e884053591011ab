"""The optimizer of aggregators with parameters to train."""

from functools import partial

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import nn
from torch.optim import Adam

from pfl_lightning.client.optimizers import checked_optimizer


def server_optimizer(given: OptimizerCallable | None, lr: float) -> OptimizerCallable:
    """Return the given optimizer, or ``Adam(lr, betas=(0.5, 0.999))``, and check the settings.

    It isn't a default argument, because the command line can't print the tuple of a lambda.

    Args:
        given: the configured optimizer; None takes Adam.
        lr: Adam's learning rate.

    Raises:
        MisconfigurationException: if the optimizer refuses its settings.
    """
    optimizer = given or partial(Adam, lr=lr, betas=(0.5, 0.999))
    # on a dummy parameter: the parameters to train exist only once the federation is set up
    checked_optimizer(optimizer, [nn.Parameter(torch.zeros(1))], "aggregator.optimizer")
    return optimizer
