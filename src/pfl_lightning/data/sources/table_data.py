"""CSV, Parquet and data frames."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_warn
from numpy.typing import NDArray
from torch import Tensor

from pfl_lightning.choices import check_choices
from pfl_lightning.data.loaded import Loaded
from pfl_lightning.data.sources.base import OwnedData, targets_of
from pfl_lightning.data.sources.columns import chosen_columns, package
from pfl_lightning.tasks import Task

UNLIKE = 1000
"""Times the width of another column that a column has when a warning tells of it."""


class TableData(OwnedData):
    """A table, a row a sample: a CSV or Parquet file, or a data frame; needs the extra ``tables``.

    Inputs are the numbers in the feature columns, [number of features]. A column of texts becomes codes: 0 for the
    first of its texts in the alphabet, 1 for the next; so do texts that are classes. A net learns little from columns
    of very different scales, of which a warning tells; ``standardize`` brings each to mean 0 and deviation 1.

    Args:
        path: The file, ``.csv`` or ``.parquet``; from Python also a pandas data frame.
        target: Column of the target, or columns where a sample has several.
        task: What is predicted.
        features: Columns of the inputs; None takes all others.
        client: Column of who holds each row; None under another partitioner than `Natural`.
        time: Column of when each row came: a number, or a text that sorts, such as 2024-05-31.
        split_column: Column of ``train``, ``val`` or ``test``.
        standardize: By which rows feature columns are standardized: all of the ``table``, whose means and deviations
            the sites then know of each other, or those of each ``client`` alone, which tells nothing and takes away
            what sets clients apart; None leaves them as they are.
        **kwargs: Settings of `FederatedDataModule`; ``root`` and ``download`` have no effect.

    Raises:
        MisconfigurationException: There is no such file or column, or a column has gaps.
    """

    def __init__(
        self,
        path: Any,
        target: str | list[str],
        task: Task,
        features: list[str] | None = None,
        client: str | None = None,
        time: str | None = None,
        split_column: str | None = None,
        standardize: Literal["table", "client"] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(task, **kwargs)
        if standardize is not None:
            check_choices("data", standardize=(standardize, ("table", "client")))
        if standardize == "client" and client is None:
            raise MisconfigurationException(
                "data.standardize=client needs data.client, the column of who holds each row; or take table."
            )
        self._standardize = standardize
        self._path = Path(path) if isinstance(path, str | os.PathLike) else path
        self._others = {"client": client, "split": split_column, "time": time}
        there = column_names(self._path)
        named = {"client": client, "split_column": split_column, "time": time}
        self._features, self._targets = chosen_columns(there, features, target, **named)
        self.input_shape = (len(self._features),)

    def load(self) -> Loaded:
        """Read the columns that are named."""
        others = [column for column in self._others.values() if column is not None]
        wanted = list(dict.fromkeys([*self._features, *self._targets, *others]))
        table = read_table(self._path, wanted)
        where = str(self._path) if isinstance(self._path, Path) else "the data frame"
        x = torch.stack([numbers(table, column, where).float() for column in self._features], dim=1)
        y = torch.stack([numbers(table, column, where) for column in self._targets], dim=1)
        columns = {name: None if column is None else table[column].to_numpy() for name, column in self._others.items()}
        if self._standardize is None:
            warn_of_scales(x, self._features)
        else:
            holders = columns["client"] if self._standardize == "client" else None
            groups = np.zeros(len(x), np.int64) if holders is None else np.unique(holders, return_inverse=True)[1]
            x = standardized(x, groups)
        return Loaded(x, targets_of(y if y.shape[1] > 1 else y[:, 0]), **columns)


def warn_of_scales(x: Tensor, names: Sequence[str]) -> None:
    """Warn where one column is a thousand times as wide as another.

    Args:
        x: The columns, [rows, columns].
        names: Their names.
    """
    widths = x.std(0, correction=0)
    known = [index for index in range(len(names)) if widths[index] > 0]
    if not known:
        return
    low, high = (function(known, key=lambda index: float(widths[index])) for function in (min, max))
    if widths[high] > UNLIKE * widths[low]:
        rank_zero_warn(
            f"data: column {names[high]!r} varies by {float(widths[high]):.3g} and column {names[low]!r} by "
            f"{float(widths[low]):.3g}, and a net learns little from columns of such different scales; "
            "data.standardize=table or client brings them to one."
        )


def standardized(x: Tensor, groups: NDArray[np.int64]) -> Tensor:
    """Columns less their mean, over their standard deviation, each group of rows by itself; constant ones become 0.

    Args:
        x: The columns, [rows, columns].
        groups: The group of each row.
    """
    result = torch.empty_like(x)
    for group in np.unique(groups):
        rows = torch.from_numpy(groups == group)
        own = x[rows].double()
        width = own.std(0, correction=0)
        result[rows] = torch.where(width > 0, (own - own.mean(0)) / width, 0.0).float()
    return result


def column_names(path: Any) -> list[str]:
    """Names of a table's columns, without reading its rows.

    Args:
        path: The file, or a data frame.

    Raises:
        MisconfigurationException: It is no such file.
    """
    return [str(name) for name in read_table(path, None).columns]


def read_table(path: Any, columns: Sequence[str] | None) -> Any:
    """Read columns of a table.

    Args:
        path: The file, or a data frame.
        columns: Which; None reads no row.

    Raises:
        MisconfigurationException: It is no such file, or a package is missing.
    """
    pandas = package("pandas", "tables", "TableData")
    if isinstance(path, pandas.DataFrame):
        return path.iloc[:0] if columns is None else path[list(columns)]
    if not isinstance(path, Path):
        raise MisconfigurationException(f"data.path is a {type(path).__name__}; give a file, or a pandas data frame")
    try:
        if path.suffix == ".csv":
            return pandas.read_csv(path, usecols=columns, nrows=0 if columns is None else None)
        if path.suffix == ".parquet":
            parquet = package("pyarrow.parquet", "tables", "TableData")
            schema = parquet.read_schema(path)
            return schema.empty_table().to_pandas() if columns is None else pandas.read_parquet(path, columns=columns)
    except MisconfigurationException:
        raise
    # a file that is missing or damaged, or of another kind
    except Exception as error:
        reason = " ".join(str(error).split())[:100]
        raise MisconfigurationException(f"data.path={str(path)!r} cannot be read ({reason}); give a table") from None
    raise MisconfigurationException(f"data.path={str(path)!r} must be a .csv or .parquet file")


def numbers(table: Any, column: str, path: str) -> Tensor:
    """A column as numbers, texts as codes.

    Args:
        table: A pandas data frame.
        column: Name of the column.
        path: Where it is from, for the message.

    Raises:
        MisconfigurationException: It has gaps, or is neither of numbers nor of texts.
    """
    values = table[column]
    if gaps := int(values.isna().sum()):
        raise MisconfigurationException(
            f"column {column!r} of {path} has no value in {gaps} of {len(values)} rows, first in row "
            f"{int(values.isna().to_numpy().argmax())}; fill them in, or leave these rows or the column out"
        )
    if values.dtype.kind in "bif" or values.dtype.kind == "u":
        array = values.to_numpy()
        return torch.from_numpy(array.astype(np.float64 if array.dtype.kind == "f" else np.int64))
    if values.dtype.kind in "mM":
        raise MisconfigurationException(
            f"column {column!r} of {path} is of dates; take it as data.time, or make numbers of it"
        )
    return torch.from_numpy(np.unique(values.to_numpy().astype(str), return_inverse=True)[1].astype(np.int64))
