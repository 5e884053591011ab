"""The two checkpoints of every run, in addition to any `ModelCheckpoint` of the user."""

import math
import time
from pathlib import Path
from typing import Any, cast

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_info

from pfl_lightning.engines.evaluation import measured_names, names_logged
from pfl_lightning.federation.federation import Federation

SHARE = 0.1
"""The largest share of a run's time that writing ``last.ckpt`` takes by default."""
MINUTE = 60.0
"""Seconds of lost work from which on a run says what a kill costs."""


class BestCheckpoint(ModelCheckpoint):
    """Save the round with the best validation metric as ``best.ckpt``, for ``test --ckpt_path best``."""

    def __init__(self) -> None:
        # placeholders: only `setup` knows the metric that selects
        # always in the hook in which LastCheckpoint saves, so that a round's two files are one
        settings: dict[str, Any] = {"save_on_train_epoch_end": True, "enable_version_counter": False}
        super().__init__(monitor="val/acc", mode="max", filename="best", **settings)
        self.saved = 0
        """The round that was saved last in this process; 0 before the first."""

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

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the round if it is the best."""
        before = self.best_model_score
        super().on_train_epoch_end(trainer, pl_module)
        if self.best_model_score is not before:
            self.saved = trainer.global_step

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check before the first round that validation gives the monitored metric.

        Raises:
            MisconfigurationException: if the client module has no metric of this name.
        """
        federation = cast(Federation, pl_module)
        metric = federation.monitor.metric
        names, client = measured_names(federation.engines[0].metrics, pooled=True), federation.client
        source = f"{type(client).__name__}.configure_metrics has"
        if client.measures_itself and metric not in names:
            names += names_logged(client, federation.data)
            source = f"{type(client.net).__name__} logs"
        if metric not in [*names, "loss"]:
            raise MisconfigurationException(
                f"{source} {', '.join(names) or 'nothing'} and no "
                f"{metric}, by which the best round is kept; name another by trainer.monitor, or set "
                "trainer.enable_checkpointing=false."
            )


class LastCheckpoint(ModelCheckpoint):
    """Save rounds as ``last.ckpt``, to resume an interrupted run by ``--ckpt_path last``.

    Saved are each round that becomes ``best.ckpt``, the last round, and each round whose number is a multiple of
    ``trainer.checkpoint_every``. Without this setting a file is written when ten times the seconds that one takes have
    passed since the last one, and after each round that must not be repeated. In a round that is saved as ``best.ckpt``
    too, the file is a hard link to it, or a copy where the file system has no links.
    """

    def __init__(self) -> None:
        # not by save_last, which only saves when the monitored value has improved
        super().__init__(filename="last", save_on_train_epoch_end=True, enable_version_counter=False)
        self.every: int | None = None
        """Rounds from one file to the next; None where the time decides."""
        self.seconds = 0.0
        """What the last file took to write."""
        self.written = -math.inf
        """When, on the monotonic clock."""
        self._is_told = False

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Settle how often rounds are saved, and say what a kill costs where it is a number of rounds.

        Raises:
            MisconfigurationException: if a round must not be lost, as its privacy is spent or its masks are used.
        """
        federation = cast(Federation, pl_module)
        options = federation.options
        every = options.checkpoint_every
        reasons = {
            "clients are at sites": options.is_deployed,
            "its privacy is spent": federation.publishable or options.example_privacy or options.local_privacy,
            "its sums are secure": options.secure_sum,
        }
        reason = next((words for words, holds in reasons.items() if holds), "")
        if reason and every not in (None, 1):
            raise MisconfigurationException(
                f"trainer.checkpoint_every={every} could lose a round, which must not be repeated where {reason}; "
                "leave it out, or give 1."
            )
        self.every = 1 if reason else every
        self.seconds, self.written, self._is_told = 0.0, -math.inf, False
        if self.every is not None and self.every > 1:
            rank_zero_info(
                f"trainer.checkpoint_every={every}: a run that is killed, or stopped within a round, repeats up to "
                f"{self.every - 1} rounds."
            )

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the round if it is due."""
        federation = cast(Federation, pl_module)
        is_last, is_best = trainer.should_stop or federation.round == trainer.max_epochs, self._is_best(trainer)
        if is_last or is_best or self._is_due(trainer, federation.round):
            start = time.monotonic()
            super().on_train_epoch_end(trainer, pl_module)
            self.written = time.monotonic()
            # a link to best.ckpt takes no time
            self.seconds = self.seconds if is_best else self.written - start

    def _is_due(self, trainer: Trainer, round: int) -> bool:
        """Return True if enough rounds, or enough time, have passed since the last file."""
        if self.every is not None:
            return round % self.every == 0
        wait = self.seconds / SHARE
        if wait > MINUTE and not self._is_told:
            self._is_told = True
            rank_zero_info(
                f"last.ckpt took {self.seconds:.0f} s to write: it is written each {wait / MINUTE:.0f} min, and a run "
                "that is killed repeats what came after; trainer.checkpoint_every=1 writes it each round."
            )
        # all ranks save together, and the clock of one decides
        return bool(trainer.strategy.broadcast(time.monotonic() - self.written >= wait))

    def _is_best(self, trainer: Trainer) -> bool:
        """Return True if the round has been saved as ``best.ckpt``; a run must not resume from before it."""
        kept = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, BestCheckpoint)]
        return any(callback.saved == trainer.global_step for callback in kept)


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
