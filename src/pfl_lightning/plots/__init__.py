"""Figures of partitions, runs, class distributions and aggregation weights."""

from pfl_lightning.plots.aggregation import (
    plot_distances,
    plot_server_terms,
    plot_weight_heatmaps,
    plot_weights,
    plot_weights_against,
)
from pfl_lightning.plots.calibration import plot_calibration
from pfl_lightning.plots.classes import (
    plot_class_heatmaps,
    plot_distribution_scatter,
    plot_distribution_trace,
    plot_lambda_sweep,
    plot_mixing_matrix,
)
from pfl_lightning.plots.features import plot_conductance, plot_tsne
from pfl_lightning.plots.runs import (
    plot_against_local_epochs,
    plot_cross_matrix,
    plot_curves,
    plot_drift,
    plot_mean_curves,
    plot_partition,
)
from pfl_lightning.plots.similarity import plot_gaps, plot_peer_counts, plot_peers, plot_similarity
from pfl_lightning.plots.trace import trace_distribution, trace_job

__all__ = [
    "plot_against_local_epochs",
    "plot_calibration",
    "plot_class_heatmaps",
    "plot_conductance",
    "plot_cross_matrix",
    "plot_curves",
    "plot_distances",
    "plot_distribution_scatter",
    "plot_distribution_trace",
    "plot_drift",
    "plot_gaps",
    "plot_lambda_sweep",
    "plot_mean_curves",
    "plot_mixing_matrix",
    "plot_partition",
    "plot_peer_counts",
    "plot_peers",
    "plot_server_terms",
    "plot_similarity",
    "plot_tsne",
    "plot_weight_heatmaps",
    "plot_weights",
    "plot_weights_against",
    "trace_distribution",
    "trace_job",
]
