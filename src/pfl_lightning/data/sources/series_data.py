"""Time series in tables: windows of each client's rows, to forecast from."""

from collections.abc import Mapping, Sequence
from datetime import date
from itertools import pairwise
from numbers import Integral
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast, get_args

import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from numpy.typing import NDArray
from torch import Tensor

from pfl_lightning.data.checks import check_integers
from pfl_lightning.data.columns import NUMBER, check_times, column_of, mostly
from pfl_lightning.data.datamodule import DataSettings
from pfl_lightning.data.division import Division
from pfl_lightning.data.identity import keys_of_tree
from pfl_lightning.data.preprocessing import Preprocessing
from pfl_lightning.data.samples import Loaded, Samples, Split
from pfl_lightning.data.sources.base import resident
from pfl_lightning.data.sources.columns import check_column, listed, package, rows_table
from pfl_lightning.data.sources.table_data import TableData
from pfl_lightning.data.splits import part_sizes
from pfl_lightning.data.trees import Tree
from pfl_lightning.settings import Unpack, check_choices
from pfl_lightning.tasks import Regression, Task

CLOSE = 1e-6
"""Relative difference below which two steps are equal: decimal fractions such as 0.1 have no exact sums."""
SPLITS = get_args(Split)


class Clock(NamedTuple):
    """The even step of a table's times.

    Args:
        unit: what a step counts: ``number``, ``microseconds``, or ``months`` of unequal lengths.
        step: the step in this unit.
    """

    unit: str
    step: float

    def __str__(self) -> str:
        if self.unit == "number":
            return f"{self.step:g}"
        if self.unit == "months":
            return f"{self.step:g} month{'s' * (self.step != 1)}"
        return str(package("pandas", "tables", "SeriesData").Timedelta(int(self.step), unit="us"))


class Windows:
    """Windows of consecutive rows, cut out on access: a pool with all of them would hold each row many times.

    Args:
        rows: the rows of all series, ``[rows, features]``.
        starts: position of each window's first row, ``[N]``.
        length: rows per window.
    """

    def __init__(self, rows: Tensor, starts: Tensor, length: int) -> None:
        self.rows, self.starts, self.length = rows, starts, length

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, positions: NDArray[np.int64]) -> Tensor:
        return windows_at(self.rows, self.starts[torch.as_tensor(positions)], self.length)


class SeriesData(TableData):
    """Time series of clients in one long table, one row per client and time; needs the extra ``tables``.

    An input is a window of a client's consecutive rows, ``[history, features]``, and its target the following values,
    ``[number of targets * horizon]``, all times of a target side by side. A net of any kind has this many outputs.

    Each client's rows are split by time: the newest ``test_fraction`` test, ``val_fraction`` of the earlier ones
    validate, the others train. A window belongs to the part that holds all its target rows. Training windows lie in
    training rows as a whole; histories of val and test windows may reach back into earlier parts, as all of it is known
    when the forecast is made. ``standardize`` and ``preprocessing`` are fitted on the rows before the first cut.

    A row is in many windows: under ``trainer.example_privacy``, an example is a window.

    Predictions for raw rows of a client begin after the last row: `inputs` takes the last ``history`` ones by time.

    Args:
        path: the file, ``.csv`` or ``.parquet``; or a folder of such files, one a client; from Python also a pandas
            data frame.
        windows: rows of the history and of the horizon, both at least 1, such as ``[168, 24]`` for hours.
        time: column of each row's time: numbers, dates as 2024-05-31, or dates with hours.
        client: column of each row's client; None under a folder.
        target: column of the forecast series, or columns of several; None takes all inputs. Targets are inputs too.
        features: columns of further inputs; None takes all other columns, unless ``target`` is None too.
        stride: rows from a window to the next one, at least 1.
        gaps: what happens where the time from a row to the next isn't the table's usual step: ``refuse`` names client
            and time; ``skip`` takes no window across; ``accept`` takes the rows as consecutive, such as business days.
        task: the prediction task, `Regression`, `Poisson` or `Quantile` of horizon * number of targets quantities; None
            is `Regression`.
        standardize: as for `TableData`.
        categories: as for `TableData`.
        decimal: as for `TableData`.
        separator: as for `TableData`.
        preprocessing: as for `TableData`.
        standardize_target: as for `TableData`.
        drop_missing_target: leave rows without a target out, which then are gaps.
        fitted: as for `TableData`.
        fill_missing_columns: as for `TableData`.
        **kwargs: settings of `FederatedDataModule`; ``root`` and ``download`` have no effect.

    Raises:
        MisconfigurationException: if a column is refused as in `TableData`, a client has a time twice, times have no
            order or an uneven step, a client has too few rows, or a setting would mix past and future.
    """

    # of the class, as a data module may be made of its entry in a checkpoint alone, without __init__
    windows: tuple[int, int]
    """Rows of the history and of the horizon."""
    gaps: Literal["refuse", "skip", "accept"]
    _time: str
    _clock: Clock | None = None
    _order: NDArray[np.int64]
    """Positions of the table's rows by client and time; all further rows are in this order."""
    _rows: Samples
    """The rows as loaded."""
    _series: Tensor
    """Number of each row's client."""
    _part: Tensor
    """Number of each row's split."""
    _starts: Tensor
    """First row of each sample's window."""
    _shown: NDArray[Any]
    """Each row's time as written in the table."""

    def __init__(
        self,
        path: Any,
        windows: tuple[int, int],
        time: str,
        client: str | None = None,
        target: str | list[str] | None = None,
        features: list[str] | None = None,
        stride: int = 1,
        gaps: Literal["refuse", "skip", "accept"] = "refuse",
        task: Task | None = None,
        standardize: Literal["table", "client"] | Mapping[str, Sequence[float]] | None = None,
        categories: dict[str, list[str | int]] | None = None,
        decimal: Literal[".", ","] = ".",
        separator: str = ",",
        preprocessing: Preprocessing | Literal["auto"] | None = None,
        standardize_target: Literal["auto", "table", "client"] | Mapping[str, Sequence[float]] | None = "auto",
        drop_missing_target: bool = False,
        fitted: str | Path | None = None,
        fill_missing_columns: bool = False,
        **kwargs: Unpack[DataSettings],
    ) -> None:
        check_choices("data", gaps=(gaps, ("refuse", "skip", "accept")))
        check_integers("data.", stride=stride)
        if not isinstance(windows, list | tuple) or len(windows) != 2 or any(type(n) is not int for n in windows):
            raise MisconfigurationException(
                f"data.windows={windows!r} must be the rows of the history and of the horizon, such as [24, 6]"
            )
        if min(*windows, stride) < 1:
            raise MisconfigurationException(
                f"data.windows={list(windows)} and data.stride={stride} count rows, and must be 1 or more each"
            )
        # before `TableData`, which may load a checkpoint's entry and then compares the windows
        self.windows, self.stride, self.gaps = (windows[0], windows[1]), stride, gaps
        self._time = time
        # without clients, rows of several series would be taken for one
        is_folder = isinstance(path, str | Path) and Path(path).is_dir()
        if client is None and not is_folder:
            raise MisconfigurationException(
                "data.client is missing: name the column of each row's client, or give a folder with a CLIENT.csv each"
            )
        super().__init__(
            path,
            # `_chosen` takes None for all inputs
            cast(Any, target),
            Regression() if task is None else task,
            features=features,
            client=client,
            time=time,
            standardize=standardize,
            categories=categories,
            decimal=decimal,
            separator=separator,
            preprocessing=preprocessing,
            standardize_target=standardize_target,
            drop_missing_target=drop_missing_target,
            fitted=fitted,
            fill_missing_columns=fill_missing_columns,
            **kwargs,
        )
        # only `TableData` has read the names of the columns, among which the targets may be left over
        count = windows[1] * len(self._targets)
        if task is None:
            self._task = Regression(count)
        elif not isinstance(task, Regression):
            raise MisconfigurationException(
                f"data.task={task} is no task of a forecast; take Regression, Poisson or Quantile, or leave it out"
            )
        elif task.quantities != count:
            raise MisconfigurationException(
                f"data.task={task} has {task.quantities} quantities, and data.windows={list(windows)} with "
                f"{len(self._targets)} targets make {count}; set data.task.quantities={count}, or leave the task out"
            )
        self._check_splits()

    def _check_splits(self) -> None:
        """Refuse settings by which windows of the past would be trained or tested on among those of the future."""
        wrong = {
            "client_split": self.client_split not in (None, "given"),
            "partitioner": not getattr(self.partitioner, "by_owner", False),
            "central_test": self.central_test is not None,
            "client_test": self.client_test != "own",
            "val_fold": self.val_fold is not None,
            "drift": self.drift is not None,
        }
        for name, is_wrong in wrong.items():
            if is_wrong:
                raise MisconfigurationException(
                    f"data.{name}={getattr(self, name)!r}: each client's series is split by time, the newest rows for "
                    f"tests, and {name} would mix rows of several times or clients; leave it out"
                )

    def _chosen(
        self, there: Sequence[str], features: list[str] | None, target: Any, named: Mapping[str, str | None]
    ) -> tuple[list[str], list[str]]:
        used = {column for column in named.values() if column is not None}
        free = [column for column in there if column not in used]
        if target is None:
            target, features = free if features is None else features, []
        targets = [target] if isinstance(target, str) else list(target)
        features = [column for column in free if column not in targets] if features is None else features
        others = {name: [column] for name, column in named.items() if column is not None}
        for setting, columns in {"target": targets, "features": features, **others}.items():
            for column in columns:
                check_column(setting, column, there)
        # the past of a target is an input: its future is in no history
        inputs = [*targets, *(column for column in features if column not in targets)]
        if not targets:
            raise MisconfigurationException(
                f"data.target must name a column of {self._where}, which has {listed(there)}"
            )
        if twice := used & set(inputs):
            raise MisconfigurationException(
                f"data.target and data.features name {min(twice)!r}, the column of clients or times; leave it out"
            )
        return inputs, targets

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input, [history, features]; see `TableData.input_shape`."""
        return (self.windows[0], *super().input_shape)

    @input_shape.setter
    def input_shape(self, shape: tuple[int, ...]) -> None:
        # the whole shape from a checkpoint, and a row's from `TableData`
        self._shape = tuple(shape[-1:])

    def load(self) -> Loaded:
        """Read the table, sort the rows of each client by time, and cut windows."""
        loaded = super().load()
        if self._table_words:
            column = min(self._table_words)
            raise MisconfigurationException(
                f"column {column!r} of {self._where} holds texts, and codes of all its texts would tell of rows after "
                f"the training rows; list the texts in data.categories.{column}, or set data.preprocessing=auto"
            )
        count, y = len(loaded), cast(Tensor, loaded.y)
        # a missing client or time is refused, as its row would have no place in a series
        owners = column_of("client", cast(Any, loaded.client), count)
        times = instants(column_of("time", cast(Any, loaded.time), count), f"column {self._time!r} of {self._where}")
        # rows may come in any order, and clients' rows mixed
        names, series = np.unique(owners, return_inverse=True)
        self._order = np.lexsort((times, series))
        times, series = times[self._order], series[self._order]
        self._shown = np.asarray(loaded.time)[self._order]
        # of raw rows, before values fitted on other rows make them differ
        keys = keys_of_tree(super().row_contents(loaded))[self._order]
        order = torch.from_numpy(self._order)
        self._rows = Samples(cast(Tensor, loaded.x)[order], y.view(count, -1)[order])
        self._series = torch.from_numpy(series.astype(np.int64))
        is_broken = self._checked_steps(times, series, names)
        starts, splits = self._cut(is_broken, names)
        self._starts = torch.from_numpy(starts)
        # sums over windows, as differences of sums from the first row on
        sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(keys, dtype=np.uint64)])
        ends = starts + sum(self.windows)
        firsts = np.searchsorted(series, series[starts])
        # with the place in the series, so that a load that stays equal for days isn't taken for rows held twice
        contents = np.stack([sums[ends] - sums[starts], (starts - firsts).astype(np.uint64)], axis=1)
        self._contents = torch.from_numpy(contents.view(np.int64))
        return Loaded(
            self._starts, self._targets_at(self._starts, self._rows.y), names[series[starts]].tolist(), splits.tolist()
        )

    def _targets_at(self, starts: Tensor, y: Tensor) -> Tensor:
        """Return the targets of windows, ``[N, targets * horizon]``.

        Args:
            starts: first rows of the windows.
            y: the targets of all rows.
        """
        history, horizon = self.windows
        # a target's times are neighbours, as a target's scale is for each of its neighbouring outputs
        return windows_at(y, starts + history, horizon).transpose(1, 2).flatten(1)

    def row_contents(self, loaded: Loaded) -> Tree:
        """Return a number for the rows of each window, the window's place in its series, and the targets.

        Args:
            loaded: the pool, as loaded.
        """
        return self._contents, loaded.y

    def _checked_steps(self, times: NDArray[Any], series: NDArray[Any], names: NDArray[Any]) -> NDArray[np.bool_]:
        """Return whether the step before each row isn't the table's usual one; the first row of a series has none.

        Args:
            times: the rows' times, ascending in each series.
            series: number of each row's client.
            names: the clients' names.

        Raises:
            MisconfigurationException: if a client has a time twice, or a gap that is refused.
        """
        is_same = np.concatenate([[False], series[1:] == series[:-1]])
        # the clock of a checkpoint's federation, or the one of this table
        clock = clock_of(times, is_same) if self._clock is None else self._clock
        steps = steps_of(times, clock.unit)
        # months count days away, so times are compared too
        twice = is_same & (steps == 0) & (np.concatenate([[False], times[1:] == times[:-1]]))
        if twice.any():
            row = int(twice.argmax())
            raise MisconfigurationException(
                f"client {str(names[series[row]])!r} of {self._where} has several rows of the time "
                f"{shown(self._shown[row])} (of {int(twice.sum())} such times); leave one row for each time"
            )
        is_broken: NDArray[np.bool_] = is_same & ~clock_fits(steps, clock)
        if is_broken.any() and self.gaps == "refuse":
            row = int(is_broken.argmax())
            raise MisconfigurationException(
                f"client {str(names[series[row]])!r} of {self._where} has the time {shown(self._shown[row])} after "
                f"{shown(self._shown[row - 1])}, the first of {int(is_broken.sum())} steps that aren't the usual "
                f"{clock}; add the missing rows, or set data.gaps=skip for windows between gaps, or accept"
            )
        self._clock = clock
        return is_broken if self.gaps == "skip" else np.zeros_like(is_broken)

    def _cut(self, is_broken: NDArray[np.bool_], names: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[Any]]:
        """Return the first row of each window, and its split; keep the split of each row.

        Args:
            is_broken: whether no window may reach over the step before a row.
            names: the clients' names.

        Raises:
            MisconfigurationException: if a client has no window in a split.
        """
        history, horizon = self.windows
        # a window is whole if as many breaks lie before its last row as before its first one
        breaks = np.cumsum(is_broken)
        part = np.zeros(len(is_broken), dtype=np.int64)
        series = self._series.numpy()
        firsts = np.searchsorted(series, np.arange(len(names) + 1))
        starts: list[NDArray[np.int64]] = []
        splits: list[NDArray[Any]] = []
        short: dict[str, list[str]] = {}
        for number, (first, end) in enumerate(pairwise(firsts.tolist())):
            # the sizes of other data's splits; a single row, for which they are not made, is too few in any case
            num_test, num_val = part_sizes(max(2, end - first), self.test_fraction, self.val_fraction)
            cuts = end - num_val - num_test, end - num_test
            part[cuts[0] : cuts[1]], part[cuts[1] : end] = 1, 2
            # by the first target row; the histories of val and test windows may begin before the cut
            bounds = {
                "train": (first + history, cuts[0]),
                "val": (max(cuts[0], first + history), cuts[1]),
                "test": (max(cuts[1], first + history), end),
            }
            wanted = {"train": True, "val": self.val_fraction > 0, "test": self.test_fraction > 0}
            for split, (low, high) in bounds.items():
                # a fraction of 0 asks for no such split, so that none is missing
                if not wanted[split]:
                    continue
                own = np.arange(low, high - horizon + 1, self.stride, dtype=np.int64) - history
                own = own[breaks[own] == breaks[own + history + horizon - 1]] if len(own) else own
                starts.append(own)
                splits.append(np.full(len(own), split))
                if not len(own):
                    short.setdefault(f"{names[number]} ({end - first} rows)", []).append(split)
        if short:
            lacking = sorted({split for each in short.values() for split in each}, key=SPLITS.index)
            raise MisconfigurationException(
                f"data.windows={[history, horizon]}: {len(short)} of {len(names)} clients have no window in "
                f"{' or '.join(lacking)}: {listed(list(short))}; take shorter windows, other fractions, or leave "
                "these clients out"
            )
        self._part = torch.from_numpy(part)
        return np.concatenate(starts), np.concatenate(splits)

    def preprocess(self, samples: Samples, division: Division) -> Samples:
        """Fit on the rows before each client's first cut, and make windows of prepared rows.

        Args:
            samples: the pool, as loaded.
            division: the pool positions of each client's windows.
        """
        # anew, as max_samples may have left some windows out
        self._starts = samples.x
        numbers = self._series[samples.x]
        held = []
        ends = torch.searchsorted(self._series, torch.arange(int(self._series[-1]) + 2)).tolist()
        for parts in division.clients:
            own = set(numbers[torch.cat(list(parts.values()))].tolist())
            rows = torch.cat([torch.arange(ends[number], ends[number + 1]) for number in sorted(own)])
            # all rows before the cut, in windows or not: more of them make better moments
            held.append({split: rows[self._part[rows] == place] for place, split in enumerate(SPLITS)})
        nothing = torch.empty(0, dtype=torch.int64)
        of_rows = Division(cast(Any, held), nothing, nothing, division.names, division.newcomers)
        prepared = super().preprocess(self._rows, of_rows)
        history, _ = self.windows
        size = 4 * len(samples) * history * prepared.x.shape[1]
        # each row is in up to `history` windows, so that few series may fill the memory
        x = resident(Windows(prepared.x, self._starts, history), size)
        return Samples(x, self._targets_at(self._starts, prepared.y))

    def seasonal_naive(self, period: int, split: Split = "test") -> dict[str, float]:
        r"""Return the mean absolute error of each client by name, if forecasts repeat the last period.

        The forecast for :math:`h` rows ahead is :math:`y_{t + h - p \lceil h / p \rceil}`, with :math:`t` the last row
        and :math:`p` the period. A model with a larger error has learnt nothing of use. Known after `setup`.

        Args:
            period: rows per period, from 1 to the history, such as 24 for days of hours.
            split: the split of the windows.

        Raises:
            MisconfigurationException: if the period is out of range.
        """
        history, horizon = self.windows
        check_integers("", period=period)
        if not 1 <= period <= history:
            raise MisconfigurationException(f"period={period} must be 1 to {history}, the rows of the history")
        # targets as loaded, in their own unit
        division = self.division
        ahead = torch.arange(horizon)
        errors = {}
        for place, parts in enumerate(division.clients):
            ends = self._starts[parts[split]][:, None] + history
            y = self._rows.y.double()
            wrong = y[ends + ahead] - y[ends + ahead % period - period]
            errors[str(self.client_name(place))] = float(wrong.abs().mean())
        return errors

    def inputs(self, rows: Any, client: int | str) -> Tree:
        """Return the net's input ``[1, history, features]`` for raw rows of a client: the last ones by time.

        Args:
            rows: a CSV or Parquet file, a pandas data frame, a dict with a list of values per column, or a list of
                dicts, one per row, with times and features, in any order; more rows than the history have no effect.
            client: as for `TableData.inputs`.

        Raises:
            MisconfigurationException: as in `TableData.inputs`; or if the rows are less than the history, have a time
                twice, or steps other than the training table's.
        """
        table, _, _ = self._last(rows, client)
        return self.transform(self._prepared_rows(table, client)[None])

    def prediction_labels(self, rows: Any, client: int | str) -> dict[str, list[Any]]:
        """Return the time of the last row before each forecast, and of raw rows its position.

        Args:
            rows: raw rows as `inputs` takes them; None is for the client's test split.
            client: name or id of the client.
        """
        if rows is not None:
            _, row, time = self._last(rows, client)
            return {"row": [row], "time": [time]}
        if self._pool is None:
            return {}
        windows = self.division.clients[self.client_id(client)]["test"]
        return {"time": [shown(time) for time in self._shown[(self._starts[windows] + self.windows[0] - 1).numpy()]]}

    def _last(self, rows: Any, client: int | str) -> tuple[Any, int, str]:
        """Return the last rows by time, the last one's position, and its time; see `inputs`."""
        history, _ = self.windows
        columns = [*self._features, self._time]
        fills = self.fill_missing_columns and "by" in self.preprocessing
        table, owner = rows_table(rows, columns, self._csv, self._text_columns, fills)
        # as in `_fitted_place`, ids are those of now; a message needs the name
        names = self.client_names if self._pool is not None else self._names_now
        whose = names[client] if isinstance(client, Integral) and client < len(names) else client
        owner = f"{owner}, for client {whose!r},"
        column = column_of("time", table[self._time].to_numpy(), len(table))
        times = instants(column, f"column {self._time!r} of {owner}")
        if len(table) < history:
            raise MisconfigurationException(
                f"{owner} has {len(table)} rows, and a forecast is made of the last {history}; give these"
            )
        # earlier rows have no effect on the forecast, so that gaps among them are no mistake
        order = np.argsort(times, kind="stable")[-history:]
        times = times[order]
        clock = cast(Clock, self._clock)
        # a window with a gap was trained on under ``accept`` alone
        is_twice = times[1:] == times[:-1]
        is_wrong = is_twice if self.gaps == "accept" else ~clock_fits(steps_of(times, clock.unit)[1:], clock)
        if is_wrong.any():
            place = int(is_wrong.argmax())
            raise MisconfigurationException(
                f"{owner} has the time {shown(column[order[place + 1]])} after {shown(column[order[place]])}, and the "
                f"step of the training table is {clock}; give each of the last {history} rows of one client once"
            )
        return table.iloc[order].reset_index(drop=True), int(order[-1]), shown(column[order[-1]])

    def state_dict(self) -> dict[str, Any]:
        """Return the data module's entry in checkpoints, with windows and the step of times."""
        state = super().state_dict()
        if "table" in state and self._clock is not None:
            series = {"windows": list(self.windows), "time": self._time, "gaps": self.gaps, "clock": [*self._clock]}
            state["table"] = {**state["table"], **series}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the preprocessing of a checkpoint and its step of times, unless the data module has been set up.

        Args:
            state_dict: the data module's entry in a checkpoint.

        Raises:
            MisconfigurationException: if the checkpoint is of other windows.
        """
        if self._pool is None and "table" in state_dict:
            table = state_dict["table"]
            windows = (int(table["windows"][0]), int(table["windows"][1]))
            if (own := getattr(self, "windows", windows)) != windows:
                raise MisconfigurationException(
                    f"data.windows={list(own)}: the checkpoint is of windows {list(windows)}; give these"
                )
            self.windows, self._clock = windows, Clock(*table["clock"])
            self._time = getattr(self, "_time", table["time"])
            self.gaps = getattr(self, "gaps", table["gaps"])
        super().load_state_dict(state_dict)

    @property
    def agreed(self) -> dict[str, Any]:
        """Return windows and the step of times beside `TableData.agreed`."""
        return super().agreed | {"windows": list(self.windows), "step": str(self._clock)}

    @property
    def head_lines(self) -> list[tuple[str, str]]:
        """Return lines about windows and inputs."""
        history, horizon = self.windows
        step = "" if self._clock is None else f", a row each {self._clock}"
        return [
            ("windows", f"{history} rows to forecast {horizon} of {listed(self._targets)}{step}"),
            *super().head_lines,
        ]


def windows_at(rows: Tensor, starts: Tensor, length: int) -> Tensor:
    """Return windows of consecutive rows.

    >>> windows_at(torch.arange(5), torch.tensor([0, 2]), 3)
    tensor([[0, 1, 2],
            [2, 3, 4]])

    Args:
        rows: the rows, ``[rows, ...]``.
        starts: first rows of the windows, ``[N]``.
        length: rows per window.
    """
    return rows[starts[:, None] + torch.arange(length)]


def shown(time: Any) -> str:
    """Return a time as in the table.

    >>> shown("2024-01-01"), shown(3)
    ('2024-01-01', '3')

    Args:
        time: the time.
    """
    # NumPy would write a date with a T and six digits of microseconds
    is_date = isinstance(time, np.datetime64)
    return str(package("pandas", "tables", "SeriesData").Timestamp(time)) if is_date else str(time)


def instants(column: NDArray[Any], owner: str) -> NDArray[Any]:
    """Return times as numbers or as dates in microseconds, without time zones.

    Args:
        column: numbers, dates, or texts of dates.
        owner: name of the column for messages.

    Raises:
        MisconfigurationException: if a text is no date that sorts by time.
    """
    if column.dtype.kind in "biuf":
        # large integers, such as nanoseconds since 1970, would lose digits as floats
        return column.astype(np.int64 if column.dtype.kind in "iu" else np.float64)
    if column.dtype.kind == "M":
        # nanoseconds end in the year 2262
        return column.astype("datetime64[us]")
    check_times(column)
    pandas = package("pandas", "tables", "SeriesData")
    if column.dtype.kind in "US":
        texts, counts = np.unique(column.astype(str), return_counts=True)
        if mostly(NUMBER, texts.tolist(), counts):
            return column.astype(np.float64)
    # numbers among dates would silently be taken for nanoseconds since 1970
    is_time = np.array([isinstance(value, str | date) for value in column.tolist()])
    # one time for all zones: a row's offset from universal time may change in summer
    dates = pandas.to_datetime(
        pandas.Series(column, dtype=object).where(is_time), format="ISO8601", errors="coerce", utc=True
    )
    if (bad := dates.isna().to_numpy()).any():
        row = int(bad.argmax())
        raise MisconfigurationException(
            f"{owner} has {str(column[row])!r} in row {row} (counted from 0), which is no date; write dates as "
            "2024-05-31, with hours as 2024-05-31 13:00, or give numbers"
        )
    return cast(NDArray[Any], dates.dt.tz_localize(None).to_numpy().astype("datetime64[us]"))


def clock_of(times: NDArray[Any], is_same: NDArray[np.bool_]) -> Clock:
    """Return the usual step of times: the median one.

    Dates on one day of each month, or on each month's last day, count months.

    >>> str(clock_of(np.array([0.0, 0.5, 1.0, 3.0]), np.array([False, True, True, True])))
    '0.5'

    Args:
        times: the times of all series, ascending in each.
        is_same: whether each time's series is that of the time before.
    """
    unit = "number"
    if times.dtype.kind == "M":
        # months have 28 to 31 days, and are even all the same
        months = times.astype("datetime64[M]")
        within = times - months.astype("datetime64[us]")
        next_day = times + np.timedelta64(1, "D")
        is_last = next_day.astype("datetime64[M]") > months
        is_monthly = bool((within == within[0]).all() or is_last.all()) and bool(
            (months[1:] != months[:-1])[is_same[1:]].all()
        )
        unit = "months" if is_monthly else "microseconds"
    # the median and not the least step: a doubled entry a minute later must not make all others gaps
    steps = steps_of(times, unit)[is_same]
    # without a second row of any client there is no step; such clients are refused as too short
    return Clock(unit, float(np.sort(steps)[(len(steps) - 1) // 2]) if len(steps) else 0.0)


def steps_of(times: NDArray[Any], unit: str) -> NDArray[np.float64]:
    """Return the step before each row in a clock's unit, 0 before the first one.

    Args:
        times: the times.
        unit: unit of a `Clock`.

    Raises:
        MisconfigurationException: if the times are numbers where the clock counts dates, or the other way.
    """
    if (times.dtype.kind == "M") is (unit == "number"):
        kinds = ("dates", "numbers") if unit == "number" else ("numbers", "dates")
        raise MisconfigurationException(f"times are {kinds[0]}, and those of the training table {kinds[1]}; give these")
    if unit == "months":
        times = times.astype("datetime64[M]")
    values = times.astype(np.int64) if times.dtype.kind == "M" else times
    return np.diff(values, prepend=values[:1]).astype(np.float64)


def clock_fits(steps: NDArray[np.float64], clock: Clock) -> NDArray[np.bool_]:
    """Return whether each step is the clock's.

    Args:
        steps: the steps in the clock's unit.
        clock: the clock.
    """
    return np.abs(steps - clock.step) <= CLOSE * abs(clock.step)
