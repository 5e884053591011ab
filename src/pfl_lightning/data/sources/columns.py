"""Choice and checks of a table's columns, by name."""

from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from numpy.typing import NDArray
from torch import Tensor


def chosen_columns(
    there: Sequence[str], features: Sequence[str] | None, target: str | Sequence[str], **others: str | None
) -> tuple[list[str], list[str]]:
    """Check that columns exist; return the columns of the inputs and of the targets.

    Args:
        there: names of all columns.
        features: columns of the inputs; None takes all columns without another role.
        target: columns of the targets.
        **others: further columns, by the setting that names each.

    Raises:
        MisconfigurationException: if a column doesn't exist, none is left for the inputs, or one is both input and
            target.
    """
    targets = [target] if isinstance(target, str) else list(target)
    named = {"features": features or (), "target": targets} | {
        setting: [column] for setting, column in others.items() if column is not None
    }
    for setting, columns in named.items():
        for column in columns:
            check_column(setting, column, there)
    used = {column for columns in named.values() for column in columns}
    inputs = [column for column in there if column not in used] if features is None else list(features)
    if not inputs or not targets:
        raise MisconfigurationException(f"data.features and data.target must each name a column of {', '.join(there)}")
    # a net that reads its own target has perfect figures
    if both := set(inputs) & set(targets):
        raise MisconfigurationException(f"data.features has {min(both)!r}, which is the target; leave it out")
    return inputs, targets


def check_column(setting: str, column: str, there: Sequence[str]) -> None:
    """Check that a column exists.

    Args:
        setting: the setting that names the column.
        column: name of the column.
        there: names of all columns.

    Raises:
        MisconfigurationException: if there is no such column.
    """
    if column not in there:
        # another case is the likeliest slip, and the distance of "AGE" to "age" is too large for close matches
        alike = [name for name in there if name.casefold() == str(column).casefold()]
        near = alike or get_close_matches(str(column), there, n=3)
        instead = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(there[:10])}"
        raise MisconfigurationException(f"data.{setting}: there is no column {column!r}; {instead}")


def check_finite_column(values: Tensor, owner: str, rows: Sequence[int] | NDArray[np.int64] | None = None) -> None:
    """Check that numbers are finite, also in single precision, the type of nets.

    Args:
        values: the numbers, [rows, ...]; integers pass.
        owner: name of the numbers for the message, such as ``column 'age' of patients.csv``.
        rows: position of each row in the data; None counts from 0.

    Raises:
        MisconfigurationException: if a number is NaN, infinite, or too large for single precision.
    """
    if not values.is_floating_point():
        return
    # cast first: 1e300 is finite in double precision and infinite in the net's
    finite = values.to(torch.float32).isfinite().reshape(len(values), -1)
    wrong = ~finite.all(1)
    if wrong.any():
        first = int(wrong.int().argmax())
        place = int((~finite[first]).int().argmax())
        value = values[first].reshape(-1)[place].item()
        row = first if rows is None else int(rows[first])
        column = f", column {place}" if values.ndim == 2 else ""
        raise MisconfigurationException(
            f"{owner} has {value} in row {row}{column} (counted from 0), the first of {int(wrong.sum())} such rows, "
            "where numbers must be finite in single precision; correct them, or leave these rows out"
        )


def package(name: str, extra: str, owner: str) -> Any:
    """Import an optional package.

    Args:
        name: name of the package.
        extra: the extra that installs the package.
        owner: the class that needs the package.

    Raises:
        MisconfigurationException: if the package isn't installed.
    """
    try:
        return import_module(name)
    except ImportError:
        raise MisconfigurationException(
            f"data {owner} needs the package {name}; install it by pip install 'pfl-lightning[{extra}]'"
        ) from None
