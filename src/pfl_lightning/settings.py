"""Types of keyword settings, checks of settings, and the settings of an object read back."""

import inspect
from collections.abc import Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning.fabric.utilities.exceptions import MisconfigurationException

if TYPE_CHECKING:
    from typing_extensions import Unpack as Unpack
else:

    class Unpack:
        """Types of ``**kwargs`` for type checkers and editors: ``**kwargs: Unpack[ClientSettings]``.

        At runtime the type is ``Any``: jsonargparse finds settings and defaults by following ``**kwargs`` to the parent
        class, and would take a TypedDict's keys, which have no defaults, in their place.
        """

        def __class_getitem__(cls, settings: Any) -> Any:
            """Return ``Any``, whatever the settings."""
            return Any


def check_choices(owner: str, **settings: tuple[Any, Collection[str]]) -> None:
    """Check settings against their choices.

    Args:
        owner: prefix of the settings on the command line, such as ``model``.
        **settings: value and choices, by name.

    Raises:
        MisconfigurationException: if a value is none of its choices.
    """
    for name, (value, choices) in settings.items():
        if value not in choices:
            raise MisconfigurationException(f"{owner}.{name}={value!r} must be one of {', '.join(choices)}.")


def check_least(owner: str, **settings: tuple[float, float]) -> None:
    """Check settings against their lower bounds.

    Args:
        owner: prefix of the settings on the command line, such as ``model``.
        **settings: value and lower bound, by name.

    Raises:
        MisconfigurationException: if a value is less.
    """
    for name, (value, least) in settings.items():
        # written with `not`, so that NaN is refused too
        if not value >= least:
            raise MisconfigurationException(f"{owner}.{name}={value} must be {least} or more.")


def is_count(value: Any) -> bool:
    """Return True for integers from 1 up."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


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


SHORT = 60
"""Length in characters up to which `as_call` shows a value in full."""


def as_call(made: object, shown: Collection[str] = ()) -> str:
    """Return the call that makes an object, with the arguments that differ from their defaults.

    >>> from torch.nn import Dropout
    >>> as_call(Dropout(0.25)), as_call(Dropout(), shown=["p"])
    ('Dropout(p=0.25)', 'Dropout(p=0.5)')

    Args:
        made: the object; arguments that it keeps neither as attributes nor in ``hparams`` are left out.
        shown: arguments to show even with their defaults.
    """
    parameters, kept = parameters_of(made), kept_arguments(made)
    names = [name for name in kept if name in parameters and (name in shown or not is_default(kept, parameters, name))]
    return f"{type(made).__name__}({', '.join(f'{name}={value_text(kept[name])}' for name in names)})"


def is_default(kept: Mapping[str, Any], parameters: Mapping[str, inspect.Parameter], name: str) -> bool:
    """Return whether an argument has its default; False for values that can't be compared, such as arrays."""
    default = parameters[name].default
    try:
        return kept[name] is default or bool(kept[name] == default)
    except (ValueError, TypeError, RuntimeError):
        return False


def value_text(value: Any) -> str:
    """Return a setting as short text: a class or function by its name, a large object by its class."""
    if isinstance(value, partial):
        made = next((part for part in (value.func, *value.args) if inspect.isclass(part)), value.func)
        arguments = ", ".join(f"{name}={value_text(each)}" for name, each in value.keywords.items())
        return f"{getattr(made, '__name__', made)}({arguments})"
    if inspect.isclass(value) or inspect.isroutine(value):
        return str(value.__name__)
    text = repr(value)
    return text if len(text) <= SHORT and "\n" not in text and " object at 0x" not in text else type(value).__name__
