"""The server side: aggregators combine the updates of a round into each client's next payload."""

from pfl_lightning.server.aggregator_list import AggregatorList
from pfl_lightning.server.base import Aggregator, Server
from pfl_lightning.server.class_means import ClassMeans
from pfl_lightning.server.graph import GraphAggregator
from pfl_lightning.server.means import Mean
from pfl_lightning.server.model_pool import ModelPool, inner_products, mean_loss
from pfl_lightning.server.weighted_average import (
    WeightedAverage,
    Weighting,
    client_weights,
    mean_model,
    moved_model,
)

__all__ = [
    "Aggregator",
    "AggregatorList",
    "ClassMeans",
    "GraphAggregator",
    "Mean",
    "ModelPool",
    "Server",
    "WeightedAverage",
    "Weighting",
    "client_weights",
    "inner_products",
    "mean_loss",
    "mean_model",
    "moved_model",
]
