"""Pictures of calibration: how often predictions of some probability are correct, by client."""

from typing import TYPE_CHECKING, cast

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from pfl_lightning.callbacks.feature_pictures import as_used
from pfl_lightning.callbacks.pictures import Pictures, needs_classes
from pfl_lightning.federation.federation import Federation
from pfl_lightning.plots import plot_calibration
from pfl_lightning.tasks import Classification
from pfl_lightning.tasks.class_metrics import CalibrationError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class CalibrationPictures(Pictures):
    """Draw a reliability diagram of each client's model, and of all clients together, as ``pictures/calibration``.

    Test samples are sorted into 15 bins by the probability of the predicted class. A bin's share of correct predictions
    is drawn over its mean probability; a calibrated model is on the diagonal. The mean distance from it over samples is
    the metric ``ece`` of `Classification`. A client's model here is the one for evaluation. Without a logger nothing
    is drawn, and clients without test samples are left out.

    Args:
        every: number of rounds between pictures, in ``pictures/round_N/``; None draws at the end of ``fit`` only.
        most: number of clients to draw, the first ones by id, at least 1; the panel of all has every client.

    Raises:
        MisconfigurationException: if a number is below 1; at the start of ``fit``, if the task isn't `Classification`,
            or clients are at sites.
    """

    def __init__(self, every: int | None = None, most: int = 19) -> None:
        super().__init__(every)
        if most < 1:
            raise MisconfigurationException(f"CalibrationPictures.most={most} must be at least 1.")
        self.most = most

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the run's folder, and check task and data."""
        needs_classes(self, pl_module)
        data = cast(Federation, pl_module).data
        if data.at_sites or not isinstance(data.task, Classification):
            reason = "clients at sites keep theirs" if data.at_sites else f"task {data.task} isn't Classification"
            raise MisconfigurationException(
                f"trainer.callbacks: CalibrationPictures counts predictions of clients' test samples, and {reason}; "
                "leave it out."
            )
        super().on_fit_start(trainer, pl_module)

    def draw(self, trainer: Trainer, federation: Federation, where: str) -> None:
        """Count each client's predictions, and draw."""

        def picture() -> "Figure":
            # a picture must not move the run's random state
            with torch.inference_mode(False), isolate_rng():
                counted = {
                    client: counts
                    for client in range(federation.data.num_clients)
                    if (counts := predictions(federation, client)) is not None
                }
            names = federation.data.client_names or range(federation.data.num_clients)
            shown = {f"client {names[client]}": counts for client, counts in [*counted.items()][: self.most]}
            return plot_calibration({"all clients": torch.stack([*counted.values()]).sum(0), **shown})

        self.show(trainer, "calibration", picture, where)


@torch.no_grad()
def predictions(federation: Federation, client: int) -> Tensor | None:
    """Return a client's test samples, correct predictions and sum of probabilities by bin ``[3, bins]``; None without.

    Args:
        federation: the federation.
        client: id of the client.
    """
    part = federation.data.part(client, "test")
    if not len(part):
        return None
    engine = as_used(federation, client)
    part = part.to(engine.device, cast(torch.dtype, engine.module.dtype))
    error = CalibrationError().to(engine.device)
    for x, y in part.chunks():
        with engine.forward_context():
            outputs = engine.module(x)
        error.update(outputs, cast(Tensor, y))
    return error.sums.cpu()
