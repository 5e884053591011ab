"""Heatmaps of values by client and class."""

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
    """Plot heatmaps side by side on one colour scale, so that colours are comparable.

    A panel with negative values is a difference: it has its own scale, white at 0. NaN is left grey.

    Args:
        panels: matrices ``[M, K]`` by title; ``[K, K]`` for class models.
        label: name of the values, beside the colour bars.
        rows: meaning of a row.
        columns: meaning of a column.
    """
    # imported on use, as matplotlib is slow to import; Figure and not pyplot, which keeps every figure in memory
    from matplotlib.figure import Figure

    values = {title: matrix.detach().cpu().double().numpy() for title, matrix in panels.items()}
    figure = Figure(figsize=_size(values), layout="constrained")
    width = min(len(values), PANELS_A_ROW)
    grid = figure.subplots(-(-len(values) // width), width, squeeze=False)
    # a difference needs a scale of both signs, on which counts and shares would lose half of the colours
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
    """Plot a heatmap of the sources' shares in each client's next start.

    Args:
        mixing: shares ``[M, S]`` of S sources, rows sum to 1.
    """
    return plot_class_heatmaps({"Mixing matrix": mixing}, "share in the client's start", "client", "source")


def _heatmap(axes: "Axes", matrix: Any, **scale: Any) -> Any:
    """Draw a heatmap with at most about ten labels per axis."""
    image = axes.imshow(matrix, aspect="auto", interpolation="nearest", **scale)
    # shines through at NaN, so that a missing value looks like no value of the scale
    axes.set_facecolor("lightgrey")
    for axis, length in zip((axes.yaxis, axes.xaxis), matrix.shape, strict=True):
        axis.set_ticks(range(0, length, 1 + (length - 1) // 10))
    return image


def _size(values: Mapping[str, Any]) -> tuple[float, float]:
    """Return the figure's size in inches: cells stay visible up to 20 x 100, labels fit around 2 x 2."""
    tall, wide = np.max([matrix.shape for matrix in values.values()], axis=0)
    across = min(len(values), PANELS_A_ROW)
    down = -(-len(values) // across)
    return 1.2 + across * float(np.clip(1 + 0.2 * wide, 2.6, 6)), down * float(np.clip(1.2 + 0.14 * tall, 2.8, 6))


def _range(matrices: list[Any]) -> tuple[float, float]:
    """Return 0 and the largest value."""
    # from 0: on a scale that starts at the smallest value, small differences between rows would look large
    return 0.0, max((float(np.nanmax(matrix, initial=0)) for matrix in matrices), default=0.0)
