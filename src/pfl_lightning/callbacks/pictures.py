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
    """Draws into ``RUN_FOLDER/pictures/``, and for Weights & Biases and TensorBoard where they log.

    Subclasses override `draw`, which hands each picture to `show`. Nothing is drawn without a logger. A picture that
    fails is a warning; the run goes on.

    Args:
        every: rounds between pictures, in ``pictures/round_N/``; None draws at the end of ``fit`` alone.

    Raises:
        MisconfigurationException: if ``every`` isn't a number of rounds.
    """

    def __init__(self, every: int | None = None) -> None:
        if every is not None and every < 1:
            raise MisconfigurationException(f"{type(self).__name__}.every={every} must be at least 1, or null.")
        self.every = every
        self.folder: Path | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Finds the run's folder."""
        self.folder = run_folder(trainer)

    def on_aggregate_end(self, trainer: Trainer, federation: Federation, logs: dict[str, float]) -> None:
        """Draws every so many rounds."""
        done = federation.round + 1
        if self.every and done % self.every == 0:
            self.draw(trainer, federation, f"round_{done:04d}")

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draws the end."""
        self.draw(trainer, cast(Federation, pl_module), "")

    def draw(self, trainer: Trainer, federation: Federation, where: str) -> None:
        """Draws what there is to see now.

        Args:
            trainer: the trainer.
            federation: the federation.
            where: folder under ``pictures/``; empty at the end of ``fit``.
        """

    def show(self, trainer: Trainer, name: str, picture: Callable[[], "Figure"], where: str = "") -> None:
        """Draws a picture and keeps it.

        Args:
            trainer: the trainer, whose loggers get it.
            name: its name, of the file too.
            picture: draws it.
            where: folder under ``pictures/``.
        """
        if self.folder is None:
            return
        try:
            figure = picture()
            path = self.folder / "pictures" / where / f"{name}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path, dpi=150)
            show_figure(trainer, f"pictures/{name}", figure)
        # whatever it is: hours of training are worth more than a picture
        except Exception as error:
            rank_zero_warn(f"{type(self).__name__}: {name} was not drawn: {error}")


def needs_classes(callback: Callback, federation: LightningModule) -> None:
    """Refuses a callback that looks at classes where samples have none.

    Args:
        callback: the callback.
        federation: the federation that it looks at.

    Raises:
        MisconfigurationException: if they have none.
    """
    task = cast(Federation, federation).client.task
    number_of_classes(task, f"callback {type(callback).__name__}", "leave it out")
