"""List the valid classes of a setting and the settings of a class, and name the own aggregator of a client module."""

import inspect
from contextlib import suppress
from importlib import import_module
from typing import Any, get_args

from jsonargparse import ArgumentParser
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.seed import isolate_rng
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from pfl_lightning.client import ClientModule
from pfl_lightning.data import FederatedDataModule, Partitioner
from pfl_lightning.federation.options import STAGES
from pfl_lightning.nets import Net
from pfl_lightning.selection import Selection
from pfl_lightning.server import Aggregator, Mean
from pfl_lightning.trainer import FederatedTrainer

KINDS: dict[str, type] = {
    "model": ClientModule,
    "data": FederatedDataModule,
    "aggregator": Aggregator,
    "mean": Mean,
    "partitioner": Partitioner,
    "cohort": Selection,
    **{
        name: kind
        for name, parameter in inspect.signature(FederatedTrainer).parameters.items()
        # of settings that are no class to choose, flags are the class's own
        if name in STAGES and inspect.isabstract(kind := get_args(parameter.annotation)[0])
    },
    "net": Net,
    "optimizer": Optimizer,
    "lr_scheduler": LRScheduler,
    "logger": Logger,
    "callbacks": Callback,
}
"""Base class of each setting that names a class."""


def class_names(kind: str) -> set[str]:
    """Return the names of all imported classes valid for a setting.

    Args:
        kind: last part of the setting's name, such as ``net``; for an unknown one, classes of all kinds.
    """
    bases = [KINDS[kind]] if kind in KINDS else list(KINDS.values())
    # from imported modules only: a user's class is known once `--model FILE.CLASS` has imported the file
    found: set[type] = {cls for base in bases for cls in subclasses(base)}
    return {cls.__name__ for cls in found if not inspect.isabstract(cls) and not cls.__name__.startswith("_")}


def subclasses(base: type) -> set[type]:
    """Return a class and all subclasses, at any depth."""
    direct: list[type] = base.__subclasses__()
    return {base}.union(*map(subclasses, direct))


def settings(class_path: str) -> list[str]:
    """Return the names of a class's settings; an empty list for an unknown class.

    Args:
        class_path: dotted path of the class.
    """
    module, _, name = class_path.rpartition(".")
    try:
        cls: Any = getattr(import_module(module), name)
        # jsonargparse follows **kwargs up to base classes, which inspect.signature doesn't
        return list(ArgumentParser(exit_on_error=False).add_class_arguments(cls, fail_untyped=False))
    except (ImportError, AttributeError, ValueError):
        return []


def own_server(model: str) -> str:
    """Return the class name of a client module's own aggregator; ``WeightedAverage`` for an unknown module.

    Args:
        model: the class of the client module, with or without its module.
    """
    found = [cls for cls in subclasses(ClientModule) if cls.__name__ == model.rpartition(".")[2]]
    # a class that is unknown, or that needs settings, gets its sentence from the parser afterwards
    # building the module draws initial weights, which must not move the run's random state
    with suppress(IndexError, TypeError, MisconfigurationException), isolate_rng():
        made: Any = found[0]
        return type(made().configure_aggregator()).__name__
    return "WeightedAverage"
