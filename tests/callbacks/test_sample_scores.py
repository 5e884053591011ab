"""Scores of single rows: their means are the clients' metrics, under every engine and whichever model is evaluated."""

import math

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from sklearn.metrics import roc_auc_score
from torchmetrics import MetricCollection
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy

from federations import Pause, blobs, equal, fit, make_client, read_csv
from pfl_lightning.callbacks import SampleScores
from pfl_lightning.callbacks.sample_scores import scored
from pfl_lightning.methods import Ditto, FedAvg, FedPer, KNNPer, Local
from pfl_lightning.privacy import DPAverage
from pfl_lightning.runs.sample_scores import FILE, read_scores
from pfl_lightning.tasks import Classification, Regression

SIZES = (50, 30, 40)


def run_of(root, cls=FedPer, callbacks=None, **settings):
    data = blobs(*SIZES, val_fraction=0.3, test_fraction=0.4)
    return fit(make_client(cls), data, root, callbacks=callbacks or [SampleScores()], **settings)


def check(run):
    """The scores' means are each client's metrics of the last round, and there is one of each row."""
    rows = read_csv(run.folder / "clients.csv")
    for split in ("test", "val"):
        scores = read_scores(run.folder, split)
        assert [each.rows for each in scores] == [run.data.size(client, split) for client in range(3)]
        assert all(set(each.values.tolist()) <= {0.0, 1.0} and len(each.values) == each.rows for each in scores)
        if split == "test":
            assert [each.values.mean() for each in scores] == pytest.approx([float(row["test/acc"]) for row in rows])
    mean = np.mean([each.values.mean() for each in read_scores(run.folder, "val")])
    assert mean == pytest.approx(run.rows[-1]["val/acc_mean"])


@pytest.mark.parametrize("evaluate", ["before", "after", "both"])
@pytest.mark.parametrize("engine", ["sequential", "vectorised", "processes"])
@pytest.mark.by_default("sequential-before", "sequential-after", "vectorised-after", "vectorised-before")
def test_the_mean_of_the_scores_is_the_metric(tmp_path, engine, evaluate):
    check(run_of(tmp_path, engine=engine, evaluate=evaluate))


@pytest.mark.parametrize("method", [FedAvg, Local, Ditto, KNNPer])
@pytest.mark.by_default(but=["Ditto", "Local"])
def test_the_scores_are_of_the_models_that_methods_evaluate(tmp_path, method):
    check(run_of(tmp_path, method))


def test_a_resumed_run_leaves_the_same_file_and_the_callback_changes_nothing(tmp_path):
    whole = run_of(tmp_path / "whole", evaluate="after")
    run_of(tmp_path / "half", callbacks=[SampleScores(), Pause(2)], evaluate="after")
    (last,) = (tmp_path / "half").glob("*/*/checkpoints/last.ckpt")
    resumed = run_of(tmp_path / "rest", evaluate="after", ckpt_path=last)
    assert (whole.folder / FILE).read_bytes() == (resumed.folder / FILE).read_bytes()
    other = run_of(tmp_path / "without", callbacks=[Pause(9)], evaluate="after")
    assert equal(whole.weights, other.weights) and not (other.folder / FILE).exists()
    assert read_csv(whole.folder / "clients.csv") == read_csv(other.folder / "clients.csv")


def test_a_guarantee_of_privacy_covers_no_scores(tmp_path):
    private = {"aggregator": DPAverage(noise_multiplier=1.0)}
    with pytest.raises(MisconfigurationException, match=r"SampleScores.*guarantee"):
        run_of(tmp_path, FedAvg, **private)
    run = run_of(tmp_path, FedAvg, callbacks=[SampleScores(optional=True)], **private)
    assert run.rows and not (run.folder / FILE).exists()


@pytest.mark.exhaustive
def test_an_auroc_has_pseudo_values_whose_spread_is_that_of_resampled_rows():
    rng = np.random.default_rng(0)
    target = torch.from_numpy(rng.integers(0, 2, 120))
    outputs = torch.from_numpy(rng.normal(0, 1, 120) + target.numpy()).float()
    metrics = MetricCollection({"auroc": BinaryAUROC()})
    scores = scored({"outputs": outputs, "target": target}, metrics, Regression(1), "auroc")
    assert scores.rows == len(scores.values) == 120
    assert scores.values.mean() == pytest.approx(roc_auc_score(target, outputs), abs=1e-6)
    drawn = [rng.integers(0, 120, 120) for _ in range(1000)]
    resampled = [roc_auc_score(target[rows], outputs[rows]) for rows in drawn]
    assert scores.values.std(ddof=1) / math.sqrt(120) == pytest.approx(np.std(resampled), rel=0.1)


@pytest.mark.exhaustive
def test_many_rows_are_left_out_in_equal_parts():
    rng = np.random.default_rng(1)
    target = torch.from_numpy(rng.integers(0, 2, 1000))
    outputs = torch.from_numpy(rng.normal(0, 1, 1000) + target.numpy()).float()
    scores = scored(
        {"outputs": outputs, "target": target}, MetricCollection({"auroc": BinaryAUROC()}), Regression(1), "auroc"
    )
    assert (len(scores.values), scores.rows) == (200, 1000)
    drawn = [rng.integers(0, 1000, 1000) for _ in range(500)]
    resampled = [roc_auc_score(target[rows], outputs[rows]) for rows in drawn]
    assert scores.values.std(ddof=1) / math.sqrt(200) == pytest.approx(np.std(resampled), rel=0.15)


def test_a_metric_undefined_without_some_row_has_no_scores():
    rows = {"outputs": torch.tensor([0.1, 0.2, 0.9]), "target": torch.tensor([0, 0, 1])}
    metrics = MetricCollection({"auroc": Undefined()})
    assert scored(rows, metrics, Regression(1), "auroc").rows == 3
    assert len(scored(rows, metrics, Regression(1), "auroc").values) == 0
    assert scored(None, metrics, Regression(1), "auroc").rows == 0


class Undefined(BinaryAUROC):
    """NaN with rows of one class."""

    def compute(self):
        target = torch.cat(self.target)
        return super().compute() if len(target.unique()) == 2 else torch.tensor(math.nan)


def test_the_loss_has_scores_too():
    outputs = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
    target = torch.arange(20) % 3
    metrics = MetricCollection({"acc": MulticlassAccuracy(3, average="micro")})
    scores = scored({"outputs": outputs, "target": target}, metrics, Classification(3), "loss")
    assert scores.values == pytest.approx(torch.nn.functional.cross_entropy(outputs, target, reduction="none").numpy())
