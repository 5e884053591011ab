"""The base class of callbacks that draw pictures of a run."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, cast

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_warn

from pfl_lightning.callbacks.base import FederatedCallback
from pfl_lightning.callbacks.trackers import show_figure
from pfl_lightning.federation.federation import Federation
from pfl_lightning.runs.folder import run_folder
from pfl_lightning.tasks.base import number_of_classes

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Pictures(FederatedCallback):
    """Draw pictures into ``RUN_FOLDER/pictures/``, and log each to Weights & Biases and TensorBoard if used.

    A subclass overrides `draw`, which hands each picture to `show`. Without a logger the run has no folder, and nothing
    is drawn. A picture that fails gives a warning, and the run goes on.

    Args:
        every: number of rounds between pictures, in ``pictures/round_N/``; None draws at the end of ``fit`` only.

    Raises:
        MisconfigurationException: if ``every`` is less than 1.
    """

    def __init__(self, every: int | None = None) -> None:
        if every is not None and every < 1:
            raise MisconfigurationException(f"{type(self).__name__}.every={every} must be at least 1, or null.")
        self.every = every
        self.folder: Path | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the run's folder."""
        self.folder = run_folder(trainer)

    def on_aggregate_end(self, trainer: Trainer, federation: Federation, logs: dict[str, float]) -> None:
        """Draw after every ``every`` rounds."""
        # `federation.round` is the number of finished rounds, and this round isn't finished yet
        done = federation.round + 1
        if self.every and done % self.every == 0:
            self.draw(trainer, federation, f"round_{done:04d}")

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw at the end of ``fit``."""
        self.draw(trainer, cast(Federation, pl_module), "")

    def draw(self, trainer: Trainer, federation: Federation, where: str) -> None:
        """Draw all pictures of the current state.

        Args:
            trainer: the trainer.
            federation: the federation.
            where: folder under ``pictures/``; empty at the end of ``fit``.
        """

    def show(self, trainer: Trainer, name: str, picture: Callable[[], "Figure"], where: str = "") -> None:
        """Draw one picture, and save and log the figure.

        Args:
            trainer: the trainer, whose loggers receive the figure.
            name: name of the picture and of its file.
            picture: returns the figure.
            where: folder under ``pictures/``.
        """
        if self.folder is None:
            return
        # called within the try: drawing and saving may fail for any reason, such as a full disk or a missing matplotlib
        try:
            figure = picture()
            path = self.folder / "pictures" / where / f"{name}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path, dpi=150)
            show_figure(trainer, f"pictures/{name}", figure)
        # any exception: hours of training are worth more than a picture
        except Exception as error:
            rank_zero_warn(f"{type(self).__name__}: {name} was not drawn: {error}")


def needs_classes(callback: Callback, federation: LightningModule) -> None:
    """Refuse a callback that needs classes on a task without any.

    Args:
        callback: the callback.
        federation: the federation.

    Raises:
        MisconfigurationException: if samples have no classes.
    """
    task = cast(Federation, federation).client.task
    number_of_classes(task, f"callback {type(callback).__name__}", "leave it out")
