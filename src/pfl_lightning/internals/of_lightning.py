"""Private names of Lightning.

Three private methods are overridden, which only a subclass can do:

* ``Trainer._run_stage``, by ``FederatedTrainer``: to test after the last round, or to join in place of a test,
  while models are still on the device.
* ``DDPStrategy._configure_launcher``, by ``ClientParallel``: to start ranks by a launcher of its own.
* ``LightningCLI._parse_ckpt_path``, by ``PflCLI``: to keep the given settings, which a checkpoint's would replace.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.strategies import ParallelStrategy, launchers

ScriptLauncher = launchers._SubprocessScriptLauncher
"""The launcher that starts each rank by the command line of this process; attribute ``procs`` has the processes."""

KEPT_ARGUMENTS = ("_hparams_initial", "_hparams_name")
"""Attributes of a module that ``save_hyperparameters`` sets, beside ``hparams``."""
COMMAND_LINE_NOTES = ("_class_path", "_instantiator")
"""Names that Lightning's command line adds to the ``hparams`` of a module, beside the arguments."""


def start_ranks(launcher: ScriptLauncher) -> None:
    """Start the other ranks; ``launch`` would also start an observer, which kills all ranks without a message.

    Args:
        launcher: the launcher; afterwards ``procs`` has the started processes.
    """
    launcher._call_children_scripts()


def set_launcher(strategy: ParallelStrategy, launcher: ScriptLauncher) -> None:
    """Replace a strategy's launcher; the public property ``launcher`` can only be read.

    Args:
        strategy: the strategy.
        launcher: the new launcher.
    """
    strategy._launcher = launcher


def continue_run(logger: CSVLogger | TensorBoardLogger | WandbLogger, version: str) -> None:
    """Make a logger continue an earlier run, unless the logger has a run already.

    The public way is an argument of the constructor, but the run is known only when a checkpoint has been found.

    Args:
        logger: a logger that hasn't logged yet.
        version: name of the earlier run; for Weights & Biases the run's id.
    """
    if isinstance(logger, WandbLogger):
        if logger.version is None:
            logger._id = logger._wandb_init["id"] = version
    # reading the public ``version`` would create a new run
    elif logger._version is None:
        logger._version = version


@contextmanager
def attached(module: LightningModule, trainer: Any, log: Callable[..., None]) -> Iterator[None]:
    """Replace a LightningModule's Trainer and ``log`` inside this context.

    The public setter of ``trainer`` takes Trainers alone.

    Args:
        module: the LightningModule.
        trainer: the object.
        log: takes the arguments of ``LightningModule.log``.
    """
    table = vars(module)
    before = table["_trainer"]
    table.update(_trainer=trainer, log=log)
    try:
        yield
    finally:
        del table["log"]
        table["_trainer"] = before
