"""Whether optimizers and schedules of the learning rate can be used, found out before the first round."""

import inspect
import warnings
from collections.abc import Callable, Mapping
from math import inf, isfinite
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import OptimizerCallable
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

PLATEAU = (
    "model.lr_scheduler=ReduceLROnPlateau waits for a metric, and schedules here count rounds; take one that counts, "
    "such as ExponentialLR or CosineAnnealingLR."
)


def checked_optimizer(build: OptimizerCallable, parameters: list[nn.Parameter], setting: str) -> Optimizer:
    """An optimizer whose settings are in range.

    Args:
        build: makes it.
        parameters: what it shall train.
        setting: its dotted name.

    Raises:
        MisconfigurationException: if it refuses its settings, one of them is NaN or infinite, or it needs more than
            gradients.
    """
    if not callable(build):
        raise MisconfigurationException(f"{setting}={build} is no optimizer; name a class of torch.optim, such as SGD.")
    try:
        optimizer = build(parameters)
    except (TypeError, ValueError) as error:
        raise MisconfigurationException(f"{setting}: {error}.") from error
    for group in optimizer.param_groups:
        refuse_infinite({name: value for name, value in group.items() if name != "params"}, setting)
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise MisconfigurationException(
            f"{setting}={type(optimizer).__name__} computes the loss again in each step, which clients don't offer; "
            "take another class of torch.optim, such as SGD or Adam."
        )
    return optimizer


def refuse_infinite(settings: Mapping[str, Any], owner: str) -> None:
    """Refuses settings that are NaN or infinite."""
    for name, value in settings.items():
        for number in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(number, float) and not isfinite(number):
                raise MisconfigurationException(f"{owner}.{name}={value} must be finite.")


def check_schedule(configured: Any, rounds: int) -> None:
    """Goes through the schedule of a run's learning rate.

    Args:
        configured: a new optimizer with its schedule, as `ClientModule.configure_optimizers` gives them; nothing else
            will use them.
        rounds: rounds to be run; 0 looks at no rate yet.

    Raises:
        MisconfigurationException: if the schedule waits for a metric, ends before the run does, or gives a rate that
            is negative, NaN or infinite.
    """
    scheduler = configured.get("lr_scheduler") if isinstance(configured, Mapping) else None
    if isinstance(scheduler, ReduceLROnPlateau):
        raise MisconfigurationException(PLATEAU)
    if not isinstance(scheduler, LRScheduler):
        return
    name = f"model.lr_scheduler={type(scheduler).__name__}"
    for round in range(1, rounds + 1):
        rate = configured["optimizer"].param_groups[0]["lr"]
        if not 0 <= rate < inf:
            raise MisconfigurationException(
                f"{name} gives round {round} the learning rate {rate}; give it settings by which rates stay finite and "
                "not negative."
            )
        try:
            with warnings.catch_warnings():
                # torch's, of schedules that step before their optimizer
                warnings.simplefilter("ignore")
                scheduler.step()
        except (ArithmeticError, ValueError) as error:
            reason = str(error).rstrip(".")
            raise MisconfigurationException(
                f"{name} can't go on after round {round} of trainer.max_rounds={rounds}: {reason}; give it other "
                "settings."
            ) from error


def check_first_rate(configure: Callable[[], Any]) -> None:
    """Makes an optimizer and its schedule.

    Args:
        configure: a client module's ``configure_optimizers``.

    Raises:
        MisconfigurationException: if the schedule refuses its settings, or its first rate can't be used.
    """
    try:
        check_schedule(configure(), rounds=0)
    except (ArithmeticError, TypeError, ValueError) as error:
        raise MisconfigurationException(f"model.lr_scheduler: {error}.") from error
