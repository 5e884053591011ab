"""Figures of the similarity of clients' classifiers, and of clients' peers."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from pfl_lightning.data.client_names import axis_label
from pfl_lightning.methods.fedrema import is_over

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANELS_A_ROW = 5
FEW_ROUNDS = 50


def plot_similarity(
    similarities: Mapping[int, Tensor], groups: Sequence[int] | None = None, names: Sequence[str] = ()
) -> "Figure":
    """Plot heatmaps of the similarity of clients' classifiers, one panel and one colour scale per round.

    Each scale spans the similarities between different clients: similarities change more from round to round than
    within one round.

    Args:
        similarities: by round, matrices ``[K, K]``; NaN (left grey) for clients absent from the round.
        groups: the true group of each client ``[K]``: clients are sorted by group, and lines separate the groups.
        names: names of the clients by id; empty shows ids.
    """
    # imported on use, as matplotlib is slow to import; Figure and not pyplot, which keeps every figure in memory
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    down = -(-len(similarities) // PANELS_A_ROW)
    across = -(-len(similarities) // down)
    size = float(np.clip(1.4 + 0.07 * len(next(iter(similarities.values()))), 2.6, 4.2))
    figure = Figure(figsize=(max(1.3 * size * across, 3.6), 0.4 + 1.1 * size * down), layout="constrained")
    figure.suptitle("Similarity of clients' classifiers")
    grid = figure.subplots(down, across, squeeze=False)
    for axes, (round, matrix) in zip(grid.flat, similarities.items(), strict=False):
        values = matrix.double().numpy()
        # without the diagonal, whose similarity of 1 would use up the whole scale
        others = values[~np.eye(len(values), dtype=bool) & ~np.isnan(values)]
        low, high = (others.min(), others.max()) if others.size else (0.0, 1.0)
        # at least 1e-9 wide: otherwise rounding errors alone would be drawn in the strongest colours
        image = _pairs(axes, values, groups, names, vmin=min(low, high - 1e-9), vmax=high)
        axes.set_title(f"round {round}", fontsize="medium")
        figure.colorbar(image, ax=axes, fraction=0.046, ticks=MaxNLocator(5)).ax.tick_params(labelsize="small")
    for axes in grid.flat[len(similarities) :]:
        axes.remove()
    return figure


def plot_peer_counts(counts: Tensor, groups: Sequence[int] | None = None, names: Sequence[str] = ()) -> "Figure":
    """Plot a heatmap of the number of rounds in which each client had each other client as peer.

    Args:
        counts: G ``[K, K]``, one row per client.
        groups: the true group of each client ``[K]``: clients are sorted by group, and lines separate the groups.
        names: names of the clients by id; empty shows ids.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    size = float(np.clip(2 + 0.12 * len(counts), 3.4, 7))
    figure = Figure(figsize=(1.25 * size, size), layout="constrained")
    axes = figure.subplots()
    image = _pairs(axes, counts.double().numpy(), groups, names, vmin=0)
    axes.set(title="Peers in the co-learning period", xlabel="peer", ylabel="client")
    figure.colorbar(image, ax=axes, fraction=0.046, label="rounds", ticks=MaxNLocator(integer=True))
    return figure


def _pairs(axes: "Axes", matrix: Any, groups: Sequence[int] | None, names: Sequence[str], **scale: Any) -> Any:
    """Draw a heatmap of clients by clients, in the order of their groups."""
    clients = len(matrix)
    order = list(range(clients)) if groups is None else sorted(range(clients), key=lambda client: groups[client])
    image = axes.imshow(matrix[np.ix_(order, order)], interpolation="nearest", cmap="viridis", **scale)
    axes.set_facecolor("lightgrey")
    places = range(0, clients, 1 + (clients - 1) // 10)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks(places, [axis_label(order[index], names) for index in places], fontsize="small")
    # ids are short, and names would run into each other
    if names:
        axes.tick_params(axis="x", rotation=90)
    if groups is not None:
        for index in range(1, clients):
            if groups[order[index]] != groups[order[index - 1]]:
                axes.axhline(index - 0.5, color="white", linewidth=1)
                axes.axvline(index - 0.5, color="white", linewidth=1)
    return image


def plot_gaps(rounds: Sequence[int], gaps: Sequence[float], delta: float) -> "Figure":
    r"""Plot the mean gap :math:`\bar\Delta^t` by round, its running maximum, and the threshold delta times the maximum.

    The period of FedReMa's co-learning ends in the first round at or below the threshold.

    Args:
        rounds: numbers of the rounds.
        gaps: mean gap of each round.
        delta: share of the maximum at which the period ends.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.8, 4), layout="constrained")
    axes = figure.subplots()
    highest = list(accumulate(gaps, max))
    axes.plot(rounds, gaps, color="C0", zorder=3, label=r"mean gap $\bar\Delta^t$", **_marker(rounds))
    # steps: the maximum holds from its round on, and isn't approached before
    axes.step(rounds, highest, where="post", color="grey", linewidth=1.2, label="running maximum")
    threshold = [delta * value for value in highest]
    label = rf"$\delta$ times it, $\delta={delta:g}$"
    axes.step(rounds, threshold, where="post", color="C1", linestyle="--", linewidth=1.2, label=label)
    # by the method's own rule, so that figure and method can't disagree
    ends = (index for index in range(len(gaps)) if is_over(list(gaps[: index + 1]), delta))
    if (end := next(ends, None)) is not None:
        axes.axvline(rounds[end], color="C3", linestyle=":", label=f"end of the period, round {rounds[end]}")
        axes.axvspan(rounds[0], rounds[end], color="C3", alpha=0.05, linewidth=0)
    axes.set(title="Mean of the largest gaps in clients' similarities", xlabel="round", ylabel="gap", ylim=(0, None))
    _whole_rounds(axes)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize="small")
    return figure


def plot_peers(
    rounds: Sequence[int],
    peers: Sequence[Sequence[int]],
    precision: Sequence[float] | None = None,
    chance: float | None = None,
) -> "Figure":
    """Plot the number of peers per client by round; below, the share of peers of the client's true group.

    Args:
        rounds: numbers of the rounds.
        peers: for each round, the number of peers of each participating client.
        precision: mean precision of each round, if true groups are known.
        chance: precision of randomly drawn peers.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.8, 3 if precision is None else 5), layout="constrained")
    grid = figure.subplots(1 if precision is None else 2, 1, sharex=True, squeeze=False)[:, 0]
    axes = grid[0]
    # the band shows clients without any peer, which a mean hides
    low, high = list(map(min, peers)), list(map(max, peers))
    axes.fill_between(rounds, low, high, color="C0", alpha=0.15, linewidth=0, label="fewest to most")
    axes.plot(rounds, list(map(fmean, peers)), color="C0", label="mean", **_marker(rounds))
    axes.set(title="Peers of a client, itself among them", ylabel="peers", ylim=(0, None))
    axes.legend(frameon=False, fontsize="small")
    if precision is not None:
        axes = grid[1]
        axes.plot(rounds, precision, color="C2", label="mean", **_marker(rounds))
        if chance is not None:
            axes.axhline(chance, color="grey", linestyle="--", linewidth=1, label="by chance")
        axes.set(title="Peers that are of the client's true group", ylabel="precision", ylim=(0, 1.03))
        axes.legend(frameon=False, fontsize="small")
    for axes in grid:
        _whole_rounds(axes)
    axes.set_xlabel("round")
    return figure


def _marker(rounds: Sequence[int]) -> dict[str, Any]:
    """Return line settings with points, unless too many points would merge."""
    return {"marker": "o", "markersize": 3} if len(rounds) <= FEW_ROUNDS else {"linewidth": 1}


def _whole_rounds(axes: "Axes") -> None:
    """Label only whole rounds, and draw a grid."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
