"""Settings that are one of a few values, or no less than one."""

from collections.abc import Collection
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException


def check_choices(owner: str, **settings: tuple[Any, Collection[str]]) -> None:
    """Checks that each setting is one of its choices.

    Args:
        owner: what stands before their names on the command line, such as ``model``.
        **settings: the value and the choices, by name.

    Raises:
        MisconfigurationException: if one isn't.
    """
    for name, (value, choices) in settings.items():
        if value not in choices:
            raise MisconfigurationException(f"{owner}.{name}={value!r} must be one of {', '.join(choices)}.")


def check_least(owner: str, **settings: tuple[float, float]) -> None:
    """Checks that each setting is no less than it may be.

    Args:
        owner: what stands before their names on the command line, such as ``model``.
        **settings: the value and the least one, by name.

    Raises:
        MisconfigurationException: if one is less.
    """
    for name, (value, least) in settings.items():
        if not value >= least:
            raise MisconfigurationException(f"{owner}.{name}={value} must be {least} or more.")
