"""Columns of a table: choice by name, reading, conversion to numbers, and checks."""

import math
import os
import warnings
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from datetime import date
from decimal import Decimal
from difflib import get_close_matches
from importlib import import_module
from numbers import Number
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from numpy.typing import NDArray
from torch import Tensor

from pfl_lightning.data.columns import is_number

NAMELESS = "Unnamed: "
"""Beginning of the name that pandas gives a nameless column."""

SHOWN = 8
"""Largest number of names in a line or a message."""
OWNER = "client, by its file"
"""Column of each row's client, where a folder has one table for each client."""
SPLITS = frozenset({"train", "training", "val", "valid", "validation", "dev", "eval", "test", "testing"})
"""Names of files that hold splits, in lower case, where files are named by clients."""


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


def column_names(path: Any, csv: dict[str, str]) -> list[str]:
    """Return the names of a table's columns, without reading rows.

    Args:
        path: the file, or a data frame.
        csv: settings of ``pandas.read_csv``.

    Raises:
        MisconfigurationException: if the file isn't such a table, or two columns share a name.
    """
    names = [str(name) for name in read_table(path, None, csv)]
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise MisconfigurationException(
            f"data.path has {Counter(names)[twice[0]]} columns of the name {twice[0]!r}; give each a name of its own"
        )
    return names


def has_rows(path: Any, csv: dict[str, str]) -> bool:
    """Return whether a table has rows below the names of its columns.

    Args:
        path: the file, or a data frame.
        csv: settings of ``pandas.read_csv``.
    """
    if not isinstance(path, Path):
        return len(path) > 0
    if path.is_dir():
        return all(has_rows(file, csv) for file in client_files(path).values())
    if path.suffix == ".parquet":
        return bool(package("pyarrow.parquet", "tables", "TableData").read_metadata(path).num_rows)
    return len(package("pandas", "tables", "TableData").read_csv(path, **csv, nrows=1)) > 0


def read_table(
    path: Any, columns: Sequence[str] | None, csv: dict[str, str], texts: Collection[str] = (), fills: bool = False
) -> Any:
    """Read columns of a table.

    Args:
        path: the file, or a data frame.
        columns: names of the columns; None reads no row, and returns the names of all columns.
        csv: settings of ``pandas.read_csv``.
        texts: columns of a CSV file whose cells stay texts, also if they look like numbers.
        fills: whether a column that one of a folder's files lacks is a gap in its rows.

    Returns:
        A data frame with rows numbered from 0, or names.

    Raises:
        MisconfigurationException: if the file isn't such a table, or a package is missing.
    """
    pandas = package("pandas", "tables", "TableData")
    if isinstance(path, pandas.DataFrame):
        # columns of a data frame may have integers as names; settings name columns by texts
        named = {str(name): name for name in path.columns}
        if columns is None:
            return [str(name) for name in path.columns]
        table = path[[named[column] for column in columns]]
        table.columns = list(columns)
        # messages name rows by their position, whatever the frame calls them
        table.index = pandas.RangeIndex(len(table))
        return table
    if not isinstance(path, Path):
        raise MisconfigurationException(f"data.path is a {type(path).__name__}; give a file, or a pandas data frame")
    if path.is_dir():
        return read_folder(path, columns, csv, texts, fills)
    if path.suffix not in (".csv", ".parquet"):
        raise MisconfigurationException(f"data.path={str(path)!r} must be a .csv or .parquet file")
    if csv != {"decimal": ".", "sep": ","} and path.suffix == ".parquet":
        raise MisconfigurationException(
            f"data.decimal={csv['decimal']!r} and data.separator={csv['sep']!r} are of CSV files, and data.path is "
            f"{str(path)!r}; leave them out"
        )
    parquet = package("pyarrow.parquet", "tables", "TableData") if path.suffix == ".parquet" else None
    try:
        if parquet is not None:
            if columns is None:
                schema = parquet.read_schema(path)
                # pandas stores row labels as a column of the file, which is no feature
                index = (schema.pandas_metadata or {}).get("index_columns", [])
                return [name for name in schema.names if name not in index]
            return pandas.read_parquet(path, columns=columns).reset_index(drop=True)
        if columns is None:
            # read as a row: as a header, pandas would rename the second of two equal names
            header = pandas.read_csv(path, sep=csv["sep"], header=None, nrows=1, dtype=str, keep_default_na=False)
            if any("\0" in name for name in header.iloc[0]):
                raise ValueError("its first line has null characters")
            return [name or f"{NAMELESS}{place}" for place, name in enumerate(header.iloc[0])]
        with warnings.catch_warnings():
            # The warning that rows have more cells than the header: without index_col=False, pandas would take the
            # first column for row labels and shift all cells by one.
            warnings.simplefilter("error", pandas.errors.ParserWarning)
            # All columns, as with a choice of columns pandas silently drops surplus cells. low_memory=False finds a
            # column's type by all rows; by chunks, one column could become numbers and texts.
            kinds = dict.fromkeys(texts, str)
            table = pandas.read_csv(path, **csv, index_col=False, low_memory=False, dtype=kinds)
        return table[list(columns)]
    # a missing or damaged file, or one of another kind: pandas and pyarrow raise many types
    except Exception as error:
        reason = " ".join(str(error).split())[:100]
        raise MisconfigurationException(f"data.path={str(path)!r} cannot be read ({reason}); give a table") from None


def client_files(
    path: Path, setting: str = "data.path", endings: Sequence[str] = (".csv", ".parquet")
) -> dict[str, Path]:
    """Return the tables of a folder with one for each client, by the client's name.

    Args:
        path: the folder.
        setting: the setting that gives the folder, for messages.
        endings: endings of tables.

    Raises:
        MisconfigurationException: if there is no table, two of one client, or one is named like a split.
    """
    files = [file for file in sorted(path.iterdir()) if file.suffix in endings and file.name[0] != "."]
    owner = f"{setting}={str(path)!r}"
    if not files:
        raise MisconfigurationException(
            f"{owner} is a folder without tables; give one with a CLIENT{endings[0]} for each client"
        )
    if len(kinds := {file.suffix for file in files}) > 1:
        raise MisconfigurationException(f"{owner} has files of {' and '.join(sorted(kinds))}; give files of one kind")
    if named := [file.name for file in files if file.stem.lower() in SPLITS]:
        raise MisconfigurationException(
            f"{owner} has {named[0]}, and each file of such a folder is a client's; name files by clients, and "
            "splits by a column, as in data.split_column=split"
        )
    return {file.stem: file for file in files}


def read_folder(
    path: Path, columns: Sequence[str] | None, csv: dict[str, str], texts: Collection[str], fills: bool
) -> Any:
    """Read columns of the tables in a folder with one for each client, as `read_table`; `OWNER` has the clients' names.

    Raises:
        MisconfigurationException: if a table lacks a column.
    """
    pandas = package("pandas", "tables", "TableData")
    files = client_files(path)
    there = {name: column_names(file, csv) for name, file in files.items()}
    if columns is None:
        return [*dict.fromkeys(column for names in there.values() for column in names), OWNER]
    wanted = [column for column in columns if column != OWNER]
    for name, names in there.items():
        for column in wanted:
            if column not in names and not fills:
                other = next(files[each].name for each in there if column in there[each])
                raise MisconfigurationException(
                    f"data.path={str(path)!r}: {files[name].name} has no column {column!r}, as {other} has; add the "
                    "column, name those of all files in data.features, or set data.fill_missing_columns=true"
                )

    def part(name: str, kept: Collection[str]) -> Any:
        own = [column for column in wanted if column in there[name]]
        return read_table(files[name], own, csv, [column for column in kept if column in own]).reindex(columns=wanted)

    parts = {name: part(name, texts) for name in files}
    # texts in one file and numbers in another: as one table, cells such as 01 stay texts in both
    mixed = [
        column
        for column in wanted
        if len({has_texts(each[column]) for each in parts.values() if each[column].notna().any()}) > 1
    ]
    if mixed:
        parts = {name: part(name, [*texts, *mixed]) for name in files}
    if empty := next((files[name].name for name, each in parts.items() if not len(each)), None):
        raise MisconfigurationException(
            f"data.path={str(path)!r}: {empty} has no rows; give at least one, or remove it"
        )
    # numbers in their order, in which client 2 comes before client 10
    numbered = all(name.isdecimal() and str(int(name)) == name for name in parts)
    owned = [each.assign(**{OWNER: int(name) if numbered else name}) for name, each in parts.items()]
    table = pandas.concat(owned, ignore_index=True)
    return table[list(columns)]


def rows_table(
    rows: Any, columns: Sequence[str], csv: dict[str, str], texts: Collection[str], fills: bool = False
) -> tuple[Any, str]:
    """Return raw rows as a data frame of some columns, and a name of the rows for messages.

    Args:
        rows: a CSV or Parquet file, a pandas data frame, a dict with a list of values per column, or a list of dicts.
        columns: names of the columns.
        csv: settings of ``pandas.read_csv``.
        texts: columns of texts in the training table, in which cells such as 01 stay texts.
        fills: whether a missing column is a gap in all rows.

    Raises:
        MisconfigurationException: if the rows are no table, a column is missing, or there is no row.
    """
    path = Path(rows) if isinstance(rows, str | os.PathLike) else rows
    owner = str(path) if isinstance(path, Path) else "the rows"
    if isinstance(path, Mapping | list):
        try:
            path = package("pandas", "tables", "TableData").DataFrame(path)
        except (ValueError, TypeError, AttributeError) as error:
            raise MisconfigurationException(
                f"data: the rows cannot be read as a table ({' '.join(str(error).split())[:100]}); give a dict with a "
                "list of values per column, or a list of dicts"
            ) from None
    # a Parquet file knows its types and has no cells to part
    options = {"decimal": ".", "sep": ","} if isinstance(path, Path) and path.suffix == ".parquet" else csv
    there = column_names(path, options)
    lacking = [column for column in columns if column not in there] if fills else []
    for column in columns:
        if column not in lacking:
            check_column(f"inputs of {owner}", column, there)
    if not len(table := read_table(path, [each for each in columns if each not in lacking], options, texts)):
        raise MisconfigurationException(f"data: {owner} has no row to predict for; give at least one")
    return table.assign(**dict.fromkeys(lacking, math.nan))[list(columns)], owner


def vocabulary(setting: str, words: Sequence[str | int]) -> list[str]:
    """Return the texts of a vocabulary.

    Args:
        setting: name of the setting that gives the vocabulary.
        words: the texts, or integers.

    Raises:
        MisconfigurationException: if the vocabulary is no list of different texts.
    """
    texts = [as_text(word) for word in words] if isinstance(words, list | tuple) else []
    if not texts or len(set(texts)) < len(texts):
        raise MisconfigurationException(f"{setting}={words!r} must be a list of texts, each of them once")
    return texts


def plain_numbers(values: Any, owner: str) -> Tensor | None:
    """Return a column of numbers, floats in double precision and integers as int64; None for a column of texts.

    Args:
        values: a pandas series without gaps.
        owner: name of the column for the message.

    Raises:
        MisconfigurationException: if the column holds dates, lists or other objects.
    """
    kind = values.dtype.kind
    # NumPy copies, as torch takes no reversed array, such as a column of table[::-1];
    # unsigned integers beyond int64 become floats, which lose digits but keep their order
    if kind in "bi" or (kind == "u" and int(values.max()) < 2**63):
        return torch.from_numpy(np.array(values, dtype=np.int64))
    if kind in "fu":
        return torch.from_numpy(np.array(values, dtype=np.float64))
    # pandas keeps decimals and mixed columns as objects
    objects = values.to_numpy(dtype=object)
    types = set(map(type, objects))
    if all(issubclass(each, str) for each in types):
        return None
    if all(issubclass(each, Number | Decimal) and not issubclass(each, complex) for each in types):
        return torch.from_numpy(objects.astype(np.float64))
    if kind in "mM" or any(issubclass(each, date) for each in types):
        raise MisconfigurationException(f"{owner} holds dates; take it as data.time, or make numbers of it")
    for row, value in zip(values.index, objects, strict=True):
        if not isinstance(value, str | Number) or isinstance(value, complex):
            raise not_one_value(value, row, owner)
    return None


def numbers_with_gaps(values: Any, owner: str, decimal: str | None = None) -> NDArray[np.float64]:
    """Return a column of numbers in double precision, with NaN for gaps.

    Args:
        values: a pandas series.
        owner: name of the column for messages.
        decimal: decimal separator of numbers that are texts; None refuses these.

    Raises:
        MisconfigurationException: if a value is no number, or none within single precision.
    """
    is_there = values.notna().to_numpy()
    there = values[is_there]
    result = np.full(len(values), np.nan)
    if there.empty:
        return result
    if (numbers := plain_numbers(there, owner)) is None:
        for row, text in there.items():
            if decimal is None or not is_number(str(text), decimal):
                raise MisconfigurationException(
                    f"{owner} has the text {shortened(str(text))} in row {row} (counted from 0), where the training "
                    "table has numbers"
                )
        numbers = torch.tensor(
            [float(str(text).replace(cast(str, decimal), ".")) for text in there], dtype=torch.float64
        )
    check_finite_column(numbers, owner, there.index.to_numpy())
    result[is_there] = numbers.numpy()
    return result


def has_texts(values: Any) -> bool:
    """Return whether the first value of a column, gaps aside, is a text.

    Args:
        values: a pandas series.
    """
    first = values.first_valid_index()
    return first is not None and isinstance(values[first], str)


def codes_of(values: Any, words: list[str], owner: str, setting: str) -> Tensor:
    """Return the position of each row's value in a vocabulary, int64.

    Args:
        values: a pandas series without gaps.
        words: the vocabulary.
        owner: name of the column for the message.
        setting: the setting that gave the vocabulary.

    Raises:
        MisconfigurationException: if a value isn't in the vocabulary.
    """
    numbers = {word: number for number, word in enumerate(words)}
    code_of: dict[Any, int] = {}
    codes = np.empty(len(values), dtype=np.int64)
    for place, (row, value) in enumerate(zip(values.index, values.to_numpy(dtype=object), strict=True)):
        if not isinstance(value, str | Number):
            raise not_one_value(value, row, owner)
        # a column has few different values: each is turned into a text once, and not in every row
        if value not in code_of:
            if (text := as_text(value)) not in numbers:
                raise MisconfigurationException(
                    f"{owner} has {shortened(text)} in row {row} (counted from 0), which is not in {setting} "
                    f"({listed(words)}); correct it, or add it there"
                )
            code_of[value] = numbers[text]
        codes[place] = code_of[value]
    return torch.from_numpy(codes)


def coded(values: Any, owner: str) -> tuple[NDArray[np.int64], list[str]]:
    """Return the code of each row's category, -1 for gaps, and all categories of a column, in order.

    Args:
        values: a pandas series.
        owner: name of the column for messages.

    Raises:
        MisconfigurationException: if a cell holds neither a text nor a number.
    """
    pandas = package("pandas", "tables", "TableData")
    if isinstance(values.dtype, pandas.CategoricalDtype):
        return values.cat.codes.to_numpy().astype(np.int64), [as_text(value) for value in values.cat.categories]
    objects = values.to_numpy(dtype=object)
    gaps = values.isna().to_numpy()
    if not all(issubclass(kind, str | Number) for kind in set(map(type, objects[~gaps]))):
        wrong = ((row, each) for row, each in values[~gaps].items() if not isinstance(each, str | Number))
        row, value = next(wrong)
        raise not_one_value(value, row, owner)
    codes = np.full(len(objects), -1, dtype=np.int64)
    numbers, different = pandas.factorize(objects[~gaps])
    texts = [as_text(value) for value in different]
    words = sorted(set(texts))
    places = {word: place for place, word in enumerate(words)}
    codes[~gaps] = np.array([places[text] for text in texts], dtype=np.int64)[numbers]
    return codes, words


def parts_of_dates(values: Any, parts: Sequence[str], since: str, owner: str) -> dict[str, NDArray[np.float64]]:
    """Return numbers made of a column of dates, with NaN for gaps.

    Args:
        values: a pandas series of dates, or of texts such as 2024-05-31.
        parts: the numbers, each one of `~pfl_lightning.data.preprocessing.Part`.
        since: the date from which ``days`` counts.
        owner: name of the column for messages.

    Raises:
        MisconfigurationException: if a value is no date.
    """
    pandas = package("pandas", "tables", "TableData")
    is_there = values.notna()
    dates = values
    if values.dtype.kind not in "mM":
        texts = values.astype(object).where(is_there, None)
        wrong = is_there & texts.map(lambda value: not isinstance(value, str | date))
        try:
            dates = pandas.to_datetime(texts.where(~wrong, None), format="ISO8601", errors="coerce")
        except ValueError:
            # offsets from universal time that differ from row to row
            dates = pandas.to_datetime(texts.where(~wrong, None), format="ISO8601", errors="coerce", utc=True)
    if (bad := is_there & dates.isna()).any():
        row = bad.idxmax()
        raise MisconfigurationException(
            f"{owner} has {shortened(str(values[row]))} in row {row} (counted from 0), which is no date; write dates "
            "as 2024-05-31"
        )
    if getattr(dates.dt, "tz", None) is not None:
        dates = dates.dt.tz_localize(None)
    # pandas 3 warns of its older name, weekday
    made = {part: getattr(dates.dt, "day_of_week" if part == "weekday" else part) for part in parts if part != "days"}
    if "days" in parts:
        made["days"] = (dates - pandas.Timestamp(since)) / pandas.Timedelta(days=1)
    return {part: made[part].to_numpy(dtype=np.float64, na_value=np.nan) for part in parts}


def without_empty(values: Any) -> Any:
    """Return a column in which an empty text counts as a gap, as in a CSV file.

    Args:
        values: a pandas series.
    """
    if values.dtype.kind not in "OUST":
        return values
    if values.dtype == object:
        # no comparison of the whole column: cells may hold arrays
        objects = values.to_numpy()
        is_empty = np.fromiter((isinstance(each, str) and not each for each in objects), dtype=bool, count=len(values))
    else:
        is_empty = (values == "").to_numpy(dtype=bool, na_value=False)
    return values.mask(is_empty) if is_empty.any() else values


def check_no_gaps(values: Any, owner: str, instead: str = "") -> None:
    """Check that a column has a value in each row.

    Args:
        values: a pandas series.
        instead: a setting that takes gaps, with its value, for the message.
        owner: name of the column for the message.

    Raises:
        MisconfigurationException: if a value is missing.
    """
    if gaps := int(values.isna().sum()):
        raise MisconfigurationException(
            f"{owner} has no value in {gaps} of {len(values)} rows, first in row "
            f"{values.isna().idxmax()} (counted from 0); {f'set {instead}, or ' if instead else ''}fill them in, or "
            "leave these rows or the column out"
        )


def not_one_value(value: Any, row: int, owner: str) -> MisconfigurationException:
    """Return the error for a cell with a list, bytes or another object.

    Args:
        value: contents of the cell.
        row: the row.
        owner: name of the column.
    """
    return MisconfigurationException(
        f"{owner} has a {type(value).__name__} in row {row} (counted from 0), where each row has one number or text; "
        "make columns of it, or leave it out of data.features"
    )


def as_text(value: Any) -> str:
    """Return a value in the notation of vocabularies: whole numbers without a decimal point.

    >>> as_text("flu"), as_text(2.0), as_text(True)
    ('flu', '2', 'True')

    Args:
        value: a text or a number.
    """
    # pandas reads a column of integers with gaps as floats, so that 2 comes as 2.0
    return str(int(value)) if isinstance(value, float | np.floating) and float(value).is_integer() else str(value)


def shortened(text: str) -> str:
    """Return a text in quotes, cut after forty letters."""
    return repr(text if len(text) <= 40 else f"{text[:40]}...")


def listed(words: Sequence[str]) -> str:
    """Return some words separated by commas, and the number of the remaining words.

    >>> listed(["a", "b"]), listed([str(number) for number in range(10)])
    ('a, b', '0, 1, 2, 3, 4, 5, 6, 7 and 2 more')

    Args:
        words: all words.
    """
    rest = len(words) - SHOWN
    return ", ".join(words[:SHOWN]) + (f" and {rest} more" if rest > 0 else "")
