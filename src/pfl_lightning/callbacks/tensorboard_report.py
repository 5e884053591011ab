"""What TensorBoard shows of a federation, beside the record of its rounds."""

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
    """Gives a `TensorBoardLogger` the partition's heatmap, tables of clients and of the summary, and the final test.

    Does nothing where there is no TensorBoardLogger. The tables are texts. Of the final test, the metric that selects
    is the ``hp_metric`` beside the hyper-parameters too.
    """

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Shows who holds what."""
        federation = cast(Federation, pl_module)
        for logger in tensorboard_loggers(trainer):
            figure = plot_partition(amounts(federation.data))
            logger.experiment.add_figure("partition", figure, federation.round)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Shows the final tables and numbers."""
        metric = f"final/test/{cast(Federation, pl_module).monitor.metric}"
        for record in records(trainer):
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
                logger.save()


def tensorboard_loggers(trainer: Trainer) -> list[TensorBoardLogger]:
    """The Trainer's loggers to TensorBoard."""
    return [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]


def text(rows: Iterable[dict[str, Any]]) -> str:
    """Rows as a table in Markdown, which TensorBoard shows as one."""
    known = list(rows)
    columns = columns_of(known)
    return markdown_table([columns, *([shown(row.get(name)) for name in columns] for row in known)])


def shown(value: Any) -> str:
    """A value in a cell."""
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
