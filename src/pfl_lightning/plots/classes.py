"""Heatmaps of what clients, or class models, hold of each class."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANELS_A_ROW = 4


def plot_class_heatmaps(
    panels: Mapping[str, Tensor], label: str = "", rows: str = "client", columns: str = "class"
) -> "Figure":
    """Heatmaps side by side, on one colour scale, so that colours mean the same in all of them.

    A panel with negative values is a difference: it has a scale of its own, white at 0. NaN is left grey.

    Args:
        panels: matrices ``[M, K]`` by title; ``[K, K]`` for class models.
        label: what the values are, beside the colour bars.
        rows: what a row stands for.
        columns: what a column stands for.
    """
    from matplotlib.figure import Figure

    values = {title: matrix.detach().cpu().double().numpy() for title, matrix in panels.items()}
    figure = Figure(figsize=_size(values), layout="constrained")
    width = min(len(values), PANELS_A_ROW)
    grid = figure.subplots(-(-len(values) // width), width, squeeze=False)
    signed = {title for title, matrix in values.items() if np.nanmin(matrix, initial=0) < 0}
    low, high = _range([matrix for title, matrix in values.items() if title not in signed])
    shared = []
    for axes, (title, matrix) in zip(grid.flat, values.items(), strict=False):
        reach = np.nanmax(np.abs(matrix), initial=0)
        scale = {"cmap": "RdBu_r", "vmin": -reach, "vmax": reach} if title in signed else {"vmin": low, "vmax": high}
        image = _heatmap(axes, matrix, **{"cmap": "viridis", **scale})
        axes.set(title=title, xlabel=columns, ylabel=rows)
        if title in signed:
            figure.colorbar(image, ax=axes, label=label)
        else:
            shared.append((axes, image))
    for axes in grid.flat[len(values) :]:
        axes.remove()
    if shared:
        figure.colorbar(shared[-1][1], ax=[axes for axes, _ in shared], label=label)
    return figure


def plot_mixing_matrix(mixing: Tensor) -> "Figure":
    """Heatmap of whose uploads make up each client's next start.

    Args:
        mixing: shares ``[M, S]`` of S sources, rows sum to 1.
    """
    return plot_class_heatmaps({"Mixing matrix": mixing}, "share in the client's start", "client", "source")


def _heatmap(axes: "Axes", matrix: Any, **scale: Any) -> Any:
    image = axes.imshow(matrix, aspect="auto", interpolation="nearest", **scale)
    axes.set_facecolor("lightgrey")
    for axis, length in zip((axes.yaxis, axes.xaxis), matrix.shape, strict=True):
        axis.set_ticks(range(0, length, 1 + (length - 1) // 10))
    return image


def _size(values: Mapping[str, Any]) -> tuple[float, float]:
    """Inches: cells stay visible up to 20 x 100, and labels fit around 2 x 2."""
    tall, wide = np.max([matrix.shape for matrix in values.values()], axis=0)
    across = min(len(values), PANELS_A_ROW)
    down = -(-len(values) // across)
    return 1.2 + across * float(np.clip(1 + 0.2 * wide, 2.6, 6)), down * float(np.clip(1.2 + 0.14 * tall, 2.8, 6))


def _range(matrices: list[Any]) -> tuple[float, float]:
    """0 and the largest value; differences between rows would look larger on a scale that starts at the smallest."""
    return 0.0, max((float(np.nanmax(matrix, initial=0)) for matrix in matrices), default=0.0)
