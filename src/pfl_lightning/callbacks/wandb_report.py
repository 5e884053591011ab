"""What Weights & Biases shows of a federation, beside the record of its rounds."""

from typing import cast

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import WandbLogger

from pfl_lightning.callbacks.base import FederatedCallback
from pfl_lightning.callbacks.trackers import flat_summary, outcome, records
from pfl_lightning.data.description import amounts
from pfl_lightning.federation.federation import Federation
from pfl_lightning.plots import plot_partition
from pfl_lightning.runs.report import numbers


class WandbReport(FederatedCallback):
    """Gives a `WandbLogger` the round as x axis, the partition's heatmap, the table of clients and the summary.

    Does nothing where there is no WandbLogger. The rows of the record, and the configuration, come to it from
    `RoundLogger` and from the command line as they come to every logger. A resumed run that logs offline gets its
    earlier rows again: its file begins anew, and may take the place of what was synced before.
    """

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Sets the axes and shows who holds what."""
        federation = cast(Federation, pl_module)
        for logger in wandb_loggers(trainer):
            logger.experiment.define_metric("round")
            logger.experiment.define_metric("*", step_metric="round")
            monitor = federation.monitor
            best = f"{monitor.mode},last"
            logger.experiment.define_metric(f"val/{monitor.metric}", step_metric="round", summary=best)
            logger.log_image("partition", [plot_partition(amounts(federation.data))])
            earlier = [row for record in records(trainer) for row in record.rows] if logger.experiment.offline else []
            for row in earlier:
                logger.log_metrics(numbers(row), step=row["round"])

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Shows the final table of clients and the summary."""
        for record in records(trainer):
            if not record.clients:
                continue
            for logger in wandb_loggers(trainer):
                columns = list(record.clients[0])
                logger.log_table("clients", columns, [list(row.values()) for row in record.clients])
                # in the history too, where sweeps look for what they choose by
                logger.log_metrics(outcome(record) | {"round": trainer.global_step}, trainer.global_step)
                logger.experiment.summary.update(flat_summary(record))


def wandb_loggers(trainer: Trainer) -> list[WandbLogger]:
    """The Trainer's loggers to Weights & Biases."""
    return [logger for logger in trainer.loggers if isinstance(logger, WandbLogger)]
