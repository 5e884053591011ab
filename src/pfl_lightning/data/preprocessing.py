"""Preprocessing of columns, fitted on training rows after the division of a pool."""

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from numbers import Real
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_warn
from numpy.typing import NDArray
from torch import Tensor

from pfl_lightning.data.checks import check_integers
from pfl_lightning.data.division import Division
from pfl_lightning.settings import check_choices, check_least

FittedOn: TypeAlias = Literal["nothing", "each client", "all clients"]
"""Rows that decide how raw values become inputs: none, each client's own, or all clients' together."""

Moments: TypeAlias = tuple[NDArray[np.float64], NDArray[np.float64]]
"""Mean and standard deviation of each column, [columns]."""

CHUNK = 65536
"""Rows read or standardized at a time."""

Scale: TypeAlias = Literal["standard", "minmax", "robust", "none"]
"""Ways to scale a column: to mean 0 and deviation 1, to [0, 1], by median and quartiles, or not."""

Part: TypeAlias = Literal["year", "month", "day", "weekday", "hour", "days"]
"""Numbers made of a date: ``weekday`` counts from 0 on Monday, ``days`` from a given date."""

Raw: TypeAlias = Mapping[str, Any]
"""Columns of raw rows by name: numbers with NaN for gaps, or a pair of codes, with -1 for gaps, and their texts."""

UNBOUNDED = {"low": -sys.float_info.max, "high": sys.float_info.max}
"""Bounds of a column without values to fit them on."""

RANGE = ("least", "most")
"""Names of the smallest and the largest value of training rows, among fitted values."""

FILLS = ("median", "mean", "mode")
"""Values that a gap may take from the training rows of its column."""


@dataclass(frozen=True)
class Column:
    """Settings of one column in place of those of `Preprocessing`; None takes the latter's.

    Args:
        fill: value of a gap. In a column of numbers ``median``, ``mean`` or ``mode`` of the training rows, or a number;
            in a column of categories ``mode`` or a text.
        indicator: whether a further input is 1 where the column has a gap, and 0 elsewhere.
        clip: bounds of a column of numbers, see `Preprocessing`.
        scale: scale of a column of numbers, see `Preprocessing`; or a given mean and deviation, such as [50, 12].
        encode: ``onehot`` or ``codes``, of a column of categories.
        min_count: training rows that a category needs, at least 1.
        max_categories: largest number of categories, at least 1.
    """

    fill: float | str | None = None
    indicator: bool | None = None
    clip: float | list[float] | None = None
    scale: Scale | list[float] | None = None
    encode: Literal["onehot", "codes"] | None = None
    min_count: int | None = None
    max_categories: int | None = None


@dataclass(frozen=True)
class Preprocessing:
    """Gaps, texts and scales of a table, fitted on training rows.

    A column of numbers is clipped, filled and scaled, in this order. A column of texts becomes one input per category,
    1 for the row's category and 0 for the others; a gap and a text outside the vocabulary are 0 in all of them. Dates
    become numbers where ``dates`` names them.

    Args:
        by: training rows that fit: ``table`` takes those of all the federation's clients together, ``client`` each
            client's own. A vocabulary that isn't given always comes from the training rows of all clients, since their
            inputs must have one width.
        fill: value of a gap in columns of numbers: ``median``, ``mean`` or ``mode``, or a number.
        indicator: whether each column of numbers or dates has a further input that is 1 in the rows with a gap.
        clip: bounds of numbers: a number of deviations around the mean, such as 3, or two quantiles, such as
            [0.01, 0.99]; None for no bounds.
        scale: ``standard`` for mean 0 and deviation 1; ``minmax`` for [0, 1]; ``robust`` for median 0 and a distance of
            1 between the quartiles (the deviation if the quartiles are equal); or ``none``. A column that is constant
            in training rows becomes 0, except under ``none``.
        categories: columns of categories in numbers, such as codes of wards; columns of texts needn't be named.
        vocabulary: the categories of columns, in order, such as ``{sex: [F, M]}``; other columns of texts take the
            texts of training rows, in the order of the alphabet or of a pandas Categorical.
        encode: ``onehot`` for one input per category; ``codes`` for one input with the category's position in the
            vocabulary, or the number of categories for a gap or an unknown text.
        fill_category: category of a gap: ``mode`` for the most frequent category of training rows, or a text, which
            belongs to the vocabulary from then on; None for none.
        min_count: training rows that a category needs to be in a vocabulary that isn't given, at least 1.
        max_categories: largest size of a vocabulary that isn't given: the most frequent categories; None for no limit.
        dates: numbers made of each column of dates, such as ``{admitted: [month, weekday], born: [days]}``: ``year``,
            ``month``, ``day``, ``weekday``, ``hour`` and ``days``.
        since: the date from which ``days`` counts, such as 1970-01-01.
        drop: columns that are no inputs.
        columns: settings of single columns by name.
        transformer: from Python, a scikit-learn transformer of data frames, such as a ``ColumnTransformer``, in the
            place of all settings except ``by`` and ``drop``.

    Raises:
        MisconfigurationException: if a value is out of range.
    """

    by: Literal["table", "client"] = "table"
    fill: float | str = "median"
    indicator: bool = False
    clip: float | list[float] | None = None
    scale: Scale = "standard"
    categories: list[str] = field(default_factory=list)
    vocabulary: dict[str, list[str | int]] = field(default_factory=dict)
    encode: Literal["onehot", "codes"] = "onehot"
    fill_category: str | None = None
    min_count: int = 1
    max_categories: int | None = None
    dates: dict[str, list[Part]] = field(default_factory=dict)
    since: str = "1970-01-01"
    drop: list[str] = field(default_factory=list)
    columns: dict[str, Column] = field(default_factory=dict)
    transformer: Any = None

    def __post_init__(self) -> None:
        """Check the settings."""
        check_choices("data.preprocessing", by=(self.by, ("table", "client")))
        if self.transformer is not None:
            check_transformer(self)
        # from YAML, the parser makes objects of the entries; in Python, dicts are shorter
        own = {
            name: Column(**column) if isinstance(column, Mapping) else column for name, column in self.columns.items()
        }
        # frozen classes have no other way to change a field
        object.__setattr__(self, "columns", own)
        check_rule("data.preprocessing", self._shared)
        for name, column in own.items():
            check_rule(f"data.preprocessing.columns.{name}", column)
        for name, parts in self.dates.items():
            if not isinstance(parts, list | tuple) or not parts or len(set(parts)) < len(parts):
                raise MisconfigurationException(
                    f"data.preprocessing.dates.{name}={parts!r} must be a list of {', '.join(get_args(Part))}"
                )
            for part in parts:
                check_choices("data.preprocessing", **{f"dates.{name}": (part, get_args(Part))})
        try:
            datetime.fromisoformat(str(self.since))
        except ValueError:
            raise MisconfigurationException(
                f"data.preprocessing.since={self.since!r} must be a date, such as 1970-01-01"
            ) from None

    @property
    def _shared(self) -> Column:
        names = {each.name for each in fields(Column)}
        return Column(**{name: value for name, value in vars(self).items() if name in names})

    def of(self, name: str, is_category: bool, feature: str = "") -> Column:
        """Return the settings of a column: the column's own ones before the common ones.

        Args:
            name: name of the column, or of a number made of a date, such as ``admitted.month``.
            is_category: whether the column holds categories.
            feature: the column of a date, whose settings its numbers share.

        Raises:
            MisconfigurationException: if the fill is none for such a column.
        """
        shared = replace(self._shared, fill=self.fill_category, indicator=False) if is_category else self._shared
        own = self.columns.get(name) or self.columns.get(feature) or Column()
        rule = replace(shared, **{key: value for key, value in vars(own).items() if value is not None})
        wrong = (
            rule.fill in ("median", "mean") if is_category else isinstance(rule.fill, str) and rule.fill not in FILLS
        )
        if wrong:
            kind, right = (
                ("categories", "mode or a text") if is_category else ("numbers", f"{', '.join(FILLS)} or a number")
            )
            raise MisconfigurationException(
                f"data.preprocessing: fill={rule.fill!r} is of no use in column {name!r} of {kind}; give {right}"
            )
        return rule


def check_transformer(settings: Preprocessing) -> None:
    """Check a given scikit-learn transformer, beside which no other setting may stand.

    Args:
        settings: the settings.

    Raises:
        MisconfigurationException: if there are other settings, or the transformer isn't an object of scikit-learn's
            kind.
    """
    given = settings.transformer
    if isinstance(given, type) or not all(hasattr(given, name) for name in ("fit", "transform", "get_params")):
        raise MisconfigurationException(
            f"data.preprocessing.transformer={given!r} must be a scikit-learn transformer, such as a "
            "ColumnTransformer, which Python alone can give"
        )
    for each in fields(settings):
        if each.name in ("by", "drop", "transformer"):
            continue
        default = each.default_factory() if callable(each.default_factory) else each.default
        if (value := getattr(settings, each.name)) != default:
            raise MisconfigurationException(
                f"data.preprocessing.{each.name}={value!r} has no effect beside data.preprocessing.transformer; leave "
                "one of the two out"
            )


def check_rule(owner: str, rule: Column) -> None:
    """Check settings of columns.

    Args:
        owner: prefix of the settings' names in messages.
        rule: the settings; None is allowed for each.

    Raises:
        MisconfigurationException: if a value is out of range.
    """
    if rule.fill is not None and not (isinstance(rule.fill, str) or is_finite(rule.fill)):
        raise MisconfigurationException(f"{owner}.fill={rule.fill!r} must be {', '.join(FILLS)}, a number or a text")
    if rule.clip is not None:
        is_pair = isinstance(rule.clip, list | tuple)
        ends = list(rule.clip) if isinstance(rule.clip, list | tuple) else [rule.clip]
        is_right = all(map(is_finite, ends)) and len(ends) == (2 if is_pair else 1)
        if not (is_right and (0 <= ends[0] < ends[1] <= 1 if is_pair else ends[0] > 0)):
            raise MisconfigurationException(
                f"{owner}.clip={rule.clip!r} must be a number of deviations above 0, such as 3, or two quantiles, such "
                "as [0.01, 0.99]"
            )
    if isinstance(rule.scale, list | tuple):
        if len(rule.scale) != 2 or not all(map(is_finite, rule.scale)) or rule.scale[1] <= 0:
            raise MisconfigurationException(
                f"{owner}.scale={rule.scale!r} must be a mean and a deviation above 0, such as [50, 12]"
            )
    elif rule.scale is not None:
        check_choices(owner, scale=(rule.scale, get_args(Scale)))
    if rule.encode is not None:
        check_choices(owner, encode=(rule.encode, ("onehot", "codes")))
    for name in ("min_count", "max_categories"):
        if (count := getattr(rule, name)) is not None:
            check_integers(f"{owner}.", **{name: count})
            check_least(owner, **{name: (count, 1)})


def is_finite(value: Any) -> bool:
    """Return whether a value is a finite number."""
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def is_fitted(rule: Column) -> bool:
    """Return whether the settings of a column of numbers need statistics of training rows.

    Args:
        rule: the column's settings.
    """
    return isinstance(rule.fill, str) or rule.clip is not None or rule.scale in ("standard", "minmax", "robust")


def fitted_numbers(values: NDArray[np.float64], rule: Column) -> dict[str, float] | None:
    """Return the bounds, the fill and the scale of a column of numbers, by the values of training rows.

    >>> fitted_numbers(np.array([1.0, np.nan, 3.0]), Column(fill="mean", scale="minmax"))
    {'fill': 2.0, 'center': 1.0, 'width': 2.0, 'least': 1.0, 'most': 3.0}

    Args:
        values: the values of training rows, NaN for gaps.
        rule: the column's settings.

    Returns:
        Bounds ``low`` and ``high`` if the column is clipped, ``fill``, ``center`` and ``width``; width 0 stands for a
            constant column. ``least`` and ``most`` are the range of the values, unless all settings are given numbers:
            then nothing of the rows is kept. None if all values are gaps and the fill would come from them.
    """
    gaps = np.isnan(values)
    there = values[~gaps]
    fitted = {} if rule.clip is None else dict(UNBOUNDED)
    span = dict(zip(RANGE, range_of(there), strict=True)) if is_fitted(rule) else {}
    if not len(there) and isinstance(rule.fill, str):
        return None
    if rule.clip is not None and len(there):
        if isinstance(rule.clip, list | tuple):
            low, high = np.quantile(there, rule.clip)
        else:
            low, high = (there.mean() + side * rule.clip * there.std() for side in (-1, 1))
        fitted = {"low": float(low), "high": float(high)}
        there = np.clip(there, low, high)
    fill = middle(there, rule.fill) if isinstance(rule.fill, str) else float(rule.fill or 0)
    # filled values count for the scale, as in a pipeline of an imputer and a scaler
    filled = np.where(gaps, fill, values)
    filled[~gaps] = there
    if isinstance(rule.scale, list | tuple):
        center, width = rule.scale
    else:
        center, width = center_and_width(filled, rule.scale or "none")
    return {**fitted, "fill": fill, "center": float(center), "width": float(width), **span}


def range_of(values: NDArray[np.float64]) -> tuple[float, float]:
    """Return the least and the largest value of a column, both 0 without values."""
    return (float(values.min()), float(values.max())) if len(values) else (0.0, 0.0)


def warn_of_ranges(
    values: Mapping[str, NDArray[np.float64]], ranges: Mapping[str, Sequence[float]], owner: str
) -> list[str]:
    """Warn of values far from those of training rows, such as of another unit, and return their columns.

    Values are far if they lie outside the range of training rows by more than its width.

    Args:
        values: columns of raw rows by name, NaN for gaps.
        ranges: least and largest value of training rows by column; a constant column has no effect.
        owner: name of the rows for the message.
    """
    far = {}
    for name, (least, most) in ranges.items():
        there = values[name][~np.isnan(values[name])]
        count = int(((there < 2 * least - most) | (there > 2 * most - least)).sum())
        if least < most and count:
            far[name] = (
                f"{name!r} is {there.min():.6g} to {there.max():.6g} (in training {least:.6g} to {most:.6g}) in "
                f"{count} of {len(there)} rows"
            )
    if far:
        more = f", and {len(far) - 3} more" if len(far) > 3 else ""
        rank_zero_warn(
            f"{owner}: values lie far outside those of training rows, so predictions are guesses: "
            f"{'; '.join(list(far.values())[:3])}{more}. Check the units; further such rows aren't named."
        )
    return list(far)


def middle(values: NDArray[np.float64], kind: str) -> float:
    """Return the median, the mean or the most frequent value; of equally frequent ones the smallest.

    >>> middle(np.array([3.0, 1.0, 3.0, 1.0, 7.0]), "mode")
    1.0

    Args:
        values: at least one number.
        kind: ``median``, ``mean`` or ``mode``.
    """
    if kind == "mode":
        different, counts = np.unique(values, return_counts=True)
        return float(different[counts.argmax()])
    return float(np.median(values) if kind == "median" else values.mean())


def center_and_width(values: NDArray[np.float64], scale: str) -> tuple[float, float]:
    """Return the number to become 0 and the distance to become 1; a constant column has width 0.

    Args:
        values: at least one number.
        scale: one of `Scale`.
    """
    if scale == "none":
        return 0.0, 1.0
    low, high = values.min(), values.max()
    # of a constant column too, rounding would leave a tiny deviation, which would blow noise up to 1
    if low == high:
        return low, 0.0
    if scale == "minmax":
        return low, high - low
    if scale == "standard":
        return values.mean(), values.std()
    first, median, third = np.quantile(values, [0.25, 0.5, 0.75])
    return median, (third - first) or values.std()


def fitted_words(codes: NDArray[np.int64], words: Sequence[str], rule: Column) -> list[str]:
    """Return the frequent categories of training rows, in order.

    >>> fitted_words(np.array([0, 2, 2, 1, 1, -1]), ["a", "b", "c"], Column(min_count=2))
    ['b', 'c']

    Args:
        codes: position of each training row's category in ``words``; -1 for gaps.
        words: all categories of the table.
        rule: the column's settings.
    """
    counts = np.bincount(codes[codes >= 0], minlength=len(words))
    # a stable sort: of equally frequent categories the first stay
    ranked = np.argsort(-counts, kind="stable")[: rule.max_categories]
    return [words[place] for place in sorted(ranked.tolist()) if counts[place] >= (rule.min_count or 1)]


def filled_word(
    codes: NDArray[np.int64], words: Sequence[str], vocabulary: Sequence[str], fill: str | None
) -> str | None:
    """Return the category of a gap; None for none.

    >>> filled_word(np.array([1, 1, 0, -1]), ["a", "b"], ["a", "b"], "mode")
    'b'

    Args:
        codes: position of each training row's text in ``words``; -1 for gaps.
        words: the texts of the table.
        vocabulary: the vocabulary.
        fill: ``mode``, a category, or None.
    """
    if fill != "mode":
        return fill
    counts = np.bincount(codes[codes >= 0], minlength=len(words))
    counted = [
        (count, word) for count, word in zip(counts.tolist(), words, strict=True) if count and word in vocabulary
    ]
    # of equally frequent categories the first
    return max(counted, key=lambda pair: pair[0])[1] if counted else None


def input_names(fitted: Mapping[str, Any]) -> list[str]:
    """Return the name of each input, such as ``age``, ``age missing``, ``sex=F`` or ``admitted.month``.

    Args:
        fitted: the columns' ``features``, ``categories``, ``codes``, ``dates`` and ``indicators``.
    """
    names = []
    for feature in fitted["features"]:
        if feature not in fitted["categories"] or feature in fitted["codes"]:
            names += [f"{feature}.{part}" for part in fitted["dates"].get(feature, ())] or [feature]
        else:
            names += [f"{feature}={word}" for word in fitted["categories"][feature]]
        if feature in fitted["indicators"]:
            names.append(f"{feature} missing")
    return names


def preprocessed(raw: Raw, fitted: Mapping[str, Any], client: int | None) -> NDArray[np.float32]:
    """Return the inputs of raw rows, [rows, inputs], in the order of `input_names`.

    Args:
        raw: the columns.
        fitted: how columns become inputs, as in ``TableData.preprocessing``.
        client: position of the client in lists of fitted values; None where all clients share the values.

    Raises:
        MisconfigurationException: if an input is beyond single precision.
    """
    columns: list[NDArray[Any]] = []
    for feature in fitted["features"]:
        if feature in fitted["categories"]:
            codes, words = raw[feature]
            gaps = codes < 0
            vocabulary = {word: place for place, word in enumerate(fitted["categories"][feature])}
            fill = fitted["category_fill"].get(feature)
            # one entry more: the code -1 of gaps is the last
            places = [
                vocabulary.get(word, -1) for word in [*words, fill if client is None or fill is None else fill[client]]
            ]
            categories = np.array(places)[codes]
            if feature in fitted["codes"]:
                columns.append(np.where(categories < 0, len(vocabulary), categories))
            else:
                # an unknown text or a gap, -1, is 0 in all
                columns += [categories == place for place in range(len(vocabulary))]
        else:
            names = [f"{feature}.{part}" for part in fitted["dates"].get(feature, ())] or [feature]
            gaps = np.isnan(raw[names[0]])
            for name in names:
                each = fitted["numbers"][name]
                shared = {key: values for key, values in each.items() if key not in RANGE}
                own = shared if client is None else {key: values[client] for key, values in shared.items()}
                columns.append(scaled(raw[name], **own))
        if feature in fitted["indicators"]:
            columns.append(gaps)
    # an overflow is refused below, by the name of the input, and needs no warning of NumPy's
    with np.errstate(over="ignore"):
        result = np.stack(columns, axis=1).astype(np.float32)
    if not np.isfinite(result).all():
        place = int(np.argwhere(~np.isfinite(result))[0][1])
        raise MisconfigurationException(
            f"data.preprocessing: input {input_names(fitted)[place]!r} is beyond single precision in a row, far from "
            "the training rows; correct the row, or set data.preprocessing.clip"
        )
    return result


def scaled(
    values: NDArray[np.float64],
    fill: float,
    center: float,
    width: float,
    low: float = -math.inf,
    high: float = math.inf,
) -> NDArray[np.float64]:
    """Return a column of numbers, clipped, filled and scaled.

    >>> scaled(np.array([1.0, np.nan, 9.0]), fill=2.0, center=1.0, width=2.0, high=5.0)
    array([0. , 0.5, 2. ])

    Args:
        values: the numbers, NaN for gaps.
        fill: value of gaps.
        center: the number that becomes 0.
        width: the distance that becomes 1; 0 makes the whole column 0.
        low: least value.
        high: largest value.
    """
    filled = np.where(np.isnan(values), fill, np.clip(values, low, high))
    # division by infinity gives the 0 of constant columns
    return (filled - center) / (width or math.inf)


def trained_on(division: Division) -> Tensor:
    """Return the positions of the training rows of all the federation's clients, without new clients.

    Args:
        division: the pool positions of each client's rows.
    """
    members = division.clients[: len(division.clients) - division.newcomers]
    return torch.cat([held["train"] for held in members])


def moments_of(values: Tensor, rows: Tensor) -> Moments:
    """Return mean and standard deviation of each column over some rows; a constant column has deviation 0.

    >>> moments_of(torch.tensor([[1.0, 7.0], [3.0, 7.0], [9.0, 9.0]]), torch.tensor([0, 1]))
    (array([2., 7.]), array([1., 0.]))

    Args:
        values: the columns, [rows, columns].
        rows: positions of the rows.
    """
    total = square = np.zeros(values.shape[1])
    low, high = np.full(values.shape[1], np.inf), np.full(values.shape[1], -np.inf)
    for own in chunks(values, rows):
        total = total + own.sum(0)
        low, high = np.minimum(low, own.min(0)), np.maximum(high, own.max(0))
    # in a constant column, rounding of the sum would leave a tiny deviation, and standardizing would blow noise up to 1
    mean = np.where(low == high, low, total / len(rows))
    # two passes: sums of squares minus squared means lose all digits where the mean is large
    for own in chunks(values, rows):
        square = square + ((own - mean) ** 2).sum(0)
    return mean, np.sqrt(square / len(rows))


def chunks(values: Tensor, rows: Tensor) -> Iterator[NDArray[np.float64]]:
    """Yield some rows of columns in double precision, in chunks, so that no second table lies in memory.

    The chunks are NumPy arrays: the last bits of torch's sums over rows depend on the number of threads.

    Args:
        values: the columns, [rows, columns].
        rows: positions of the rows.
    """
    for part in torch.split(rows, CHUNK):
        yield values[part].double().numpy()


def known_moments(
    fitted: Mapping[str, Any], names: Sequence[str], clients: Sequence[str], by: Literal["table", "client"]
) -> dict[int, Moments]:
    """Return moments that a federation has fitted, as `standardized` takes them; clients unknown to it have none.

    >>> fitted = {"mean": {"age": [50.0, 60.0]}, "deviation": {"age": [9.0, 8.0]}}
    >>> known_moments(fitted, ["Bremen", "Ulm"], ["Jena", "Ulm"], "client")
    {1: (array([60.]), array([8.]))}

    Args:
        fitted: the ``preprocessing`` of the federation; an empty one has no moments.
        names: names of the federation's clients, in the order of lists in ``fitted``.
        clients: names of the clients of a division, by position.
        by: whether the moments are of the whole ``table`` or of each ``client``.
    """
    if "mean" not in fitted:
        return {}
    mean, deviation = (np.array(list(fitted[moment].values())) for moment in ("mean", "deviation"))
    if by == "table":
        return {0: (mean, deviation)}
    places = {name: place for place, name in enumerate(names)}
    return {
        place: (mean[:, places[name]], deviation[:, places[name]])
        for place, name in enumerate(clients)
        if name in places
    }


def standardized(
    values: Tensor, division: Division, by: Literal["table", "client"], moments: Mapping[int, Moments] | None = None
) -> tuple[Tensor, list[Moments]]:
    """Subtract each column's mean and divide by the deviation, both over training rows; constant columns become 0.

    Args:
        values: the columns, [rows, columns].
        division: the pool positions of each client's rows.
        by: ``table`` fits on the training rows of all the federation's clients and applies the result to all rows;
            ``client`` fits on each client's training rows for that client's rows, and rows of no client become 0.
        moments: moments in place of fitted ones, by the client's position in the division; 0 under ``table``. See
            `known_moments`.

    Returns:
        The columns in single precision, and the moments: one pair for all clients, or one per client, new clients
        included.
    """
    if by == "table":
        groups = [(trained_on(division), torch.arange(len(values)))]
    else:
        groups = [(held["train"], torch.cat(list(held.values()))) for held in division.clients]
    result = torch.zeros(values.shape, dtype=torch.float32)
    statistics = []
    for place, (fitted, rows) in enumerate(groups):
        mean, deviation = moments[place] if moments and place in moments else moments_of(values, fitted)
        statistics.append((mean, deviation))
        # division by infinity gives the 0 of constant columns
        width = np.where(deviation > 0, deviation, np.inf)
        for part, own in zip(torch.split(rows, CHUNK), chunks(values, rows), strict=True):
            result[part] = torch.from_numpy((own - mean) / width).float()
    return result, statistics
