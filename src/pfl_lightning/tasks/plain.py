"""Conversion of tasks into plain values for checkpoints, and back."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.tasks.base import Task
from pfl_lightning.tasks.classification import Classification


def plain(task: Task) -> dict[str, Any]:
    """Return the class path and settings of a task, as in configurations.

    >>> from pfl_lightning.tasks import Regression
    >>> plain(Regression(2))
    {'class_path': 'pfl_lightning.tasks.regression.Regression', 'init_args': {'quantities': 2}}

    Args:
        task: the task.
    """
    settings = {field.name: getattr(task, field.name) for field in fields(task)}  # type: ignore[arg-type]
    return {"class_path": f"{type(task).__module__}.{type(task).__qualname__}", "init_args": settings}


def hparams(task: Task) -> dict[str, Any]:
    """Return the entry of a task in a client module's hyper-parameters.

    >>> from pfl_lightning.tasks import Classification
    >>> hparams(Classification(3))
    {'num_classes': 3}

    Args:
        task: the task.
    """
    # the short form of the constructor
    if type(task) is Classification and task == Classification(task.num_classes):
        return {"num_classes": task.num_classes}
    return {"task": plain(task)}


def made(config: Task | Mapping[str, Any]) -> Task:
    """Return the task written by `plain`; return a task unchanged.

    >>> from pfl_lightning.tasks import Regression
    >>> made(plain(Regression(2)))
    Regression(quantities=2)

    Args:
        config: the result of `plain`, or a task.

    Raises:
        MisconfigurationException: if the argument is neither, or the class hasn't been imported: the author of a
            checkpoint must not choose the code that runs on loading.
    """
    if isinstance(config, Task):
        return config
    if not isinstance(config, Mapping) or "class_path" not in config:
        name = config.__name__ if isinstance(config, type) else repr(config)
        raise MisconfigurationException(
            f"model.task={name} is no task; give an instance, such as data.task or Classification(10)."
        )
    path = config["class_path"]
    # looked up among imported classes and never imported by name, which would run code of the checkpoint's choice
    if (kind := imported().get(path)) is None:
        raise MisconfigurationException(
            f"task={path} is no Task that has been imported; import its module before the checkpoint is loaded."
        )
    return kind(**config.get("init_args", {}))


def imported() -> dict[str, type[Task]]:
    """Return all task classes imported so far in this process, by class path."""
    kinds = Task.__subclasses__()
    for kind in kinds:
        # the list grows while the loop runs, until it has all descendants
        kinds += kind.__subclasses__()
    return {f"{kind.__module__}.{kind.__qualname__}": kind for kind in kinds}
