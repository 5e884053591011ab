"""Figures of partitions, of whole runs, and of methods compared by clients."""

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate, cycle
from os import PathLike
from pathlib import Path
from textwrap import fill
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from pfl_lightning.data import FederatedDataModule
from pfl_lightning.data.client_names import axis_label
from pfl_lightning.data.description import amounts
from pfl_lightning.runs.report import columns_of
from pfl_lightning.runs.run_status import read_rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FEW = 8
"""Number of names with room among the curves; more names stand beside the axes."""
NAMES_A_COLUMN = 22

SPLITS = {"train": "training", "val": "validation", "test": "test"}
METRICS = {"acc": "accuracy, %"}


def plot_partition(counts: Any, names: Sequence[str] = ()) -> "Figure":
    """Plot a heatmap of training samples by client and class; of a finished run, bars of samples by client.

    Args:
        counts: samples ``[clients, classes]``; a data module, set up; a trainer, whose data are shown; or a run's
            folder or `Results`, which know numbers of samples alone.
        names: names of the clients by id; empty shows the data module's, or ids.

    Raises:
        MisconfigurationException: if the counts have another form, the data module isn't set up, or the folder is of
            no finished run.
    """
    if isinstance(counts, (str, PathLike)) or isinstance(getattr(counts, "client_rows", None), list):
        return plot_sizes(clients_in(counts))
    # a Trainer has its data from its first fit on
    counts = getattr(counts, "datamodule", counts)
    if isinstance(counts, FederatedDataModule):
        names = names or counts.client_names
        counts = amounts(counts)
    if getattr(counts, "ndim", 0) != 2:
        raise MisconfigurationException(
            f"counts is a {type(counts).__name__}; give samples [clients, classes], such as data.counts, the data "
            "module, a trainer after fit, or a run's folder."
        )
    # imported on use, as matplotlib is slow to import; Figure and not pyplot, which keeps every figure in memory
    from matplotlib.figure import Figure

    clients, classes = counts.shape
    figure = Figure(figsize=(2 + 0.3 * min(classes, 40), 1.5 + 0.22 * min(clients, 60)), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(np.asarray(counts), aspect="auto", cmap="Blues", interpolation="nearest")
    axes.set(xlabel="class", ylabel="client", title="Training samples by client and class")
    for axis, length in ((axes.xaxis, classes), (axes.yaxis, clients)):
        axis.set_ticks(range(0, length, 1 + (length - 1) // 25))
    axes.set_yticks(axes.get_yticks(), [axis_label(int(client), names) for client in axes.get_yticks()])
    figure.colorbar(image, ax=axes, label="samples")
    return figure


def clients_in(run: Any) -> Sequence[Mapping[str, Any]]:
    """Return the rows of ``clients.csv`` of a finished run.

    Args:
        run: the run's folder, or its `Results`.

    Raises:
        MisconfigurationException: if there are none.
    """
    if not isinstance(run, (str, PathLike)):
        rows, where = run.client_rows, f"the run {run.name}"
    else:
        rows, where = read_rows(file) if (file := Path(run, "clients.csv")).is_file() else [], str(run)
    if not rows:
        raise MisconfigurationException(
            f"{where} has no clients.csv, which a run has from its end on; give the folder of a finished run, or the "
            "data module."
        )
    return cast(Sequence[Mapping[str, Any]], rows)


def plot_curves(runs: Any, metric: str = "val/acc") -> "Figure":
    """Plot a metric against rounds, one line per run.

    Args:
        runs: a run, or several by their names. A run is a folder, a trainer, its `Results`, or rows of ``rounds.csv``
            (or of `RoundLogger`), which need a name.
        metric: the column to draw.

    Raises:
        MisconfigurationException: if this is no run, or a run has no value of the metric.
    """
    if isinstance(runs, (str, PathLike)):
        runs = {Path(runs).resolve().parent.name: runs}
    elif (name := getattr(getattr(runs, "results", runs), "name", None)) and not isinstance(runs, Mapping):
        runs = {str(name): runs}
    if not isinstance(runs, Mapping):
        raise MisconfigurationException(
            f"runs is a {type(runs).__name__}; give a run's folder, a trainer after fit, its results, or a dict of "
            "such runs by their names."
        )
    rows = {name: rows_of(run) for name, run in runs.items()}
    for name, own in rows.items():
        if not any(row.get(metric) not in (None, "") for row in own):
            there = [column for column in columns_of(own) if column.startswith(("val/", "test/"))]
            raise MisconfigurationException(
                f"metric={metric!r} has no value in run {name}; give one of {', '.join(there[:8]) or 'another run'}."
            )
    return plot_mean_curves({name: [own] for name, own in rows.items()}, metric)


def rows_of(run: Any) -> Sequence[Mapping[str, Any]]:
    """Return a run's rows by round.

    Args:
        run: the run's folder, a trainer, its `Results`, a `RoundLogger`, a data frame, or the rows themselves.

    Raises:
        MisconfigurationException: if the folder is of no run, or the value is no run.
    """
    if not isinstance(run, (str, PathLike)):
        run = getattr(run, "results", run)
        rows = getattr(run, "rows", run)
        # a data frame of results.rounds
        rows = rows.to_dict("records") if hasattr(rows, "to_dict") else rows
        if isinstance(rows, Sequence) and all(isinstance(row, Mapping) for row in rows):
            return rows
        raise MisconfigurationException(
            f"a run is a {type(run).__name__}; give a run's folder, a trainer after fit, its results, or rows of "
            "rounds.csv."
        )
    file = Path(run, "rounds.csv")
    if not file.is_file():
        there = sorted(Path(run).glob("*/rounds.csv")) + sorted(Path(run).glob("*/*/rounds.csv"))
        example = there[-1].parent if there else "runs/FedAvg-Digits/version_0"
        raise MisconfigurationException(f"{run} has no rounds.csv; give the folder of a run, such as {example}.")
    return read_rows(file)


def plot_mean_curves(groups: Mapping[str, Sequence[Any]], metric: str = "val/acc") -> "Figure":
    """Plot a metric against rounds: one line per group for the mean over runs, in a band of one standard deviation.

    Args:
        groups: by name, several runs, such as one per seed, each as for `plot_curves`; only rounds common to all runs
            are drawn.
        metric: the column to draw.

    Raises:
        MisconfigurationException: if a value is no run.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    many = len(groups) > FEW
    columns = math.ceil(len(groups) / NAMES_A_COLUMN) if many else 0
    figure = Figure(figsize=(6.4 + 1.6 * columns, 4), layout="constrained")
    axes = figure.subplots()
    colours = colormaps["tab20" if len(groups) > 10 else "tab10"].colors  # type: ignore[attr-defined]
    # dashes let a lower line show where methods differ so little that their lines lie on each other
    for (name, runs), colour, style in zip(groups.items(), cycle(colours), cycle(("-", "--", "-."))):
        curves = [
            {int(row["round"]): float(row[metric]) for row in rows if row.get(metric) not in (None, "")}
            for rows in map(rows_of, runs)
        ]
        # a mean over other runs in each round would jump where a run ends or has no validation
        rounds = sorted(set(curves[0]).intersection(*curves))
        values = np.array([[run[round] for round in rounds] for run in curves])
        axes.plot(rounds, values.mean(0), marker="o", markersize=3, color=colour, linestyle=style, label=name)
        if len(curves) > 1:
            bounds = (values.mean(0) + sign * values.std(0, ddof=1) for sign in (-1, 1))
            # a band above 100 % would show accuracies that don't exist
            low, high = (np.clip(bound, 0, 1) for bound in bounds) if metric.endswith("acc") else bounds
            axes.fill_between(rounds, low, high, color=colour, alpha=0.2, linewidth=0)
    axes.set(xlabel="round", ylabel=in_words(metric))
    if metric.endswith("acc"):
        axes.yaxis.set_major_formatter(PercentFormatter(1, symbol=""))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    if many:
        figure.legend(loc="outside right upper", ncols=columns, frameon=False, fontsize="x-small")
    else:
        axes.legend(frameon=False)
    return figure


def plot_drift(
    values: Mapping[int, Tensor], changes: Mapping[int, Collection[int]], metric: str = "val/acc"
) -> "Figure":
    """Plot a metric of clients by round: of clients whose samples change, and of the others.

    Args:
        values: the metric of all clients ``[clients]`` by round; NaN for clients without.
        changes: ids of the clients whose samples change, by the round in which a change begins or ends; at least one.
        metric: name of the metric.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    rounds = sorted(values)
    table = np.array([np.asarray(values[round], dtype=float) for round in rounds])
    changing = set().union(*changes.values())
    groups = {
        "with a change": [client for client in range(table.shape[1]) if client in changing],
        "without": [client for client in range(table.shape[1]) if client not in changing],
    }
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for (name, clients), colour, style in zip(groups.items(), ("C3", "C0"), ("-", "--"), strict=True):
        if not clients:
            continue
        axes.plot(rounds, table[:, clients], color=colour, linewidth=0.6, alpha=0.35)
        # rounds without any value have no mean, which numpy would warn about
        known = ~np.isnan(table[:, clients]).all(1)
        means = np.nanmean(table[known][:, clients], 1)
        shown = [round for round, has in zip(rounds, known, strict=True) if has]
        label = f"{name}: mean of {len(clients)}"
        axes.plot(shown, means, color=colour, linewidth=2, linestyle=style, label=label)
    for index, (round, moved) in enumerate(sorted(changes.items())):
        axes.axvline(round, color="black", linewidth=0.8, linestyle=":")
        text = f"round {round}: {len(moved)} client{'s' * (len(moved) != 1)}"
        # two heights, as changes may follow each other closely
        height, place = 1.01 + 0.05 * (index % 2), axes.get_xaxis_transform()
        axes.text(round, height, text, transform=place, ha="center", va="bottom", fontsize="small")
    axes.set(xlabel="round", ylabel=in_words(metric))
    if metric.endswith("acc"):
        axes.yaxis.set_major_formatter(PercentFormatter(1, symbol=""))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    return figure


def plot_against_local_epochs(
    runs: Mapping[str, tuple[Any, float | Sequence[float]]], metric: str = "val/acc"
) -> "Figure":
    """Plot a metric against the local epochs of a client in all rounds so far, one line per run.

    Rounds favour methods that train long in each, such as KT-pFL with up to 20 epochs.

    Args:
        runs: by the run's name, the run as for `plot_curves`, and the local epochs per round, which the record
            doesn't contain: a number, or a list with one number per round from the first on, whose last
            number holds for later rounds.
        metric: the column to draw.

    Raises:
        MisconfigurationException: if epochs are missing, or one isn't above 0.
    """
    scaled = {name: _by_epochs(name, rows_of(run), epochs) for name, (run, epochs) in runs.items()}
    figure = plot_curves(scaled, metric)
    figure.axes[0].set_xlabel("local epochs")
    return figure


def _by_epochs(name: str, rows: Sequence[Mapping[str, Any]], epochs: float | Sequence[float]) -> list[dict[str, Any]]:
    """Return the rows with the number of epochs so far instead of the round's number."""
    by_round = [epochs] if isinstance(epochs, (int, float)) else list(epochs)
    if not by_round or min(by_round) <= 0:
        raise MisconfigurationException(
            f"runs[{name!r}]: local epochs {epochs} must be a number above 0, or at least one such number."
        )
    last = max((int(row["round"]) for row in rows), default=0)
    by_round += by_round[-1:] * (last - len(by_round))
    # 0 first: an evaluation before the first round has round 0
    done = [0, *accumulate(by_round)]
    return [{**row, "round": done[int(row["round"])]} for row in rows]


def in_words(column: str) -> str:
    """Return a record column's name for an axis.

    >>> in_words("test/acc"), in_words("val/loss"), in_words("test/global_acc"), in_words("lr")
    ('test accuracy, %', 'validation loss', "test accuracy, %, of the server's model", 'lr')

    Args:
        column: name of the column.
    """
    split, slash, metric = column.rpartition("/")
    server = metric.startswith("global_")
    metric = metric.removeprefix("global_")
    words = f"{SPLITS.get(split, split.replace('_', ' '))} " if slash else ""
    return f"{words}{METRICS.get(metric, metric)}" + (", of the server's model" if server else "")


def plot_clients(
    values: Mapping[str, Sequence[float]], metric: str = "test/acc", label: str | None = None, note: str = ""
) -> "Figure":
    """Plot the spread of a metric over clients: one box per method, from quartile to quartile, one dot per client.

    Args:
        values: metric of all clients and seeds, by method; at least one value each.
        metric: the metric's column.
        label: label of the axis of values, which are then drawn as they are; None for the metric's words.
        note: text above the picture.
    """
    # imported on use, as matplotlib is slow to import; Figure and not pyplot, which keeps every figure in memory
    from matplotlib.figure import Figure

    # matplotlib counts from the bottom: reversed, the first method stands on top
    names = list(values)[::-1]
    figure = Figure(figsize=(8, 1.2 + 0.28 * len(names)), layout="constrained")
    axes = figure.subplots()
    percent = 100 if metric.endswith("acc") and label is None else 1
    scaled = [[percent * value for value in values[name]] for name in names]
    places = range(1, len(names) + 1)
    # no separate outliers: the dots show every client
    axes.boxplot(scaled, orientation="horizontal", showfliers=False, widths=0.6, medianprops={"color": "C1"})
    for place, each in zip(places, scaled, strict=True):
        axes.plot(each, [place] * len(each), ".", color="C0", alpha=0.35, markersize=4)
    axes.set_yticks(list(places), names)
    axes.set(xlabel=label or f"{in_words(metric)}, a dot a client and seed")
    axes.set_title(fill(note, 110), fontsize="small", loc="left")
    axes.grid(axis="x", alpha=0.3)
    return figure


def plot_by_client(
    points: Mapping[str, Mapping[str, Sequence[float]]],
    label: str,
    zero: bool = False,
    empty: Mapping[str, str] = MappingProxyType({}),
) -> "Figure":
    """Plot one dot per client and method, with its interval as a line; clients from top to bottom.

    Args:
        points: (value, lower end, upper end) by method and client; NaN for an unknown end.
        label: label of the axis of values.
        zero: whether to draw a line at 0.
        empty: texts at the places of clients without a dot, by client.
    """
    from matplotlib.figure import Figure

    clients = list(dict.fromkeys([*(client for own in points.values() for client in own), *empty]))
    # each client has room for all of its methods
    step = 0.8 / len(points)
    figure = Figure(figsize=(8, 1.4 + len(clients) * max(0.3, 0.14 * len(points))), layout="constrained")
    axes = figure.subplots()
    for number, (method, own) in enumerate(points.items()):
        places = [clients.index(client) - 0.4 + (number + 0.5) * step for client in own]
        values, lows, highs = zip(*own.values(), strict=True)
        # ten colours, then the same ten with other markers
        color, marker = f"C{number % 10}", "osDv^"[number // 10 % 5]
        axes.plot(values, places, linestyle="none", markersize=4, label=method, color=color, marker=marker)
        axes.hlines(places, lows, highs, color=color, linewidth=1)
    if zero:
        axes.axvline(0, color="0.4", linewidth=0.8)
    for client, text in empty.items():
        place = 0.02, clients.index(client)
        axes.text(*place, text, transform=axes.get_yaxis_transform(), va="center", fontsize="small", color="0.4")
    axes.set_yticks(range(len(clients)), clients)
    axes.set_ylim(len(clients) - 0.5, -0.5)
    axes.set(xlabel=label)
    axes.grid(axis="x", alpha=0.3)
    figure.legend(loc="outside right upper", fontsize="small")
    return figure


def plot_cross_matrix(
    values: Sequence[Sequence[float]], models: Sequence[str], clients: Sequence[str], metric: str = "test/acc"
) -> "Figure":
    """Plot a heat map of each client's model on every client's rows; a frame marks each model's own client.

    Args:
        values: the metric by model and client; NaN is left grey.
        models: names of the models' clients, from top to bottom.
        clients: names of the rows' clients, from left to right.
        metric: the metric's column.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    percent = 100 if metric.endswith("acc") else 1
    table = percent * np.array(values, dtype=float)
    down, across = table.shape
    size = 2 + 0.42 * min(across, 25), 1.5 + 0.36 * min(down, 25)
    figure = Figure(figsize=(max(size[0], 4.2), max(size[1], 2.8)), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(table, aspect="auto", cmap="Blues", interpolation="nearest")
    axes.set_facecolor("lightgrey")
    axes.set(xlabel="test rows of client", ylabel="model of client", title="Each client's model on every client's rows")
    for set_ticks, names, turned in ((axes.set_xticks, clients, 60), (axes.set_yticks, models, 0)):
        places = range(0, len(names), 1 + (len(names) - 1) // 25)
        set_ticks(places, [axis_label(place, names) for place in places], rotation=turned)
    for row, model in enumerate(models):
        if model in clients:
            place = clients.index(model) - 0.5, row - 0.5
            axes.add_patch(Rectangle(place, 1, 1, fill=False, edgecolor="C1", linewidth=1.5))
    # figures of more cells would overlap
    if max(down, across) <= 12:
        middle = (np.nanmin(table) + np.nanmax(table)) / 2
        for (row, column), value in np.ndenumerate(table):
            if not np.isnan(value):
                text, color = f"{value:.0f}" if percent > 1 else f"{value:.3g}", "white" if value > middle else "black"
                axes.text(column, row, text, ha="center", va="center", color=color, fontsize="small")
    figure.colorbar(image, ax=axes, label=in_words(metric))
    return figure


def plot_sizes(clients: Sequence[Mapping[str, Any]]) -> "Figure":
    """Plot each client's number of training samples; above each bar the number of classes if known.

    Args:
        clients: rows of ``clients.csv``.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 2.6), layout="constrained")
    axes = figure.subplots()
    sizes = [int(row["samples"]) for row in clients]
    bars = axes.bar(range(len(sizes)), sizes, color="C0")
    # more than 40 numbers would overlap
    if len(sizes) <= 40 and all(row.get("classes") for row in clients):
        axes.bar_label(bars, [str(row["classes"]) for row in clients], fontsize="x-small")
        axes.set_title("Training samples by client; above each client its classes", fontsize="small")
    axes.set(xlabel="client", ylabel="training samples")
    # names of many clients would overlap
    if len(sizes) <= 40 and all(row.get("name") for row in clients):
        names = [str(row["name"]) for row in clients]
        axes.set_xticks(range(len(sizes)), [axis_label(place, names) for place in range(len(sizes))], rotation=60)
    return figure
