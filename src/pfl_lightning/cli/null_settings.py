"""Refuse ``null`` for settings without None among the valid values.

jsonargparse accepts null for any type; without this check a run ends in a TypeError far from the setting.
"""

import inspect
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from jsonargparse import Namespace
from lightning.fabric.utilities.exceptions import MisconfigurationException


def refuse_nulls(settings: Namespace, made: Any, prefix: str = "") -> None:
    """Refuse null for each argument without None among the valid values.

    Args:
        settings: arguments by name; values may be classes with arguments of their own.
        made: the class or function that takes the arguments.
        prefix: put before names in the message, such as ``trainer.``.

    Raises:
        MisconfigurationException: for the first such argument.
    """
    for null in nulls(settings, made, prefix):
        raise MisconfigurationException(f"{null} is null; give it a value, or leave it out.")


def nulls(settings: Namespace, made: Any, prefix: str) -> Iterator[str]:
    """Yield dotted names of arguments wrongly None, at any depth."""
    for argument, value in vars(settings).items():
        if value is None and not may_be_null(made, argument):
            yield prefix + argument
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, Namespace) and "class_path" in each:
                yield from of_class(each, f"{prefix}{argument}.")


def of_class(spec: Namespace, prefix: str) -> Iterator[str]:
    """Yield such names below a class given with arguments."""
    module, _, name = spec["class_path"].rpartition(".")
    try:
        made = getattr(import_module(module), name)
    except (ImportError, AttributeError):  # a nested class, which can't be imported by its path
        return iter(())
    return nulls(spec["init_args"], made, prefix) if "init_args" in spec else iter(())


def may_be_null(made: Any, argument: str) -> bool:
    """Return True if an argument's annotation or default allows None.

    >>> import torch
    >>> may_be_null(torch.optim.SGD, "foreach"), may_be_null(torch.optim.SGD, "lr")
    (True, False)

    A class's own signature counts before its bases', as a subclass may narrow an argument.

    Args:
        made: a class or function.
        argument: the argument's name.
    """
    for kind in getattr(made, "__mro__", [made]):
        init = vars(kind).get("__init__") if inspect.isclass(kind) else kind
        known = inspect.signature(init).parameters if inspect.isroutine(init) else {}
        if argument in known:
            kept = known[argument]
            said = str(kept.annotation)
            # annotations can be strings under `from __future__ import annotations`, so their text is searched
            return kept.default is None or kept.annotation is kept.empty or "None" in said or "Optional" in said
    # an argument that no signature names goes through **kwargs, of which nothing is known
    return True
