"""Columns of a pool: one value a sample, such as who holds it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, get_args

import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from numpy.typing import NDArray
from torch import Tensor

from pfl_lightning.data.samples import Split


def column_of(name: str, values: Sequence[Any] | NDArray[Any], count: int) -> NDArray[Any]:
    """A column as an array of values that sort.

    Args:
        name: What it is, for the message.
        values: One for each sample.
        count: Number of samples N.

    Raises:
        MisconfigurationException: There is another number of values, or one is missing.
    """
    given: Any = values.detach().cpu().numpy() if isinstance(values, Tensor) else values
    if not isinstance(given, Iterable):
        raise MisconfigurationException(
            f"load() returned a {type(given).__name__} as the {name} column; give one value a sample"
        )
    if not hasattr(given, "dtype"):
        # as they are: among texts, NumPy would make a text of a NaN
        given = _objects(list(given))
    array = np.asarray(given)
    if array.shape != (count,):
        raise MisconfigurationException(
            f"load() returned {count} samples and a {name} column of shape {list(array.shape)}; give one value a sample"
        )
    missing = _missing(array)
    if missing.any():
        raise MisconfigurationException(
            f"the {name} of {int(missing.sum())} of {count} samples is missing, first in row {int(missing.argmax())}; "
            "fill it in, or leave these samples out"
        )
    if array.dtype != object:
        return array
    typed = np.asarray(array.tolist())
    # of pairs, such as town and street, NumPy makes a table
    return typed if typed.shape == array.shape else np.array([str(value) for value in array])


def _objects(values: list[Any]) -> NDArray[Any]:
    array = np.empty(len(values), dtype=object)
    for row, value in enumerate(values):
        array[row] = value
    return array


def _missing(array: NDArray[Any]) -> NDArray[np.bool_]:
    if array.dtype.kind in "OUS":
        return np.fromiter(map(_is_missing, array.tolist()), dtype=bool, count=len(array))
    # neither a NaN nor a date that isn't is equal to itself
    return np.asarray(array != array)


def _is_missing(value: Any) -> bool:
    try:
        return value is None or value in ("", b"") or bool(value != value)
    except TypeError:
        # pandas' NA is neither
        return True


def numbered(column: NDArray[Any]) -> tuple[list[str], Tensor]:
    """The values that there are, in order, and the number of each sample's.

    >>> numbered(np.array(["b", "a", "b"]))
    (['a', 'b'], tensor([1, 0, 1]))

    Args:
        column: One value a sample.
    """
    names, codes = np.unique(column, return_inverse=True)
    return [str(name) for name in names.tolist()], torch.from_numpy(codes.astype(np.int64))


def check_splits(splits: NDArray[Any]) -> None:
    """Check that a column names splits.

    Args:
        splits: One value a sample.

    Raises:
        MisconfigurationException: One is something else.
    """
    known = get_args(Split)
    wrong = ~np.isin(splits.astype(str), known)
    if wrong.any():
        row = int(wrong.argmax())
        raise MisconfigurationException(
            f"the split of {int(wrong.sum())} of {len(splits)} samples is none of {', '.join(known)}, first in row "
            f"{row}, {str(splits[row])!r}; rename it"
        )
