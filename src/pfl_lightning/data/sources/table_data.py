"""Data in tables: CSV, Parquet and data frames."""

import math
import os
from collections.abc import Collection, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, cast

import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_warn
from numpy.typing import NDArray
from torch import Tensor

from pfl_lightning.data.client_names import codes_kept
from pfl_lightning.data.columns import DATE, NUMBER, is_number, mostly
from pfl_lightning.data.datamodule import DataSettings
from pfl_lightning.data.division import Division
from pfl_lightning.data.files import read_checkpoint
from pfl_lightning.data.identity import keys_of_texts
from pfl_lightning.data.preprocessing import (
    CHUNK,
    RANGE,
    UNBOUNDED,
    Column,
    FittedOn,
    Preprocessing,
    filled_word,
    fitted_numbers,
    fitted_words,
    input_names,
    is_fitted,
    known_moments,
    moments_of,
    preprocessed,
    range_of,
    standardized,
    trained_on,
    warn_of_ranges,
)
from pfl_lightning.data.samples import Loaded, Samples
from pfl_lightning.data.sources.base import BY_SETTING, OwnedData, targets_of, warn_of_targets
from pfl_lightning.data.sources.columns import (
    NAMELESS,
    OWNER,
    as_text,
    check_column,
    check_finite_column,
    check_no_gaps,
    chosen_columns,
    coded,
    codes_of,
    column_names,
    has_rows,
    has_texts,
    listed,
    numbers_with_gaps,
    package,
    parts_of_dates,
    plain_numbers,
    read_table,
    rows_table,
    shortened,
    vocabulary,
    without_empty,
)
from pfl_lightning.data.target_scale import TargetScale, scale_at
from pfl_lightning.data.trees import Tree
from pfl_lightning.settings import Unpack, check_choices
from pfl_lightning.tasks import MultiLabel, Regression, Task

UNLIKE = 1000
"""Ratio of two columns' widths above which a warning is shown."""
MOMENTS = ("mean", "deviation")
"""Names of a column's fitted numbers, with ``target_`` before them for a target."""
TargetRows: TypeAlias = Literal["table", "client"] | Mapping[str, Sequence[float]] | None
"""Training rows that standardise targets, or given numbers by target; None for none."""


class TableData(OwnedData):
    """A table with one row per sample: a CSV or Parquet file, or a data frame; needs the extra ``tables``.

    A folder with a ``CLIENT.csv`` or ``CLIENT.parquet`` for each client is one table, whose clients are named by files.

    Inputs are the numbers in the feature columns, [number of features]. A column of texts becomes codes, the positions
    of its texts in a vocabulary: the vocabulary in ``categories``; or the categories of a pandas Categorical, in their
    order; or all texts of the column in alphabetical order. Texts that are classes become codes in the same way, with
    the vocabulary ``classes``. A net learns little from columns of very different scales, so a warning tells of such
    columns; ``standardize`` brings each column to mean 0 and deviation 1 on training rows.

    ``preprocessing`` holds ``features`` and ``targets``, the names of the columns in order; ``categories`` and
    ``classes``, the vocabulary of each coded column by its name; and under ``standardize`` the ``mean`` and the
    ``deviation`` of each feature by its name: a number, or a list with one number per client.

    Targets of a regression are standardised too, by ``standardize_target``: a net learns them with mean 0 and deviation
    1, and predictions, metrics and losses of evaluations are in the target's unit; ``train/loss`` is of the
    standardised targets. `target_scale` returns their mean and deviation, which ``preprocessing`` holds as
    ``target_mean`` and ``target_deviation``.

    ``preprocessing`` as a setting fills gaps, turns texts and dates into inputs, and scales, all fitted on training
    rows. Then the attribute ``preprocessing`` holds further ``inputs``, the names of the net's inputs in order, and the
    fitted values of each column under ``numbers``, ``categories`` and ``category_fill``.

    Args:
        path: the file, ``.csv`` or ``.parquet``; or a folder of such files, one a client; from Python also a pandas
            data frame.
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
        preprocessing: how gaps, texts, dates and scales are prepared, in place of ``standardize`` and
            ``categories``; ``auto`` is ``Preprocessing()`` with its defaults. None refuses gaps and turns texts into
            codes.
        drop_missing_target: leave rows without a target out, which are refused otherwise.
        fitted: a checkpoint of a run with such a table, whose fitted values are taken in place of fitting anew;
            under ``by=client``, clients unknown to the checkpoint are fitted on their own training rows.
        group: column of each row's group, such as the patient; a client's rows of one group are on one side of its
            splits.
        standardize_target: training rows that standardise the targets of `Regression` and `Quantile`, ``table`` or
            ``client``, or a mean and a deviation of each target by name, such as ``{price: [300000, 90000]}``; see
            ``standardize``. ``auto`` takes those of ``preprocessing.by``, and none without ``preprocessing``. None
            leaves targets as they are.
        fill_missing_columns: take an input column that the table lacks, or raw rows for a prediction, as a gap in
            every row, under ``preprocessing``; a missing column is refused otherwise. Columns that are no inputs of a
            checkpoint's federation are ignored with a warning.
        **kwargs: settings of `FederatedDataModule`; ``root`` and ``download`` have no effect.

    Raises:
        MisconfigurationException: if there is no such file or column, or a column has gaps, numbers that aren't finite,
            texts among numbers, or values outside its vocabulary, or a target to standardise is constant.
    """

    # Attributes of the class, as a data module may be made of its entry in a checkpoint alone, without __init__.
    _settings: Preprocessing | None = None
    _target_rows: TargetRows = None
    """Training rows that standardise targets, or given numbers; a checkpoint's, where one is adopted."""
    _shape: tuple[int, ...] | None = None
    _vocabularies: Mapping[str, list[str]] = MappingProxyType({})
    """Given vocabularies of columns."""
    _table_words: Mapping[str, list[str]] = MappingProxyType({})
    """Vocabularies taken from the table."""
    _text_columns: Collection[str] = ()
    """Coded feature columns that hold texts, and not numbers."""
    _gaps: Mapping[str, int] = MappingProxyType({})
    """Number of gaps in each feature column."""
    _labels: Sequence[str] = ()
    _fitted_clients: Sequence[str] = ()
    """Clients in the order of the lists in ``preprocessing``; `arrange` may give the clients other ids."""
    _names_now: Sequence[str] = ()
    """Names of a checkpoint's clients by their ids at its end."""
    _transformers: Sequence[Any] = ()
    _raw: Any = None
    fill_missing_columns = False
    _far: frozenset[str] = frozenset()
    """Columns of raw rows that a warning has named."""

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
        preprocessing: Preprocessing | Literal["auto"] | None = None,
        drop_missing_target: bool = False,
        fitted: str | Path | None = None,
        group: str | None = None,
        fill_missing_columns: bool = False,
        standardize_target: Literal["auto", "table", "client"] | Mapping[str, Sequence[float]] | None = "auto",
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
        self._settings = Preprocessing() if preprocessing == "auto" else preprocessing
        self._check_preprocessing(standardize, categories)
        self.standardize_target = standardize_target
        self._target_rows = self._asked_target_rows()
        if fill_missing_columns and self._settings is None:
            raise MisconfigurationException(
                "data.fill_missing_columns=true needs values for gaps; set data.preprocessing=auto, or leave it out"
            )
        self.fill_missing_columns = fill_missing_columns
        self.standardize = standardize
        self.drop_missing_target = drop_missing_target
        self._path = Path(path) if isinstance(path, str | os.PathLike) else path
        self._where = str(self._path) if isinstance(self._path, Path) else "the data frame"
        self._csv = {"decimal": decimal, "sep": separator}
        if isinstance(self._path, Path) and self._path.is_dir():
            if client is not None:
                raise MisconfigurationException(
                    f"data.client={client!r}: each file of the folder data.path={self._where!r} is a client's, by its "
                    "name; leave data.client out, or give one file"
                )
            client = OWNER
        self._others = {"client": client, "split": split_column, "time": time, "group": group}
        # only the header is read here, so that a wrong name is refused before a large file is read
        there = self._there = column_names(self._path, self._csv)
        if fill_missing_columns:
            # those that settings name; `load` adds what a checkpoint names
            settings = cast(Preprocessing, self._settings)
            wanted = [*(features or ()), *settings.categories, *settings.vocabulary, *settings.dates]
            there = list(dict.fromkeys([*there, *wanted]))
        named = {"client": client, "split_column": split_column, "time": time, "group": group}
        self._features, self._targets = self._chosen(there, features, target, named)
        if self._settings is not None:
            check_named(self._settings, self._features)
            self._features = [name for name in self._features if name not in self._settings.drop]
        if features is None and (nameless := [name for name in self._features if name.startswith(NAMELESS)]):
            raise MisconfigurationException(
                f"data.path={self._where!r} has a column without a name ({nameless[0]!r}), such as row numbers that "
                "came along; leave it out of the file, or name the features in data.features"
            )
        if isinstance(standardize, Mapping):
            check_given(standardize, self._features, "standardize")
        if isinstance(self._target_rows, Mapping):
            check_given(self._target_rows, self._targets, "standardize_target")
            if lacking := [name for name in self._targets if name not in self._target_rows]:
                raise MisconfigurationException(
                    f"data.standardize_target has no mean and deviation of {listed(lacking)}; give both, such as [50, "
                    "12], for each target"
                )
        # columns named by the user may be ids or dates, on purpose; columns that were merely left over may not
        self._are_named = features is not None
        self._table_words: dict[str, list[str]] = {}
        self._vocabularies = self._given_vocabularies(classes, categories or {})
        self._shape = None if self._settings else (len(self._features),)
        self._asked = self.standardize, self._features, self._vocabularies
        if fitted is not None:
            own = self.num_clients
            self.load_state_dict(fitted_of(Path(fitted), type(self).__qualname__))
            # the clients of this table, and not of the checkpoint's
            self.num_clients = own
            self._check_columns(self._features)

    def _chosen(
        self, there: Sequence[str], features: list[str] | None, target: str | list[str], named: Mapping[str, str | None]
    ) -> tuple[list[str], list[str]]:
        """Return the columns of the inputs and of the targets.

        Args:
            there: names of all columns.
            features: columns of the inputs, as given.
            target: columns of the targets, as given.
            named: further columns, by the setting that names each.
        """
        return chosen_columns(there, features, target, **named)

    def _check_preprocessing(self, standardize: object, categories: object) -> None:
        """Refuse ``preprocessing`` of a wrong type, or beside settings of the same purpose."""
        settings = self._settings
        if settings is None:
            return
        if not isinstance(settings, Preprocessing):
            raise MisconfigurationException(
                f"data.preprocessing={settings!r} must be auto or settings, such as Preprocessing(by='client'); a "
                "scikit-learn transformer belongs into Preprocessing(transformer=...)"
            )
        for name, value, instead in (
            ("standardize", standardize, "scale"),
            ("categories", categories, "vocabulary"),
        ):
            if value:
                raise MisconfigurationException(
                    f"data.{name}={value!r} has no effect beside data.preprocessing; set data.preprocessing.{instead}"
                )
        if settings.by == "client" and self.central_test is not None:
            raise MisconfigurationException(
                f"data.preprocessing.by=client: rows of data.central_test={self.central_test} belong to no client, so "
                "no training rows fit them; take table, or leave data.central_test out"
            )

    def _asked_target_rows(self) -> TargetRows:
        """Return whose training rows standardise targets by the settings, or given numbers."""
        asked, has_scale = self.standardize_target, vars(type(self.task)).get("has_scale", False)
        if not isinstance(asked, Mapping) and asked is not None:
            check_choices("data", standardize_target=(asked, ("auto", "table", "client")))
        if asked == "auto":
            return self._settings.by if self._settings is not None and has_scale else None
        if asked is not None and not has_scale:
            raise MisconfigurationException(
                f"data.standardize_target={asked!r}: targets of task {self.task} have no scale to learn, as those of "
                "Regression and Quantile have; leave it out"
            )
        if asked == "client" and self.central_test is not None:
            raise MisconfigurationException(
                f"data.standardize_target=client: rows of data.central_test={self.central_test} belong to no client, "
                "so no training rows standardise their targets; take table, or leave data.central_test out"
            )
        return asked

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input; under ``preprocessing``, fitted by a `setup` on first access unless settings tell."""
        if self._shape is None:
            settings = cast(Preprocessing, self._settings)
            is_known = set(self._features) <= {*settings.vocabulary, *settings.dates}
            # a server's table may be a line of names alone, whose further columns must be numbers at every site
            if settings.transformer is None and (is_known or not has_rows(self._path, self._csv)):
                self._shape = (len(input_names(self._outline({}))),)
            else:
                self.setup()
        return cast(tuple[int, ...], self._shape)

    @input_shape.setter
    def input_shape(self, shape: tuple[int, ...]) -> None:
        self._shape = shape

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
        if self._pool is not None:
            # once more, for the server's public samples, which are fitted by themselves
            self.adopted = {}
        # of an earlier fit, which must not decide over columns once more
        self.preprocessing, self._table_words = {}, {}
        # `preprocess` fits a given transformer, which is in no checkpoint
        # late rows are measured and predicted by the federation's scale, whatever their own settings
        taken = bool(self.adopted)
        self._target_rows = self.adopted.get("standardize_target") if taken else self._asked_target_rows()
        if self.adopted and "transformer" not in self.adopted:
            self._adopt_columns()
        else:
            self.standardize, self._features, self._vocabularies = self._asked
        others = [column for column in self._others.values() if column is not None]
        wanted = list(dict.fromkeys([*self._features, *self._targets, *others]))
        # names of clients and groups are read as texts, since client 01 isn't client 1
        is_csv = isinstance(self._path, Path) and self._path.suffix != ".parquet"
        by_role = {
            role: column for role in ("client", "group") if is_csv and (column := self._others[role]) is not None
        }
        # of a folder's column there is nothing to read
        apart = set(by_role.values()) - {OWNER} - {*self._features, *self._targets, self._others["time"]}
        # and a column that had texts in training has them here too, so that 01 doesn't become 1
        kept = self._text_columns if self.adopted else ()
        there = [name for name in wanted if name in self._there]
        table = read_table(self._path, there, self._csv, [*apart, *kept], self.fill_missing_columns)
        if lacking := [name for name in wanted if name not in self._there]:
            rank_zero_warn(
                f"data.fill_missing_columns: {self._where} has no column {listed(lacking)}, which counts as a gap in "
                "all its rows."
            )
            table = table.assign(**dict.fromkeys(lacking, math.nan))
        if self.drop_missing_target:
            table = table[table[self._targets].notna().all(axis=1)]
            if table.empty:
                raise MisconfigurationException(f"data.drop_missing_target: no row of {self._where} has a target")
        if self._settings is None:
            x = self._matrix([self._numbers(table[column], is_target=False) for column in self._features])
        else:
            # positions of rows: raw columns become inputs after the division, in `preprocess`
            x = torch.arange(len(table))
            frame = self._settings.transformer is not None
            self._raw = table[self._features] if frame else self._raw_columns(table, self._where)
            self._gaps = {column: int(table[column].isna().sum()) for column in self._features}
        y = torch.stack([self._numbers(table[column], is_target=True) for column in self._targets], dim=1)
        if isinstance(self.task, Regression):
            # whole dollars and counts are quantities too, and no numbers of classes
            y = y.double()
        columns = {name: None if column is None else table[column].to_numpy() for name, column in self._others.items()}
        for role, column in by_role.items():
            # a column that is an input too was read as inputs are
            texts = table if column in apart else read_table(self._path, [column], self._csv, [column]).loc[table.index]
            columns[role] = codes_kept(texts[column])
        if (time := self._others["time"]) is not None and getattr(table[time].dtype, "ordered", False):
            # an ordered category sorts by its own order ("first", "second") and not by the alphabet; pandas codes gaps
            # as -1
            codes = table[time].cat.codes.to_numpy()
            columns["time"] = np.where(codes < 0, np.nan, codes)
        words = {**self._vocabularies, **self._table_words}
        raw = self._raw if isinstance(self._raw, dict) else {}
        is_coded = [column in words or isinstance(raw.get(column), tuple) for column in self._features]
        # in a file of raw rows, these columns are read as texts, so that "01" doesn't become 1
        self._text_columns = [
            column for column, has in zip(self._features, is_coded, strict=True) if has and has_texts(table[column])
        ]
        self.preprocessing = {
            "features": list(self._features),
            "categories": {column: words[column] for column in self._features if column in words},
            "targets": list(self._targets),
            "classes": {column: words[column] for column in self._targets if column in words},
            "standardize": self.standardize,
        }
        self._labels = self._labels_of(table)
        return Loaded(x, targets_of(y if y.shape[1] > 1 else y[:, 0]), **columns)

    def row_contents(self, loaded: Loaded) -> Tree:
        """Return the raw columns and the targets under ``preprocessing``, else the loaded inputs and targets.

        Args:
            loaded: the pool, as loaded.
        """
        if self._settings is None:
            return super().row_contents(loaded)
        raw = self._raw if isinstance(self._raw, dict) else columns_of(self._raw)
        columns = []
        for values in raw.values():
            if isinstance(values, tuple):
                # by the texts, as codes depend on the texts of other rows; the last one is of gaps
                codes, words = values
                columns.append(keys_of_texts([*words, ""])[torch.from_numpy(codes)])
            else:
                columns.append(torch.from_numpy(values))
        return columns, loaded.y

    def _adopt_columns(self) -> None:
        """Take features and vocabularies of a checkpoint, unless made by another kind of preprocessing."""
        settings, taken = self._settings, self.adopted
        here = None if settings is None else settings.by
        if settings is not None and settings.transformer is not None:
            raise MisconfigurationException(
                "data.preprocessing.transformer is in no checkpoint, so its fitted values can't be taken; fit anew on "
                "the first run's table"
            )
        if here != taken.get("by"):
            raise MisconfigurationException(
                f"data.fitted: the checkpoint has fitted values of data.preprocessing.by={taken.get('by') or 'null'}, "
                f"and here it is {here or 'null'}; give the settings of the first run"
            )
        self._check_columns(taken["features"])
        if self._are_named and (left := [name for name in taken["features"] if name not in self._asked[1]]):
            raise MisconfigurationException(
                f"data.features lacks {listed(left)} among the inputs of the federation, which are "
                f"{listed(taken['features'])}; name the federation's in data.features, or none"
            )
        if extra := [name for name in self._asked[1] if name not in taken["features"]]:
            rank_zero_warn(f"data: {self._where} has columns that are no inputs of the federation: {listed(extra)}.")
        self._features, self.preprocessing = list(taken["features"]), dict(taken)
        if self._settings is None:
            self._shape = (len(self._features),)
        self.standardize = taken["standardize"]
        own = {} if "by" in taken else taken["categories"]
        self._vocabularies = {**self._vocabularies, **taken["classes"], **own}

    def _check_columns(self, features: Sequence[str]) -> None:
        """Check that the table has a federation's inputs, unless ``fill_missing_columns`` makes gaps of missing ones.

        Args:
            features: names of the federation's inputs.

        Raises:
            MisconfigurationException: if one is missing.
        """
        lacking = [column for column in features if column not in self._there]
        if lacking and not self.fill_missing_columns:
            roles = {*features, *self._targets, *self._others.values()}
            # a column by another name is the likeliest reason
            others = [column for column in self._there if column not in roles]
            beside = f", which has {listed(others)} beside the federation's columns" if others else ""
            raise MisconfigurationException(
                f"data.fitted: there is no column {lacking[0]!r} in {self._where}{beside}, and it is an input of the "
                "federation; add the column, or set data.fill_missing_columns=true, with data.preprocessing"
            )

    def _matrix(self, columns: Sequence[Tensor]) -> Tensor:
        """Return columns side by side, [rows, columns]."""
        # large numbers, such as times in seconds, lose their differences in single precision: subtract the mean first
        wide = torch.float32 if self.standardize is None else torch.float64
        x = torch.empty(len(columns[0]), len(columns), dtype=wide)
        for index, column in enumerate(columns):
            x[:, index] = column
        return x

    def _labels_of(self, table: Any) -> list[str]:
        """Return the class labels as written in the table, by class number; an empty list without classes."""
        if not self.task.has_classes:
            return []
        (target,) = self._targets
        is_bool = table[target].dtype.kind == "b"
        words = self.preprocessing["classes"].get(target, ["False", "True"] if is_bool else [])
        return [*words, *map(str, range(len(words), self.task.outputs))]

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
        instead = "data.drop_missing_target=true" if is_target else "data.preprocessing=auto"
        check_no_gaps(values, owner, instead)
        setting = "data.classes" if is_target else f"data.categories.{column}"
        # a given vocabulary also applies to numbers, such as postal codes, which are no quantities
        if column in self._vocabularies:
            return codes_of(values, self._vocabularies[column], owner, setting)
        if isinstance(values.dtype, package("pandas", "tables", "TableData").CategoricalDtype):
            words, codes = [as_text(value) for value in values.cat.categories], values.cat.codes.to_numpy()
        elif (numbers := plain_numbers(values, owner)) is not None:
            check_finite_column(numbers, owner, values.index.to_numpy())
            return numbers
        else:
            words, codes = self._texts(values, owner, setting, is_target)
        # a vocabulary from this table alone: another site's table may have another, see `needs_all_clients`
        self._table_words = {**self._table_words, column: words}
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
                check_finite_column(numbers[torch.from_numpy(codes)], owner, values.index.to_numpy())
            place = int(wrong[codes].argmax())
            row, text = values.index[place], words[codes[place]]
            # a decimal comma is a likely reason, so it gets its own advice
            comma = NUMBER.fullmatch(text) is not None and "," in text and self._csv["decimal"] == "."
            raise MisconfigurationException(
                f"{owner} is mostly of numbers, and has the text {shortened(text)} in row {row} (counted from 0); "
                + ("set data.decimal=',' if that is a decimal comma, or " if comma else "make a number of it, or ")
                + f"name all texts of the column in {setting}"
            )
        # codes of ids and dates would let a net learn the rows by heart, with good figures and no use
        is_id = 2 * len(words) > len(values) and not self._are_named
        if not is_target and (is_id or (is_date and not (self._are_named and self._settings is None))):
            kind = "dates" if is_date else "ids: nearly each row has a text of its own"
            advice = (
                "list the inputs in data.features, without this column, or with it to turn its texts into codes in "
                "alphabetical order"
                if self._settings is None
                else f"name it in data.preprocessing.drop or data.preprocessing.{'dates' if is_date else 'categories'}"
            )
            raise MisconfigurationException(f"{owner} holds {kind}, such as {shortened(words[codes[0]])}; {advice}")
        return words, codes

    def _raw_columns(self, table: Any, where: str) -> dict[str, Any]:
        """Return the feature columns of raw rows, as `preprocessed` takes them.

        Before the fit, a column's own values tell numbers from categories; afterwards the fit has told them.

        Args:
            table: a pandas data frame with the feature columns.
            where: name of the rows for messages.
        """
        settings = cast(Preprocessing, self._settings)
        raw: dict[str, Any] = {}
        # raw rows alone may look otherwise: a column of texts may have none, or only numbers
        is_fitted = "inputs" in self.preprocessing
        dates = self.preprocessing["dates"] if is_fitted else settings.dates
        for name in self._features:
            values, owner = without_empty(table[name]), f"column {name!r} of {where}"
            if name in dates:
                since = self.preprocessing["since"] if is_fitted else settings.since
                numbers = parts_of_dates(values, dates[name], since, owner)
                raw |= {f"{name}.{part}": each for part, each in numbers.items()}
            elif is_fitted and name not in self.preprocessing["categories"]:
                raw[name] = numbers_with_gaps(values, owner, self._csv["decimal"])
            elif is_fitted or self._is_category(values, owner):
                raw[name] = coded(values, owner)
            else:
                raw[name] = numbers_with_gaps(values, owner)
        return raw

    def _is_category(self, values: Any, owner: str) -> bool:
        """Return whether a column of the training table holds categories.

        Args:
            values: a pandas series.
            owner: name of the column for messages.

        Raises:
            MisconfigurationException: if the column's texts are ids, dates, or stand among numbers.
        """
        settings, name = cast(Preprocessing, self._settings), str(values.name)
        if name in settings.vocabulary or name in settings.categories:
            return True
        if isinstance(values.dtype, package("pandas", "tables", "TableData").CategoricalDtype):
            return True
        there = values[values.notna()]
        if values.dtype.kind in "mM":
            raise MisconfigurationException(
                f"{owner} holds dates; name it in data.preprocessing.drop, or its parts in data.preprocessing.dates"
            )
        if there.empty or plain_numbers(there, owner) is not None:
            return False
        self._texts(there, owner, f"data.preprocessing.vocabulary.{name}", is_target=False)
        return True

    def _outline(self, words: Mapping[str, list[str]]) -> dict[str, Any]:
        """Return the layout of inputs, decided by settings and vocabularies.

        Args:
            words: vocabularies of columns without a given one.
        """
        settings = cast(Preprocessing, self._settings)
        words = {**{name: list(map(as_text, given)) for name, given in settings.vocabulary.items()}, **words}
        rules = {name: settings.of(name, is_category=name in words) for name in self._features}
        categories = {}
        for name in self._features:
            if name in words:
                fill = rules[name].fill
                # a gap that has a text of its own becomes a category
                own = [] if fill in (None, "mode") or as_text(fill) in words[name] else [as_text(fill)]
                categories[name] = [*words[name], *own]
        outline: dict[str, Any] = {
            "features": list(self._features),
            "by": settings.by,
            "categories": categories,
            "codes": [name for name in categories if rules[name].encode == "codes"],
            "dates": {name: list(settings.dates[name]) for name in self._features if name in settings.dates},
            "since": settings.since,
            "indicators": [name for name in self._features if rules[name].indicator],
        }
        return outline | {"inputs": input_names(outline)}

    def preprocess(self, samples: Samples, division: Division) -> Samples:
        """Fit on training rows and make the inputs, or warn of very different scales.

        Args:
            samples: the pool, as loaded.
            division: the pool positions of each client's rows.
        """
        if "transformer" in self.adopted and set(division.names) != set(self.adopted_names):
            raise MisconfigurationException(
                "data.preprocessing.transformer is in no checkpoint, and can't be fitted anew without the rows of all "
                "clients of the federation; give a table with all of them, or settings of columns in its place"
            )
        self._fitted_clients = list(division.names) or list(map(str, range(len(division.clients))))
        if self.adopted:
            places = {name: place for place, name in enumerate(self.adopted_names)}
            self._taken_places = [places.get(name) for name in self._fitted_clients]
        samples = Samples(samples.x, self._scaled_targets(samples.y, division))
        if self._settings is not None:
            x = self._prepared(samples.x.numpy(), division)
            self._raw = None
            if self._pool is not None and self._fitted_words:
                raise MisconfigurationException(
                    f"data.public: column {self._fitted_words[0]!r} holds texts, and the texts of public rows would "
                    "give other inputs than those of clients; list all texts in data.public.preprocessing.vocabulary"
                )
            # a fitted vocabulary has told the number of inputs
            self.input_shape = tuple(x.shape[1:])
            return Samples(x, samples.y)
        if self.standardize is None:
            warn_of_scales(moments_of(samples.x, trained_on(division))[1], self._features)
            return samples
        if isinstance(self.standardize, Mapping):
            # a column without given moments stays unchanged: mean 0, deviation 1
            known = {column: self.standardize.get(column, (0.0, 1.0)) for column in self._features}
            self.preprocessing |= {
                "mean": {column: float(values[0]) for column, values in known.items()},
                "deviation": {column: float(values[1]) for column, values in known.items()},
            }
            return Samples(self._scaled(samples.x, None), samples.y)
        fitted = known_moments(self.adopted, self.adopted_names, self._fitted_clients, self.standardize)
        x, statistics = standardized(samples.x, division, self.standardize, fitted)
        for name, of_groups in zip(("mean", "deviation"), zip(*statistics, strict=True), strict=True):
            columns = np.stack(of_groups, axis=1).tolist()
            self.preprocessing[name] = {
                column: values if self.standardize == "client" else values[0]
                for column, values in zip(self._features, columns, strict=True)
            }
        self._keep_ranges(samples.x, division)
        return Samples(x, samples.y)

    def _scaled_targets(self, y: Tensor, division: Division) -> Tensor:
        """Return targets standardised by training rows, by given numbers or by a federation's values; keep the scale.

        Args:
            y: the targets, [rows] or [rows, targets].
            division: the pool positions of each client's rows.

        Raises:
            MisconfigurationException: if a target is constant in the training rows that would standardise it.
        """
        rows, columns = self._target_rows, y.view(len(y), -1)
        if rows is None:
            if type(self.task) is Regression:
                warn_of_targets(columns[trained_on(division)], self._targets, BY_SETTING)
            return y
        by: Literal["table", "client"] = "client" if rows == "client" else "table"
        known = {name: self.adopted[f"target_{name}"] for name in MOMENTS if f"target_{name}" in self.adopted}
        # a late table may have another name for its target
        if isinstance(rows, Mapping) and not known:
            known = {name: {each: rows[each][end] for each in self._targets} for end, name in enumerate(MOMENTS)}
        fitted = known_moments(known, self.adopted_names, self._fitted_clients, by)
        scaled, statistics = standardized(columns, division, by, fitted)
        for place, (mean, deviation) in enumerate(statistics):
            for name, value, width in zip(self._targets, mean, deviation, strict=True):
                if not width > 0:
                    whose = "" if by == "table" else f" of client {self._fitted_clients[place]}"
                    raise MisconfigurationException(
                        f"data.standardize_target={rows}: target {name!r} is {value:.6g} in all training rows{whose}, "
                        "so it has no deviation to learn; "
                        + ("name another target" if by == "table" else "take table, or give mean and deviation")
                    )
        self.preprocessing["standardize_target"] = rows if isinstance(rows, str) else dict(rows)
        for name, of_groups in zip(MOMENTS, zip(*statistics, strict=True), strict=True):
            values = np.stack(of_groups, axis=1).tolist()
            self.preprocessing[f"target_{name}"] = {
                target: own if by == "client" else own[0] for target, own in zip(self._targets, values, strict=True)
            }
        return scaled.view(y.shape)

    def target_scale(self, client: int | str | None) -> TargetScale | None:
        """Return mean and deviation of a client's standardised targets, as `FederatedDataModule.target_scale`."""
        place = None
        if client is not None and self.preprocessing.get("standardize_target") == "client":
            place = self._fitted_place(client)
        return scale_at(self.preprocessing, place)

    def _keep_ranges(self, x: Tensor, division: Division) -> None:
        """Keep the range of each column's training rows beside mean and deviation, to warn of other rows by it.

        Args:
            x: the columns, [rows, columns].
            division: the pool positions of each client's rows.
        """
        is_shared = self.standardize == "table"
        groups = [trained_on(division)] if is_shared else [held["train"] for held in division.clients]
        ranges = [[range_of(column) for column in x[rows].double().numpy().T] for rows in groups]
        for end, name in enumerate(RANGE):
            taken, kept = self.adopted.get(name), {}
            for place, column in enumerate(self._features):
                own = [each[place][end] for each in ranges]
                if taken is not None:
                    own = [taken[column]] if is_shared else self._inherited(own, taken[column])
                kept[column] = own[0] if is_shared else own
            self.preprocessing[name] = kept

    def _warn_of_far(self, raw: Mapping[str, Any], place: int, owner: str) -> None:
        """Warn of rows far from the training rows, once for each column of numbers whose range is known.

        Args:
            raw: the rows' columns by name.
            place: position of the client among those fitted; without effect where all clients share the values.
            owner: name of the rows for the message.
        """
        fitted = self.preprocessing
        by_column = fitted.get("numbers") or {
            column: {name: fitted[name][column] for name in RANGE if name in fitted}
            for column in self._features
            if column not in fitted["categories"]
        }
        ends = {column: [each[name] for name in RANGE if name in each] for column, each in by_column.items()}
        # a list has a value for each client
        ranges = {
            column: [end[place] if isinstance(end, list) else end for end in both]
            for column, both in ends.items()
            if len(both) == len(RANGE) and column not in self._far
        }
        self._far = self._far | set(warn_of_ranges(raw, ranges, owner))

    def _inherited(self, values: list[Any], taken: list[Any]) -> list[Any]:
        """Return fitted values of clients, for the clients of a checkpoint the checkpoint's values.

        Args:
            values: a value fitted anew for each client.
            taken: the checkpoint's values, in the order of its clients.
        """
        pairs = zip(values, self._taken_places, strict=True)
        return [value if place is None else taken[place] for value, place in pairs]

    def _prepared(self, rows: NDArray[np.int64], division: Division) -> Tensor:
        """Fit ``preprocessing`` on training rows, and return the inputs of all rows, in single precision.

        Args:
            rows: positions of the pool's rows in the raw columns.
            division: the pool positions of each client's rows.
        """
        settings = cast(Preprocessing, self._settings)
        if settings.by == "table":
            groups = [(trained_on(division), torch.arange(len(rows)))]
        else:
            groups = [(held["train"], torch.cat(list(held.values()))) for held in division.clients]
        fitted_rows = [rows[train.numpy()] for train, _ in groups]
        if settings.transformer is not None:
            self._fit_transformers(fitted_rows)
        else:
            self._fit(fitted_rows, rows[trained_on(division).numpy()])
        x: Tensor | None = None
        for place, (_, held) in enumerate(groups):
            # in chunks, so that no second table in double precision lies in memory
            for part in torch.split(held, CHUNK):
                inputs = torch.from_numpy(self._made(take_rows(self._raw, rows[part.numpy()]), place))
                if x is None:
                    x = torch.zeros(len(rows), inputs.shape[1])
                if inputs.shape[1] != x.shape[1]:
                    raise MisconfigurationException(
                        f"data.preprocessing.transformer makes {inputs.shape[1]} inputs for client {place} and "
                        f"{x.shape[1]} for client 0; take by=table, or give the transformer all categories"
                    )
                x[part] = inputs
        return cast(Tensor, x)

    def _made(self, raw: Any, place: int) -> NDArray[np.float32]:
        """Return the inputs of raw rows.

        Args:
            raw: the rows' columns, or a data frame for a given transformer.
            place: position of the client among those fitted; without effect under ``by=table``.
        """
        # under by=table, one fit serves all clients, unknown ones too
        is_shared = self.preprocessing["by"] == "table"
        if "transformer" not in self.preprocessing:
            return preprocessed(raw, self.preprocessing, None if is_shared else place)
        made = self._transformers[0 if is_shared else place].transform(raw)
        # transformers return arrays, sparse matrices or data frames
        x = np.asarray(made.toarray() if hasattr(made, "toarray") else made, dtype=np.float32)
        if x.ndim != 2 or not np.isfinite(x).all():
            raise MisconfigurationException(
                f"data.preprocessing.transformer made inputs of shape {list(x.shape)}, or with NaN or infinity; let it "
                "make finite numbers, [rows, inputs], such as by a SimpleImputer for gaps"
            )
        return x

    def _fit_transformers(self, groups: Sequence[NDArray[np.int64]]) -> None:
        """Fit a copy of the given scikit-learn transformer on each group of training rows."""
        from sklearn.base import clone

        settings = cast(Preprocessing, self._settings)
        # clones: the user's own object stays unfitted, and each client has one
        self._transformers = [clone(settings.transformer).fit(self._raw.iloc[rows]) for rows in groups]
        width = self._transformers[0].transform(self._raw.iloc[groups[0][:1]]).shape[1]
        self.preprocessing |= {"by": settings.by, "transformer": str(settings.transformer), "width": int(width)}

    def _fit(self, groups: Sequence[NDArray[np.int64]], members: NDArray[np.int64]) -> None:
        """Fit gaps, vocabularies and scales of columns on training rows.

        Args:
            groups: positions of the training rows of all clients together, or of each client.
            members: positions of the training rows of all the federation's clients.

        Raises:
            MisconfigurationException: if a column has no value in all training rows.
        """
        settings, raw = cast(Preprocessing, self._settings), self._raw
        if self.adopted and settings.by == "table":
            # nothing is fitted anew: new clients share the federation's values
            self.preprocessing |= {name: self.adopted[name] for name in (*OUTLINE, "numbers", "category_fill")}
            return
        words = {}
        for name in self._features:
            if not isinstance(raw.get(name), tuple):
                continue
            codes, there = raw[name]
            if name in settings.vocabulary:
                self._warn_of_unknown(name, codes[members], there)
                continue
            if self.adopted:
                words[name] = self.adopted["categories"][name]
            elif not (found := fitted_words(codes[members], there, settings.of(name, is_category=True))):
                raise no_value(name, self._where)
            else:
                words[name] = found
        fitted = self._outline(words)
        numbers: dict[str, Any] = {}
        fills: dict[str, Any] = {}
        empty: dict[int, list[str]] = {}
        for name, values in raw.items():
            if isinstance(values, tuple):
                fill = settings.of(name, is_category=True).fill
                word = None if fill is None else as_text(fill)
                own = [filled_word(values[0][rows], values[1], fitted["categories"][name], word) for rows in groups]
                fills[name] = own if settings.by == "client" else own[0]
                continue
            rule = self._rule(name)
            of_groups: list[dict[str, float]] = []
            for place, rows in enumerate(groups):
                if (each := fitted_numbers(values[rows], rule)) is None:
                    if settings.by == "table":
                        raise no_value(name, self._where)
                    # refusing would end the run of all clients for one of them, and NaN would spoil its model
                    empty.setdefault(place, []).append(name)
                    bounds = {} if rule.clip is None else UNBOUNDED
                    each = {**bounds, "fill": 0.0, "center": 0.0, "width": 0.0, **dict.fromkeys(RANGE, 0.0)}
                of_groups.append(each)
            numbers[name] = (
                {key: [each[key] for each in of_groups] for key in of_groups[0]}
                if settings.by == "client"
                else of_groups[0]
            )
        if self.adopted:
            for name, each in self.adopted["numbers"].items():
                numbers[name] = {key: self._inherited(numbers[name][key], each[key]) for key in each}
            fills = {name: self._inherited(fills[name], each) for name, each in self.adopted["category_fill"].items()}
        self.preprocessing |= fitted | {"numbers": numbers, "category_fill": fills}
        if empty:
            whose = [
                f"{self._fitted_clients[place] if self._fitted_clients else place} ({listed(names)})"
                for place, names in empty.items()
            ]
            rank_zero_warn(
                f"data.preprocessing: {len(empty)} clients have columns without a value in their training rows, and "
                f"these are 0 in all their rows: {listed(whose)}"
            )

    def _warn_of_unknown(self, name: str, codes: NDArray[np.int64], words: Sequence[str]) -> None:
        """Warn of training rows with texts outside a given vocabulary.

        Args:
            name: name of the column.
            codes: position of each row's text in ``words``; -1 for gaps.
            words: the texts of the table.
        """
        given = {as_text(word) for word in cast(Preprocessing, self._settings).vocabulary[name]}
        counts = np.bincount(codes[codes >= 0], minlength=len(words)).tolist()
        unknown = {word: count for word, count in zip(words, counts, strict=True) if count and word not in given}
        if unknown:
            rank_zero_warn(
                f"data.preprocessing.vocabulary.{name}: {sum(unknown.values())} of {len(codes)} training rows hold "
                f"other texts ({listed(list(unknown))}), and count as unknown; correct them, or add these texts."
            )

    def _rule(self, name: str) -> Column:
        """Return the settings of a column of numbers, or of a number made of a date."""
        settings = cast(Preprocessing, self._settings)
        feature = next((each for each in settings.dates if name.startswith(f"{each}.")), "")
        return settings.of(name, is_category=False, feature=feature)

    def _scaled(self, x: Tensor, client: int | None) -> Tensor:
        """Return feature columns standardized by the fitted or given values, in single precision.

        Args:
            x: the columns, [rows, columns].
            client: position of the client among those fitted; None where all clients share the values.
        """
        if self.standardize is None:
            return x
        mean, deviation = (
            torch.tensor(
                [each if client is None else each[client] for each in self.preprocessing[name].values()],
                dtype=torch.float64,
            )
            for name in ("mean", "deviation")
        )
        # division by infinity gives the 0 of constant columns
        return ((x - mean) / deviation.where(deviation > 0, math.inf)).float()

    @property
    def class_names(self) -> list[str]:
        """Labels of the classes as written in the table, by class number; known after `setup`."""
        return list(self._labels)

    def state_dict(self) -> dict[str, Any]:
        """Return the data module's entry in checkpoints, from which `inputs` can prepare raw rows without the table."""
        state = super().state_dict()
        if not self.preprocessing:
            return state
        return state | {
            "classes": list(self._labels),
            "table": {
                "clients": list(self._fitted_clients),
                "texts": list(self._text_columns),
                "csv": self._csv,
                "fill_missing_columns": self.fill_missing_columns,
            },
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the preprocessing of a checkpoint, unless the data module has been set up.

        A later `setup` fits nothing anew that the state has, and refuses other kinds of preprocessing.

        Args:
            state_dict: the data module's entry in a checkpoint.

        """
        # before the base class, which asks for the shape
        if self._pool is None and "table" in state_dict:
            taken, table = dict(state_dict["preprocessing"]), state_dict["table"]
            self.preprocessing, self.adopted = dict(taken), taken
            self._labels, self._fitted_clients = list(state_dict["classes"]), list(table["clients"])
            self.adopted_names = self._fitted_clients
            self._names_now = list(state_dict.get("clients", ()))
            self._text_columns, self._csv = list(table["texts"]), dict(table["csv"])
            # a late table may ask for itself what the federation didn't
            self.fill_missing_columns = self.fill_missing_columns or bool(table["fill_missing_columns"])
            self._features, self._targets = taken["features"], taken["targets"]
            self.standardize = taken["standardize"]
            self._shape = (taken.get("width") or len(taken.get("inputs", self._features)),)
        super().load_state_dict(state_dict)

    def inputs(self, rows: Any, client: int | str) -> Tensor:
        """Return the net's inputs for raw rows, prepared as a client's own rows are.

        The data module has been set up, or has loaded its entry of a checkpoint, for which the table itself isn't
        needed.

        Args:
            rows: a CSV or Parquet file, a pandas data frame, a dict with a list of values per column, or a list of
                dicts, one per row. The target and other further columns have no effect.
            client: name or id of the client, or ``new`` for one unknown to the federation.

        Raises:
            MisconfigurationException: if a feature column is missing, or has values that were refused in the table
                too, or nothing was fitted for the client.
        """
        return self.transform(self._prepared_rows(rows, client))  # type: ignore[no-any-return]

    def _prepared_rows(self, rows: Any, client: int | str) -> Tensor:
        """Return raw rows as the pool has them, before `transform`; see `inputs`."""
        fitted = self.preprocessing
        if not fitted:
            raise MisconfigurationException(
                "data: nothing is known yet of how raw rows become inputs; call setup(), or load_state_dict() with the "
                "data module's entry of a checkpoint"
            )
        if "transformer" in fitted and not self._transformers:
            raise MisconfigurationException(
                "data.preprocessing.transformer is fitted on the training table and in no checkpoint; call setup() "
                "with that table first, or take the settings of Preprocessing"
            )
        fills = self.fill_missing_columns and "by" in fitted
        table, owner = rows_table(rows, self._features, self._csv, self._text_columns, fills)
        place = self._fitted_place(client) if "client" in (fitted["standardize"], fitted.get("by")) else 0
        if "by" in fitted:
            raw = table if "transformer" in fitted else self._raw_columns(table, owner)
            if "transformer" not in fitted:
                self._warn_of_far(raw, place, owner)
            return torch.from_numpy(self._made(raw, place))
        columns = []
        for name in self._features:
            values, whose = table[name], f"column {name!r} of {owner}"
            check_no_gaps(values, whose)
            if name in fitted["categories"]:
                columns.append(codes_of(values, fitted["categories"][name], whose, "the training table's vocabulary"))
                continue
            if (numbers := plain_numbers(values, whose)) is None:
                raise MisconfigurationException(f"{whose} holds texts, where the training table has numbers")
            check_finite_column(numbers, whose)
            columns.append(numbers)
        plain = {name: each.double().numpy() for name, each in zip(self._features, columns, strict=True)}
        self._warn_of_far(plain, place, owner)
        shared = None if self.standardize != "client" else place
        return self._scaled(self._matrix(columns), shared)

    def _fitted_place(self, client: int | str) -> int:
        """Return a client's position in lists of values fitted on each client's own rows.

        Args:
            client: name or id of the client.

        Raises:
            MisconfigurationException: if nothing was fitted for this client.
        """
        fitted = list(self._fitted_clients)
        # ids are those of now, and of the fit where clients have no names
        names = (self.client_names if self._pool is not None else self._names_now) or fitted
        if isinstance(client, Integral) and 0 <= client < len(names):
            client = names[int(client)]
        if client not in fitted:
            raise MisconfigurationException(
                f"client {client!r}: inputs are made by values fitted on each client's own training rows, and none are "
                f"of this client; take one of {listed(fitted)}, or fit on the rows of all clients (by table)"
            )
        return fitted.index(client)

    @property
    def fitted_on(self) -> FittedOn:
        """Return the deciding rows of the fit; a vocabulary from the table counts as all clients' rows."""
        by = self.standardize if self._settings is None else self._settings.by if self._fits_values else None
        # a target's mean is a use of rows as an input's is
        if "table" in (by, self._target_rows) or self._table_words or self._fitted_words:
            return "all clients"
        return "each client" if "client" in (by, self._target_rows) else "nothing"

    @property
    def _fitted_words(self) -> list[str]:
        """Columns with a vocabulary from the table, under ``preprocessing``."""
        given = self._settings.vocabulary if self._settings else {}
        return (
            [name for name in self.preprocessing.get("categories", ()) if name not in given] if self._settings else []
        )

    @property
    def _fits_values(self) -> bool:
        """True if ``preprocessing`` fits fills, bounds, scales or a transformer."""
        settings, fitted = cast(Preprocessing, self._settings), self.preprocessing
        return (
            settings.transformer is not None
            or any(is_fitted(self._rule(name)) for name in fitted.get("numbers", ()))
            or any(settings.of(name, is_category=True).fill == "mode" for name in fitted.get("categories", ()))
        )

    @property
    def needs_all_clients(self) -> str:
        """Return why a site with only its own rows would compute other inputs, and the remedy; else an empty text."""
        by_table = self.standardize == "table" if self._settings is None else self._settings.by == "table"
        if by_table and (self._settings is None or self._fits_values):
            setting = "standardize" if self._settings is None else "preprocessing.by"
            return (
                f"data.{setting}=table takes the training rows of all clients, which are not in one place here; take "
                f"client, or {'null' if self._settings is None else 'give fill and scale as numbers'}"
            )
        if self._target_rows == "table":
            return (
                "data.standardize_target=table takes the targets of all clients, which are not in one place here; take "
                "client, or give each target's mean and deviation, such as {price: [300000, 90000]}"
            )
        for column in (*self._table_words, *self._fitted_words):
            setting = "data.categories" if self._settings is None else "data.preprocessing.vocabulary"
            setting = "data.classes" if column in self._targets else f"{setting}.{column}"
            return (
                f"column {column!r} holds texts, and the texts of each site's own table would give other codes; list "
                f"all texts in {setting}, the same at every site"
            )
        return ""

    @property
    def agreed(self) -> dict[str, Any]:
        """Return features, vocabularies and scales, as `FederatedDataModule.agreed`."""
        fitted, settings = self.preprocessing, self._settings
        own = "client" in (fitted["standardize"], fitted.get("by"))
        fits = () if own else ("mean", "deviation", "numbers", "category_fill")
        form: dict[str, Any] = {name: fitted[name] for name in ("features", "classes", "categories") if name in fitted}
        scales = {name: fitted[name] for name in ("standardize", *fits) if name in fitted}
        if (rows := fitted.get("standardize_target")) is not None:
            shared = self.target_scale(None)
            form["standardize_target"] = [rows, *([] if shared is None else map(list, shared))]
        if settings is None:
            return form | {"standardize": scales}
        given = {name: value for name, value in vars(settings).items() if name != "transformer"}
        return form | {"preprocessing": [scales, given]}

    @property
    def head_lines(self) -> list[tuple[str, str]]:
        """Return lines about inputs, classes and the rows of the fit."""
        fitted = self.preprocessing
        if not fitted:
            return []
        whose = {"table": "by training rows of all clients", "client": "by each client's own training rows"}
        texts = [f"{column} ({len(words)} texts)" for column, words in fitted["categories"].items()]
        if self._settings is None:
            by = "by given numbers" if isinstance(self.standardize, Mapping) else whose.get(str(self.standardize))
            features = [
                f"{len(self._features)}",
                f"codes of {listed(texts)}" if texts else "",
                f"standardized {by}" if by else "",
            ]
        else:
            gaps = [f"{column} ({count} rows)" for column, count in self._gaps.items() if count]
            features = [
                f"{len(self._features)} columns, {self._shape[0]} inputs" if self._shape else "",
                f"categories of {listed(texts)}" if texts else "",
                f"gaps in {listed(gaps)}" if gaps else "",
                f"fitted {whose[self._settings.by]}",
            ]
        lines = [("features", "; ".join(filter(None, features)))]
        if self.task.has_classes and fitted["classes"]:
            (words,) = fitted["classes"].values()
            lines.append(("classes", listed([f"{number} {word}" for number, word in enumerate(words)])))
        if (rows := fitted.get("standardize_target")) is not None:
            shared = self.target_scale(None)
            scales = [] if shared is None else zip(self._targets, *shared, strict=True)
            each = [f"{name}: mean {mean:.6g}, deviation {deviation:.6g}" for name, mean, deviation in scales]
            by = whose[rows] if isinstance(rows, str) else "by given numbers"
            fitted_by = f"standardized {by}" + (f" ({'; '.join(each)})" if each else "")
            units = "val/ and test/ figures are in the target's unit, train/loss of standardized targets"
            lines.append(("targets", f"{fitted_by}; {units}"))
        return lines


OUTLINE = ("by", "categories", "codes", "dates", "since", "indicators", "inputs")
"""Entries of ``preprocessing`` that say how columns become inputs, beside the fitted numbers."""


def check_given(moments: Mapping[str, Sequence[float]], columns: Sequence[str], setting: str) -> None:
    """Check the given mean and deviation of columns.

    Args:
        moments: mean and deviation by the column's name.
        columns: names of the columns that may have some.
        setting: name of the setting, without ``data``.

    Raises:
        MisconfigurationException: if an entry isn't two finite numbers with a deviation above 0, or belongs to no
            such column.
    """
    for column, values in moments.items():
        if column not in columns:
            kind = "feature; features" if setting == "standardize" else "target; targets"
            raise MisconfigurationException(f"data.{setting}.{column} is no {kind} are {listed(columns)}")
        numbers = list(values) if isinstance(values, Sequence) and not isinstance(values, str) else []
        if len(numbers) != 2 or not all(map(math.isfinite, numbers)) or numbers[1] <= 0:
            raise MisconfigurationException(
                f"data.{setting}.{column}={values!r} must be the column's mean and its deviation, which is above 0, "
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


def check_named(settings: Preprocessing, features: Sequence[str]) -> None:
    """Check the columns named in settings of preprocessing: features, each of one kind.

    Args:
        settings: the settings.
        features: names of the feature columns, those to drop among them.

    Raises:
        MisconfigurationException: if a column is no feature, or is named twice in contrary settings, or a vocabulary
            is no list of different texts.
    """
    kinds = {name: getattr(settings, name) for name in ("drop", "categories", "vocabulary", "dates")}
    parts = [f"{name}.{part}" for name, each in settings.dates.items() for part in each]
    for setting, names in {**kinds, "columns": settings.columns}.items():
        for name in names:
            check_column(f"preprocessing.{setting}", name, [*features, *(parts if setting == "columns" else ())])
    for name, words in settings.vocabulary.items():
        vocabulary(f"data.preprocessing.vocabulary.{name}", words)
    for name in settings.dates:
        if other := [setting for setting in ("drop", "categories", "vocabulary") if name in kinds[setting]]:
            raise MisconfigurationException(
                f"data.preprocessing.dates has column {name!r}, and so has data.preprocessing.{other[0]}; name it once"
            )
    if set(features) <= set(settings.drop):
        raise MisconfigurationException("data.preprocessing.drop leaves no column for the inputs")


def fitted_of(path: Path, name: str) -> dict[str, Any]:
    """Return a data module's entry in a checkpoint.

    Args:
        path: the checkpoint.
        name: name of the data module's class.

    Raises:
        MisconfigurationException: if the file is no checkpoint of a run with such data.
    """
    owner = f"data.fitted={str(path)!r}"
    state = read_checkpoint(path, owner, needed=(), instead="give one, such as last.ckpt").get(name, {})
    if "table" not in state:
        raise MisconfigurationException(f"{owner} is no checkpoint of a run with a {name}; give one, such as last.ckpt")
    return cast(dict[str, Any], state)


def columns_of(table: Any) -> dict[str, Any]:
    """Return the columns of a data frame by name: numbers, or pairs of codes and texts.

    Args:
        table: a pandas data frame.
    """
    factorize = package("pandas", "tables", "TableData").factorize
    columns: dict[str, Any] = {}
    for name in table:
        values = table[name]
        if values.dtype.kind in "biuf":
            columns[name] = values.to_numpy(dtype=np.float64, na_value=np.nan)
        else:
            codes, texts = factorize(values.astype(str).to_numpy())
            columns[name] = codes, [str(text) for text in texts]
    return columns


def take_rows(raw: Any, rows: NDArray[np.int64]) -> Any:
    """Return some rows of raw columns, or of a data frame.

    Args:
        raw: the columns by name, numbers or pairs of codes and texts; or a pandas data frame.
        rows: positions of the rows.
    """
    if not isinstance(raw, dict):
        return raw.iloc[rows]
    return {
        name: (values[0][rows], values[1]) if isinstance(values, tuple) else values[rows]
        for name, values in raw.items()
    }


def no_value(column: str, where: str) -> MisconfigurationException:
    """Return the error for a column without values, or without frequent categories, in training rows.

    Args:
        column: name of the column.
        where: name of the table.
    """
    return MisconfigurationException(
        f"column {column!r} of {where} has no value in the training rows to fit data.preprocessing on; name it in "
        "data.preprocessing.drop"
    )
