"""The record of a run: one row per round, a table of clients, a summary."""

import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, cast

import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities import rank_zero_warn

from pfl_lightning.callbacks.base import FederatedCallback
from pfl_lightning.client.module import ClientModule
from pfl_lightning.data.description import described
from pfl_lightning.engines.evaluation import own_values
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
from pfl_lightning.runs.run_status import RunStatus
from pfl_lightning.tasks import Monitor


def shown(metrics: Row, monitor: Monitor) -> Row:
    """Return the test metrics for a summary besides the monitored one: clients' other metrics, and the server model's.

    Args:
        metrics: test metrics, among others.
        monitor: the metric that selects.
    """
    own = {f"test/{name}": value for name, value in further(metrics, monitor)}
    return own | {name: metrics[name] for name in (f"test/global_{monitor.metric}",) if name in metrics}


def plain_entry(column: str, value: Any) -> Any:
    """Return an entry of a row as a plain number or text, which survives files and checkpoints unchanged.

    Args:
        column: name of the entry.
        value: a number, a NumPy scalar, a tensor with one element, a text, or None.

    Raises:
        MisconfigurationException: for any other type.
    """
    if isinstance(value, (np.generic, torch.Tensor)):
        value = value.tolist()
    if type(value) not in (int, float, str, bool, type(None)):
        raise MisconfigurationException(
            f"federation.metrics[{column!r}] is of the type {type(value).__name__}, and a record has numbers and texts "
            "only; give one of them."
        )
    return value


LOST = "lost.json"
"""The file with the clients of rounds that no checkpoint of the run has, in runs with a guarantee of privacy."""


class RoundLogger(FederatedCallback):
    """Write ``rounds.csv``, ``clients.csv`` and ``summary.json`` into the run's folder, and log one row per round.

    * ``rounds.csv`` grows by a row per round. The rows are part of the checkpoint: a resumed run's record is complete,
      and rounds made again after a checkpoint appear once.
    * ``clients.csv`` and ``summary.json`` follow at the end of ``fit``, with the test of the last round's models and of
      the models that validation selects; a table of both is printed.
    * ``publishable.csv`` is written under a guarantee of privacy: only the columns of the record that the guarantee
      covers.

    * ``client_rounds.csv`` follows on request: a row per round and evaluated client.

    A round's work is ``local/steps``, the optimizer steps of all clients whose updates count, and ``local/samples``,
    the samples in these steps' batches, each as often as it was in one. All phases of a method count. Passes over
    samples without a step of the client's optimizer don't: inner steps on a batch (pFedMe, Per-FedAvg, FedSAM, APFL's
    share), weights and statistics computed before or after training (FedALA, pFedFDA, SCAFFOLD's option I, FedAS),
    training before an evaluation (FedBABU, Per-FedAvg), and the server's own. `FlopCounter` counts the operations of
    all work in a client's round. Under ``trainer.example_privacy`` samples are the expected number of the drawn ones.

    With ``logger=False`` nothing is written or printed, and ``rows`` holds the record.

    Args:
        client_rounds: whether to write each client's metrics of each round into ``client_rounds.csv``. They are part of
            the checkpoint too: about ten bytes per metric, client and round. No guarantee of privacy covers them.
        client_curves: largest number of clients for which Weights & Biases and TensorBoard get a curve per client, as
            ``client/NAME/val/acc``, with the client's id for an unnamed client; 0 for none. A federation of more
            clients has no such curves, and a warning tells so.

    Raises:
        MisconfigurationException: if ``client_curves`` is negative.
    """

    def __init__(self, client_rounds: bool = False, client_curves: int = 0) -> None:
        if client_curves < 0:
            raise MisconfigurationException(f"RoundLogger.client_curves={client_curves} must be 0 or more.")
        self.client_rounds = client_rounds
        self.client_curves = client_curves
        self.client_rows: list[Row] = []
        self._packed_clients = PackedRows()
        self._client_columns: set[str] = set()
        self.rows: list[Row] = []
        self.clients: list[Row] = []
        self.summary: dict[str, Any] = {}
        self.fingerprints: dict[str, str] = {}
        self._packed = PackedRows()
        self._columns: set[str] = set()
        self._lost = 0
        self._seconds = 0.0
        self._start = time.perf_counter()

    def state_dict(self) -> dict[str, Any]:
        """Return the rows so far, the elapsed seconds, and fingerprints of partition and initial nets."""
        packed = self._packed.state(self.rows)
        state = {"rows": packed, "seconds": self._elapsed(), "fingerprints": self.fingerprints, "lost": self._lost}
        return state | {"client_rows": self._packed_clients.state(self.client_rows)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the record of a resumed run."""
        self.rows, self._packed = PackedRows.unpacked(state_dict["rows"]), PackedRows()
        if self.client_rounds:
            self.client_rows, self._packed_clients = PackedRows.unpacked(state_dict["client_rows"]), PackedRows()
        self._seconds = state_dict["seconds"]
        self.fingerprints = dict(state_dict["fingerprints"])
        self._lost = state_dict["lost"]

    def _elapsed(self) -> float:
        return self._seconds + time.perf_counter() - self._start

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Create the run's folder, and fingerprint the initial nets before training changes them."""
        if stage == "fit" and (folder := run_folder(trainer)):
            # created once, not by each writer: a folder moved away during the run must not come back half empty
            folder.mkdir(parents=True, exist_ok=True)
        federation = cast(Federation, pl_module)
        # the federation takes its seed when it is first set up: with a seed, the nets may be trained already
        if federation.seed is None:
            nets = [cast(ClientModule, kind).net.state_dict() for kind in federation.architectures]
            self.fingerprints = {"initial": digest(nets)}

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the rows so far, and log the settings.

        A new run has its file from the start. A resumed run writes the rows of its checkpoint again, also to a
        CSVLogger, which starts its own file anew, and to an MLFlowLogger, which starts a new run.
        """
        self._start = time.perf_counter()
        federation = cast(Federation, pl_module)
        # rounds after the checkpoint are lost, but clients' updates were released: privacy accounting must count both
        if self.rows and federation.publishable and (folder := run_folder(trainer)):
            self._count_lost(federation, folder)
        self._write(trainer)
        self._write_clients(trainer)
        if 0 < self.client_curves < federation.data.num_clients:
            rank_zero_warn(
                f"RoundLogger.client_curves={self.client_curves}, but there are {federation.data.num_clients} clients, "
                "so trackers get no curves of clients"
            )
        # taken from the federation, which computes it once: it needs the samples of all clients
        # left out under a guarantee: who knows all rows but one could try candidates for it
        rows = None if federation.publishable else federation.trained["rows"]
        held = {} if rows is None else {"rows": digest([rows])}
        self.fingerprints = {"partition": federation.trained["partition"], **held, **self.fingerprints}
        settings = built_settings(federation)
        settings |= {f"data.{name}": value for name, value in federation.data.hparams.items() if name[0] != "_"}
        # Lightning logs the client module's settings later, and TensorBoard keeps only the first call
        settings |= {name: value for name, value in federation.hparams.items() if name[0] != "_"}
        for logger in trainer.loggers:
            named = {"method": federation.method, "data.name": type(federation.data).__name__}
            logger.log_hyperparams(named | {"max_rounds": trainer.max_epochs} | settings)
            if isinstance(logger, (CSVLogger, MLFlowLogger)):
                for row in self.rows:
                    logger.log_metrics(numbers(row), step=row["round"])

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the round after validation, before a checkpoint is saved."""
        # the row must be part of the checkpoint that ModelCheckpoint saves in this very hook
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._record(trainer, cast(Federation, pl_module))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record a round without validation."""
        self._record(trainer, cast(Federation, pl_module))

    def _record(self, trainer: Trainer, federation: Federation) -> None:
        row = federation.metrics
        if not row or (self.rows and self.rows[-1]["round"] == row["round"]):
            return
        row = {name: plain_entry(name, value) for name, value in row.items()}
        self.rows.append(row)
        # compared with the known columns, not with all rows, so that a round's cost doesn't grow with the run
        if not self._columns.issuperset(row):
            self._write(trainer)
        # a row with known columns is appended; a new column rewrites the file with a new header
        elif folder := run_folder(trainer):
            append_row(folder / "rounds.csv", row)
            stamp(folder)
        clients = clients_of(federation) if self.client_rounds or self.client_curves else []
        if self.client_rounds and clients:
            self._record_clients(trainer, [{"round": row["round"]} | each for each in clients])
        curves = curves_of(clients) if federation.data.num_clients <= self.client_curves else {}
        for logger in trainer.loggers:
            # the CSV file of Lightning's logger would get a column per client and metric
            more = curves if isinstance(logger, (WandbLogger, TensorBoardLogger)) else {}
            logger.log_metrics(numbers(row) | more, step=row["round"])
            logger.save()

    def _record_clients(self, trainer: Trainer, rows: list[Row]) -> None:
        self.client_rows += rows
        if not self._client_columns.issuperset(columns_of(rows)):
            self._write_clients(trainer)
        elif folder := run_folder(trainer):
            append_row(folder / "client_rounds.csv", *rows)

    def _write_clients(self, trainer: Trainer) -> None:
        self._client_columns = set(columns_of(self.client_rows))
        if self.client_rows and (folder := run_folder(trainer)):
            write_rows(folder / "client_rounds.csv", self.client_rows)

    def on_final_test(self, trainer: Trainer, federation: Federation, tested: FinalTest) -> None:
        """Write ``clients.csv`` and ``summary.json``, and print the table."""
        if not self.rows:
            return
        monitor = federation.monitor
        column, server = f"test/{monitor.metric}", f"test/global_{monitor.metric}"
        central = {name: value for name, value in tested.metrics.items() if name.startswith("test/global_")}
        groups = federation.evaluations.groups
        apart = {name: value for name, value in tested.metrics.items() if name.partition("/")[0] in groups}
        final = {column: tested.metrics.get(column), **shown(tested.metrics, monitor), **central, **apart}
        rows, joined = (described(federation.data, each) for each in (tested.clients, tested.new.clients))
        private = federation.privacy_of(tested.clients)
        clients = [
            row | own | metrics for row, own, metrics in zip(rows, private, tested.clients.values(), strict=True)
        ]
        new = [row | tested.new.clients[row["client"]] for row in joined]
        # without new clients the column would be constant, so it is left out
        self.clients = [row | {"new": 0} for row in clients] + [row | {"new": 1} for row in new] if new else clients
        self.summary = {
            "name": federation.method,
            "method": type(federation.client).__name__,
            "aggregator": federation.aggregator.name,
            "monitor": asdict(monitor),
            "final": {"round": self.rows[-1]["round"], **final},
            "selected": self._selected(monitor, final, tested.selected),
            # the best round on test is an optimistic figure, reported because papers do
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
        # Lightning's users read results from callback_metrics after `fit`
        chosen = {f"selected/{name}": value for name, value in self.summary["selected"].items()}
        known = {name: value for name, value in (final | chosen).items() if value is not None}
        trainer.callback_metrics.update({name: torch.tensor(value) for name, value in known.items()})
        if folder := run_folder(trainer):
            write_rows(folder / "clients.csv", self.clients)
            write_json(folder / "summary.json", self.summary)
            if patterns := federation.publishable:
                write_rows(folder / "publishable.csv", [covered(row, patterns) for row in self.rows])
            print(summary_table(self.summary, self.rows, clients, folder))

    @staticmethod
    def _new(monitor: Monitor, test: float | None, metrics: Row) -> Row:
        """Return the new clients' metric as received and after joining, and the gap to the participating clients."""
        received, joined = (metrics.get(f"{name}/{monitor.metric}") for name in ("new_received", "new"))
        # signed so that a positive gap means: new clients are worse off
        gap = None if test is None or joined is None else monitor.sign * (test - joined)
        return {f"received/{monitor.metric}": received, f"joined/{monitor.metric}": joined, "gap": gap}

    def _best(self, monitor: Monitor, column: str) -> Row:
        """Return the round with the best value of a column; the first of equals."""
        best = max(self._rows_with(column), key=lambda row: (monitor.sign * row[column], -row["round"]), default={})
        return {name: best.get(name) for name in ("round", column)}

    def _ten_best(self, monitor: Monitor, column: str) -> Row:
        """Return mean and standard deviation of a column's ten best values.

        Source: the published code of FedAWA, which reports these.
        """
        values = sorted((row[column] for row in self._rows_with(column)), key=lambda value: -monitor.sign * value)[:10]
        return {"ten_best_mean": fmean(values), "ten_best_std": pstdev(values)} if values else {}

    def _rows_with(self, column: str) -> list[Row]:
        """Return the rounds with a value in a column."""
        return [row for row in self.rows if not math.isnan(row.get(column, math.nan))]

    def _selected(self, monitor: Monitor, final: Row, best: Row) -> Row:
        """Return the round with the best validation, with its test metrics if known.

        Args:
            monitor: the metric that selects.
            final: test metrics of the last round.
            best: test metrics of the best checkpoint, and its round.
        """
        validation, test = f"val/{monitor.metric}", f"test/{monitor.metric}"
        validated = self._rows_with(validation)
        if not validated:
            return {"round": None, validation: None, test: None}
        # compared in float32, like ModelCheckpoint, which keeps the first of rounds that are equal in float32
        row = max(validated, key=lambda row: (monitor.sign * torch.tensor(row[validation]).item(), -row["round"]))
        # a row has test metrics of its own under trainer.test_every_round
        tested = final if row is self.rows[-1] else row
        # which are of a sample of the clients under trainer.evaluate_clients, and those of the checkpoint of all
        if best.get("round") == row["round"]:
            tested = row | best
        return {"round": row["round"], validation: row[validation], test: tested.get(test), **shown(tested, monitor)}

    def _count_lost(self, federation: Federation, folder: Path) -> None:
        """Count the rounds made after the checkpoint, also those before an earlier interruption since.

        The record is about to be cut back to the checkpoint, so that a file of its own keeps the lost cohorts; the
        checkpoint says how many of these it has counted.
        """
        path = folder / LOST
        earlier = json.loads(path.read_text(encoding="utf-8"))["cohorts"] if path.is_file() else []
        lost = earlier + lost_cohorts(RunStatus(folder), len(self.rows), federation.data.num_clients)
        if lost:
            write_json(path, {"cohorts": lost})
        federation.count_lost(lost[self._lost :])
        self._lost = len(lost)

    def _write(self, trainer: Trainer) -> None:
        self._columns = set(columns_of(self.rows))
        if folder := run_folder(trainer):
            write_rows(folder / "rounds.csv", self.rows)
            stamp(folder)


def clients_of(federation: Federation) -> list[Row]:
    """Return a row per evaluated client: id, name if named, and the client's metrics as ``val/acc``.

    Args:
        federation: the federation after an evaluation; without one since the round began the list is empty.
    """
    results, names = federation.evaluations.results, federation.data.client_names
    rows = []
    for client in sorted({client for of_clients in results.values() for client in of_clients}):
        row: Row = {"client": client} | ({"name": names[client]} if names else {})
        for split, of_clients in results.items():
            own = own_values(of_clients.get(client, {}))
            row |= {f"{split}/{name}": plain_entry(name, value) for name, value in own.items()}
        rows.append(row)
    return rows


def curves_of(clients: Sequence[Row]) -> Row:
    """Return clients' metrics by names for a tracker.

    >>> curves_of([{"client": 0, "name": "Bremen", "val/acc": 0.5}, {"client": 1, "val/acc": 0.25}])
    {'client/Bremen/val/acc': 0.5, 'client/1/val/acc': 0.25}

    Args:
        clients: the result of `clients_of`.
    """
    return {
        f"client/{row.get('name') or row['client']}/{name}": value
        for row in clients
        for name, value in row.items()
        if name not in ("client", "name")
    }


def built_settings(federation: Federation) -> Row:
    """Return the settings that hyper-parameters lack: of net, optimizer, aggregator, Trainer, partitioner and task.

    Objects are described by their class and settings, whether made in Python or by the command line. None is left out.

    Args:
        federation: the federation, set up.
    """
    nets = dict.fromkeys(type(cast(ClientModule, each).net).__name__ for each in federation.architectures)
    # the command line logs a whole section under each of these names
    sections = ("data", "aggregator")
    known = {name: value for name, value in federation.settings.items() if name not in sections and value is not None}
    return known | {
        "model.net": ", ".join(nets),
        "aggregator.name": federation.aggregator.name,
        "data.task": str(federation.data.task),
    }


def lost_cohorts(status: RunStatus, kept: int, clients: int) -> list[list[int]]:
    """Return the clients of each round that a run may have made and its checkpoint lacks.

    Args:
        status: state of the run, read from its folder.
        kept: number of rounds in the checkpoint.
        clients: number of all clients.
    """
    everybody = [*range(clients)]
    cohorts = [row.get("cohort") for row in status.rows[kept:]]
    lost = [everybody if text is None else [*map(int, text.split())] for text in cohorts]
    # one more may have been under way, unless the run had finished; nobody knows its clients
    ended = status.summary.get("final", {}).get("round") == len(status.rows)
    return lost if ended else [*lost, everybody]


def covered(row: Row, patterns: Sequence[str]) -> Row:
    """Return the entries of a row whose names match a pattern.

    >>> covered({"round": 1, "val/acc": 0.5, "privacy/epsilon": 2.0}, ["round", "privacy/*"])
    {'round': 1, 'privacy/epsilon': 2.0}

    Args:
        row: a row of the record.
        patterns: shell-style patterns.
    """
    return {name: value for name, value in row.items() if any(fnmatchcase(name, pattern) for pattern in patterns)}
