"""Figures for a comparison of methods: metrics and samples of clients."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pfl_lightning.data.client_names import axis_label
from pfl_lightning.plots.runs import in_words

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_clients(values: Mapping[str, Sequence[float]], metric: str = "test/acc") -> "Figure":
    """Plot the spread of a metric over clients: one box per method, from quartile to quartile, one dot per client.

    Args:
        values: metric of all clients and seeds, by method; at least one value each.
        metric: the metric's column.
    """
    # imported on use, as matplotlib is slow to import; Figure and not pyplot, which keeps every figure in memory
    from matplotlib.figure import Figure

    # matplotlib counts from the bottom: reversed, the first method stands on top
    names = list(values)[::-1]
    figure = Figure(figsize=(8, 1.2 + 0.28 * len(names)), layout="constrained")
    axes = figure.subplots()
    percent = 100 if metric.endswith("acc") else 1
    scaled = [[percent * value for value in values[name]] for name in names]
    places = range(1, len(names) + 1)
    # no separate outliers: the dots show every client
    axes.boxplot(scaled, orientation="horizontal", showfliers=False, widths=0.6, medianprops={"color": "C1"})
    for place, each in zip(places, scaled, strict=True):
        axes.plot(each, [place] * len(each), ".", color="C0", alpha=0.35, markersize=4)
    axes.set_yticks(list(places), names)
    axes.set(xlabel=f"{in_words(metric)}, a dot a client and seed")
    axes.grid(axis="x", alpha=0.3)
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
    # names of many clients would overlap
    if len(sizes) <= 40 and all(row.get("name") for row in clients):
        names = [str(row["name"]) for row in clients]
        axes.set_xticks(range(len(sizes)), [axis_label(place, names) for place in range(len(sizes))], rotation=60)
    return figure
