"""Whether a client and an aggregator fit together."""

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.aggregators import Aggregator
from pfl_lightning.client import FedAvg
from pfl_lightning.exchange import StateDict, Updates


def check_finite(client: FedAvg, aggregator: Aggregator) -> None:
    """Refuses settings that are NaN or infinite, but for those that are so by default."""
    for name, value in (*numbers("model", client), *numbers("aggregator", aggregator)):
        if not math.isfinite(value):
            raise MisconfigurationException(f"{name}={value} must be finite.")


def numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """The floating numbers of a setting under their dotted names, also those within what was made with settings.

    >>> list(numbers("model.optimizer", partial(dict, lr=0.1, betas=[0.5, 0.9])))
    [('model.optimizer.lr', 0.1), ('model.optimizer.betas.0', 0.5), ('model.optimizer.betas.1', 0.9)]
    """
    if isinstance(value, float):
        yield name, value
        return
    if isinstance(value, FedAvg | Aggregator):
        value = given(value)
    elif isinstance(value, partial):
        value = value.keywords
    elif isinstance(value, list | tuple):
        value = dict(enumerate(value))
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from numbers(f"{name}.{key}", part)


def given(made: FedAvg | Aggregator) -> dict[str, Any]:
    """The settings that something was made with, without numbers that are the defaults."""
    args, kwargs = made._made_with
    classes: list[Any] = list(type(made).__mro__)
    signatures = [inspect.signature(cls.__init__).parameters for cls in classes]
    settings = dict(zip(list(signatures[0])[1:], args, strict=False)) | kwargs
    defaults = {name: each.default for parameters in reversed(signatures) for name, each in parameters.items()}
    return {n: value for n, value in settings.items() if not (isinstance(value, float) and value == defaults.get(n))}


def check_pair(client: FedAvg, aggregator: Aggregator) -> None:
    """Refuses a client and an aggregator that don't exchange what the other needs."""
    names = type(client).__name__, aggregator.name
    for needed, sent, (one, other) in (
        (aggregator.needs, client.sends | client.offers, names[::-1]),
        (client.needs, aggregator.sends, names),
    ):
        if missing := sorted(needed - sent):
            raise MisconfigurationException(
                f"{one} needs {' and '.join(missing)}, which {other} does not send; choose another aggregator for "
                f"model {names[0]}, or leave it out to take {client.configure_aggregator().name}."
            )


def check_updates(updates: Updates, aggregator: Aggregator, client: str) -> None:
    """Refuses updates without what the aggregator needs, which a client's `upload` promised and left out."""
    for update in updates.values():
        if missing := sorted(aggregator.needs - update.keys()):
            raise MisconfigurationException(
                f"{client}.upload gave no {' and '.join(missing)}, which {aggregator.name} needs; let it add "
                "to super().upload(data), or say in `sends` and `offers` what it gives."
            )


def check_common(kinds: Sequence[FedAvg], shared: Sequence[StateDict]) -> None:
    """Refuses networks whose shared entries are not the same in all of them.

    Args:
        kinds: the client modules, one a network.
        shared: what each of them shares.
    """
    first = {name: tensor.shape for name, tensor in shared[0].items()}
    for kind, entries in zip(kinds, shared, strict=True):
        own = {name: tensor.shape for name, tensor in entries.items()}
        if different := [name for name in {**first, **own} if first.get(name) != own.get(name)]:
            raise MisconfigurationException(
                f"model.net: {type(kinds[0].net).__name__} and {type(kind.net).__name__} differ in {different[0]}, "
                f"which {type(kind).__name__} shares; give one network, or take a method that shares only what all "
                "have alike, such as FedClassAvg."
            )
