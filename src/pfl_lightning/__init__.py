"""Personalized federated learning on PyTorch Lightning."""

from pfl_lightning.aggregators import Aggregator, AggregatorList, ClassMeans, Server, WeightedAverage
from pfl_lightning.client import ClientModule, Phase
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
