"""Selection of the data module arguments that checkpoints hold."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities.parsing import collect_init_args

LONG = 100
"""A list of this many entries or more is data and not a setting."""


def unsaved_arguments() -> list[str]:
    """Return the names of arguments that are no plain settings, of the running ``__init__`` and its subclasses' ones.

    Checkpoints hold plain values only. Lightning copies saved arguments, so arrays would be read from disk as a whole.
    """
    caller = inspect.currentframe()
    if caller is None or caller.f_back is None:
        return []
    # Lightning's own walk over the frames of nested __init__ calls, so that both see the same arguments
    collected = collect_init_args(caller.f_back, [], classes=(LightningDataModule,))
    return [name for arguments in collected for name, value in arguments.items() if not is_plain(value)]


def is_plain(value: Any) -> bool:
    """Return whether a value is a number, a text, a path, or a short list or dict of plain values.

    >>> is_plain([1, "a", None]), is_plain([0] * 1000), is_plain(object())
    (True, False, False)
    """
    if isinstance(value, Mapping):
        value = [*value, *value.values()]
    # exact types: a named tuple or a subclass may not survive the safe loading of checkpoints
    if type(value) in (list, tuple):
        return len(value) < LONG and all(map(is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str, os.PathLike))
