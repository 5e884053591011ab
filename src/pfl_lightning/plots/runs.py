"""Pictures of partitions and of whole runs."""

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_partition(counts: Tensor) -> "Figure":
    """Heatmap of who holds what: training samples by client and class.

    Args:
        counts: samples ``[clients, classes]``.
    """
    from matplotlib.figure import Figure

    clients, classes = counts.shape
    figure = Figure(figsize=(2 + 0.3 * min(classes, 40), 1.5 + 0.22 * min(clients, 60)), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(np.asarray(counts), aspect="auto", cmap="Blues", interpolation="nearest")
    axes.set(xlabel="class", ylabel="client", title="Training samples by client and class")
    for axis, length in ((axes.xaxis, classes), (axes.yaxis, clients)):
        axis.set_ticks(range(0, length, 1 + (length - 1) // 25))
    figure.colorbar(image, ax=axes, label="samples")
    return figure


def plot_curves(runs: Mapping[str, Sequence[Mapping[str, Any]]], metric: str = "val/acc") -> "Figure":
    """A metric against the rounds, a line a run.

    Args:
        runs: rows of ``rounds.csv`` (or of `RoundRecord`) by the run's name.
        metric: the column to draw.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(6.4, 4), layout="constrained")
    axes = figure.subplots()
    # methods that differ little lie on each other: dashes let the lower line show
    for (name, rows), style in zip(runs.items(), cycle(("-", "--", "-.", ":"))):
        points = [(int(row["round"]), float(row[metric])) for row in rows if row.get(metric) not in (None, "")]
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, linestyle=style, label=name)
    axes.set(xlabel="round", ylabel=metric)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    return figure
