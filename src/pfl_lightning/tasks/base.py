"""What all supervised tasks share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Literal

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torchmetrics import Metric, MetricCollection

Reduction = Literal["mean", "sum"]
"""What becomes of the errors of a batch, as in ``torch.nn.functional``."""


METHODS_WITHOUT = "take a method that needs no classes, such as FedAvg, FedPer or Ditto"


class Task(ABC):
    """What is predicted of a sample: a net's outputs, the loss, the metrics, and the one that selects.

    A data module names its task, and client modules compute with it. Subclasses are frozen dataclasses of plain
    settings, so that two of them can be compared and a checkpoint can hold one.

    Raises:
        MisconfigurationException: if it has no output.
    """

    monitor: ClassVar[str]
    """The metric that selects the best round."""
    mode: ClassVar[Literal["max", "min"]]
    """Whether more or less of it is better."""
    has_classes: ClassVar[bool] = False
    """Whether a sample has one class, by which methods and partitioners tell samples apart."""

    allows_nan: ClassVar[bool] = False
    """Whether NaN in a target stands for a value that is missing, which the task's loss and metrics leave out."""

    def __post_init__(self) -> None:
        if self.outputs < 1:
            raise MisconfigurationException(f"task {self} must have at least 1 output.")

    @property
    @abstractmethod
    def outputs(self) -> int:
        """Values that a net gives for a sample, or for each position of it."""

    @abstractmethod
    def loss(self, outputs: Tensor, target: Any, reduction: Reduction = "mean") -> Tensor:
        """The error of a net's outputs, which is minimised.

        Args:
            outputs: of the net, for n samples.
            target: their targets.
            reduction: ``mean`` over the errors that `weight` counts, or their ``sum``.
        """

    def weight(self, target: Any) -> int | Tensor:
        """Number of errors in a batch: samples, or the positions of them that count."""
        return len(target)

    @abstractmethod
    def metrics(self) -> MetricCollection:
        """Metrics of one client's evaluation; NaN for one that isn't defined on what the client holds."""

    def pooled(self) -> dict[str, Metric]:
        """Metrics of all clients' samples together, by name, where that is not the mean of the clients' own.

        Their states are sums, so that those of clients add up.
        """
        return {}

    @abstractmethod
    def check(self, target: Any, owner: str) -> None:
        """Refuses the targets of another task.

        Args:
            target: of all samples.
            owner: who has them, for the message.

        Raises:
            MisconfigurationException: if they are not what the task takes.
        """

    @abstractmethod
    def check_outputs(self, outputs: Any, target: Any, net: str) -> None:
        """Refuses a net of another task.

        Args:
            outputs: what it gives for some samples.
            target: their targets.
            net: its name, for the message.

        Raises:
            MisconfigurationException: if the outputs have another shape than the task needs.
        """

    def classes(self, target: Any) -> Tensor | None:
        """The class of each sample ``[n]``, int64; None where it has none."""
        return None


def described(target: Any) -> str:
    """What targets are, for messages."""
    if not isinstance(target, Tensor):
        return f"targets that are a {type(target).__name__}"
    return f"{target.dtype} targets of shape {list(target.shape)}"


def check_shape(outputs: Any, shape: list[int], net: str, task: Task) -> None:
    """Refuses outputs of another shape.

    Args:
        outputs: what a net gives for some samples.
        shape: what it should be.
        net: its name.
        task: the task that needs it.
    """
    if not isinstance(outputs, Tensor) or list(outputs.shape) != shape:
        what = f"shape {list(outputs.shape)}" if isinstance(outputs, Tensor) else f"type {type(outputs).__name__}"
        raise MisconfigurationException(
            f"model.net: {net} gives outputs of {what} for {shape[0]} samples, and task {task} needs shape {shape}; "
            "let the net end in as many outputs as the task has."
        )


def check_range(target: Tensor, upper: int, ignored: int | None, owner: str, task: Task) -> None:
    """Refuses class numbers out of range.

    Args:
        target: class numbers.
        upper: number of classes.
        ignored: a number that stands for nothing, allowed too.
        owner: who has them.
        task: whose they are.
    """
    counted = target if ignored is None else target[target != ignored]
    if len(counted) and (counted.min() < 0 or counted.max() >= upper):
        raise MisconfigurationException(
            f"{owner} has targets from {int(counted.min())} to {int(counted.max())}; task {task} allows 0 to "
            f"{upper - 1}" + ("" if ignored is None else f", and {ignored} for what doesn't count")
        )


def task_for(asker: Any, task: Task) -> Task:
    """The task, unless its samples have no class and a client module ``requires`` them.

    Args:
        asker: the client module.
        task: the task.

    Raises:
        MisconfigurationException: if they have none.
    """
    if "classes" in asker.requires:
        number_of_classes(task, f"model {type(asker).__name__}")
    return task


def number_of_classes(task: Task, asker: str, instead: str = METHODS_WITHOUT) -> int:
    """Number of classes of a task.

    Args:
        task: the task.
        asker: who needs them, for the message.
        instead: what would work, for the message.

    Raises:
        MisconfigurationException: if samples have no class.
    """
    if task.has_classes:
        return task.outputs
    raise MisconfigurationException(f"{asker} tells samples by their class, and task {task} has none; {instead}.")
