"""Read back the constructor arguments of an object."""

import inspect
from collections.abc import Mapping
from typing import Any


def live(arguments: Mapping[str, Any]) -> list[str]:
    """Return the names of arguments with functions or classes as values, alone or in lists.

    Such arguments are Python objects, which a checkpoint can't hold; runs from the command line save their
    configuration in place of them.

    Args:
        arguments: an object's constructor arguments, by name.
    """
    return [
        name
        for name, value in arguments.items()
        if callable(value) or (isinstance(value, list) and any(map(callable, value)))
    ]


def kept_arguments(made: object) -> dict[str, Any]:
    """Return an object's constructor arguments, as far as it kept them as attributes or in ``hparams``.

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
    """Return the parameters of all ``__init__`` of an object's classes, by name; a subclass's parameters win.

    Args:
        made: the object.
    """
    # from the base class to the object's own, so that a default which a subclass changes is the one that holds
    inits = [vars(cls).get("__init__") for cls in reversed(type(made).__mro__)]
    signatures = [inspect.signature(init) for init in inits if inspect.isfunction(init)]
    return {name: parameter for each in signatures for name, parameter in each.parameters.items()}
