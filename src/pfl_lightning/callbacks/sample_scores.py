"""Scores of single validation and test rows, from which intervals over rows follow."""

import warnings
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torchmetrics import MetricCollection

from pfl_lightning.callbacks.base import FederatedCallback
from pfl_lightning.client import ClientModule
from pfl_lightning.data import Split
from pfl_lightning.engines import ClientMetrics
from pfl_lightning.engines.evaluation import POOLED, ROWS, evaluate_outputs, metrics_of
from pfl_lightning.federation.federation import Federation
from pfl_lightning.federation.final_test import FinalTest
from pfl_lightning.runs.folder import run_folder
from pfl_lightning.runs.report import size
from pfl_lightning.runs.sample_scores import FILE, Scores, write_scores
from pfl_lightning.tasks import NextToken, Segmentation, Task

PARTS = 200
"""Largest number of parts of a client's rows that are left out one by one, for a metric that isn't a mean over rows."""


class SampleScores(FederatedCallback):
    r"""Write the score of each validation and test row in the last round into ``sample_scores.npz``.

    A client's metric is the mean of its rows' scores: of accuracy they are 0 and 1, of a mean error the errors. For a
    metric :math:`m` that is no mean over rows, such as an AUROC, they are the jackknife's pseudo-values

    .. math:: n\, m - (n - 1)\, m_{-i}

    of the client's n rows, shifted to the mean m; beyond 200 rows, equal parts of them are left out together, and each
    score is a part's. A client whose metric is undefined without one of its parts has no scores. The command
    ``pfl-lightning compare`` makes intervals over rows from them. Four bytes a row; evaluations keep outputs and
    targets of all rows in memory.
    Source: Efron and Tibshirani, 1993, An Introduction to the Bootstrap, chapter 11.

    Args:
        optional: whether to write nothing, and say why, where scores aren't possible, in place of refusing the run.

    Raises:
        MisconfigurationException: at the start of ``fit``, if a guarantee of privacy holds, rows are at sites, or a
            sample has several positions, such as tokens or pixels.
    """

    reads_updates = False

    def __init__(self, optional: bool = False) -> None:
        self.optional = optional

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Let evaluations keep the rows, before engines are made."""
        if stage != "fit":
            return
        federation = cast(Federation, pl_module)
        reason = hindrance(federation)
        if reason and not self.optional:
            raise MisconfigurationException(f"trainer.callbacks=SampleScores: {reason}; leave it out.")
        if reason:
            rank_zero_info(f"No scores of single rows are kept: {reason}.")
        for module in cast(Sequence[ClientModule], federation.architectures):
            module.keeps_rows = not reason

    def on_final_test(self, trainer: Trainer, federation: Federation, tested: FinalTest) -> None:
        """Write the file."""
        if not federation.client.keeps_rows:
            return
        clients, evaluations = range(federation.data.num_clients), federation.evaluations
        tests = evaluations.results
        # the last round may be one without validation, and the final test has replaced that round's rows
        evaluations.evaluate(clients, ("val",))
        none = ClientMetrics()
        rows = {"test": tests.get("test", none), "val": evaluations.results.get("val", none)}
        evaluations.results = tests
        folder = run_folder(trainer)
        if folder is None or not trainer.is_global_zero:
            return
        name = federation.monitor.metric
        modules = cast(Sequence[ClientModule], federation.architectures)
        metrics = [MetricCollection({k: m for k, m in metrics_of(each).items() if k == name}) for each in modules]
        scores: dict[Split, list[Scores]] = {"val": [], "test": []}
        for client in clients:
            kind = federation.architecture_of(client)
            for split, of_split in scores.items():
                own: Any = rows[split].get(client, {}).get(ROWS)
                of_split.append(scored(own, metrics[kind], modules[kind].task, name))
        written = write_scores(folder, scores)
        count = sum(each.rows for of_split in scores.values() for each in of_split)
        rank_zero_info(f"{FILE}: scores of {count:,} rows, {size(written)}")


def hindrance(federation: Federation) -> str:
    """Return why no scores of single rows can be kept; empty if they can.

    Args:
        federation: the federation.
    """
    if federation.publishable:
        return "no guarantee of privacy covers scores of single rows"
    if federation.data.at_sites:
        return "the rows stay at their sites"
    if federation.monitor.metric.endswith(POOLED):
        return f"{federation.monitor.metric} is of all clients' rows together"
    if isinstance(task := federation.data.task, (NextToken, Segmentation)):
        return f"task {task} has several positions a sample"
    return ""


@torch.no_grad()
def scored(rows: dict[str, Tensor] | None, metrics: MetricCollection, task: Task, name: str) -> Scores:
    """Return the scores of a client's rows; see `SampleScores`.

    Args:
        rows: ``outputs`` and ``target`` of the rows; None without rows.
        metrics: the client's metrics, with the one asked for; without it for the loss.
        task: the task.
        name: name of the metric.
    """
    none = np.empty(0, dtype=np.float32)
    if rows is None or not len(rows["target"]):
        return Scores(none, 0)
    outputs, target = rows["outputs"], rows["target"]
    count = len(target)

    def values(own: Tensor, its: Tensor, sizes: list[int]) -> np.ndarray[Any, np.dtype[np.float64]]:
        # single rows have one class, of which torchmetrics warns
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            found = evaluate_outputs(own, its, sizes, metrics, task)
        return np.array(found[name], dtype=np.float64)

    [whole] = values(outputs, target, [count])
    alone = values(outputs, target, [1] * count)
    # a mean over rows, such as an accuracy, is known by giving the same for single rows
    if np.isfinite(alone).all() and abs(alone.mean() - whole) <= 1e-5 * max(1.0, abs(whole)):
        return Scores(alone.astype(np.float32), count)
    parts = min(count, PARTS)
    part = torch.arange(count) % parts
    if parts < 2:
        return Scores(none, count)
    without = np.array(
        [values(outputs[part != k], target[part != k], [int((part != k).sum())])[0] for k in range(parts)]
    )
    pseudo = parts * whole - (parts - 1) * without
    if not np.isfinite(pseudo).all():
        return Scores(none, count)
    return Scores((pseudo - pseudo.mean() + whole).astype(np.float32), count)
