"""Additional views of a federation in TensorBoard: partition, tables, final test."""

from collections.abc import Iterable
from typing import Any, cast

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger

from pfl_lightning.callbacks.base import FederatedCallback
from pfl_lightning.callbacks.trackers import flat_summary, outcome, records
from pfl_lightning.data.description import amounts
from pfl_lightning.federation.federation import Federation
from pfl_lightning.plots import plot_partition
from pfl_lightning.runs.report import columns_of
from pfl_lightning.runs.tables import markdown_table


class TensorBoardReport(FederatedCallback):
    """Log the partition, tables of clients and of the summary, and the final test to a `TensorBoardLogger`.

    The partition is a heatmap; tables are texts. Without a TensorBoardLogger nothing happens. The final test's
    monitored metric is also logged as ``hp_metric``, for TensorBoard's page of hyper-parameters.
    """

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the partition."""
        federation = cast(Federation, pl_module)
        for logger in tensorboard_loggers(trainer):
            figure = plot_partition(amounts(federation.data), federation.data.client_names)
            logger.experiment.add_figure("partition", figure, federation.round)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the final tables and numbers."""
        metric = f"final/test/{cast(Federation, pl_module).monitor.metric}"
        for record in records(trainer):
            # a run that was interrupted has no final test
            if not record.clients:
                continue
            numbers = outcome(record)
            if metric in numbers:
                numbers["hp_metric"] = numbers[metric]
            entries = [{"entry": name, "value": value} for name, value in flat_summary(record).items()]
            step = trainer.global_step
            for logger in tensorboard_loggers(trainer):
                logger.experiment.add_text("clients", text(record.clients), step)
                logger.experiment.add_text("summary", text(entries), step)
                logger.log_metrics(numbers, step)
                # flushed now: the process may end before TensorBoard's writer thread wakes up
                logger.save()


def tensorboard_loggers(trainer: Trainer) -> list[TensorBoardLogger]:
    """Return the trainer's TensorBoard loggers."""
    return [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]


def text(rows: Iterable[dict[str, Any]]) -> str:
    """Return rows as a Markdown table, which TensorBoard renders."""
    known = list(rows)
    columns = columns_of(known)
    return markdown_table([columns, *([shown(row.get(name)) for name in columns] for row in known)])


def shown(value: Any) -> str:
    """Return a value as a cell of a table."""
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
