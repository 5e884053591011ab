"""The task of a LightningModule with a loss of its own, on samples of any form."""

from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torchmetrics import MetricCollection

from pfl_lightning.tasks.base import Reduction, Task


@dataclass(frozen=True)
class OwnLoss(Task):
    """The task of a LightningModule: the loss of ``training_step``, and the values logged by ``validation_step``.

    Nothing is known of targets, so that no method or partitioner tells samples apart by class; for a classifier, take
    `Classification`, under which the module's own loss and values count too.

    Args:
        monitor: name of the value that selects the best round, without ``val_`` or ``val/``.
        mode: ``min`` if smaller values are better, ``max`` if larger ones are.
    """

    monitor: str = "loss"
    mode: Literal["max", "min"] = "min"

    outputs = 1

    def loss(self, outputs: Any, target: Any, reduction: Reduction = "mean") -> NoReturn:
        """Refuse, as the loss is the LightningModule's.

        Raises:
            MisconfigurationException: always.
        """
        raise MisconfigurationException(
            f"task {self} has no loss of a net's outputs, which method, server or a callback computes: the loss is of "
            "a training_step; give a LightningModule as model.net, and take a method of loss and weights, such as "
            "FedAvg, FedPer or Ditto, or give data with another task, such as Regression()."
        )

    def configure_metrics(self) -> MetricCollection:
        """Return no metrics, as the module logs values by itself."""
        return MetricCollection({})

    def check(self, target: Any, owner: str) -> None:
        """Take any targets."""

    def check_outputs(self, outputs: Any, target: Any, net: str) -> None:
        """Take any outputs."""

    def predictions(self, outputs: Tensor) -> dict[str, Tensor]:
        """Return the outputs as ``values``."""
        return {"values": outputs}
