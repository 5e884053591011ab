"""CSV, Parquet and data frames."""

from __future__ import annotations

import math
import os
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import date
from decimal import Decimal
from numbers import Number
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_warn
from numpy.typing import NDArray
from torch import Tensor

from pfl_lightning.choices import check_choices
from pfl_lightning.data.columns import DATE, NUMBER, is_number, mostly
from pfl_lightning.data.division import Division
from pfl_lightning.data.loaded import Loaded
from pfl_lightning.data.preprocessing import FittedOn, moments_of, standardized, trained_on
from pfl_lightning.data.samples import Samples
from pfl_lightning.data.sources.base import OwnedData, targets_of
from pfl_lightning.data.sources.columns import check_finite_column, chosen_columns, package
from pfl_lightning.tasks import MultiLabel, Task

UNLIKE = 1000
"""Times the width of another column that a column has when a warning tells of it."""

NAMELESS = "Unnamed: "
"""The beginning of the name that pandas gives a column without one."""

SHOWN = 8
"""Names that a line or a message has at most."""


class TableData(OwnedData):
    """A table, a row a sample: a CSV or Parquet file, or a data frame; needs the extra ``tables``.

    Inputs are the numbers in the feature columns, [number of features]. A column of texts becomes codes, the positions
    of its texts in a vocabulary: the one in ``categories``; or the categories of a pandas Categorical, in their order;
    or all texts of the column in the order of the alphabet. So do texts that are classes, whose vocabulary is
    ``classes``. A net learns little from columns of very different scales, of which a warning tells; ``standardize``
    brings each to mean 0 and deviation 1 on training rows.

    ``preprocessing`` holds ``features`` and ``targets``, the names of the columns in order; ``categories`` and
    ``classes``, the vocabulary of each coded column by its name; and under ``standardize`` the ``mean`` and the
    ``deviation`` of each feature by its name, a number, or a list with one number a client.

    Args:
        path: The file, ``.csv`` or ``.parquet``; from Python also a pandas data frame.
        target: Column of the target, or columns where a sample has several.
        task: What is predicted.
        features: Columns of the inputs; None takes all others, and refuses ids and dates among them.
        client: Column of who holds each row; None under another partitioner than `Natural`.
        time: Column of when each row came: a number, or a text that sorts, such as 2024-05-31.
        split_column: Column of ``train``, ``val`` or ``test``.
        standardize: By which training rows feature columns are standardized: those of all clients of the federation,
            ``table``, whose means and deviations they then know of each other; or those of each ``client`` alone, which
            tells nothing and takes away what sets clients apart; or given numbers, the mean and the deviation of
            columns by their names, such as ``{age: [50, 12]}``, for which nothing is fitted; None leaves columns as
            they are.
        classes: All values of the target column, whose order gives class numbers from 0; None takes integers as they
            are, and those texts that are in the table. Sites with a table each need it for texts.
        categories: All values of each feature column that becomes codes from 0, by the column's name, such as
            ``{size: [small, large]}``; a column of texts that isn't named takes those that are in the table.
        decimal: Decimal separator of the numbers in a CSV file, ``.`` or ``,``.
        separator: What stands between the cells of a CSV file, such as ``;``.
        **kwargs: Settings of `FederatedDataModule`; ``root`` and ``download`` have no effect.

    Raises:
        MisconfigurationException: There is no such file or column, or a column has gaps, numbers that aren't finite,
            texts among numbers, or values outside its vocabulary.
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
        standardize: Literal["table", "client"] | Mapping[str, Sequence[float]] | None = None,
        classes: list[str | int] | None = None,
        categories: dict[str, list[str | int]] | None = None,
        decimal: Literal[".", ","] = ".",
        separator: str = ",",
        **kwargs: Any,
    ) -> None:
        super().__init__(task, **kwargs)
        if standardize is not None and not isinstance(standardize, Mapping):
            check_choices("data", standardize=(standardize, ("table", "client")))
        if standardize == "client" and self.central_test is not None:
            raise MisconfigurationException(
                f"data.standardize=client: rows of data.central_test={self.central_test} are of no client, by whose "
                "training rows to standardize them; take table, or leave data.central_test out"
            )
        check_choices("data", decimal=(decimal, (".", ",")))
        self.standardize = standardize
        self._path = Path(path) if isinstance(path, str | os.PathLike) else path
        self._where = str(self._path) if isinstance(self._path, Path) else "the data frame"
        self._csv = {"decimal": decimal, "sep": separator}
        self._others = {"client": client, "split": split_column, "time": time}
        there = column_names(self._path, self._csv)
        named = {"client": client, "split_column": split_column, "time": time}
        self._features, self._targets = chosen_columns(there, features, target, **named)
        if features is None and (nameless := [name for name in self._features if name.startswith(NAMELESS)]):
            raise MisconfigurationException(
                f"data.path={self._where!r} has a column without a name ({nameless[0]!r}), such as row numbers that "
                "came along; leave it out of the file, or name the features in data.features"
            )
        if isinstance(standardize, Mapping):
            check_given(standardize, self._features)
        self._are_named = features is not None
        self._found: dict[str, list[str]] = {}
        self._vocabularies = self._given_vocabularies(classes, categories or {})
        self.input_shape = (len(self._features),)

    def _given_vocabularies(
        self, classes: Sequence[str | int] | None, categories: dict[str, list[str | int]]
    ) -> dict[str, list[str]]:
        """Return the vocabulary of each column that the settings give one."""
        given: dict[str, list[str]] = {}
        for column in categories:
            if column not in self._features:
                raise MisconfigurationException(
                    f"data.categories: {column!r} is no column of the inputs, which are {listed(self._features)}"
                )
            given[column] = vocabulary(f"data.categories.{column}", categories[column])
        if classes is not None:
            if not (self.task.has_classes or isinstance(self.task, MultiLabel)):
                raise MisconfigurationException(
                    f"data.classes={classes}: task {self.task} has no classes; leave it out"
                )
            words = vocabulary("data.classes", classes)
            count = self.task.outputs if self.task.has_classes else 2
            if len(words) != count:
                raise MisconfigurationException(
                    f"data.classes has {len(words)} classes ({listed(words)}), and task {self.task} takes {count}"
                )
            given |= dict.fromkeys(self._targets, words)
        return given

    def load(self) -> Loaded:
        """Read the columns that are named."""
        others = [column for column in self._others.values() if column is not None]
        wanted = list(dict.fromkeys([*self._features, *self._targets, *others]))
        table = read_table(self._path, wanted, self._csv)
        # means are subtracted before large numbers, such as times in seconds, are cut to single precision
        wide = torch.float32 if self.standardize is None else torch.float64
        x = torch.empty(len(table), len(self._features), dtype=wide)
        for index, column in enumerate(self._features):
            x[:, index] = self._numbers(table[column], is_target=False)
        y = torch.stack([self._numbers(table[column], is_target=True) for column in self._targets], dim=1)
        columns = {name: None if column is None else table[column].to_numpy() for name, column in self._others.items()}
        if (time := self._others["time"]) is not None and getattr(table[time].dtype, "ordered", False):
            codes = table[time].cat.codes.to_numpy()
            columns["time"] = np.where(codes < 0, np.nan, codes)
        words = self._vocabularies | self._found
        self.preprocessing = {
            "features": list(self._features),
            "categories": {column: words[column] for column in self._features if column in words},
            "targets": list(self._targets),
            "classes": {column: words[column] for column in self._targets if column in words},
            "standardize": self.standardize,
        }
        return Loaded(x, targets_of(y if y.shape[1] > 1 else y[:, 0]), **columns)

    def _numbers(self, values: Any, is_target: bool) -> Tensor:
        """Return a column as numbers, or as codes, whose vocabulary is kept.

        Args:
            values: A pandas series.
            is_target: Whether it is a target.
        """
        column = str(values.name)
        owner = f"column {column!r} of {self._where}"
        if gaps := int(values.isna().sum()):
            raise MisconfigurationException(
                f"{owner} has no value in {gaps} of {len(values)} rows, first in row "
                f"{int(values.isna().to_numpy().argmax())} (counted from 0); fill them in, or leave these rows or the "
                "column out"
            )
        setting = "data.classes" if is_target else f"data.categories.{column}"
        if column in self._vocabularies:
            return codes_of(values, self._vocabularies[column], owner, setting)
        if isinstance(values.dtype, package("pandas", "tables", "TableData").CategoricalDtype):
            words, codes = [as_text(value) for value in values.cat.categories], values.cat.codes.to_numpy()
        elif (numbers := plain_numbers(values, owner)) is not None:
            check_finite_column(numbers, owner)
            return numbers
        else:
            words, codes = self._texts(values, owner, setting, is_target)
        self._found[column] = words
        if is_target and not (self.task.has_classes or isinstance(self.task, MultiLabel)):
            raise MisconfigurationException(
                f"{owner} is of texts ({listed(words)}), and task {self.task} predicts numbers; name another target"
            )
        if is_target and self.task.has_classes and len(words) > self.task.outputs:
            raise MisconfigurationException(
                f"{owner} has {len(words)} classes ({listed(words)}), and task {self.task} takes {self.task.outputs}; "
                "correct data.task or the rows, or give data.classes"
            )
        return torch.from_numpy(codes.astype(np.int64))

    def _texts(
        self, values: Any, owner: str, setting: str, is_target: bool
    ) -> tuple[list[str], NDArray[np.integer[Any]]]:
        """Return the different texts of a column in the order of the alphabet, and the code of each row's text.

        Args:
            values: A pandas series of texts.
            owner: Name of the column for messages.
            setting: The setting that gives it a vocabulary.
            is_target: Whether it is a target.

        Raises:
            MisconfigurationException: Texts stand among numbers, or are ids or dates that nobody has named as features.
        """
        codes, unique = package("pandas", "tables", "TableData").factorize(values.astype(str).to_numpy(), sort=True)
        words = [str(word) for word in unique]
        counts = np.bincount(codes, minlength=len(words))
        is_date = mostly(DATE, words, counts)
        if not is_date and mostly(NUMBER, words, counts):
            wrong = np.array([not is_number(word, self._csv["decimal"]) for word in words])
            if not wrong.any():
                # pandas leaves a column as texts where one of its numbers is too large
                numbers = torch.tensor([float(word.replace(self._csv["decimal"], ".")) for word in words])
                check_finite_column(numbers[torch.from_numpy(codes)], owner)
            row = int(wrong[codes].argmax())
            text = words[codes[row]]
            comma = NUMBER.fullmatch(text) is not None and "," in text and self._csv["decimal"] == "."
            raise MisconfigurationException(
                f"{owner} is mostly of numbers, and has the text {shortened(text)} in row {row} (counted from 0); "
                + ("set data.decimal=',' if that is a decimal comma, or " if comma else "make a number of it, or ")
                + f"name all texts of the column in {setting}"
            )
        if not is_target and not self._are_named and (is_date or 2 * len(words) > len(values)):
            kind = "dates" if is_date else "ids: nearly each row has a text of its own"
            raise MisconfigurationException(
                f"{owner} is of {kind}, such as {shortened(words[codes[0]])}, and no feature unless data.features "
                "names it; list the features there without it, or with it to have codes in the order of the alphabet"
            )
        return words, codes

    def preprocess(self, samples: Samples, division: Division) -> Samples:
        """Standardize features by training rows, or warn of very different scales; see ``standardize``.

        Args:
            samples: The pool, as loaded.
            division: Who holds which rows of it.
        """
        if self.standardize is None:
            warn_of_scales(moments_of(samples.x, trained_on(division))[1], self._features)
            return samples
        if isinstance(self.standardize, Mapping):
            known = {column: self.standardize.get(column, (0.0, 1.0)) for column in self._features}
            mean, deviation = torch.tensor(list(known.values()), dtype=torch.float64).T
            self.preprocessing |= {
                "mean": {column: float(values[0]) for column, values in known.items()},
                "deviation": {column: float(values[1]) for column, values in known.items()},
            }
            return Samples(((samples.x - mean) / deviation).float(), samples.y)
        x, statistics = standardized(samples.x, division, self.standardize)
        for name, of_groups in zip(("mean", "deviation"), zip(*statistics, strict=True), strict=True):
            columns = np.stack(of_groups, axis=1).tolist()
            self.preprocessing[name] = {
                column: values if self.standardize == "client" else values[0]
                for column, values in zip(self._features, columns, strict=True)
            }
        return Samples(x, samples.y)

    @property
    def fitted_on(self) -> FittedOn:
        """Return the rows that decide over inputs: those of all clients too where a vocabulary is the table's own."""
        if self.standardize == "table" or self._found:
            return "all clients"
        return "each client" if self.standardize == "client" else "nothing"

    @property
    def needs_all_clients(self) -> str:
        """Return why a site with its own rows alone would make other inputs, and the remedy; else an empty text."""
        if self.standardize == "table":
            return (
                "data.standardize=table takes the training rows of all clients, which are not in one place here; take "
                "client, or null"
            )
        for column in self._found:
            setting = "data.classes" if column in self._targets else f"data.categories.{column}"
            return (
                f"column {column!r} is of texts, to which each place would give other numbers by the texts in its own "
                f"table; list all texts in {setting}, the same everywhere"
            )
        return ""

    @property
    def head_lines(self) -> list[tuple[str, str]]:
        """Return lines on columns that are codes, on classes and on statistics."""
        if not self.preprocessing:
            return []
        coded = [f"{column} ({len(words)} texts)" for column, words in self.preprocessing["categories"].items()]
        scaled = {"table": "by training rows of all clients", "client": "by each client's own training rows"}
        by = "by given numbers" if isinstance(self.standardize, Mapping) else scaled.get(str(self.standardize))
        features = [
            f"{len(self._features)}",
            f"codes of {listed(coded)}" if coded else "",
            f"standardized {by}" if by else "",
        ]
        lines = [("features", "; ".join(filter(None, features)))]
        if self.task.has_classes and self.preprocessing["classes"]:
            (words,) = self.preprocessing["classes"].values()
            lines.append(("classes", listed([f"{number} {word}" for number, word in enumerate(words)])))
        return lines


def check_given(moments: Mapping[str, Sequence[float]], features: Sequence[str]) -> None:
    """Check the mean and the deviation that are given for columns.

    Args:
        moments: Both by the column's name.
        features: Names of the columns that there are.

    Raises:
        MisconfigurationException: One isn't two finite numbers, the deviation above 0, or is of no feature.
    """
    for column, values in moments.items():
        if column not in features:
            raise MisconfigurationException(f"data.standardize.{column} is no feature; features are {listed(features)}")
        numbers = list(values) if isinstance(values, Sequence) and not isinstance(values, str) else []
        if len(numbers) != 2 or not all(map(math.isfinite, numbers)) or numbers[1] <= 0:
            raise MisconfigurationException(
                f"data.standardize.{column}={values!r} must be the column's mean and its deviation, which is above 0, "
                "such as [50, 12]"
            )


def warn_of_scales(widths: NDArray[np.float64], names: Sequence[str]) -> None:
    """Warn where one column is a thousand times as wide as another.

    Args:
        widths: Standard deviation of each column, over training rows.
        names: Their names.
    """
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


def column_names(path: Any, csv: dict[str, str]) -> list[str]:
    """Return the names of a table's columns, without reading its rows.

    Args:
        path: The file, or a data frame.
        csv: Settings of ``pandas.read_csv``.

    Raises:
        MisconfigurationException: It is no such file, or two columns have one name.
    """
    names = [str(name) for name in read_table(path, None, csv)]
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise MisconfigurationException(
            f"data.path has {Counter(names)[twice[0]]} columns of the name {twice[0]!r}; give each a name of its own"
        )
    return names


def read_table(path: Any, columns: Sequence[str] | None, csv: dict[str, str]) -> Any:
    """Read columns of a table.

    Args:
        path: The file, or a data frame.
        columns: Names of the columns; None reads no row, and returns the names of all columns alone.
        csv: Settings of ``pandas.read_csv``.

    Raises:
        MisconfigurationException: It is no such file, or a package is missing.
    """
    pandas = package("pandas", "tables", "TableData")
    if isinstance(path, pandas.DataFrame):
        named = {str(name): name for name in path.columns}
        if columns is None:
            return [str(name) for name in path.columns]
        table = path[[named[column] for column in columns]]
        table.columns = list(columns)
        return table
    if not isinstance(path, Path):
        raise MisconfigurationException(f"data.path is a {type(path).__name__}; give a file, or a pandas data frame")
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
                index = (schema.pandas_metadata or {}).get("index_columns", [])
                return [name for name in schema.names if name not in index]
            return pandas.read_parquet(path, columns=columns)
        if columns is None:
            # as a row, since pandas renames the second of two columns with one name
            header = pandas.read_csv(path, sep=csv["sep"], header=None, nrows=1, dtype=str, keep_default_na=False)
            return [name or f"{NAMELESS}{place}" for place, name in enumerate(header.iloc[0])]
        with warnings.catch_warnings():
            # that rows have more cells than the first line has names; without index_col their cells would shift
            warnings.simplefilter("error", pandas.errors.ParserWarning)
            # all columns, as pandas otherwise drops what a row has too much; types by all rows, not by some at a time
            table = pandas.read_csv(path, **csv, index_col=False, low_memory=False)
        return table[list(columns)]
    # a file that is missing or damaged, or of another kind
    except Exception as error:
        reason = " ".join(str(error).split())[:100]
        raise MisconfigurationException(f"data.path={str(path)!r} cannot be read ({reason}); give a table") from None


def plain_numbers(values: Any, owner: str) -> Tensor | None:
    """Return a column of numbers, floating ones in double precision and others as int64; None for one of texts.

    Args:
        values: A pandas series without gaps.
        owner: Name of the column for the message.

    Raises:
        MisconfigurationException: It is of dates, lists or other objects.
    """
    kind = values.dtype.kind
    if kind in "bi" or (kind == "u" and int(values.max()) < 2**63):
        return torch.tensor(values.to_numpy(dtype=np.int64))
    if kind in "fu":
        return torch.tensor(values.to_numpy(dtype=np.float64))
    objects = values.to_numpy(dtype=object)
    types = set(map(type, objects))
    if all(issubclass(each, str) for each in types):
        return None
    if all(issubclass(each, Number | Decimal) and not issubclass(each, complex) for each in types):
        return torch.from_numpy(objects.astype(np.float64))
    if kind in "mM" or any(issubclass(each, date) for each in types):
        raise MisconfigurationException(f"{owner} is of dates; take it as data.time, or make numbers of it")
    for row, value in enumerate(objects):
        if not isinstance(value, str | Number) or isinstance(value, complex):
            raise not_one_value(value, row, owner)
    return None


def codes_of(values: Any, words: list[str], owner: str, setting: str) -> Tensor:
    """Return the position of each row's value in a vocabulary, int64.

    Args:
        values: A pandas series without gaps.
        words: The vocabulary.
        owner: Name of the column for the message.
        setting: The setting that has given it.

    Raises:
        MisconfigurationException: A value isn't in the vocabulary.
    """
    numbers = {word: number for number, word in enumerate(words)}
    known: dict[Any, int] = {}
    codes = np.empty(len(values), dtype=np.int64)
    for row, value in enumerate(values.to_numpy(dtype=object)):
        if not isinstance(value, str | Number):
            raise not_one_value(value, row, owner)
        if value not in known:
            if (text := as_text(value)) not in numbers:
                raise MisconfigurationException(
                    f"{owner} has {shortened(text)} in row {row} (counted from 0), which is not in {setting} "
                    f"({listed(words)}); correct it, or add it there"
                )
            known[value] = numbers[text]
        codes[row] = known[value]
    return torch.from_numpy(codes)


def not_one_value(value: Any, row: int, owner: str) -> MisconfigurationException:
    """Return the refusal of a cell that holds a list, bytes or another object.

    Args:
        value: What it holds.
        row: The row.
        owner: Name of the column.
    """
    return MisconfigurationException(
        f"{owner} has a {type(value).__name__} in row {row} (counted from 0), where each row has one number or text; "
        "make columns of it, or leave it out of data.features"
    )


def vocabulary(setting: str, words: Sequence[str | int]) -> list[str]:
    """Return the texts of a vocabulary.

    Args:
        setting: Name of the setting that gives it.
        words: The texts, or integers.

    Raises:
        MisconfigurationException: It is no list of different texts.
    """
    texts = [as_text(word) for word in words] if isinstance(words, list | tuple) else []
    if not texts or len(set(texts)) < len(texts):
        raise MisconfigurationException(f"{setting}={words!r} must be a list of texts, each of them once")
    return texts


def as_text(value: Any) -> str:
    """Return a value as vocabularies have it: whole numbers without a decimal point.

    >>> as_text("flu"), as_text(2.0), as_text(True)
    ('flu', '2', 'True')

    Args:
        value: A text or a number.
    """
    return str(int(value)) if isinstance(value, float | np.floating) and float(value).is_integer() else str(value)


def shortened(text: str) -> str:
    """Return a text in quotes, cut after forty letters."""
    return repr(text if len(text) <= 40 else f"{text[:40]}...")


def listed(words: Sequence[str]) -> str:
    """Return some words with commas between them, and the number of the others.

    >>> listed(["a", "b"]), listed([str(number) for number in range(10)])
    ('a, b', '0, 1, 2, 3, 4, 5, 6, 7 and 2 more')

    Args:
        words: All of them.
    """
    rest = len(words) - SHOWN
    return ", ".join(words[:SHOWN]) + (f" and {rest} more" if rest > 0 else "")
