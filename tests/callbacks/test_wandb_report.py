"""One run with Weights & Biases, offline, read back from its file."""

import json
from pathlib import Path
from typing import Any

import pytest
import wandb
from lightning.pytorch.loggers import WandbLogger

from federations import fit, make_client
from pfl_lightning.callbacks import RoundLogger, WandbReport
from pfl_lightning.methods import FedPer
from wandb_files import records


def items(entries: Any) -> dict[str, Any]:
    return {entry.key or "/".join(entry.nested_key): json.loads(entry.value_json) for entry in entries}


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    root = tmp_path_factory.mktemp("wandb")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        for name in ("CACHE", "CONFIG", "DATA", "ARTIFACT"):
            patch.setenv(f"WANDB_{name}_DIR", str(root / name.lower()))
        patch.setenv("WANDB_SILENT", "true")
        before = set(Path.home().glob("*wandb*"))
        logger = WandbLogger(project="test", save_dir=root, offline=True)
        # first in the list, where it has to come last
        callbacks = [WandbReport(), RoundLogger()]
        run = fit(make_client(FedPer), root=root, logger=logger, test_every_round=True, callbacks=callbacks)
        wandb.finish()
        # the service that writes the file may still be at it
        wandb.teardown()
        assert set(Path.home().glob("*wandb*")) == before
    (path,) = root.glob("wandb/offline-run-*/run-*.wandb")
    return run, list(records(path)), path.parent


def history(logged) -> list[dict[str, Any]]:
    return [items(record.history.item) for record in logged[1] if record.WhichOneof("record_type") == "history"]


def test_the_record_of_each_round_is_in_the_history_under_its_round(logged):
    rows = {row["round"]: row for row in history(logged) if "val/acc" in row}
    assert set(rows) == {1, 2, 3}
    for row in logged[0].rows:
        for name in ("val/acc", "val/acc_worst", "test/acc", "bytes/up", "train/loss", "lr"):
            assert rows[row["round"]][name] == pytest.approx(row[name])


def test_the_round_is_the_x_axis(logged):
    metrics = [record.metric for record in logged[1] if record.WhichOneof("record_type") == "metric"]
    assert any(metric.glob_name == "*" and metric.step_metric == "round" for metric in metrics)
    (accuracy,) = (metric for metric in metrics if metric.name == "val/acc")
    assert accuracy.step_metric == "round" and accuracy.summary.max and accuracy.summary.last


def test_the_partition_and_the_clients_are_shown(logged):
    run, _, folder = logged
    shown = {name: value for row in history(logged) for name, value in row.items()}
    assert shown["partition/_type"].startswith("image")
    assert list((folder / "files" / "media").rglob("*.png"))
    assert shown["clients/_type"] == "table-file"
    (path,) = (folder / "files" / "media").rglob("*.table.json")
    table = json.loads(path.read_text())
    assert table["columns"] == list(run.logger.clients[0])
    assert len(table["data"]) == 4 and [row[0] for row in table["data"]] == [0, 1, 2, 3]


def test_settings_and_the_summary_are_kept(logged):
    run, everything, _ = logged
    config: dict[str, Any] = {}
    summary: dict[str, Any] = {}
    for record in everything:
        config |= items(record.run.config.update) | items(record.config.update)
        summary |= items(record.summary.update)
    assert config["num_classes"] == 3 and config["method"] == "FedPer"
    assert {"data.batch_size": 5, "data.num_clients": 4}.items() <= config.items()
    for part in ("final", "selected", "best_on_test"):
        assert summary[f"{part}/test/acc"] == pytest.approx(run.logger.summary[part]["test/acc"])
    assert summary["method"] == "FedPer"


def test_files_of_the_run_stay_together(logged):
    run, _, folder = logged
    assert run.folder.is_relative_to(folder.parent.parent)
    assert (run.folder / "rounds.csv").exists() and run.last.exists()
