"""The base classes of prediction tasks and of metrics that are a ratio, and the metric that selects the best round."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from numpy.typing import NDArray
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from pfl_lightning.messages import tensors
from pfl_lightning.settings import as_call

Reduction = Literal["mean", "sum"]
"""Reduction of the errors of a batch, as in ``torch.nn.functional``."""


METHODS_WITHOUT = "take a method that needs no classes, such as FedAvg, FedPer or Ditto"
"""Advice for methods that need classes under a task without classes."""

UNDEFINED = {
    "auroc": "its rows are of one class",
    "average_precision": "no row is of class 1",
    "c_index": "no pair of its rows has a known order",
    "map": "no row has a label",
    "recall": "no row is of class 1",
    "specificity": "all rows are of class 1",
}
"""Why a client with rows has no value of a metric, for metrics that its targets alone leave undefined."""


class Task(ABC):
    """A prediction task: a net's outputs, the loss, the metrics, and the metric that selects the best round.

    A data module names its task, and client modules compute with the task. Subclasses are frozen dataclasses of plain
    settings, so that tasks can be compared and a checkpoint can hold one.

    Raises:
        MisconfigurationException: if the task has no output.
    """

    has_classes: ClassVar[bool] = False
    """True if each sample has one class, by which methods and partitioners tell samples apart."""

    allows_nan: ClassVar[bool] = False
    """True if NaN in a target stands for a missing value, left out by the task's loss and metrics."""

    has_scale: ClassVar[bool] = False
    """True if targets may be standardised, as outputs are quantities in the target's unit.

    It isn't inherited: each class sets it, since a subclass may have a loss of counts or of positive quantities.
    """

    reconstructs: ClassVar[bool] = False
    """True if the target of a sample is its input, as the net takes it; targets that the data load have no effect."""

    def __post_init__(self) -> None:
        # a task of no output has a loss of NaN, which would only show after the first round
        if self.outputs < 1:
            raise MisconfigurationException(f"task {self} must have at least 1 output.")

    def __str__(self) -> str:
        """Return the call that makes the task, without arguments that have their defaults."""
        return as_call(self)

    @property
    @abstractmethod
    def monitor(self) -> str:
        """The metric that selects the best round; a plain class attribute will do."""

    @property
    @abstractmethod
    def mode(self) -> Literal["max", "min"]:
        """The direction of ``monitor``: ``max`` if larger values are better, ``min`` if smaller ones are."""

    @property
    @abstractmethod
    def outputs(self) -> int:
        """Number of a net's outputs for a sample, or for each position of a sample."""

    @property
    def samples_meet(self) -> bool:
        """Whether a sample's loss depends on the other samples of its batch, as in a ranking.

        Evaluations then compute the loss over all of a client's samples at once, and DP-SGD refuses the task.
        """
        return False

    @abstractmethod
    def loss(self, outputs: Tensor, target: Any, reduction: Reduction = "mean") -> Tensor:
        """Return the error of a net's outputs, the training objective.

        Args:
            outputs: the net's outputs for n samples.
            target: the samples' targets.
            reduction: ``mean`` over the errors that `weight` counts, or their ``sum``.
        """

    def weight(self, target: Any) -> int | Tensor:
        """Return the number of errors in a batch: samples, or the counted positions of samples.

        Args:
            target: the batch's targets.
        """
        # a tree has a row of each of its tensors for a sample
        first = next(tensors(target), None)
        return len(target if first is None else first)

    def length(self, target: Any) -> int | None:
        """Return the number of leading positions that a batch's errors depend on; None, by default, for all.

        Args:
            target: the batch's targets.
        """
        return None

    def combined(self, outputs: Tensor, shares: Tensor) -> Tensor:
        """Return the outputs that stand for the mean prediction of several models; by default the mean of outputs.

        A task whose outputs are logits overrides it, so that probabilities are averaged.

        Args:
            outputs: the models' outputs ``[models, n, ...]``.
            shares: the models' weights ``[models]``, of sum 1.
        """
        mean: Tensor = torch.tensordot(shares.to(outputs.dtype), outputs, 1)
        return mean

    @abstractmethod
    def configure_metrics(self) -> MetricCollection:
        """Return the metrics of one client's evaluation; a metric undefined on the client's samples becomes NaN."""

    def pooled(self) -> dict[str, Metric]:
        """Return the metrics of all clients' samples together, by name, for metrics that no mean over clients can give.

        Their states are sums, so that the states of clients add up, or lists, which are joined. A site of a deployment
        sends sums alone: a metric with lists there needs ``by_counts``, which returns one with sums. A metric with
        ``of_all`` set to True is recorded under its own name, in place of a mean over clients, then ``NAME_mean``.
        """
        return {}

    @abstractmethod
    def check(self, target: Any, owner: str) -> None:
        """Refuse the targets of another task.

        Args:
            target: targets of all samples.
            owner: origin of the targets, for the message.

        Raises:
            MisconfigurationException: if the targets don't fit the task.
        """

    def check_training(self, batch_size: int, targets: Iterable[Any] | None) -> None:  # noqa: B027 - a hook
        """Refuse training samples from which nothing can be learned; by default none.

        Args:
            batch_size: samples per training batch.
            targets: targets of each client's training samples; None if they aren't at hand.

        Raises:
            MisconfigurationException: if every loss is 0, whatever the net.
        """

    @abstractmethod
    def check_outputs(self, outputs: Any, target: Any, net: str) -> None:
        """Refuse a net of another task.

        Args:
            outputs: the net's outputs for some samples.
            target: the samples' targets.
            net: name of the net, for the message.

        Raises:
            MisconfigurationException: if the outputs have another shape than the task needs.
        """

    def classes(self, target: Any) -> Tensor | None:
        """Return the class of each sample ``[n]``, int64; None for a task without classes.

        Args:
            target: the samples' targets.
        """
        return None

    def predictions(self, outputs: Tensor) -> dict[str, Tensor]:
        """Return what a net's outputs predict: ``classes`` and ``probabilities``, or ``values``.

        By default ``values`` are the outputs; with classes, logits of the classes are in the second dimension.

        Args:
            outputs: the net's outputs for n samples, floating.
        """
        if self.has_classes:
            return {"classes": outputs.argmax(1), "probabilities": outputs.softmax(1)}
        return {"values": outputs}

    def row_errors(self, outputs: Tensor, x: Any) -> Tensor | None:
        """Return an error of each row's outputs ``[n]``, known from the inputs alone; None, by default, for none.

        Args:
            outputs: the net's outputs for n samples, floating.
            x: the samples' inputs.
        """
        return None


def described(target: Any) -> str:
    """Describe targets, for messages."""
    if not isinstance(target, Tensor):
        return f"targets that are a {type(target).__name__}"
    return f"{target.dtype} targets of shape {list(target.shape)}"


def check_shape(outputs: Any, shape: list[int], net: str, task: Task) -> None:
    """Refuse outputs of another shape.

    Args:
        outputs: a net's outputs for some samples.
        shape: the right shape.
        net: name of the net.
        task: the task that needs the shape.

    Raises:
        MisconfigurationException: if the shape differs.
    """
    # losses broadcast or index silently where shapes are merely compatible, so the exact shape is required
    if not isinstance(outputs, Tensor) or list(outputs.shape) != shape:
        what = f"shape {list(outputs.shape)}" if isinstance(outputs, Tensor) else f"type {type(outputs).__name__}"
        raise MisconfigurationException(
            f"model.net: {net} gives outputs of {what} for {shape[0]} samples, and task {task} needs shape {shape}; "
            "let the net end in as many outputs as the task has."
        )


def check_range(target: Tensor, upper: int, ignored: int | None, owner: str, task: Task) -> None:
    """Refuse class numbers out of range.

    Args:
        target: class numbers.
        upper: number of classes.
        ignored: a number outside the range that marks uncounted positions; None allows none.
        owner: origin of the targets.
        task: the task of the targets.

    Raises:
        MisconfigurationException: if a number is out of range.
    """
    # cross-entropy with a number out of range fails on a GPU without a readable message, far from the cause
    counted = target if ignored is None else target[target != ignored]
    if len(counted) and (counted.min() < 0 or counted.max() >= upper):
        raise MisconfigurationException(
            f"{owner} has targets from {int(counted.min())} to {int(counted.max())}; task {task} allows 0 to "
            f"{upper - 1}" + ("" if ignored is None else f", and {ignored} for uncounted positions")
        )


def task_for(asker: Any, task: Task) -> Task:
    """Return the task, unless a client module ``requires`` classes and the task has none.

    Args:
        asker: the client module.
        task: the task.

    Raises:
        MisconfigurationException: if classes are required and missing.
    """
    # asked when the client module is made, before any round
    if "classes" in asker.requires:
        number_of_classes(task, f"model {type(asker).__name__}")
    return task


def number_of_classes(task: Task, asker: str, instead: str = METHODS_WITHOUT) -> int:
    """Return the number of classes of a task.

    Args:
        task: the task.
        asker: the method or setting that needs classes, for the message.
        instead: an alternative that would work, for the message.

    Raises:
        MisconfigurationException: if the task has no classes.
    """
    if task.has_classes:
        return task.outputs
    raise MisconfigurationException(f"{asker} needs the class of each sample, and task {task} has none; {instead}.")


def log_mean(logarithms: Tensor, shares: Tensor) -> Tensor:
    """Return the logarithm of the mean of values given by their logarithms.

    >>> round(log_mean(torch.tensor([[1.0], [3.0]]).log(), torch.tensor([0.5, 0.5])).exp().item(), 4)
    2.0

    Args:
        logarithms: the logarithms ``[models, ...]``.
        shares: the models' weights ``[models]``, of sum 1.
    """
    logs = shares.to(logarithms.dtype).log().view(-1, *[1] * (logarithms.dim() - 1))
    return (logarithms + logs).logsumexp(0)


class Ratio(Metric):
    """A sum divided by the number of its addends, both increased by ``update``; NaN without addends.

    Args:
        dtype: type of the sum.
    """

    full_state_update = False
    plot_lower_bound: float | None = 0.0
    total: Tensor
    count: Tensor

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        # sums, so that states of clients and of processes add up
        self.add_state("total", torch.tensor(0, dtype=dtype), dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")

    def compute(self) -> Tensor:
        """Return the ratio."""
        return self.total / self.count


@dataclass(frozen=True)
class Monitor:
    """The metric that selects the best round, with its direction.

    Args:
        metric: name of the metric, without the split.
        mode: ``max`` if larger values are better, ``min`` if smaller ones are.
    """

    metric: str = "acc"
    mode: Literal["max", "min"] = "max"

    @property
    def sign(self) -> int:
        """Factor that turns the metric into a value to maximise: 1 or -1."""
        return 1 if self.mode == "max" else -1

    @property
    def decile(self) -> str:
        """Name of the worst decile: the lowest one, ``p10``, or the highest one, ``p90``."""
        return "p10" if self.mode == "max" else "p90"

    def spread(self, values: Sequence[float] | NDArray[np.float64]) -> dict[str, float]:
        """Return the spread of a metric over clients: mean, deviation, the worst, the worst decile, the worst tenth.

        Clients count alike, whatever their samples.

        >>> Monitor("mae", "min").spread([1.0, 3.0])
        {'mae_mean': 2.0, 'mae_std': 1.0, 'mae_worst': 3.0, 'mae_p90': 2.8, 'mae_worst10': 3.0}

        Args:
            values: the metric of each client.
        """
        worst, share = (np.min, 0.1) if self.mode == "max" else (np.max, 0.9)
        parts = {
            "mean": np.mean(values),
            # of these clients and not an estimate for others: divided by their number
            "std": np.std(values),
            "worst": worst(values),
            self.decile: np.quantile(values, share),
            "worst10": self.worst_tenth(values),
        }
        return {f"{self.metric}_{name}": float(value) for name, value in parts.items()}

    def worst_tenth(self, values: Sequence[float] | NDArray[np.float64]) -> float:
        """Return the plain mean over the worst tenth of clients, their number rounded up.

        >>> Monitor().worst_tenth([0.9, 0.1, 0.5, 0.6, 0.7, 0.8, 0.9, 0.9, 0.9, 0.9, 0.3])
        0.2

        Args:
            values: the metric of each client, at least one; NaN in one makes the mean NaN.
        """
        # sorting has no place for NaN: the tenth would depend on the order of clients
        if np.isnan(values).any():
            return math.nan
        worst_first = np.sort(np.asarray(values) * self.sign)[: math.ceil(len(values) / 10)]
        return float(np.mean(worst_first * self.sign))

    def written(self, value: float | None) -> str:
        """Return a value for people: accuracies in per cent.

        >>> Monitor().written(0.98765), Monitor("mae", "min").written(0.98765), Monitor().written(None)
        ('98.77 %', '0.9877', 'not evaluated')

        Args:
            value: the metric's value, or None.
        """
        if value is None:
            return "not evaluated"
        return f"{100 * value:.2f} %" if self.metric == "acc" else f"{value:.4g}"

    @property
    def words(self) -> str:
        """Name of the metric for people."""
        return "accuracy" if self.metric == "acc" else self.metric
