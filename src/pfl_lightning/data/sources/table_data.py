"""Data in tables: CSV, Parquet and data frames."""

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

from pfl_lightning.data.columns import DATE, NUMBER, is_number, mostly
from pfl_lightning.data.datamodule import DataSettings
from pfl_lightning.data.division import Division
from pfl_lightning.data.loaded import Loaded
from pfl_lightning.data.preprocessing import FittedOn, Moments, moments_of, standardized, trained_on
from pfl_lightning.data.samples import Samples
from pfl_lightning.data.sources.base import OwnedData, targets_of
from pfl_lightning.data.sources.columns import check_finite_column, chosen_columns, package
from pfl_lightning.settings import Unpack, check_choices
from pfl_lightning.tasks import MultiLabel, Task

UNLIKE = 1000
"""Ratio of two columns' widths above which a warning is shown."""

NAMELESS = "Unnamed: "
"""Beginning of the name that pandas gives a nameless column."""

SHOWN = 8
"""Largest number of names in a line or a message."""


class TableData(OwnedData):
    """A table with one row per sample: a CSV or Parquet file, or a data frame; needs the extra ``tables``.

    Inputs are the numbers in the feature columns, [number of features]. A column of texts becomes codes, the positions
    of its texts in a vocabulary: the vocabulary in ``categories``; or the categories of a pandas Categorical, in their
    order; or all texts of the column in alphabetical order. Texts that are classes become codes in the same way, with
    the vocabulary ``classes``. A net learns little from columns of very different scales, so a warning tells of such
    columns; ``standardize`` brings each column to mean 0 and deviation 1 on training rows.

    ``preprocessing`` holds ``features`` and ``targets``, the names of the columns in order; ``categories`` and
    ``classes``, the vocabulary of each coded column by its name; and under ``standardize`` the ``mean`` and the
    ``deviation`` of each feature by its name: a number, or a list with one number per client.

    Args:
        path: the file, ``.csv`` or ``.parquet``; from Python also a pandas data frame.
        target: column of the target, or columns for several targets per sample.
        task: the prediction task.
        features: columns of the inputs; None takes all other columns, and refuses ids and dates among them.
        client: column of each row's client; None under another partitioner than `Natural`.
        time: column of each row's time: a number, or a text that sorts, such as 2024-05-31.
        split_column: column of ``train``, ``val`` or ``test``.
        standardize: training rows that standardize feature columns. ``table`` takes the rows of all the federation's
            clients, which then know each other's means and deviations. ``client`` takes each client's own rows, which
            reveals nothing, and removes differences of scale between clients. A dict gives mean and deviation of
            columns by name, such as ``{age: [50, 12]}``, and nothing is fitted. None leaves columns unchanged.
        classes: all values of the target column, in the order of class numbers from 0; None takes integers unchanged,
            and the texts in the table. Sites with one table each need this for texts.
        categories: all values of each feature column that becomes codes from 0, by the column's name, such as ``{size:
            [small, large]}``; a column of texts without an entry takes the texts in the table.
        decimal: decimal separator of the numbers in a CSV file, ``.`` or ``,``.
        separator: separator of the cells of a CSV file, such as ``;``.
        **kwargs: settings of `FederatedDataModule`; ``root`` and ``download`` have no effect.

    Raises:
        MisconfigurationException: if there is no such file or column, or a column has gaps, numbers that aren't finite,
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
        **kwargs: Unpack[DataSettings],
    ) -> None:
        super().__init__(task, **kwargs)
        if standardize is not None and not isinstance(standardize, Mapping):
            check_choices("data", standardize=(standardize, ("table", "client")))
        if standardize == "client" and self.central_test is not None:
            raise MisconfigurationException(
                f"data.standardize=client: rows of data.central_test={self.central_test} belong to no client, so no "
                "training rows standardize them; take table, or leave data.central_test out"
            )
        check_choices("data", decimal=(decimal, (".", ",")))
        self.standardize = standardize
        self._path = Path(path) if isinstance(path, str | os.PathLike) else path
        self._where = str(self._path) if isinstance(self._path, Path) else "the data frame"
        self._csv = {"decimal": decimal, "sep": separator}
        self._others = {"client": client, "split": split_column, "time": time}
        # only the header is read here, so that a wrong name is refused before a large file is read
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
        # columns named by the user may be ids or dates, on purpose; columns that were merely left over may not
        self._are_named = features is not None
        self._found: dict[str, list[str]] = {}
        self._vocabularies = self._given_vocabularies(classes, categories or {})
        self.input_shape = (len(self._features),)

    def _given_vocabularies(
        self, classes: Sequence[str | int] | None, categories: dict[str, list[str | int]]
    ) -> dict[str, list[str]]:
        """Return the vocabulary of each column for which the settings give one."""
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
            # each target of a multi-label task is yes or no
            count = self.task.outputs if self.task.has_classes else 2
            if len(words) != count:
                raise MisconfigurationException(
                    f"data.classes has {len(words)} classes ({listed(words)}), and task {self.task} takes {count}"
                )
            given |= dict.fromkeys(self._targets, words)
        return given

    def load(self) -> Loaded:
        """Read the named columns."""
        if self.adopted:
            self._adopt_columns()
        others = [column for column in self._others.values() if column is not None]
        wanted = list(dict.fromkeys([*self._features, *self._targets, *others]))
        table = read_table(self._path, wanted, self._csv)
        # large numbers, such as times in seconds, lose their differences in single precision: subtract the mean first
        wide = torch.float32 if self.standardize is None else torch.float64
        x = torch.empty(len(table), len(self._features), dtype=wide)
        for index, column in enumerate(self._features):
            x[:, index] = self._numbers(table[column], is_target=False)
        y = torch.stack([self._numbers(table[column], is_target=True) for column in self._targets], dim=1)
        columns = {name: None if column is None else table[column].to_numpy() for name, column in self._others.items()}
        if (time := self._others["time"]) is not None and getattr(table[time].dtype, "ordered", False):
            # an ordered category sorts by its own order ("first", "second") and not by the alphabet; pandas codes gaps
            # as -1
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

    def _adopt_columns(self) -> None:
        """Take the order of features and the vocabularies of the federation that these rows join.

        Raises:
            MisconfigurationException: if the features are others.
        """
        features = self.adopted["features"]
        if set(features) != set(self._features):
            raise MisconfigurationException(
                f"data.features: inputs of the federation are {listed(features)}, and those of {self._where} are "
                f"{listed(self._features)}; name the federation's in data.features"
            )
        self._features = list(features)
        # vocabularies in the settings stay, and a line tells where they differ
        self._vocabularies = self.adopted["categories"] | self.adopted["classes"] | self._vocabularies
        self._found = {}

    def _adopted_moments(self, division: Division) -> dict[int, Moments]:
        """Return the federation's moments by position in the division; a client that it doesn't know has none."""
        if self.adopted.get("standardize") != self.standardize:
            return {}
        mean, deviation = (
            np.array([self.adopted[moment][column] for column in self._features]) for moment in ("mean", "deviation")
        )
        if self.standardize == "table":
            return {0: (mean, deviation)}
        clients = {name: client for client, name in enumerate(self.adopted_names)}
        return {
            place: (mean[:, clients[name]], deviation[:, clients[name]])
            for place, name in enumerate(division.names)
            if name in clients
        }

    def _numbers(self, values: Any, is_target: bool) -> Tensor:
        """Return a column as numbers, or as codes, whose vocabulary is kept.

        Args:
            values: a pandas series.
            is_target: whether the column is a target.

        Raises:
            MisconfigurationException: if the column has gaps, or values that neither the column's type nor the task
                allows.
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
        # a given vocabulary also applies to numbers, such as postal codes, which are no quantities
        if column in self._vocabularies:
            return codes_of(values, self._vocabularies[column], owner, setting)
        if isinstance(values.dtype, package("pandas", "tables", "TableData").CategoricalDtype):
            words, codes = [as_text(value) for value in values.cat.categories], values.cat.codes.to_numpy()
        elif (numbers := plain_numbers(values, owner)) is not None:
            check_finite_column(numbers, owner)
            return numbers
        else:
            words, codes = self._texts(values, owner, setting, is_target)
        # a vocabulary from this table alone: another site's table may have another, see `needs_all_clients`
        self._found[column] = words
        if is_target and not (self.task.has_classes or isinstance(self.task, MultiLabel)):
            raise MisconfigurationException(
                f"{owner} holds texts ({listed(words)}), and task {self.task} predicts numbers; name another target"
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
        """Return the different texts of a column in alphabetical order, and the code of each row's text.

        Args:
            values: a pandas series of texts.
            owner: name of the column for messages.
            setting: the setting that would give the column a vocabulary.
            is_target: whether the column is a target.

        Raises:
            MisconfigurationException: if texts stand among numbers, or are ids or dates that aren't named as features.
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
            # a decimal comma is a likely reason, so it gets its own advice
            comma = NUMBER.fullmatch(text) is not None and "," in text and self._csv["decimal"] == "."
            raise MisconfigurationException(
                f"{owner} is mostly of numbers, and has the text {shortened(text)} in row {row} (counted from 0); "
                + ("set data.decimal=',' if that is a decimal comma, or " if comma else "make a number of it, or ")
                + f"name all texts of the column in {setting}"
            )
        # codes of ids and dates would let a net learn the rows by heart, with good figures and no use
        if not is_target and not self._are_named and (is_date or 2 * len(words) > len(values)):
            kind = "dates" if is_date else "ids: nearly each row has a text of its own"
            raise MisconfigurationException(
                f"{owner} holds {kind}, such as {shortened(words[codes[0]])}; list the inputs in data.features, "
                "without this column, or with it to turn its texts into codes in alphabetical order"
            )
        return words, codes

    def preprocess(self, samples: Samples, division: Division) -> Samples:
        """Standardize features by training rows, or warn of very different scales; see ``standardize``.

        Args:
            samples: the pool, as loaded.
            division: the pool positions of each client's rows.
        """
        if self.standardize is None:
            warn_of_scales(moments_of(samples.x, trained_on(division))[1], self._features)
            return samples
        if isinstance(self.standardize, Mapping):
            # a column without given moments stays unchanged: mean 0, deviation 1
            known = {column: self.standardize.get(column, (0.0, 1.0)) for column in self._features}
            mean, deviation = torch.tensor(list(known.values()), dtype=torch.float64).T
            self.preprocessing |= {
                "mean": {column: float(values[0]) for column, values in known.items()},
                "deviation": {column: float(values[1]) for column, values in known.items()},
            }
            return Samples(((samples.x - mean) / deviation).float(), samples.y)
        x, statistics = standardized(samples.x, division, self.standardize, self._adopted_moments(division))
        for name, of_groups in zip(("mean", "deviation"), zip(*statistics, strict=True), strict=True):
            columns = np.stack(of_groups, axis=1).tolist()
            self.preprocessing[name] = {
                column: values if self.standardize == "client" else values[0]
                for column, values in zip(self._features, columns, strict=True)
            }
        return Samples(x, samples.y)

    @property
    def fitted_on(self) -> FittedOn:
        """Return the rows that decide over inputs; a vocabulary taken from the table counts as all clients' rows."""
        if self.standardize == "table" or self._found:
            return "all clients"
        return "each client" if self.standardize == "client" else "nothing"

    @property
    def needs_all_clients(self) -> str:
        """Return why a site with only its own rows would compute other inputs, and the remedy; else an empty text."""
        if self.standardize == "table":
            return (
                "data.standardize=table takes the training rows of all clients, which are not in one place here; take "
                "client, or null"
            )
        for column in self._found:
            setting = "data.classes" if column in self._targets else f"data.categories.{column}"
            return (
                f"column {column!r} holds texts, and the texts of each site's own table would give other codes; list "
                f"all texts in {setting}, the same at every site"
            )
        return ""

    @property
    def head_lines(self) -> list[tuple[str, str]]:
        """Return lines about coded columns, classes and standardization."""
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
    """Check the given mean and deviation of columns.

    Args:
        moments: mean and deviation by the column's name.
        features: names of the feature columns.

    Raises:
        MisconfigurationException: if an entry isn't two finite numbers with a deviation above 0, or belongs to no
            feature.
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
    """Warn if one column is a thousand times as wide as another.

    Args:
        widths: standard deviation of each column over training rows.
        names: names of the columns.
    """
    # constant columns have no scale
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


def read_table(path: Any, columns: Sequence[str] | None, csv: dict[str, str]) -> Any:
    """Read columns of a table.

    Args:
        path: the file, or a data frame.
        columns: names of the columns; None reads no row, and returns the names of all columns.
        csv: settings of ``pandas.read_csv``.

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
                # pandas stores row labels as a column of the file, which is no feature
                index = (schema.pandas_metadata or {}).get("index_columns", [])
                return [name for name in schema.names if name not in index]
            return pandas.read_parquet(path, columns=columns)
        if columns is None:
            # read as a row: as a header, pandas would rename the second of two equal names
            header = pandas.read_csv(path, sep=csv["sep"], header=None, nrows=1, dtype=str, keep_default_na=False)
            return [name or f"{NAMELESS}{place}" for place, name in enumerate(header.iloc[0])]
        with warnings.catch_warnings():
            # The warning that rows have more cells than the header: without index_col=False, pandas would take the
            # first column for row labels and shift all cells by one.
            warnings.simplefilter("error", pandas.errors.ParserWarning)
            # All columns, as with a choice of columns pandas silently drops surplus cells. low_memory=False finds a
            # column's type by all rows; by chunks, one column could become numbers and texts.
            table = pandas.read_csv(path, **csv, index_col=False, low_memory=False)
        return table[list(columns)]
    # a missing or damaged file, or one of another kind: pandas and pyarrow raise many types
    except Exception as error:
        reason = " ".join(str(error).split())[:100]
        raise MisconfigurationException(f"data.path={str(path)!r} cannot be read ({reason}); give a table") from None


def plain_numbers(values: Any, owner: str) -> Tensor | None:
    """Return a column of numbers, floats in double precision and integers as int64; None for a column of texts.

    Args:
        values: a pandas series without gaps.
        owner: name of the column for the message.

    Raises:
        MisconfigurationException: if the column holds dates, lists or other objects.
    """
    kind = values.dtype.kind
    # unsigned integers beyond int64 become floats, which lose digits but keep their order
    if kind in "bi" or (kind == "u" and int(values.max()) < 2**63):
        return torch.tensor(values.to_numpy(dtype=np.int64))
    if kind in "fu":
        return torch.tensor(values.to_numpy(dtype=np.float64))
    # pandas keeps decimals and mixed columns as objects
    objects = values.to_numpy(dtype=object)
    types = set(map(type, objects))
    if all(issubclass(each, str) for each in types):
        return None
    if all(issubclass(each, Number | Decimal) and not issubclass(each, complex) for each in types):
        return torch.from_numpy(objects.astype(np.float64))
    if kind in "mM" or any(issubclass(each, date) for each in types):
        raise MisconfigurationException(f"{owner} holds dates; take it as data.time, or make numbers of it")
    for row, value in enumerate(objects):
        if not isinstance(value, str | Number) or isinstance(value, complex):
            raise not_one_value(value, row, owner)
    return None


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
    known: dict[Any, int] = {}
    codes = np.empty(len(values), dtype=np.int64)
    for row, value in enumerate(values.to_numpy(dtype=object)):
        if not isinstance(value, str | Number):
            raise not_one_value(value, row, owner)
        # a column has few different values: each is turned into a text once, and not in every row
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
