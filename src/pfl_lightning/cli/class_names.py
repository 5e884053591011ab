"""Names of the classes that a setting can take, and of their settings."""

import inspect
from importlib import import_module
from typing import Any

from jsonargparse import ArgumentParser
from lightning.pytorch import Callback
from lightning.pytorch.loggers import Logger
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from pfl_lightning.aggregators import Aggregator, Mean
from pfl_lightning.client import ClientModule
from pfl_lightning.compression import Compression
from pfl_lightning.data import FederatedDataModule, Partitioner
from pfl_lightning.nets import Net
from pfl_lightning.selection import Selection

KINDS: dict[str, type] = {
    "model": ClientModule,
    "data": FederatedDataModule,
    "aggregator": Aggregator,
    "mean": Mean,
    "partitioner": Partitioner,
    "cohort": Selection,
    "compression": Compression,
    "net": Net,
    "optimizer": Optimizer,
    "lr_scheduler": LRScheduler,
    "logger": Logger,
    "callbacks": Callback,
}
"""The base class of what a setting names."""


def class_names(kind: str) -> set[str]:
    """Names of the classes that a setting can take.

    Args:
        kind: the setting's own name, such as ``net``; of an unknown one all classes are given.
    """
    bases = [KINDS[kind]] if kind in KINDS else list(KINDS.values())
    found: set[type] = {cls for base in bases for cls in subclasses(base)}
    return {cls.__name__ for cls in found if not inspect.isabstract(cls) and not cls.__name__.startswith("_")}


def subclasses(base: type) -> set[type]:
    """A class and all classes below it."""
    direct: list[type] = base.__subclasses__()
    return {base}.union(*map(subclasses, direct))


def settings(class_path: str) -> list[str]:
    """Names of a class's settings; none if there is no such class.

    Args:
        class_path: the class with its module.
    """
    module, _, name = class_path.rpartition(".")
    try:
        cls: Any = getattr(import_module(module), name)
        return list(ArgumentParser(exit_on_error=False).add_class_arguments(cls, fail_untyped=False))
    except (ImportError, AttributeError, ValueError):
        return []
