"""Pictures of what clients get and hold, for comparing methods."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pfl_lightning.plots.words import in_words

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_clients(values: Mapping[str, Sequence[float]], metric: str = "test/acc") -> "Figure":
    """How a metric is spread over clients: a box a method, from quartile to quartile, and a dot a client.

    Args:
        values: of all clients and seeds, by method; at least one each.
        metric: the column that they are of.
    """
    from matplotlib.figure import Figure

    names = list(values)[::-1]
    figure = Figure(figsize=(8, 1.2 + 0.28 * len(names)), layout="constrained")
    axes = figure.subplots()
    percent = 100 if metric.endswith("acc") else 1
    scaled = [[percent * value for value in values[name]] for name in names]
    places = range(1, len(names) + 1)
    axes.boxplot(scaled, orientation="horizontal", showfliers=False, widths=0.6, medianprops={"color": "C1"})
    for place, each in zip(places, scaled, strict=True):
        axes.plot(each, [place] * len(each), ".", color="C0", alpha=0.35, markersize=4)
    axes.set_yticks(list(places), names)
    axes.set(xlabel=f"{in_words(metric)}, a dot a client and seed")
    axes.grid(axis="x", alpha=0.3)
    return figure


def plot_sizes(clients: Sequence[Mapping[str, Any]]) -> "Figure":
    """How many training samples each client has, and of how many classes where that is known.

    Args:
        clients: rows of ``clients.csv``.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 2.6), layout="constrained")
    axes = figure.subplots()
    sizes = [int(row["samples"]) for row in clients]
    bars = axes.bar(range(len(sizes)), sizes, color="C0")
    if len(sizes) <= 40 and all(row.get("classes") for row in clients):
        axes.bar_label(bars, [str(row["classes"]) for row in clients], fontsize="x-small")
        axes.set_title("above each client its classes", fontsize="small")
    axes.set(xlabel="client", ylabel="training samples")
    return figure
