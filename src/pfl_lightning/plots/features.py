"""Figures of clients' features: embedded samples, and units that decide."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.figure import Figure

TSNE_COLUMNS = ("client", "label", "x", "y")
NAMED_COLOURS = 20
WRITTEN_CLIENTS = 10


def plot_tsne(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> "Figure":
    """Plot embedded features of all clients: two panels per run, coloured by label and by client.

    A colour means the same label, or client, in all rows. Only neighbourhoods have a meaning, so axes have no numbers.

    Args:
        runs: by the run's name, rows of `FeaturePictures`' ``tsne.csv``: ``client``, ``label``, ``x``, ``y``.
    """
    # imported on use, as matplotlib is slow to import; Figure and not pyplot, which keeps every figure in memory
    from matplotlib.figure import Figure

    tables = {
        name: np.array([[float(row[column]) for column in TSNE_COLUMNS] for row in rows]).reshape(-1, 4)
        for name, rows in runs.items()
    }
    figure = Figure(figsize=(10.4, 0.2 + 4.3 * len(tables)), layout="constrained")
    grid = figure.subplots(len(tables), 2, squeeze=False)
    for index, quantity in enumerate(("label", "client")):
        column = TSNE_COLUMNS.index(quantity)
        # over all runs, so that a client or label keeps its colour from row to row
        values = np.unique(np.concatenate([points[:, column] for points in tables.values()])).astype(int)
        colours = _colours(len(values))
        for axes, (name, points) in zip(grid[:, index], tables.items(), strict=True):
            # shuffled, with a fixed seed: in the order of clients, the last client would cover the others
            points = np.random.RandomState(0).permutation(points)
            axes.scatter(
                *points[:, 2:].T,
                c=colours.to_rgba(np.searchsorted(values, points[:, column])),
                s=float(np.clip(400 / np.sqrt(max(len(points), 1)), 3, 24)),
                alpha=0.8,
                linewidths=0,
            )
            axes.set_title(f"{name}: by {quantity}" if name else f"By {quantity}", fontsize="medium")
            axes.set(xticks=[], yticks=[])
            axes.set_aspect("equal", "datalim")
        shown = range(0, len(values), 1 + (len(values) - 1) // NAMED_COLOURS)
        # a colour bar and no legend: it holds any number of clients
        bar = figure.colorbar(colours, ax=grid[:, index].tolist(), label=quantity, aspect=40, ticks=shown)
        bar.ax.set_yticklabels(values[shown].tolist())
        bar.ax.tick_params(length=0, labelsize="small")
    return figure


def _colours(count: int) -> "ScalarMappable":
    """Return a colour for each number from 0 on: from a palette for few numbers, else along a scale."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, Normalize

    if count <= NAMED_COLOURS:
        colours = colormaps["tab10" if count <= 10 else "tab20"](np.arange(count))
    else:
        colours = colormaps["turbo"](np.linspace(0, 1, count))
    return ScalarMappable(Normalize(-0.5, count - 0.5), ListedColormap(colours))


def plot_conductance(conductance: Tensor, clients: Sequence[int], title: str = "") -> "Figure":
    """Plot the ranks of units' conductance by client, and the rank correlation between clients.

    Units are sorted by the first client's conductance: the more alike the other columns, the more clients decide by the
    same units.

    Args:
        conductance: ``layer_conductance`` of one image, one row per client ``[clients, units]``.
        clients: ids of the clients.
        title: title above both panels.
    """
    from matplotlib.figure import Figure
    from scipy.stats import rankdata

    # ranks, since magnitudes of conductance depend on each client's scale of logits
    ranks = rankdata(conductance.double().numpy(), axis=1)
    correlation = spearman(conductance)
    others = correlation[~np.eye(len(clients), dtype=bool)]
    size = float(np.clip(1.8 + 0.16 * len(clients), 3, 5))
    figure = Figure(figsize=(2.5 + 2.1 * size, 1.3 + size), layout="constrained")
    figure.suptitle(title)
    left, right = figure.subplots(1, 2)
    image = left.imshow(ranks[:, np.argsort(ranks[0])].T, aspect="auto", interpolation="nearest", cmap="viridis")
    left.set_title("Rank of each unit's conductance", fontsize="medium")
    left.set(xlabel="client", ylabel=f"units, sorted by client {clients[0]}", yticks=[])
    figure.colorbar(image, ax=left, label="rank, 1 is the lowest")
    image = right.imshow(correlation, interpolation="nearest", cmap="RdBu_r", vmin=-1, vmax=1)
    right.set_facecolor("lightgrey")
    known = others[~np.isnan(others)]
    mean = f", mean {known.mean():.2f}" if len(known) else ""
    right.set_title(f"Rank correlation of clients{mean}", fontsize="medium")
    right.set(xlabel="client", ylabel="client")
    if len(clients) <= WRITTEN_CLIENTS:
        _write_values(right, correlation)
    figure.colorbar(image, ax=right, fraction=0.046, label="Spearman's rank correlation")
    places = range(0, len(clients), 1 + (len(clients) - 1) // NAMED_COLOURS)
    names = [str(clients[index]) for index in places]
    for axis in (left.xaxis, right.xaxis, right.yaxis):
        axis.set_ticks(places, names, fontsize="small")
    return figure


def spearman(values: Tensor) -> Any:
    """Return Spearman's rank correlation between rows.

    >>> import torch
    >>> spearman(torch.tensor([[1.0, 2.0, 3.0], [5.0, 7.0, 70.0], [3.0, 2.0, 1.0]])).round(2).tolist()
    [[1.0, 1.0, -1.0], [1.0, 1.0, -1.0], [-1.0, -1.0, 1.0]]

    Args:
        values: ``[n, d]``.

    Returns:
        An array ``[n, n]``; NaN for a row of equal values.
    """
    from scipy.stats import rankdata

    ranks = rankdata(values.double().numpy(), axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        # reshaped, as corrcoef of a single row returns a number
        return np.corrcoef(ranks).reshape(len(ranks), len(ranks))


def _write_values(axes: "Axes", matrix: Any) -> None:
    """Write each value into its cell, in a colour that contrasts with the cell's."""
    for (row, column), value in np.ndenumerate(matrix):
        if not np.isnan(value):
            colour = "white" if abs(value) > 0.6 else "black"
            axes.text(column, row, f"{value:.2f}", ha="center", va="center", color=colour, fontsize="x-small")
