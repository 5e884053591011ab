"""Tasks as plain values, for checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException

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

    Raises:
        MisconfigurationException: if it is neither, or its class hasn't been imported: who writes a checkpoint is not
            to choose what is imported and called where it is read.
    """
    if isinstance(config, Task):
        return config
    if not isinstance(config, Mapping) or "class_path" not in config:
        name = config.__name__ if isinstance(config, type) else repr(config)
        raise MisconfigurationException(
            f"model.task={name} is no task; give an instance, such as data.task or Classification(10)."
        )
    path = config["class_path"]
    if (kind := imported().get(path)) is None:
        raise MisconfigurationException(
            f"task={path} is no Task that has been imported; import its module before the checkpoint is loaded."
        )
    return kind(**config.get("init_args", {}))


def imported() -> dict[str, type[Task]]:
    """The kinds of tasks that there are in this process, by their class paths."""
    kinds = Task.__subclasses__()
    for kind in kinds:
        # the list grows until it has those of all
        kinds += kind.__subclasses__()
    return {f"{kind.__module__}.{kind.__qualname__}": kind for kind in kinds}
