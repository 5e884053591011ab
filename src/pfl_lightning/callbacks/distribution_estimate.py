"""Measure how much uploads reveal about clients' class distributions."""

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from pfl_lightning.callbacks.base import FederatedCallback
from pfl_lightning.callbacks.pictures import needs_classes
from pfl_lightning.federation.federation import Federation
from pfl_lightning.messages import Updates
from pfl_lightning.methods.cwfedavg import row_distribution
from pfl_lightning.nets import find_output_layer


def estimation_error(estimate: Tensor, counts: Tensor) -> tuple[float, float]:
    r"""Return the distance of an estimated class distribution from the true one, and the mass on absent classes.

    >>> estimation_error(torch.tensor([0.5, 0.5, 0.0]), torch.tensor([30, 0, 0]))
    (0.7071067811865476, 0.5)

    Args:
        estimate: the estimate :math:`\tilde p` ``[K]``.
        counts: samples of each class ``[K]``.

    Returns:
        The distance :math:`\lVert p - \tilde p\rVert_2`, at most the root of 2, and :math:`\sum_{j: n_j = 0} \tilde
        p_j`.
    """
    true = counts.double() / counts.sum()
    estimate = estimate.double()
    return float(torch.linalg.vector_norm(true - estimate)), float(estimate[counts == 0].sum())


class DistributionEstimate(FederatedCallback):
    """Record how well the output layers in uploads show clients' class distributions, for any method.

    A server could estimate a client's class distribution from the norms of the rows of its output layer. The round's
    record gets the errors of this estimate as means over the cohort: ``estimate/distance`` and
    ``estimate/absent_mass``, see `estimation_error`. Clients that don't send an output layer reveal nothing here, and
    nothing is recorded.

    Args:
        output_layer: name of the linear layer with one row per class; needed if the net's classifier has several.
    """

    def __init__(self, output_layer: str | None = None) -> None:
        self.output_layer = output_layer

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the output layer; a net without one is refused before the first round."""
        needs_classes(self, pl_module)
        federation: Federation = pl_module  # type: ignore[assignment]
        self._rows = find_output_layer(federation.client, federation.client.num_classes, self.output_layer) + ".weight"

    def on_aggregate_start(self, trainer: Trainer, federation: Federation, updates: Updates) -> None:
        """Compare the estimates with the class counts of the clients' training samples."""
        # the true counts are read from the data, which a real server hasn't: an audit, not an attack
        counts = federation.data.counts
        errors = [
            estimation_error(row_distribution(update["weights"][self._rows]), counts[client])
            for client, update in updates.items()
            if self._rows in update.get("weights", {})
        ]
        if errors:
            distance, absent = torch.tensor(errors, dtype=torch.float64).mean(0).tolist()
            federation.metrics |= {"estimate/distance": distance, "estimate/absent_mass": absent}
