"""Tasks as plain values, for checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from importlib import import_module
from typing import Any

from pfl_lightning.tasks.base import Task
from pfl_lightning.tasks.classification import Classification


def plain(task: Task) -> dict[str, Any]:
    """The class path and settings of a task, as configurations have them.

    >>> from pfl_lightning.tasks import Regression
    >>> plain(Regression(2))
    {'class_path': 'pfl_lightning.tasks.regression.Regression', 'init_args': {'quantities': 2}}
    """
    settings = {field.name: getattr(task, field.name) for field in fields(task)}  # type: ignore[arg-type]
    return {"class_path": f"{type(task).__module__}.{type(task).__qualname__}", "init_args": settings}


def hparams(task: Task) -> dict[str, Any]:
    """A task as a client module's hyper-parameters have it.

    >>> from pfl_lightning.tasks import Classification
    >>> hparams(Classification(3))
    {'num_classes': 3}
    """
    return {"num_classes": task.num_classes} if type(task) is Classification else {"task": plain(task)}


def made(config: Task | Mapping[str, Any]) -> Task:
    """The task that `plain` has written; a task is itself.

    >>> from pfl_lightning.tasks import Regression
    >>> made(plain(Regression(2)))
    Regression(quantities=2)
    """
    if isinstance(config, Task):
        return config
    module, _, name = config["class_path"].rpartition(".")
    task: Task = getattr(import_module(module), name)(**config.get("init_args", {}))
    return task
