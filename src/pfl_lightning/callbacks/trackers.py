"""Send pictures, records and summaries to experiment trackers."""

from typing import TYPE_CHECKING, Any

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger

from pfl_lightning.callbacks.round_logger import RoundLogger
from pfl_lightning.runs.report import numbers

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def show_figure(trainer: Trainer, name: str, figure: "Figure") -> None:
    """Log a figure to Weights & Biases and to TensorBoard, if the trainer has such loggers.

    Args:
        trainer: the trainer; the number of finished rounds is the step.
        name: name in the tracker.
        figure: the figure.
    """
    # Lightning's loggers have no common method for images
    for logger in trainer.loggers:
        if isinstance(logger, WandbLogger):
            send_figure(logger, name, figure)
        elif isinstance(logger, TensorBoardLogger):
            logger.experiment.add_figure(name, figure, trainer.global_step)


def send_figure(logger: WandbLogger, name: str, figure: "Figure") -> None:
    """Log a figure to Weights & Biases as an image."""
    # wandb.Image compares the figure with matplotlib.pyplot, and fails where nothing has imported pyplot
    import matplotlib.pyplot  # noqa: F401

    logger.log_image(name, [figure])


def records(trainer: Trainer) -> list[RoundLogger]:
    """Return the trainer's `RoundLogger` callbacks."""
    return [callback for callback in trainer.callbacks if isinstance(callback, RoundLogger)]  # type: ignore[attr-defined]


def flat_summary(record: RoundLogger) -> dict[str, Any]:
    """Return a run's summary without nesting, with names such as ``final/test/acc``."""
    flat = {name: value for name, value in record.summary.items() if not isinstance(value, dict)}
    # one level is enough: no part of a summary has parts of its own
    for part in ("final", "selected", "best_on_test", "best_global"):
        flat |= {f"{part}/{name}": value for name, value in record.summary.get(part, {}).items()}
    return flat


def outcome(record: RoundLogger) -> dict[str, Any]:
    """Return the summary's numbers, such as ``selected/val/acc``, for sweeps and for sorting runs."""
    # only names with a slash: the seed and other settings are logged as hyper-parameters already
    return {name: value for name, value in numbers(flat_summary(record)).items() if "/" in name}
