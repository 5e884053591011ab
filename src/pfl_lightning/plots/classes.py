"""Figures by class: heatmaps by client, and distributions estimated from the rows of an output layer."""

from collections.abc import Mapping, Sequence
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
    # from 0: on a scale that starts at the smallest value, small differences between rows would look large
    high = max(
        (float(np.nanmax(matrix, initial=0)) for title, matrix in values.items() if title not in signed), default=0.0
    )
    shared = []
    for axes, (title, matrix) in zip(grid.flat, values.items(), strict=False):
        reach = np.nanmax(np.abs(matrix), initial=0)
        scale = {"cmap": "RdBu_r", "vmin": -reach, "vmax": reach} if title in signed else {"vmin": 0.0, "vmax": high}
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


NAMED_CLASSES = 4


def plot_distribution_trace(traces: Mapping[str, Tensor], p: Tensor) -> "Figure":
    """Plot the estimated class distribution step by step, one line per class; dotted lines at the true shares.

    The client's largest classes have colours and dotted lines, the others are grey.

    Args:
        traces: the estimates ``[steps, K]`` by title, from `trace_distribution`.
        p: the client's class distribution ``[K]``.
    """
    # imported on use, as matplotlib is slow to import; Figure and not pyplot, which keeps every figure in memory
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1 + 4.2 * len(traces), 4), layout="constrained")
    grid = figure.subplots(1, len(traces), sharey=True, squeeze=False)
    for axes, (title, trace) in zip(grid.flat, traces.items(), strict=True):
        _draw_trace(axes, trace, p)
        axes.set(title=title, xlabel="iteration")
    grid.flat[0].set(ylabel="class distribution", ylim=(0, None))
    handles, labels = grid.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=NAMED_CLASSES, title="estimate (dotted: true)")
    return figure


def _draw_trace(axes: "Axes", trace: Tensor, p: Tensor) -> None:
    """Draw one trace."""
    # a hundred coloured lines, as of CIFAR-100, couldn't be told apart
    largest = [j for j in p.argsort(descending=True).tolist()[:NAMED_CLASSES] if p[j] > 0]
    colours = {j: f"C{index}" for index, j in enumerate(largest)}
    for j, line in enumerate(trace.T.tolist()):
        named = j in colours
        axes.plot(
            line,
            color=colours.get(j, "grey"),
            linewidth=1.5 if named else 0.6,
            alpha=1 if named else 0.5,
            zorder=3 if named else 2,
            label=f"class {j}" if named else None,
        )
    for j, colour in colours.items():
        axes.axhline(float(p[j]), color=colour, linestyle=":", linewidth=1.2)
    axes.grid(alpha=0.3)


def plot_distribution_scatter(pairs: Mapping[str, tuple[Tensor, Tensor]]) -> "Figure":
    """Plot true shares of classes against estimated shares; both agree on the diagonal.

    Args:
        pairs: shares and estimates by name, of one shape: ``[K]`` of one client or ``[M, K]`` of many; NaN is left out.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6, 4.4), layout="constrained")
    axes = figure.subplots()
    axes.axline((0, 0), slope=1, color="grey", linestyle="--", linewidth=1, zorder=1)
    markers = ("o", "^", "s", "D")
    for index, (name, (p, estimate)) in enumerate(pairs.items()):
        marker = markers[index % len(markers)]
        axes.scatter(p.flatten().tolist(), estimate.flatten().tolist(), s=16, alpha=0.7, marker=marker, label=name)
    axes.set(xlabel="true share of the class", ylabel="share estimated from row norms")
    top = 1.05 * max(float(side.nan_to_num().max()) for pair in pairs.values() for side in pair)
    # one scale for both axes, since the distance from the diagonal is the message
    axes.set(xlim=(-0.03 * top, top), ylim=(-0.03 * top, top), aspect="equal")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    return figure


def plot_lambda_sweep(lambdas: Sequence[float], accuracy: Sequence[float], distance: Sequence[float]) -> "Figure":
    """Plot accuracy and distance to the class distribution against the regulariser's weight.

    Args:
        lambdas: the weights, at least 0, ascending.
        accuracy: accuracy for each weight.
        distance: mean distance over clients for each weight.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator

    figure = Figure(figsize=(5.6, 3.8), layout="constrained")
    left = figure.subplots()
    # two axes: an accuracy and a distance have no common unit
    right = left.twinx()
    # logarithmic, with a linear stretch down to 0: without regulariser is the point of comparison
    left.set_xscale("symlog", linthresh=min((x for x in lambdas if x > 0), default=1.0), linscale=0.5)
    left.set_xticks(list(lambdas), [f"{x:g}" for x in lambdas])
    left.xaxis.set_minor_locator(NullLocator())
    for axes, values, label, colour, marker in (
        (left, accuracy, "accuracy", "C0", "o"),
        (right, distance, "mean distance to the class distribution", "C1", "s"),
    ):
        axes.plot(lambdas, values, color=colour, marker=marker)
        axes.set_ylabel(label, color=colour)
        axes.tick_params(axis="y", colors=colour)
    left.set_xlabel("lambda")
    right.set_ylim(bottom=0)
    left.grid(alpha=0.3)
    return figure
