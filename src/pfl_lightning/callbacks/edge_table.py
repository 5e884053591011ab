"""Table of the edges over which clients exchange models in rounds on a graph."""

from typing import Any, cast

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer

from pfl_lightning.callbacks.base import FederatedCallback
from pfl_lightning.federation.federation import Federation
from pfl_lightning.runs.folder import run_folder
from pfl_lightning.runs.report import write_rows
from pfl_lightning.server import GraphAggregator

FILE = "edges.csv"
COLUMNS = ("round", "sender", "receiver", "bytes")


class EdgeTable(FederatedCallback):
    """Write the edges of each round, with the bytes on each, into ``edges.csv`` of the run's folder.

    A row is a direction of an edge: ``round``, ``sender``, ``receiver`` and ``bytes``, those of the sender's upload. In
    a round, the bytes have the sum ``server/edge_bytes`` of the record. The rows are part of the checkpoint, and the
    file is written at the end of ``fit``; without a logger there is none.

    Raises:
        MisconfigurationException: at the start of ``fit``, if the aggregator is none on a graph.
    """

    reads_updates = False

    def __init__(self) -> None:
        self.table = torch.empty(0, len(COLUMNS), dtype=torch.int64)

    def state_dict(self) -> dict[str, Any]:
        """Return the rows so far."""
        return {"table": self.table}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the rows of a resumed run."""
        self.table = state_dict["table"]

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse other aggregators, and drop the rows of an earlier fit."""
        federation = cast(Federation, pl_module)
        if federation.aggregator.find(GraphAggregator) is None:
            raise MisconfigurationException(
                f"trainer.callbacks=EdgeTable: aggregator={federation.aggregator.name} has no edges between clients; "
                "take one on a graph, such as GossipAverage, or leave it out."
            )
        self.table = self.table[self.table[:, 0] <= federation.round]

    def on_aggregate_end(self, trainer: Trainer, federation: Federation, logs: dict[str, float]) -> None:
        """Add the round's edges."""
        # a round without updates logs nothing, and leaves the edges of the one before in the state
        if "edges" in logs:
            edges = cast(GraphAggregator, federation.aggregator.find(GraphAggregator)).state["edges"]
            rounds = torch.full((len(edges), 1), federation.round + 1)
            self.table = torch.cat([self.table, torch.cat([rounds, edges], 1)])

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the file."""
        folder = run_folder(trainer)
        if folder is not None and trainer.is_global_zero:
            write_rows(folder / FILE, [dict(zip(COLUMNS, row, strict=True)) for row in self.table.tolist()])
