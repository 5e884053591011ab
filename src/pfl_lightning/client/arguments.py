"""Constructor arguments that a checkpoint can't hold."""

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
