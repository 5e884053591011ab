"""What callbacks give to trackers of experiments: pictures, and a run's record and summary."""

from typing import TYPE_CHECKING, Any

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger

from pfl_lightning.callbacks.round_logger import RoundLogger
from pfl_lightning.runs.report import numbers

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def show_figure(trainer: Trainer, name: str, figure: "Figure") -> None:
    """Gives a picture to Weights & Biases and to TensorBoard, where they log.

    Args:
        trainer: whose loggers get it, with the rounds that are done as step.
        name: in the tracker.
        figure: the picture.
    """
    for logger in trainer.loggers:
        if isinstance(logger, WandbLogger):
            logger.log_image(name, [figure])
        elif isinstance(logger, TensorBoardLogger):
            logger.experiment.add_figure(name, figure, trainer.global_step)


def records(trainer: Trainer) -> list[RoundLogger]:
    """The Trainer's records of rounds."""
    return [callback for callback in trainer.callbacks if isinstance(callback, RoundLogger)]  # type: ignore[attr-defined]


def flat_summary(record: RoundLogger) -> dict[str, Any]:
    """A run's summary without nesting: what is in its parts has names such as ``final/test/acc``."""
    flat = {name: value for name, value in record.summary.items() if not isinstance(value, dict)}
    for part in ("final", "selected", "best_on_test", "best_global"):
        flat |= {f"{part}/{name}": value for name, value in record.summary.get(part, {}).items()}
    return flat


def outcome(record: RoundLogger) -> dict[str, Any]:
    """The numbers of a summary's parts, such as ``selected/val/acc``, by which sweeps choose and trackers sort runs."""
    return {name: value for name, value in numbers(flat_summary(record)).items() if "/" in name}
