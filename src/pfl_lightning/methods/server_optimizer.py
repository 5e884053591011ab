"""The optimizer of aggregators with parameters to train."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import nn
from torch.optim import Adam, Optimizer

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


def go_on(optimizer: Optimizer, state: Mapping[Any, Any]) -> None:
    """Give an optimizer the moments of an earlier round, and leave its settings.

    Args:
        optimizer: a new optimizer of the same parameters.
        state: the entry ``state`` of the earlier one's ``state_dict``; empty before the first step.
    """
    if state:
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
