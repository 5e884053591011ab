"""Objects that remember what they were made with."""

from abc import ABCMeta
from typing import Any


class Remembering(ABCMeta):
    """Makes objects whose ``_made_with`` has the arguments that they were made with, by position and by name."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Makes one."""
        made = super().__call__(*args, **kwargs)
        made._made_with = args, kwargs
        return made
