"""Which classes a configuration from elsewhere may name."""

import inspect
import re
from collections.abc import Collection, Iterator, Mapping
from importlib import import_module
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torchmetrics import Metric

from pfl_lightning.aggregators import Aggregator
from pfl_lightning.client import ClientModule
from pfl_lightning.flower.template import Refused
from pfl_lightning.tasks import Task

KINDS = (ClientModule, Aggregator, Task, Optimizer, LRScheduler, Metric, nn.Module)
PACKAGES = ("pfl_lightning", "torch.nn", "torch.optim", "torchmetrics")
PLAIN = re.compile(r"[\w +-]*")


def check_class_paths(settings: Mapping[str, Any], own: Collection[str] = ()) -> None:
    """Refuses settings that name something else than a class of this library or of torch that training needs.

    Nets, client modules, losses, optimizers, schedules and metrics are such; functions aren't, nor is anything that a
    module has only imported. As the parser reads any text that it can as a name, as a file or as settings in one line,
    all texts count, whatever their settings: each is a word, a number or such a name.

    Args:
        settings: parsed settings, such as the ``model`` of a configuration.
        own: dotted names that the site allows beside.

    Raises:
        Refused: if they do.
    """
    for name, text in texts(settings, ""):
        if not (text in own or PLAIN.fullmatch(text) or is_number(text) or is_known(text)):
            raise Refused(
                f"{name}={text!r:.60} is neither a word, a number nor a class that this site knows; its operator can "
                f"allow a class by --node-config 'classes=\"mine.Net\"'."
            )


def texts(settings: Any, name: str) -> Iterator[tuple[str, str]]:
    """All texts in settings, with their dotted names."""
    if isinstance(settings, str):
        yield name, settings
    elif isinstance(settings, Mapping):
        for key, value in settings.items():
            yield from texts(value, f"{name}.{key}" if name else str(key))
    elif isinstance(settings, list | tuple | set | frozenset):
        for value in settings:
            yield from texts(value, name)


def is_number(text: str) -> bool:
    """Whether a text is of a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def is_known(path: str) -> bool:
    """Whether a dotted name is of a class that training needs, in the module that it names.

    >>> is_known("torch.optim.SGD"), is_known("torch.optim.optimizer.functools.partial"), is_known("os.system")
    (True, False, False)
    """
    module, _, name = path.rpartition(".")
    if not any(f"{module}.".startswith(f"{package}.") for package in PACKAGES):
        return False
    try:
        # of these packages only: their modules do nothing but define
        made = getattr(import_module(module), name, None)
    except Exception:
        return False
    return inspect.isclass(made) and issubclass(made, KINDS) and made.__module__.startswith(PACKAGES)
