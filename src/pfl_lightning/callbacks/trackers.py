"""Weights & Biases and TensorBoard: additional views of a federation, and figures for either."""

from typing import TYPE_CHECKING, Any

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger

from pfl_lightning.callbacks.round_logger import RoundLogger
from pfl_lightning.runs.report import numbers

if TYPE_CHECKING:
    from matplotlib.figure import Figure
from collections.abc import Iterable
from typing import cast

from lightning.pytorch import LightningModule

from pfl_lightning.callbacks.base import FederatedCallback
from pfl_lightning.data.description import amounts
from pfl_lightning.federation.federation import Federation
from pfl_lightning.plots import plot_partition
from pfl_lightning.runs.report import columns_of
from pfl_lightning.runs.tables import markdown_table


def show_figure(trainer: Trainer, name: str, figure: "Figure") -> None:
    """Log a figure to Weights & Biases and to TensorBoard, if the trainer has such loggers.

    Args:
        trainer: the trainer; the number of finished rounds is the step.
        name: name in the tracker.
        figure: the figure.
    """
    # Lightning's loggers have no common method for images
    for logger in trainer.loggers:
        if isinstance(logger, WandbLogger):
            send_figure(logger, name, figure)
        elif isinstance(logger, TensorBoardLogger):
            logger.experiment.add_figure(name, figure, trainer.global_step)


def send_figure(logger: WandbLogger, name: str, figure: "Figure") -> None:
    """Log a figure to Weights & Biases as an image."""
    # wandb.Image compares the figure with matplotlib.pyplot, and fails where nothing has imported pyplot
    import matplotlib.pyplot  # noqa: F401

    logger.log_image(name, [figure])


def records(trainer: Trainer) -> list[RoundLogger]:
    """Return the trainer's `RoundLogger` callbacks."""
    return [callback for callback in trainer.callbacks if isinstance(callback, RoundLogger)]  # type: ignore[attr-defined]


def flat_summary(record: RoundLogger) -> dict[str, Any]:
    """Return a run's summary without nesting, with names such as ``final/test/acc``."""
    flat = {name: value for name, value in record.summary.items() if not isinstance(value, dict)}
    # one level is enough: no part of a summary has parts of its own
    for part in ("final", "selected", "best_on_test", "best_global"):
        flat |= {f"{part}/{name}": value for name, value in record.summary.get(part, {}).items()}
    return flat


def outcome(record: RoundLogger) -> dict[str, Any]:
    """Return the summary's numbers, such as ``selected/val/acc``, for sweeps and for sorting runs."""
    # only names with a slash: the seed and other settings are logged as hyper-parameters already
    return {name: value for name, value in numbers(flat_summary(record)).items() if "/" in name}


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
            final = outcome(record)
            if metric in final:
                final["hp_metric"] = final[metric]
            entries = [{"entry": name, "value": value} for name, value in flat_summary(record).items()]
            step = trainer.global_step
            for logger in tensorboard_loggers(trainer):
                logger.experiment.add_text("clients", text(record.clients), step)
                logger.experiment.add_text("summary", text(entries), step)
                logger.log_metrics(final, step)
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
