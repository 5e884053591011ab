"""Columns of a pool: one value per sample, such as the client."""

import re
from collections.abc import Iterable, Sequence
from datetime import date
from typing import Any, get_args

import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from numpy.typing import NDArray
from torch import Tensor

from pfl_lightning.data.samples import Split

NUMBER = re.compile(
    r"\s*[+-]?(?:(?:\d+|\d{1,3}(?:[.,' ]\d{3})+)(?:[.,]\d*)?|[.,]\d+|inf|infinity|nan)(?:e[+-]?\d+)?\s*%?\s*",
    re.IGNORECASE,
)
"""A text that stands for a number in any notation: with a decimal comma, in groups of thousands, in percent."""

DATE = re.compile(r"\s*(?:\d{4}([-/.])\d{1,2}\1\d{1,2}|\d{1,2}([-/.])\d{1,2}\2(?:\d{4}|\d{2}))(?:[ T].*)?\s*")
"""A text that stands for a date, perhaps an impossible date, such as 2020-99-99."""


SORTED_DATE = re.compile(r"\d{4}-\d{2}-\d{2}($|[ T]([01]\d|2[0-3])(:[0-5]\d){0,2}($|[^\d:]))")
"""The beginning of a text with a date, and perhaps a time of day, in a notation that sorts by time."""


def column_of(name: str, values: Sequence[Any] | NDArray[Any], count: int) -> NDArray[Any]:
    """Return a column as an array of sortable values.

    Args:
        name: name of the column, for the message.
        values: one value per sample.
        count: number of samples N.

    Raises:
        MisconfigurationException: if there is another number of values, or a value is missing.
    """
    given: Any = values.detach().cpu().numpy() if isinstance(values, Tensor) else values
    if not isinstance(given, Iterable):
        raise MisconfigurationException(
            f"load() returned a {type(given).__name__} as the {name} column; give one value a sample"
        )
    if not hasattr(given, "dtype"):
        # values stay objects, since NumPy would turn a NaN among texts into the text 'nan', which isn't missing
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
    # NumPy makes a table of pairs, such as town and street: they become texts
    return typed if typed.shape == array.shape else np.array([str(value) for value in array])


def _objects(values: list[Any]) -> NDArray[Any]:
    """Return values as an array of objects; NumPy's own conversion would make a table of lists."""
    array = np.empty(len(values), dtype=object)
    for row, value in enumerate(values):
        array[row] = value
    return array


def _missing(array: NDArray[Any]) -> NDArray[np.bool_]:
    """Return whether each value is missing, bool [N]."""
    if array.dtype.kind in "OUS":
        return np.fromiter(map(_is_missing, array.tolist()), dtype=bool, count=len(array))
    # neither NaN nor NaT equals itself
    return np.asarray(array != array)


def _is_missing(value: Any) -> bool:
    """Return whether a value stands for a missing one."""
    try:
        return value is None or value in ("", b"") or bool(value != value)
    except TypeError:
        # pandas.NA has no truth value
        return True


def mostly(pattern: re.Pattern[str], texts: Sequence[str], counts: NDArray[np.int64]) -> bool:
    """Return whether half of the rows, or half of the different texts, match a pattern as a whole.

    >>> mostly(NUMBER, ["1", "2,5", "oops"], np.array([1, 1, 9]))
    True
    >>> mostly(NUMBER, ["1", "no", "yes"], np.array([1, 9, 9]))
    False

    Args:
        pattern: the pattern.
        texts: the different texts.
        counts: number of rows with each text.
    """
    found = np.fromiter((pattern.fullmatch(text) is not None for text in texts), dtype=bool, count=len(texts))
    return bool(2 * found.sum() >= len(texts) or 2 * counts[found].sum() >= counts.sum())


def check_times(times: NDArray[Any]) -> None:
    """Check that times given as texts sort by time: dates as 2024-05-31, no texts among numbers.

    Args:
        times: one value per sample, none missing.

    Raises:
        MisconfigurationException: if a text is no date among dates or no number among numbers, or texts sort in another
            order than times.
    """
    if times.dtype.kind not in "US":
        return
    values, rows, counts = np.unique(times.astype(str), return_index=True, return_counts=True)
    texts = values.tolist()
    if mostly(DATE, texts, counts):
        kind, wrong = "date", [not _sorts(text) for text in texts]
    elif mostly(NUMBER, texts, counts):
        kind, wrong = "number", [not is_number(text) for text in texts]
        # all are numbers, but as texts "10" sorts before "9": the first one stands for the column in the message
        if not any(wrong) and not np.all(np.diff(values.astype(np.float64)) >= 0):
            wrong[0] = True
    else:
        return
    if any(wrong):
        first = min((row, text) for row, text, is_wrong in zip(rows.tolist(), texts, wrong, strict=True) if is_wrong)
        advice = "give numbers and not texts" if kind == "number" else "write dates as 2024-05-31"
        raise MisconfigurationException(
            f"the time in row {first[0]} (counted from 0) is the text {first[1]!r}, which doesn't sort as a {kind}; "
            f"correct it, or {advice}"
        )


def _sorts(text: str) -> bool:
    """Return whether a text is an existing date in a notation that sorts by time."""
    if SORTED_DATE.match(text) is None:
        return False
    try:
        date.fromisoformat(text[:10])
    except ValueError:
        return False
    return True


def is_number(text: str, decimal: str = ".") -> bool:
    """Return whether pandas would read a text in a CSV file as a number.

    >>> is_number("0,5"), is_number("0,5", decimal=","), is_number("1_000")
    (False, True, False)

    Args:
        text: the text.
        decimal: the decimal separator.
    """
    try:
        float(text.replace(".", "x").replace(",", ".") if decimal == "," else text)
    except ValueError:
        return False
    # Python's float takes underscores between digits; pandas doesn't
    return "_" not in text


def numbered(column: NDArray[Any]) -> tuple[list[str], Tensor]:
    """Return the different values in order, and the position of each sample's value among them.

    >>> numbered(np.array(["b", "a", "b"]))
    (['a', 'b'], tensor([1, 0, 1]))

    Args:
        column: one value per sample.
    """
    names, codes = np.unique(column, return_inverse=True)
    return [str(name) for name in names.tolist()], torch.from_numpy(codes.astype(np.int64))


def check_splits(splits: NDArray[Any]) -> None:
    """Check that a column names splits.

    Args:
        splits: one value per sample.

    Raises:
        MisconfigurationException: if a value is something else.
    """
    allowed = get_args(Split)
    wrong = ~np.isin(splits.astype(str), allowed)
    if wrong.any():
        row = int(wrong.argmax())
        raise MisconfigurationException(
            f"the split of {int(wrong.sum())} of {len(splits)} samples is none of {', '.join(allowed)}, first in row "
            f"{row}, {str(splits[row])!r}; rename it"
        )
