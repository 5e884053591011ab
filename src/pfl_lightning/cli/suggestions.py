"""Names that are close to a mistyped one."""

import inspect
from collections.abc import Iterable
from difflib import get_close_matches
from importlib import import_module
from typing import Any

from jsonargparse import ArgumentParser
from lightning.pytorch import Callback
from lightning.pytorch.loggers import Logger
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from pfl_lightning.aggregators import Aggregator
from pfl_lightning.client import ClientModule
from pfl_lightning.data import FederatedDataModule, Partitioner
from pfl_lightning.nets import Net
from pfl_lightning.selection import Selection

KINDS: dict[str, type] = {
    "model": ClientModule,
    "data": FederatedDataModule,
    "aggregator": Aggregator,
    "partitioner": Partitioner,
    "cohort": Selection,
    "net": Net,
    "optimizer": Optimizer,
    "lr_scheduler": LRScheduler,
    "logger": Logger,
    "callbacks": Callback,
}
"""The base class of what a setting names."""

LISTED = 12
"""Up to so many names are listed when none is close."""


def suggestion(name: str, names: Iterable[str], prefix: str = "") -> str:
    """The end of a sentence: the names that may be meant, or all of them if they are few.

    >>> suggestion("FedPorx", ["FedProx", "Local"])
    '; did you mean FedProx?'
    >>> suggestion("lr", ["net", "optimizer"], prefix="model.")
    '; choose from model.net, model.optimizer.'

    Args:
        name: what was given.
        names: what could have been given.
        prefix: put before each name.
    """
    spelled = {known.lower(): known for known in sorted(names)}
    if close := get_close_matches(name.lower(), spelled, n=2):
        return f"; did you mean {' or '.join(prefix + spelled[known] for known in close)}?"
    if 0 < len(spelled) <= LISTED:
        return f"; choose from {', '.join(prefix + known for known in spelled.values())}."
    return "."


def nearest_option(key: str, options: Iterable[str]) -> str:
    """The end of a sentence about an unknown dotted option: looks where its path leaves the known ones.

    >>> nearest_option("trainer.max_round", ["trainer.max_rounds", "model"])
    '; did you mean trainer.max_rounds?'
    >>> nearest_option("max_rounds", ["trainer.max_rounds", "model"])
    '; did you mean trainer.max_rounds?'

    Args:
        key: the option, without dashes.
        options: all options there are, without dashes.
    """
    known = set(options)
    if elsewhere := [option for option in sorted(known) if option.endswith(f".{key}")]:
        return f"; did you mean {elsewhere[0]}?"
    parts = key.split(".")
    for depth, part in enumerate(parts):
        prefix = "".join(f"{parent}." for parent in parts[:depth])
        names = {option.removeprefix(prefix).split(".")[0] for option in known if option.startswith(prefix)}
        if part not in names:
            return suggestion(part, names, prefix)
    return "."


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
