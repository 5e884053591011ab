"""Curves against local epochs, for methods with different amounts of training per round."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.plots.runs import plot_curves

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_against_local_epochs(
    runs: Mapping[str, tuple[Sequence[Mapping[str, Any]], int | Sequence[int]]], metric: str = "val/acc"
) -> "Figure":
    """Plot a metric against the local epochs of a client in all rounds so far, one line per run.

    Rounds favour methods that train long in each, such as KT-pFL with up to 20 epochs.

    Args:
        runs: by the run's name, the rows of ``rounds.csv`` (or of `RoundLogger`), and the local epochs per round, which
            the record doesn't contain: a number, or a list with one number per round from the first on, whose last
            number holds for later rounds.
        metric: the column to draw.

    Raises:
        MisconfigurationException: if epochs are missing or less than 1.
    """
    scaled = {name: _by_epochs(name, rows, epochs) for name, (rows, epochs) in runs.items()}
    figure = plot_curves(scaled, metric)
    figure.axes[0].set_xlabel("local epochs")
    return figure


def _by_epochs(name: str, rows: Sequence[Mapping[str, Any]], epochs: int | Sequence[int]) -> list[dict[str, Any]]:
    """Return the rows with the number of epochs so far instead of the round's number."""
    by_round = [epochs] if isinstance(epochs, int) else list(epochs)
    if not by_round or min(by_round) < 1:
        raise MisconfigurationException(
            f"runs[{name!r}]: local epochs {epochs} must be a number from 1 up, or at least one such number."
        )
    last = max((int(row["round"]) for row in rows), default=0)
    by_round += by_round[-1:] * (last - len(by_round))
    # 0 first: an evaluation before the first round has round 0
    done = [0, *accumulate(by_round)]
    return [{**row, "round": done[int(row["round"])]} for row in rows]
