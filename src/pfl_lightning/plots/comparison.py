"""Figures for a comparison of methods: metrics and samples of clients."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pfl_lightning.plots.runs import in_words

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_clients(values: Mapping[str, Sequence[float]], metric: str = "test/acc", label: str | None = None) -> "Figure":
    """Plot the spread of a metric over clients: one box per method, from quartile to quartile, one dot per client.

    Args:
        values: metric of all clients and seeds, by method; at least one value each.
        metric: the metric's column.
        label: label of the axis of values, which are then drawn as they are; None for the metric's words.
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
    axes.grid(axis="x", alpha=0.3)
    return figure


def plot_by_client(points: Mapping[str, Mapping[str, Sequence[float]]], label: str, zero: bool = False) -> "Figure":
    """Plot one dot per client and method, with its interval as a line; clients from top to bottom.

    Args:
        points: (value, lower end, upper end) by method and client; NaN for an unknown end.
        label: label of the axis of values.
        zero: whether to draw a line at 0.
    """
    from matplotlib.figure import Figure

    clients = list(dict.fromkeys(client for own in points.values() for client in own))
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
    axes.set_yticks(range(len(clients)), clients)
    axes.set_ylim(len(clients) - 0.5, -0.5)
    axes.set(xlabel=label)
    axes.grid(axis="x", alpha=0.3)
    figure.legend(loc="outside right upper", fontsize="small")
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
        axes.set_title("above each client its classes", fontsize="small")
    axes.set(xlabel="client", ylabel="training samples")
    return figure
