"""Pictures of partitions, runs and class distributions, as functions that return figures."""

from pfl_lightning.plots.classes import plot_class_heatmaps, plot_mixing_matrix
from pfl_lightning.plots.distributions import plot_distribution_scatter, plot_distribution_trace, plot_lambda_sweep
from pfl_lightning.plots.runs import plot_curves, plot_partition
from pfl_lightning.plots.trace import trace_distribution, trace_task

__all__ = [
    "plot_class_heatmaps",
    "plot_curves",
    "plot_distribution_scatter",
    "plot_distribution_trace",
    "plot_lambda_sweep",
    "plot_mixing_matrix",
    "plot_partition",
    "trace_distribution",
    "trace_task",
]
