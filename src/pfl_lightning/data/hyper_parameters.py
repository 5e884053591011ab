"""Which arguments of a data module belong in checkpoints."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities.parsing import collect_init_args

LONG = 100
"""From so many entries on, a list is data and no setting."""


def unsaved_arguments() -> list[str]:
    """Names of the arguments of the running ``__init__``, and of those that called it, that are no plain settings.

    Checkpoints hold plain values only, and Lightning copies what it keeps: arrays would be read whole.
    """
    caller = inspect.currentframe()
    if caller is None or caller.f_back is None:
        return []
    collected = collect_init_args(caller.f_back, [], classes=(LightningDataModule,))
    return [name for arguments in collected for name, value in arguments.items() if not is_plain(value)]


def is_plain(value: Any) -> bool:
    """Whether a value is a number, a text, a path, or a short list or dict of such.

    >>> is_plain([1, "a", None]), is_plain([0] * 1000), is_plain(object())
    (True, False, False)
    """
    if isinstance(value, Mapping):
        value = [*value, *value.values()]
    if type(value) in (list, tuple):
        return len(value) < LONG and all(map(is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str, os.PathLike))
