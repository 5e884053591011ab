"""Local optimizers and learning-rate schedules of client modules, and their checks before the first round."""

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping
from math import inf, isclose, isfinite
from typing import Any, NamedTuple

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import OptimizerCallable
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

PLATEAU = (
    "model.lr_scheduler=ReduceLROnPlateau waits for a metric, and schedules here count rounds; take one that counts, "
    "such as ExponentialLR or CosineAnnealingLR."
)


class Configured(NamedTuple):
    """An optimizer and schedule of a ``configure_optimizers``.

    Args:
        optimizer: the optimizer; a schedule may have changed its learning rates already.
        scheduler: the schedule of its learning rate, or None.
        rates: the learning rate of each parameter group before the schedule.
        source: name of the method or setting that made them, for errors.
    """

    optimizer: Optimizer
    scheduler: Any
    rates: list[float]
    source: str = "model"

    @property
    def factors(self) -> list[float]:
        """The schedule's current factor on each group's learning rate; 1.0 for a rate of 0."""
        pairs = zip(self.optimizer.param_groups, self.rates, strict=True)
        return [group["lr"] / rate if rate else 1.0 for group, rate in pairs]


def parts_of(returned: Any, source: str) -> Configured:
    """Return the optimizer and the schedule of a ``configure_optimizers``.

    Args:
        returned: its return value, in one of Lightning's forms: an optimizer, a dict with ``optimizer`` and perhaps
            ``lr_scheduler``, a list with one of these, or a list of optimizers and a list of schedules.
        source: name of the method, for errors.

    Raises:
        MisconfigurationException: if there is no optimizer, or several, or a schedule that doesn't count rounds.
    """
    # the form `[optimizers], [schedulers]`; a list of two optimizers is no such form, and is refused below
    lists = isinstance(returned, (list, tuple)) and len(returned) == 2 and isinstance(returned[0], (list, tuple))
    optimizers, schedulers = returned if lists else (returned, [])
    optimizers = list(optimizers) if isinstance(optimizers, (list, tuple)) else [optimizers]
    if len(optimizers) == 1 and isinstance(optimizers[0], Mapping):
        schedulers = optimizers[0].get("lr_scheduler") or []
        optimizers = [optimizers[0].get("optimizer")]
    schedulers = list(schedulers) if isinstance(schedulers, (list, tuple)) else [schedulers]
    if len(optimizers) != 1 or not isinstance(optimizers[0], Optimizer) or len(schedulers) > 1:
        kinds = ", ".join(type(part).__name__ for part in [*optimizers, *schedulers])
        raise MisconfigurationException(
            f"{source} returns {kinds or 'nothing'}, and local training has one optimizer and at most one schedule; "
            "return one, or override local_optimizer(phase, parameters), which is called for each phase."
        )
    scheduler = schedulers[0] if schedulers else None
    if isinstance(scheduler, Mapping):
        interval, frequency = scheduler.get("interval", "epoch"), scheduler.get("frequency", 1)
        if interval != "epoch" or frequency != 1:
            raise MisconfigurationException(
                f"{source}: a schedule steps once a round, and not at interval={interval!r}, frequency={frequency}; "
                "leave the two out."
            )
        scheduler = scheduler.get("scheduler")
    [optimizer] = optimizers
    # a schedule sets its first learning rate when it is made, and keeps the configured one as `initial_lr`
    rates = [
        group["lr"] if scheduler is None else group.get("initial_lr", group["lr"]) for group in optimizer.param_groups
    ]
    return Configured(optimizer, scheduler, rates, source)


def restricted(made: Configured, parameters: Iterable[nn.Parameter], phase: str) -> Optimizer:
    """Return an optimizer for the parameters of one phase, with the learning rates before the schedule.

    Args:
        made: the optimizer, new, and its schedule; changed in place.
        parameters: the parameters that the phase trains.
        phase: name of the phase, for the error.

    Raises:
        MisconfigurationException: if the optimizer has none of the parameters.
    """
    # by identity: parameters are tensors, and == compares their entries
    optimizer, wanted = made.optimizer, {id(parameter) for parameter in parameters}
    groups = []
    for group, rate in zip(optimizer.param_groups, made.rates, strict=True):
        own = [parameter for parameter in group["params"] if id(parameter) in wanted]
        for parameter in group["params"]:
            if id(parameter) not in wanted:
                # Adagrad creates a state for each parameter in its constructor
                optimizer.state.pop(parameter, None)
        if own:
            groups.append(group | {"params": own, "lr": rate})
    if not groups:
        raise MisconfigurationException(
            f"{made.source} gives an optimizer without any parameter of phase {phase!r}; give it all parameters of the "
            "module, or set model.optimizer instead."
        )
    optimizer.param_groups = groups
    return optimizer


def checked_optimizer(build: OptimizerCallable, parameters: list[nn.Parameter], setting: str) -> Optimizer:
    """Build an optimizer and check the settings.

    Args:
        build: makes the optimizer from parameters.
        parameters: the parameters to train.
        setting: dotted name of the setting, such as ``model.optimizer``.

    Raises:
        MisconfigurationException: if the optimizer refuses its settings, or `check_optimizer` refuses the optimizer.
    """
    if isinstance(build, Optimizer):
        name = type(build).__name__
        raise MisconfigurationException(
            f"{setting}={name}(...) is an optimizer of fixed parameters, and each client needs its own; give a "
            f"function that builds one, such as partial({name}, lr={build.defaults.get('lr', 0.01)})."
        )
    if not callable(build):
        raise MisconfigurationException(f"{setting}={build} is no optimizer; name a class of torch.optim, such as SGD.")
    try:
        # torch's optimizers check their own settings, and name them in what they raise
        optimizer = build(parameters)
    except (TypeError, ValueError) as error:
        raise MisconfigurationException(f"{setting}: {error}.") from error
    check_optimizer(optimizer, parameters, setting)
    return optimizer


def check_optimizer(optimizer: Any, parameters: Iterable[nn.Parameter], setting: str) -> None:
    """Check an optimizer before clients train with it.

    Args:
        optimizer: the object to check.
        parameters: all parameters that it may train.
        setting: the setting or method that it comes from, for errors.

    Raises:
        MisconfigurationException: if it is no optimizer, a setting is NaN or infinite, ``step`` needs a closure, or it
            has parameters of another module.
    """
    if not isinstance(optimizer, Optimizer):
        raise MisconfigurationException(
            f"{setting} builds a {type(optimizer).__name__} and no optimizer; name a class of torch.optim, such as SGD."
        )
    for group in optimizer.param_groups:
        refuse_infinite({name: value for name, value in group.items() if name != "params"}, setting)
    # engines hand an optimizer gradients, and LBFGS asks for the loss at further points
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise MisconfigurationException(
            f"{setting}={type(optimizer).__name__} computes the loss again in each step, which clients don't offer; "
            "take another class of torch.optim, such as SGD or Adam."
        )
    check_own_parameters(optimizer, parameters, setting)


def check_own_parameters(optimizer: Optimizer, parameters: Iterable[nn.Parameter], owner: str) -> None:
    """Refuse an optimizer with parameters beside the given ones.

    Args:
        optimizer: the optimizer.
        parameters: all parameters that it may train.
        owner: the setting or method that it comes from, for errors.

    Raises:
        MisconfigurationException: if it has other parameters.
    """
    known = set(map(id, parameters))
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in known:
                raise MisconfigurationException(
                    f"{owner} has a parameter of shape {list(parameter.shape)} that it wasn't given to train; build "
                    "the optimizer from the parameters that are passed in."
                )


def refuse_infinite(settings: Mapping[str, Any], owner: str) -> None:
    """Refuse NaN and infinite settings.

    Args:
        settings: values by name; a value may be a list of numbers, such as Adam's ``betas``.
        owner: dotted name of the settings' owner, for the error.

    Raises:
        MisconfigurationException: if a number isn't finite.
    """
    for name, value in settings.items():
        for number in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(number, float) and not isfinite(number):
                raise MisconfigurationException(f"{owner}.{name}={value} must be finite.")


def check_schedule(made: Configured, rounds: int) -> None:
    """Run a learning-rate schedule through all rounds, and check each rate.

    Args:
        made: a new optimizer with its schedule, which are used up by this check.
        rounds: number of rounds to be run; 0 checks no rate yet.

    Raises:
        MisconfigurationException: if the schedule waits for a metric, moves more than one learning rate, ends before
            the run does, or gives a rate that is negative, NaN or infinite.
    """
    scheduler = made.scheduler
    setting = "model.lr_scheduler" if made.source == "model" else f"{made.source}: lr_scheduler"
    if isinstance(scheduler, ReduceLROnPlateau):
        raise MisconfigurationException(PLATEAU.replace("model.lr_scheduler", setting))
    if not isinstance(scheduler, LRScheduler):
        return
    name = f"{setting}={type(scheduler).__name__}"
    if getattr(scheduler, "cycle_momentum", False):
        raise MisconfigurationException(
            f"{name} with cycle_momentum=True moves the momentum too, and clients follow the learning rate alone; give "
            "it cycle_momentum=False."
        )
    # all rounds now, so that a bad learning rate is found before the first round
    for round in range(1, rounds + 1):
        rate = made.optimizer.param_groups[0]["lr"]
        if not 0 <= rate < inf:
            raise MisconfigurationException(
                f"{name} gives round {round} the learning rate {rate}; give it settings by which rates stay finite and "
                "not negative."
            )
        # an engine multiplies all groups' rates by one factor, which it computes once a round
        first, *others = made.factors
        if not all(isclose(factor, first, rel_tol=1e-6) for factor in others):
            raise MisconfigurationException(
                f"{name} multiplies the learning rates of parameter groups by different factors in round {round}, "
                f"{', '.join(f'{factor:g}' for factor in made.factors)}, and a round has one; give all the same."
            )
        try:
            with warnings.catch_warnings():
                # PyTorch warns of a schedule that steps before its optimizer, which never steps here
                warnings.simplefilter("ignore")
                scheduler.step()
        except (ArithmeticError, ValueError) as error:
            reason = str(error).rstrip(".")
            raise MisconfigurationException(
                f"{name} can't go on after round {round} of trainer.max_rounds={rounds}: {reason}; give it other "
                "settings."
            ) from error


def check_first_rate(configure: Callable[[], Configured]) -> None:
    """Build an optimizer and a schedule, and check their settings.

    Args:
        configure: builds both from a client module's settings.

    Raises:
        MisconfigurationException: if the schedule refuses its settings, or its first learning rate can't be used.
    """
    try:
        check_schedule(configure(), rounds=0)
    except (ArithmeticError, TypeError, ValueError) as error:
        raise MisconfigurationException(f"model.lr_scheduler: {error}.") from error
