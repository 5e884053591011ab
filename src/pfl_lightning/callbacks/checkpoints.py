"""The two checkpoints that every run keeps, whatever others a user asks for."""

import math
from pathlib import Path
from typing import cast

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from pfl_lightning.engines.evaluation import measured_names
from pfl_lightning.federation.federation import Federation


class BestCheckpoint(ModelCheckpoint):
    """Keeps the round with the best monitored metric as ``best.ckpt``: the one that is selected."""

    def __init__(self) -> None:
        super().__init__(monitor="val/acc", mode="max", filename="best", enable_version_counter=False)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Takes the metric, which the federation knows, and which names this callback's state in checkpoints."""
        monitor = cast(Federation, pl_module).monitor
        if (self.monitor, self.mode) != (f"val/{monitor.metric}", monitor.mode):
            self.monitor, self.mode = f"val/{monitor.metric}", monitor.mode
            self.kth_value = torch.tensor(math.inf * -monitor.sign)
        super().setup(trainer, pl_module, stage)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Looks for the metric before the first round.

        Raises:
            MisconfigurationException: if the client module has none of this name.
        """
        federation = cast(Federation, pl_module)
        metric = federation.monitor.metric
        names = measured_names(federation.engines[0].metrics)
        if metric not in [*names, "loss"]:
            raise MisconfigurationException(
                f"{type(federation.client).__name__}.configure_metrics has {', '.join(names) or 'nothing'} and no "
                f"{metric}, by which the best round is kept; name another by trainer.monitor, or set "
                "trainer.enable_checkpointing=false."
            )


class LastCheckpoint(ModelCheckpoint):
    """Keeps the last round as ``last.ckpt``: the one that an interrupted run goes on from."""

    def __init__(self) -> None:
        # not by save_last, which only follows when a monitored value has improved
        super().__init__(filename="last", save_on_train_epoch_end=True, enable_version_counter=False)


def best_checkpoint(trainer: Trainer) -> str | None:
    """The file of the round with the best monitored metric, if it is kept."""
    kept = [
        callback.best_model_path for callback in trainer.checkpoint_callbacks if isinstance(callback, BestCheckpoint)
    ]
    return next((path for path in kept if path and Path(path).exists()), None)
