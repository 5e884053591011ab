"""Figures of aggregation weights, and of the quantities behind the weights."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from pfl_lightning.data.client_names import axis_label
from pfl_lightning.runs.report import columns_of, numbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WEIGHT, SAMPLES, NORM = r"$\lambda_k$", r"$n_k/n$", r"$\|\tau_k\|_2$"
NAMED_CLIENTS = 6
LABELLED_POINTS = 20
PANELS_A_ROW = 4
FEW_ROUNDS = 50


def plot_weights(rounds: Sequence[int], weights: Tensor, samples: Tensor, names: Sequence[str] = ()) -> "Figure":
    r"""Plot each client's weight :math:`\lambda_k` by round, one line per client; dashed at the share of samples.

    If clients take turns, points stand for lines, and a dash for the share. Of many clients, the ones with the weights
    farthest from their shares have colours, the others are grey.

    Args:
        rounds: numbers of the rounds.
        weights: the weights ``[rounds, clients]``; NaN for a client absent from the round.
        samples: :math:`n_k / n` of the round's clients, ``[rounds, clients]``.
        names: names of the clients by id; empty shows ids.
    """
    # imported on use, as matplotlib is slow to import; Figure and not pyplot, which keeps every figure in memory
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    figure = Figure(figsize=(7.6, 4.2), layout="constrained")
    axes = figure.subplots()
    lines, aims = weights.double().numpy(), samples.double().numpy()
    took_part = ~np.isnan(lines)
    # points, since a line through rounds without the client would show weights that never were
    solid: dict[str, Any] = {"linestyle": "", "marker": "o", "markersize": 3}
    dashed: dict[str, Any] = {"linestyle": "", "marker": "_", "markersize": 6}
    if took_part.all() and len(rounds) > 1:
        solid |= {"linestyle": "-", "linewidth": 1.4, "markersize": 3 if len(rounds) <= FEW_ROUNDS else 0}
        dashed = {"linestyle": "--", "linewidth": 1}
    # few names: more than six colours and labels can't be told apart
    named = _farthest(lines - aims)
    others = [client for client in np.flatnonzero(took_part.any(0)).tolist() if client not in named]
    faint = solid | {"color": "grey", "alpha": 0.4, "linewidth": 0.5, "markersize": solid["markersize"] / 2}
    for client in others:
        axes.plot(rounds, lines[:, client], **faint)
    for index, client in enumerate(named):
        axes.plot(rounds, aims[:, client], color=f"C{index}", **dashed)
        axes.plot(rounds, lines[:, client], color=f"C{index}", label=f"client {axis_label(client, names)}", **solid)
    axes.set(xlabel="round", ylabel=f"weight {WEIGHT}", title="Aggregation weights")
    _whole_rounds(axes)
    axes.grid(alpha=0.3)
    handles, _ = axes.get_legend_handles_labels()
    # one black entry for the shares of all clients, in place of one per client
    handles.append(Line2D([], [], color="black", label=SAMPLES, **dashed))
    if others:
        handles.append(Line2D([], [], label=f"{len(others)} others, nearer to {SAMPLES}", **faint))
    figure.legend(handles=handles, loc="outside right upper", frameon=False, fontsize="small")
    return figure


def _farthest(gap: Any) -> list[int]:
    """Return the clients with the largest mean gap over their rounds, in the order of ids."""
    # the mean over a client's own rounds, or clients that are rarely selected would never be named
    parts = ~np.isnan(gap)
    mean = np.nansum(np.abs(gap), axis=0) / np.maximum(parts.sum(0), 1)
    seen = [client for client in np.argsort(-mean, kind="stable") if parts[:, client].any()]
    return sorted(int(client) for client in seen[:NAMED_CLIENTS])


def plot_weight_heatmaps(
    rounds: Sequence[int], weights: Tensor, samples: Tensor, names: Sequence[str] = ()
) -> "Figure":
    r"""Plot heatmaps of weights :math:`\lambda_k` and of their difference to shares of samples, clients by rounds.

    Args:
        rounds: numbers of the rounds, consecutive.
        weights: the weights ``[rounds, clients]``; NaN, left grey, for a client absent from the round.
        samples: :math:`n_k / n` of the round's clients, ``[rounds, clients]``.
        names: names of the clients by id; empty shows ids.
    """
    from matplotlib.figure import Figure

    lines, gap = weights.double().numpy().T, (weights - samples).double().numpy().T
    # bounded, so that a thousand rounds or clients still make a figure that fits a page
    wide, tall = np.clip(2.4 + 0.12 * len(rounds), 4.4, 10), np.clip(1.3 + 0.1 * len(lines), 2.2, 6)
    figure = Figure(figsize=(float(wide), 2 * float(tall)), layout="constrained")
    highest = np.nanmax(lines, initial=0)
    # at least 1e-6 of the weights: otherwise rounding errors alone would be drawn in the strongest colours
    reach = max(np.nanmax(np.abs(gap), initial=0), 1e-6 * highest)
    panels = (
        ("Weights", lines, WEIGHT, "viridis", 0, highest),
        ("Weights minus shares of samples", gap, f"{WEIGHT}$-${SAMPLES}", "RdBu_r", -reach, reach),
    )
    extent = (rounds[0] - 0.5, rounds[-1] + 0.5, len(lines) - 0.5, -0.5)
    grid = figure.subplots(2, 1, sharex=True)
    for axes, (title, matrix, label, colours, low, high) in zip(grid, panels, strict=True):
        image = axes.imshow(
            matrix, cmap=colours, vmin=low, vmax=high, extent=extent, aspect="auto", interpolation="nearest"
        )
        axes.set_facecolor("lightgrey")
        axes.set(title=title, ylabel="client")
        places = range(0, len(lines), 1 + (len(lines) - 1) // 20)
        axes.set_yticks(places, [axis_label(client, names) for client in places])
        _whole_rounds(axes)
        figure.colorbar(image, ax=axes, label=label)
    grid[-1].set_xlabel("round")
    return figure


def plot_weights_against(
    weights: Tensor,
    samples: Tensor,
    norms: Tensor,
    clients: Sequence[int],
    title: str = "",
    names: Sequence[str] = (),
) -> "Figure":
    r"""Plot one round's weights :math:`\lambda_k` against shares of samples and against norms of client vectors.

    Args:
        weights: the weights ``[S]`` of the round's clients.
        samples: :math:`n_k / n`, ``[S]``; on the diagonal, weight and share agree.
        norms: :math:`\lVert\tau_k\rVert_2`, ``[S]``.
        clients: ids of the clients, printed beside the points if there are few.
        title: title above both panels.
        names: names of the clients by id; empty shows ids.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 4), layout="constrained")
    figure.suptitle(title)
    panels = ((samples, f"share of samples {SAMPLES}"), (norms, f"norm of the client vector {NORM}"))
    for axes, (values, label) in zip(figure.subplots(1, 2, sharey=True), panels, strict=True):
        axes.scatter(values.tolist(), weights.tolist(), s=18, alpha=0.7, zorder=3)
        axes.set(xlabel=label)
        axes.set_title(_rank_correlation(values, weights), fontsize="medium")
        axes.grid(alpha=0.3)
        # labels of more points would cover each other
        if len(clients) <= LABELLED_POINTS:
            for client, *point in zip(clients, values.tolist(), weights.tolist(), strict=True):
                axes.annotate(axis_label(client, names), point, (3, 3), textcoords="offset points", fontsize="x-small")
    left = figure.axes[0]
    left.set_ylabel(f"weight {WEIGHT}")
    centre = float(samples.mean())
    left.locator_params(axis="x", nbins=6)
    # through the mean, where weights and shares, both of sum 1, have their common centre
    left.axline((centre, centre), slope=1, color="grey", linestyle="--", linewidth=1, zorder=1)
    return figure


def plot_server_terms(rows: Sequence[Mapping[str, Any]]) -> "Figure":
    """Plot the server's logged values and its seconds by round, one panel each.

    Args:
        rows: rows of `RoundLogger`: ``round``, ``server/NAME``, ``time/aggregate``.
    """
    from matplotlib.figure import Figure

    numeric = [numbers(row) for row in rows]
    names = [name for name in columns_of(numeric) if name.startswith("server/")]
    names += [name for name in columns_of(numeric) if name == "time/aggregate"]
    across = max(1, min(len(names), PANELS_A_ROW))
    down = max(1, -(-len(names) // across))
    figure = Figure(figsize=(0.4 + 3.2 * across, 0.3 + 2.5 * down), layout="constrained")
    grid = figure.subplots(down, across, squeeze=False)
    for axes, name in zip(grid.flat, names, strict=False):
        points = [(row["round"], row[name]) for row in numeric if name in row]
        axes.plot(
            *zip(*points, strict=True), linewidth=1.2, marker="o", markersize=3 if len(points) <= FEW_ROUNDS else 0
        )
        axes.set(title=name.removeprefix("server/"), xlabel="round")
        # an offset beside the axis is easily overlooked, and all values read wrong
        axes.ticklabel_format(axis="y", useOffset=False)
        _whole_rounds(axes)
        axes.grid(alpha=0.3)
        if name == "time/aggregate":
            axes.set(title="aggregation time", ylabel="seconds", ylim=(0, None))
    for axes in grid.flat[len(names) :]:
        axes.remove()
    return figure


def plot_distances(labels: Tensor, panels: Mapping[str, Tensor], title: str = "") -> "Figure":
    """Plot distances of client vectors against distances of label distributions, one point per pair of clients.

    Args:
        labels: distances of the label distributions ``[pairs]``.
        panels: distances of the client vectors ``[pairs]`` by name; NaN, as from a zero vector, is left out.
        title: title above all panels.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(0.4 + 4 * len(panels), 4), layout="constrained")
    figure.suptitle(title)
    # a cloud of thousands of pairs shows its density
    point = {"s": 18, "alpha": 0.6} if len(labels) <= 500 else {"s": 6, "alpha": 0.2, "linewidths": 0}
    for axes, (name, distances) in zip(
        figure.subplots(1, len(panels), squeeze=False).flat, panels.items(), strict=True
    ):
        axes.scatter(labels.tolist(), distances.tolist(), zorder=3, **point)
        axes.set(xlabel="total variation of label distributions", ylabel=name)
        axes.set_title(_rank_correlation(labels, distances), fontsize="medium")
        axes.grid(alpha=0.3)
    return figure


def _rank_correlation(x: Tensor, y: Tensor) -> str:
    """Return Spearman's rank correlation as a title."""
    from scipy.stats import spearmanr

    x, y = x[known := ~(x.isnan() | y.isnan())], y[known]
    if min(len(set(x.tolist())), len(set(y.tolist()))) < 2:
        return "no rank correlation: all values are equal"
    return f"rank correlation {spearmanr(x.numpy(), y.numpy())[0]:.2f}"


def _whole_rounds(axes: "Axes") -> None:
    """Label only whole rounds."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))
