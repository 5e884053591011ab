"""Types of keyword settings, and checks of settings with a list of choices or a lower bound."""

from collections.abc import Collection
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
