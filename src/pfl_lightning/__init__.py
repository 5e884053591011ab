"""Personalized federated learning on PyTorch Lightning."""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pfl_lightning.client import ClientModule, Phase
    from pfl_lightning.federation.federation import Federation
    from pfl_lightning.federation.prediction import Predictions
    from pfl_lightning.plots.results import Results
    from pfl_lightning.server import Aggregator, AggregatorList, ClassMeans, Server, WeightedAverage
    from pfl_lightning.trainer import FederatedTrainer

# On some processors, MKL's products of small matrices depend on where a matrix lies in memory, which differs from run
# to run. MKL reads this once, at its first product, so it is set before any module of the package computes.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

__version__ = "0.1.0"

__all__ = [
    "Aggregator",
    "AggregatorList",
    "ClassMeans",
    "ClientModule",
    "FederatedTrainer",
    "Federation",
    "Phase",
    "Predictions",
    "Results",
    "Server",
    "WeightedAverage",
    "__version__",
]

# Modules of the public names, imported on first use, so that importing one part doesn't import Lightning and all the
# rest.
_MODULES = {
    **dict.fromkeys(("Aggregator", "AggregatorList", "ClassMeans", "Server", "WeightedAverage"), "server"),
    **dict.fromkeys(("ClientModule", "Phase"), "client"),
    "FederatedTrainer": "trainer",
    "Federation": "federation.federation",
    "Predictions": "federation.prediction",
    "Results": "plots.results",
}
_ROOMS = (
    "aggregators",
    "callbacks",
    "client",
    "data",
    "engines",
    "methods",
    "nets",
    "plots",
    "privacy",
    "selection",
    "server",
    "tasks",
)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    if name in _ROOMS:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_ROOMS})
