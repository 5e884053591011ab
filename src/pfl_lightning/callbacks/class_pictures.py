"""Pictures by class: the partition, the class distributions that output layers reveal, and the server's mixing."""

from typing import TYPE_CHECKING, cast

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from pfl_lightning.callbacks.pictures import Pictures, needs_classes
from pfl_lightning.federation.federation import Federation
from pfl_lightning.messages import Message, Updates
from pfl_lightning.methods.cwfedavg import CwFedAvg
from pfl_lightning.methods.wdr import WDR
from pfl_lightning.nets import find_output_layer
from pfl_lightning.plots import (
    plot_class_heatmaps,
    plot_distribution_scatter,
    plot_distribution_trace,
    plot_mixing_matrix,
    plot_partition,
    trace_job,
)
from pfl_lightning.plots.trace import copy_client

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class ClassPictures(Pictures):
    """Draw the pictures of the cwFedAvg papers.

    * For every method: the partition; if output layers are sent, the norms of their rows as received, after local
      training, and the difference, each client's from its last round; and the class distributions estimated from these
      norms against the true ones.
    * With `CwFedAvg`: the class models and the mixing matrix.
    * With `WDR`: one client's first round step by step, beside the same round without the regulariser, at the cost of
      two rounds of one client.

    Pictures go to ``RUN_FOLDER/pictures/``, and to Weights & Biases and TensorBoard if the run logs there. Without a
    logger nothing is drawn. A picture that fails gives a warning, and the run goes on.

    Args:
        every: number of rounds between pictures, in ``pictures/round_N/``; None draws at the end of ``fit`` only.
        trace_client: id of the client whose first round is drawn step by step.

    Raises:
        MisconfigurationException: if ``every`` is less than 1.
    """

    def __init__(self, every: int | None = None, trace_client: int = 0) -> None:
        super().__init__(every)
        self.trace_client = trace_client
        self._layer: str | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the run's folder and the output layer, and draw the partition."""
        needs_classes(self, pl_module)
        super().on_fit_start(trainer, pl_module)
        federation = cast(Federation, pl_module)
        self._layer = output_layer_of(federation)
        shape = federation.data.num_clients, federation.client.num_classes
        self._starts: dict[int, Tensor] = {}
        self._received, self._trained = torch.full(shape, torch.nan), torch.full(shape, torch.nan)
        self.show(trainer, "partition", lambda: plot_partition(federation.data.counts, federation.data.client_names))

    def on_round_start(self, trainer: Trainer, federation: Federation, cohort: list[int]) -> None:
        """Record the row norms of the payloads; with `WDR`, trace a client in the first round."""
        if self.folder is None or self._layer is None:
            return
        # payloads differ between clients under personal servers, so each client's own is measured
        payloads = ((client, federation.aggregator.download(client)) for client in cohort)
        self._starts = {client: norms for client, payload in payloads if (norms := self._norms(payload)) is not None}
        if federation.round == 0 and isinstance(federation.client, WDR):
            self._show_trace(trainer, federation)

    def on_aggregate_start(self, trainer: Trainer, federation: Federation, updates: Updates) -> None:
        """Record the row norms of the updates."""
        for client, update in updates.items():
            # both norms or neither, so that their difference belongs to one round
            if client in self._starts and (norms := self._norms(update)) is not None:
                self._received[client], self._trained[client] = self._starts[client], norms

    def _norms(self, record: Message) -> Tensor | None:
        """Return the norms ``[K]`` of the output layer's rows in a message, or None if the layer isn't part of it."""
        rows = record.get("weights", {}).get(f"{self._layer}.weight")
        # in float32: norms of bf16 rows would be rounded to three digits
        return None if rows is None else torch.linalg.vector_norm(rows.detach().float(), dim=1).cpu()

    def draw(self, trainer: Trainer, federation: Federation, where: str) -> None:
        """Draw row norms and estimated distributions, and with `CwFedAvg` the server's mixing."""
        p = shares(federation.data.counts)
        if not self._trained.isnan().all():
            received, trained = self._received, self._trained
            norms = {"As received": received, "After local training": trained, "Difference": trained - received}
            estimates = shares(trained)
            pair = {"True": p, "Estimated from row norms": estimates}
            self.show(trainer, "row_norms", lambda: plot_class_heatmaps(norms, "norm of the class's row"), where)
            self.show(trainer, "distributions", lambda: plot_class_heatmaps(pair, "share of the class"), where)
            self.show(trainer, "scatter", lambda: plot_distribution_scatter({"all clients": (p, estimates)}), where)
        if (aggregator := federation.aggregator.find(CwFedAvg)) is not None:
            self.show(trainer, "mixing_matrix", lambda: plot_mixing_matrix(aggregator.mixing_matrix()), where)
            # clients with a personal output layer send no rows for class models
            if aggregator.rows in aggregator.names:
                self.show(trainer, "class_models", lambda: draw_class_models(aggregator), where)

    def _show_trace(self, trainer: Trainer, federation: Federation) -> None:
        if self.trace_client not in range(federation.data.num_clients):
            rank_zero_warn(f"ClassPictures.trace_client={self.trace_client} is not a client; no round is followed.")
            return
        p = shares(federation.data.counts)[self.trace_client]
        # drawn within `show`, so that a failing trace is a warning; the scatter needs the same two rounds
        traces: dict[str, Tensor] = {}

        def draw() -> "Figure":
            traces.update(self._trace(trainer, federation))
            return plot_distribution_trace(traces, p)

        self.show(trainer, "trace", draw)
        if traces:
            ends = {title: (p, trace[-1]) for title, trace in traces.items()}
            self.show(trainer, "trace_scatter", lambda: plot_distribution_scatter(ends))

    def _trace(self, trainer: Trainer, federation: Federation) -> dict[str, Tensor]:
        """Return class distributions during a client's round, without and with the regulariser, ``[steps + 1, K]``."""
        plain = copy_client(federation.client)
        # the same client, job and random stream: only the regulariser differs between the traces
        plain.wdr_weight = 0.0
        job, work = federation.job(self.trace_client), federation.options.work(federation.data)
        return {
            title: trace_job(client, job, work, trainer.precision_plugin, self._layer)
            for title, client in (("Without WDR", plain), ("With WDR", federation.client))
        }


def output_layer_of(federation: Federation) -> str | None:
    """Return the name of the layer with one row per class, or None if the net has no single such layer."""
    client, aggregator = federation.client, federation.aggregator.find(CwFedAvg)
    named = getattr(client, "output_layer", None) or (aggregator.output_layer if aggregator else None)
    try:
        return find_output_layer(client, client.num_classes, named)
    except MisconfigurationException:
        return None


def shares(amounts: Tensor) -> Tensor:
    """Scale rows to sum 1.

    >>> shares(torch.tensor([[1, 3], [2, 2]]))
    tensor([[0.2500, 0.7500],
            [0.5000, 0.5000]])

    Args:
        amounts: amounts ``[M, K]``, such as counts or norms.
    """
    return amounts / amounts.sum(1, keepdim=True)


def draw_class_models(aggregator: CwFedAvg) -> "Figure":
    """Return a heatmap of the norms of the class models' output rows.

    Args:
        aggregator: the cwFedAvg server.
    """
    # the output layer alone: K copies of all layers would be large
    models = aggregator.class_models([aggregator.rows])[aggregator.rows]
    norms = torch.linalg.vector_norm(models.double(), dim=2)
    return plot_class_heatmaps({"Class models": norms}, "norm of the class's row", rows="class model")
