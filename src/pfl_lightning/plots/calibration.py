"""Reliability diagrams."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ACROSS = 5
"""Panels per row."""


def plot_calibration(counts: Mapping[str, Tensor]) -> "Figure":
    """Plot reliability diagrams side by side: the share of correct predictions over their mean probability, by bin.

    A dot's area is its bin's share of the samples; the diagonal is a calibrated model. Titles have the expected
    calibration error.

    Args:
        counts: by title, the samples, the correct predictions, and the sum of probabilities of each bin ``[3, bins]``;
            at least one sample each.
    """
    # imported on use, as matplotlib is slow to import; Figure and not pyplot, which keeps every figure in memory
    from matplotlib.figure import Figure

    across = min(len(counts), ACROSS)
    down = -(-len(counts) // across)
    figure = Figure(figsize=(0.6 + 2.2 * across, 0.6 + 2.3 * down), layout="constrained")
    grid = figure.subplots(down, across, squeeze=False, sharex=True, sharey=True)
    for axes, (title, (samples, right, probability)) in zip(grid.flat, counts.items(), strict=False):
        held = samples > 0
        n = samples[held]
        error = float((right - probability).abs().sum() / samples.sum())
        axes.plot([0, 1], [0, 1], color="grey", linewidth=0.8)
        axes.plot(probability[held] / n, right[held] / n, color="C0", linewidth=0.8, alpha=0.6)
        axes.scatter(probability[held] / n, right[held] / n, s=(200 * n / samples.sum()).clamp(min=4), color="C0")
        axes.set_title(f"{title}\nECE {error:.3f}, {int(samples.sum())} samples", fontsize="small")
        axes.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
    for axes in grid.flat[len(counts) :]:
        axes.remove()
    figure.supxlabel("probability of the predicted class")
    figure.supylabel("share of correct predictions")
    return figure
