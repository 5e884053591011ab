"""The record of a run: one row a round, a table of clients, a summary."""

import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from fnmatch import fnmatchcase
from statistics import fmean, pstdev
from typing import Any, cast

import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger

from pfl_lightning.callbacks.base import FederatedCallback
from pfl_lightning.client.module import ClientModule
from pfl_lightning.data.description import described
from pfl_lightning.federation.federation import Federation
from pfl_lightning.federation.final_test import FinalTest
from pfl_lightning.messages import digest
from pfl_lightning.runs.folder import run_folder, stamp
from pfl_lightning.runs.report import (
    PackedRows,
    Row,
    append_row,
    columns_of,
    environment,
    further,
    numbers,
    summary_table,
    write_json,
    write_rows,
)
from pfl_lightning.runs.standing import Standing
from pfl_lightning.tasks import Monitor


def shown(metrics: Row, monitor: Monitor) -> Row:
    """The test metrics that a summary has beside the monitored one: others of the clients, and the server's model's.

    Args:
        metrics: test metrics, among others.
        monitor: the metric that selects.
    """
    own = {f"test/{name}": value for name, value in further(metrics, monitor)}
    return own | {name: metrics[name] for name in (f"test/global_{monitor.metric}",) if name in metrics}


def plain_entry(column: str, value: Any) -> Any:
    """Return an entry of a row as a plain number or text, which files and checkpoints give back as it was.

    Args:
        column: the entry's name.
        value: a number, also NumPy's or a tensor's only one, a text, or None.

    Raises:
        MisconfigurationException: if it is something else.
    """
    if isinstance(value, (np.generic, torch.Tensor)):
        value = value.tolist()
    if type(value) not in (int, float, str, bool, type(None)):
        raise MisconfigurationException(
            f"federation.metrics[{column!r}] is of the type {type(value).__name__}, and a record has numbers and texts "
            "only; give one of them."
        )
    return value


class RoundLogger(FederatedCallback):
    """Writes ``rounds.csv``, ``clients.csv`` and ``summary.json`` into the run's folder; logs one record a round.

    The rows are part of the checkpoint: a resumed run's record is whole, and without the round that was lost. At the
    end of ``fit`` the Trainer's test of the last round's models, and of those of the round that validation selects, is
    written, and a table is printed. With ``logger=False`` nothing is written or printed; ``rows`` holds the record.
    Under a guarantee of privacy ``publishable.csv`` has those columns of the record that the guarantee covers.
    """

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.clients: list[Row] = []
        self.summary: dict[str, Any] = {}
        self.fingerprints: dict[str, str] = {}
        self._packed = PackedRows()
        self._columns: set[str] = set()
        self._seconds = 0.0
        self._start = time.perf_counter()

    def state_dict(self) -> dict[str, Any]:
        """Return the rows so far, the seconds that they took, and fingerprints of partition and initial nets."""
        packed = self._packed.state(self.rows)
        return {"rows": packed, "seconds": self._elapsed(), "fingerprints": self.fingerprints}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from earlier rows."""
        self.rows, self._packed = PackedRows.unpacked(state_dict["rows"]), PackedRows()
        self._seconds = state_dict["seconds"]
        self.fingerprints = dict(state_dict["fingerprints"])

    def _elapsed(self) -> float:
        return self._seconds + time.perf_counter() - self._start

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Make the run's folder, and take the fingerprint of the initial nets, before training changes them."""
        if stage == "fit" and (folder := run_folder(trainer)):
            # not by each writer: a folder that is moved away is not to be made again
            folder.mkdir(parents=True, exist_ok=True)
        federation = cast(Federation, pl_module)
        if federation.seed is None:
            nets = [cast(ClientModule, kind).net.state_dict() for kind in federation.architectures]
            self.fingerprints = {"initial": digest(nets)}

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes the rows so far: a run has its file from the start, and a resumed one those that it goes on from.

        A CSVLogger, which starts its own file anew, and an MLFlowLogger, which starts a run, get them again.
        """
        self._start = time.perf_counter()
        federation = cast(Federation, pl_module)
        if self.rows and (folder := run_folder(trainer)):
            federation.aggregator.count_lost(lost_rounds(Standing(folder), len(self.rows)))
        self._write(trainer)
        # made once, by the federation: it counts the samples of all clients
        self.fingerprints = {"partition": federation.trained["partition"], **self.fingerprints}
        settings = {f"data.{name}": value for name, value in federation.data.hparams.items() if name[0] != "_"}
        # Lightning logs the method's own later; TensorBoard shows what comes first
        settings |= {name: value for name, value in federation.hparams.items() if name[0] != "_"}
        for logger in trainer.loggers:
            named = {"method": federation.method, "data.name": type(federation.data).__name__}
            logger.log_hyperparams(named | {"max_rounds": trainer.max_epochs} | settings)
            if isinstance(logger, (CSVLogger, MLFlowLogger)):
                for row in self.rows:
                    logger.log_metrics(numbers(row), step=row["round"])

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Records the round, before a checkpoint is saved at this point."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._record(trainer, cast(Federation, pl_module))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Records a round that had no validation."""
        self._record(trainer, cast(Federation, pl_module))

    def _record(self, trainer: Trainer, federation: Federation) -> None:
        row = federation.metrics
        if not row or (self.rows and self.rows[-1]["round"] == row["round"]):
            return
        row = {name: plain_entry(name, value) for name, value in row.items()}
        self.rows.append(row)
        # not by a look at all rows: a round costs the same however many there were
        if not self._columns.issuperset(row):
            self._write(trainer)
        elif folder := run_folder(trainer):
            append_row(folder / "rounds.csv", row)
            stamp(folder)
        for logger in trainer.loggers:
            logger.log_metrics(numbers(row), step=row["round"])
            logger.save()

    def on_final_test(self, trainer: Trainer, federation: Federation, tested: FinalTest) -> None:
        """Writes and prints the final tables."""
        if not self.rows:
            return
        monitor = federation.monitor
        column, server = f"test/{monitor.metric}", f"test/global_{monitor.metric}"
        central = {name: value for name, value in tested.metrics.items() if name.startswith("test/global_")}
        groups = federation.evaluations.groups
        apart = {name: value for name, value in tested.metrics.items() if name.partition("/")[0] in groups}
        final = {column: tested.metrics.get(column), **shown(tested.metrics, monitor), **central, **apart}
        clients = [
            described(federation.data, client) | federation.privacy_of(client) | metrics
            for client, metrics in tested.clients.items()
        ]
        new = [described(federation.data, client) | metrics for client, metrics in tested.new.clients.items()]
        self.clients = [row | {"new": 0} for row in clients] + [row | {"new": 1} for row in new] if new else clients
        self.summary = {
            "name": federation.method,
            "method": type(federation.client).__name__,
            "aggregator": federation.aggregator.name,
            "monitor": asdict(monitor),
            "final": {"round": self.rows[-1]["round"], **final},
            "selected": self._selected(monitor, final, tested.selected),
            "best_on_test": self._best(monitor, column),
            **({"best_global": self._best(monitor, server) | self._ten_best(monitor, server)} if central else {}),
            **({"new": self._new(monitor, final[column], tested.new.metrics)} if new else {}),
            **({"privacy": privacy} if (privacy := federation.privacy(final=True)) else {}),
            **({"audit": federation.audit} if federation.audit else {}),
            "seed": federation.seed,
            **self.fingerprints,
            "seconds": round(self._elapsed(), 3),
            **environment(federation.device),
        }
        # where Lightning's users look when `fit` is over
        known = {name: value for name, value in final.items() if value is not None}
        trainer.callback_metrics.update({name: torch.tensor(value) for name, value in known.items()})
        if folder := run_folder(trainer):
            write_rows(folder / "clients.csv", self.clients)
            write_json(folder / "summary.json", self.summary)
            if patterns := federation.publishable:
                write_rows(folder / "publishable.csv", [covered(row, patterns) for row in self.rows])
            print(summary_table(self.summary, self.rows, clients, folder))

    @staticmethod
    def _new(monitor: Monitor, test: float | None, metrics: Row) -> Row:
        """What new clients received and made of it, and how much worse that is than what the others have."""
        received, joined = (metrics.get(f"{name}/{monitor.metric}") for name in ("new_received", "new"))
        gap = None if test is None or joined is None else monitor.sign * (test - joined)
        return {f"received/{monitor.metric}": received, f"joined/{monitor.metric}": joined, "gap": gap}

    def _best(self, monitor: Monitor, column: str) -> Row:
        """The round with the best value of a column; of several the first."""
        best = max(self._known(column), key=lambda row: (monitor.sign * row[column], -row["round"]), default={})
        return {name: best.get(name) for name in ("round", column)}

    def _ten_best(self, monitor: Monitor, column: str) -> Row:
        """Mean and standard deviation of the ten best values of a column, as the FedAWA code reports them."""
        values = sorted((row[column] for row in self._known(column)), key=lambda value: -monitor.sign * value)[:10]
        return {"ten_best_mean": fmean(values), "ten_best_std": pstdev(values)} if values else {}

    def _known(self, column: str) -> list[Row]:
        """The rounds that have a value in a column."""
        return [row for row in self.rows if not math.isnan(row.get(column, math.nan))]

    def _selected(self, monitor: Monitor, final: Row, best: Row) -> Row:
        """The round with the best validation, and its test metrics where they can be known.

        Args:
            monitor: the metric that selects.
            final: test metrics of the last round.
            best: those of the best checkpoint, and its round.
        """
        validation, test = f"val/{monitor.metric}", f"test/{monitor.metric}"
        validated = self._known(validation)
        if not validated:
            return {"round": None, validation: None, test: None}
        # in float32, as ModelCheckpoint compares: of rounds that differ by less it keeps the first
        row = max(validated, key=lambda row: (monitor.sign * torch.tensor(row[validation]).item(), -row["round"]))
        tested = final if row is self.rows[-1] else row
        if test not in tested and best.get("round") == row["round"]:
            tested = row | best
        return {"round": row["round"], validation: row[validation], test: tested.get(test), **shown(tested, monitor)}

    def _write(self, trainer: Trainer) -> None:
        self._columns = set(columns_of(self.rows))
        if folder := run_folder(trainer):
            write_rows(folder / "rounds.csv", self.rows)
            stamp(folder)


def lost_rounds(standing: Standing, kept: int) -> int:
    """Return how many rounds a run may have made that its checkpoint doesn't have.

    Args:
        standing: what the run's folder tells of it.
        kept: rounds of the checkpoint.
    """
    recorded = len(standing.rows)
    # one more may have been in the middle, unless the run had come to its end
    ended = standing.summary.get("final", {}).get("round") == recorded
    return max(recorded - kept, 0) + (not ended)


def covered(row: Row, patterns: Sequence[str]) -> Row:
    """Return the entries of a row whose names match a pattern.

    >>> covered({"round": 1, "val/acc": 0.5, "privacy/epsilon": 2.0}, ["round", "privacy/*"])
    {'round': 1, 'privacy/epsilon': 2.0}

    Args:
        row: of the record.
        patterns: as shells have them.
    """
    return {name: value for name, value in row.items() if any(fnmatchcase(name, pattern) for pattern in patterns)}
