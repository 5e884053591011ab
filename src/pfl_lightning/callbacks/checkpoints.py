"""The two checkpoints of every run, in addition to any `ModelCheckpoint` of the user."""

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
    """Save the round with the best validation metric as ``best.ckpt``, for ``test --ckpt_path best``."""

    def __init__(self) -> None:
        # placeholders: only `setup` knows the metric that selects
        # always in the hook in which LastCheckpoint saves, so that a round's two files are one
        settings = {"save_on_train_epoch_end": True, "enable_version_counter": False}
        super().__init__(monitor="val/acc", mode="max", filename="best", **settings)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Set metric and mode to the federation's monitor.

        Both are part of the key of this callback's state in a checkpoint, so `setup` runs before any state is loaded.
        """
        monitor = cast(Federation, pl_module).monitor
        if (self.monitor, self.mode) != (f"val/{monitor.metric}", monitor.mode):
            self.monitor, self.mode = f"val/{monitor.metric}", monitor.mode
            # ModelCheckpoint sets the worst possible value in its constructor, for the placeholder's mode
            self.kth_value = torch.tensor(math.inf * -monitor.sign)
        super().setup(trainer, pl_module, stage)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check before the first round that validation gives the monitored metric.

        Raises:
            MisconfigurationException: if the client module has no metric of this name.
        """
        federation = cast(Federation, pl_module)
        metric = federation.monitor.metric
        names = measured_names(federation.engines[0].metrics, pooled=True)
        if metric not in [*names, "loss"]:
            raise MisconfigurationException(
                f"{type(federation.client).__name__}.configure_metrics has {', '.join(names) or 'nothing'} and no "
                f"{metric}, by which the best round is kept; name another by trainer.monitor, or set "
                "trainer.enable_checkpointing=false."
            )


class LastCheckpoint(ModelCheckpoint):
    """Save the last round as ``last.ckpt``, to resume an interrupted run by ``--ckpt_path last``.

    In a round that is saved as ``best.ckpt`` too, this is a hard link to the same file, or a copy where the file system
    has no links.
    """

    def __init__(self) -> None:
        # not by save_last, which only saves when the monitored value has improved
        super().__init__(filename="last", save_on_train_epoch_end=True, enable_version_counter=False)


def is_pair(trainer: Trainer, best: str, last: str) -> bool:
    """Return True if two paths are those of ``best.ckpt`` and ``last.ckpt``, whose callbacks save one after the other.

    Args:
        trainer: the trainer.
        best: the path written first.
        last: the path to write next.
    """
    # a callback between the two would have another state in the second file
    return any(
        isinstance(one, BestCheckpoint)
        and isinstance(other, LastCheckpoint)
        and (best, last) == (one.best_model_path, other.format_checkpoint_name({}))
        for one, other in zip(trainer.checkpoint_callbacks, trainer.checkpoint_callbacks[1:], strict=False)
    )


def best_checkpoint(trainer: Trainer) -> str | None:
    """Return the path of ``best.ckpt``, or None if the run has none."""
    # the file may be gone: a user can delete checkpoints while the run goes on
    kept = [
        callback.best_model_path for callback in trainer.checkpoint_callbacks if isinstance(callback, BestCheckpoint)
    ]
    return next((path for path in kept if path and Path(path).exists()), None)
