"""The arguments that an object was made with."""

import inspect
from collections.abc import Mapping
from typing import Any


def live(arguments: Mapping[str, Any]) -> list[str]:
    """Names of the arguments that are functions or classes, or lists of some, which don't belong in a checkpoint.

    Under the command line they come as their plain configuration instead.
    """
    return [
        name
        for name, value in arguments.items()
        if callable(value) or (isinstance(value, list) and any(map(callable, value)))
    ]


def kept_arguments(made: object) -> dict[str, Any]:
    """The arguments that an object was made with, as far as it keeps them: attributes of the same names, ``hparams``.

    >>> from torch.nn import Dropout
    >>> kept_arguments(Dropout(0.25))
    {'p': 0.25, 'inplace': False}

    Args:
        made: the object.
    """
    kept = getattr(made, "__dict__", {})
    named = {name: kept[name] for name in parameters_of(made) if name in kept}
    return named | dict(getattr(made, "hparams", {}))


def parameters_of(made: object) -> dict[str, inspect.Parameter]:
    """The parameters of all ``__init__`` of an object's classes, by name; those of the class itself win."""
    inits = [vars(cls).get("__init__") for cls in reversed(type(made).__mro__)]
    signatures = [inspect.signature(init) for init in inits if inspect.isfunction(init)]
    return {name: parameter for each in signatures for name, parameter in each.parameters.items()}
