"""A picture of clients' metrics through changes of their samples."""

from typing import TYPE_CHECKING, Any, cast

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from pfl_lightning.callbacks.pictures import Pictures
from pfl_lightning.engines import ClientMetrics
from pfl_lightning.federation.federation import Federation
from pfl_lightning.plots import plot_drift

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class DriftPictures(Pictures):
    """Draw a metric by round, of clients whose samples change and of the others, as ``pictures/drift``.

    Thin lines are clients, thick lines the means of the two groups, and each round of a change by ``data.drift`` or
    ``data.input_drift`` has a vertical line. Training doesn't change. The values are in the checkpoint, so a resumed
    run's picture is complete.

    Args:
        every: number of rounds between pictures, in ``pictures/round_N/``; None draws at the end of ``fit`` only.
        metric: the metric of clients, such as ``test/acc`` under ``trainer.test_every_round``; None takes the one that
            selects the best round.

    Raises:
        MisconfigurationException: at the start of ``fit``, if no round of a change is known.
    """

    def __init__(self, every: int | None = None, metric: str | None = None) -> None:
        super().__init__(every)
        self.metric = metric
        self.values: dict[int, Tensor] = {}
        """The metric of all clients by round, ``[clients]``; NaN for clients without."""

    def state_dict(self) -> dict[str, Any]:
        """Return the values so far, for a checkpoint."""
        return {"values": self.values}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the values of a resumed run."""
        self.values = dict(state_dict["values"])

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the run's folder, and check that samples change."""
        if not cast(Federation, pl_module).data.drifting:
            raise MisconfigurationException(
                "trainer.callbacks: DriftPictures marks rounds in which clients' samples change, and these data have "
                "none after the first; set data.drift or data.input_drift, or leave it out."
            )
        super().on_fit_start(trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep a round's metric of each client, before a checkpoint is saved."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._keep(cast(Federation, pl_module))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep a round's metric of each client where nothing is validated."""
        self._keep(cast(Federation, pl_module))

    def _keep(self, federation: Federation) -> None:
        split, _, metric = self._column(federation).partition("/")
        found = federation.evaluations.results.get(split, ClientMetrics())
        if found:
            clients = range(federation.data.num_clients)
            own = [found.get(client, {}).get(metric, torch.nan) for client in clients]
            self.values[int(federation.metrics["round"])] = torch.tensor(own)

    def _column(self, federation: Federation) -> str:
        return self.metric or f"val/{federation.monitor.metric}"

    def draw(self, trainer: Trainer, federation: Federation, where: str) -> None:
        """Draw the values so far."""

        def picture() -> "Figure":
            column = self._column(federation)
            if all(values.isnan().all() for values in self.values.values()):
                raise ValueError(f"no round has {column} of clients; take another metric, or trainer.test_every_round")
            return plot_drift(self.values, federation.data.drifting, column)

        self.show(trainer, "drift", picture, where)
