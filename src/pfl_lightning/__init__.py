"""Personalized federated learning on PyTorch Lightning."""

from pfl_lightning.aggregators.aggregator_list import AggregatorList
from pfl_lightning.aggregators.base import Aggregator, Server
from pfl_lightning.aggregators.class_means import ClassMeans
from pfl_lightning.aggregators.weighted_average import WeightedAverage
from pfl_lightning.client.module import ClientModule
from pfl_lightning.client.phases import Phase
from pfl_lightning.federation.federation import Federation
from pfl_lightning.trainer import FederatedTrainer

__version__ = "0.1.0"

__all__ = [
    "Aggregator",
    "AggregatorList",
    "ClassMeans",
    "ClientModule",
    "FederatedTrainer",
    "Federation",
    "Phase",
    "Server",
    "WeightedAverage",
    "__version__",
]
