"""Additional views of a federation in Weights & Biases: x axis, partition, table of clients, summary."""

from typing import cast

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import WandbLogger

from pfl_lightning.callbacks.base import FederatedCallback
from pfl_lightning.callbacks.trackers import flat_summary, outcome, records, send_figure
from pfl_lightning.data.description import amounts
from pfl_lightning.federation.federation import Federation
from pfl_lightning.plots import plot_partition
from pfl_lightning.runs.report import numbers


class WandbReport(FederatedCallback):
    """Set the round as x axis, and log the partition, the table of clients and the summary to a `WandbLogger`.

    Without a WandbLogger nothing happens. Rounds come from `RoundLogger` and the configuration from the command line,
    as for every logger. A resumed run that logs offline sends its earlier rows again: W&B's offline file starts anew,
    and may replace the rounds synced before.
    """

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Define the x axis, log the partition, and send the earlier rows of an offline run again."""
        federation = cast(Federation, pl_module)
        for logger in wandb_loggers(trainer):
            logger.experiment.define_metric("round")
            logger.experiment.define_metric("*", step_metric="round")
            monitor = federation.monitor
            # W&B's summary shows the last value by default; the best one is what people sort by
            best = f"{monitor.mode},last"
            logger.experiment.define_metric(f"val/{monitor.metric}", step_metric="round", summary=best)
            partition = plot_partition(amounts(federation.data), federation.data.client_names)
            send_figure(logger, "partition", partition)
            earlier = [row for record in records(trainer) for row in record.rows] if logger.experiment.offline else []
            for row in earlier:
                logger.log_metrics(numbers(row), step=row["round"])

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the final table of clients and the summary."""
        for record in records(trainer):
            if not record.clients:
                continue
            for logger in wandb_loggers(trainer):
                columns = list(record.clients[0])
                logger.log_table("clients", columns, [list(row.values()) for row in record.clients])
                # in the history too: W&B's sweeps read the metric to optimise from there
                logger.log_metrics(outcome(record) | {"round": trainer.global_step}, trainer.global_step)
                logger.experiment.summary.update(flat_summary(record))


def wandb_loggers(trainer: Trainer) -> list[WandbLogger]:
    """Return the trainer's Weights & Biases loggers."""
    return [logger for logger in trainer.loggers if isinstance(logger, WandbLogger)]
