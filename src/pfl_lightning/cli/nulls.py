"""Settings that are null and can't be: the parser lets null stand for any value."""

import inspect
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from jsonargparse import Namespace
from lightning.fabric.utilities.exceptions import MisconfigurationException


def refuse_nulls(settings: Namespace, made: Any, prefix: str = "") -> None:
    """Refuses null for arguments that can't be None.

    Args:
        settings: arguments by name, with classes and their own arguments below.
        made: what they are given to, a class or a function.
        prefix: put before their names.

    Raises:
        MisconfigurationException: if there is one.
    """
    for null in nulls(settings, made, prefix):
        raise MisconfigurationException(f"{null} is null; give it a value, or leave it out.")


def nulls(settings: Namespace, made: Any, prefix: str) -> Iterator[str]:
    """Dotted names of arguments that are None and can't be."""
    for argument, value in vars(settings).items():
        if value is None and not may_be_null(made, argument):
            yield prefix + argument
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, Namespace) and "class_path" in each:
                yield from of_class(each, f"{prefix}{argument}.")


def of_class(spec: Namespace, prefix: str) -> Iterator[str]:
    """The same of a class with its arguments."""
    module, _, name = spec["class_path"].rpartition(".")
    try:
        made = getattr(import_module(module), name)
    except (ImportError, AttributeError):  # a class within a class or a function
        return iter(())
    return nulls(spec["init_args"], made, prefix) if "init_args" in spec else iter(())


def may_be_null(made: Any, argument: str) -> bool:
    """Whether an argument can be None, as far as its annotation tells; a class's own counts before its bases'.

    >>> import torch
    >>> may_be_null(torch.optim.SGD, "foreach"), may_be_null(torch.optim.SGD, "lr")
    (True, False)
    """
    for kind in getattr(made, "__mro__", [made]):
        init = vars(kind).get("__init__") if inspect.isclass(kind) else kind
        known = inspect.signature(init).parameters if inspect.isroutine(init) else {}
        if argument in known:
            kept = known[argument]
            said = str(kept.annotation)
            return kept.default is None or kept.annotation is kept.empty or "None" in said or "Optional" in said
    return True
