"""One run with Weights & Biases, offline, read back from its file."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import wandb
from lightning.pytorch.loggers import WandbLogger

from command import QUIET, pfl
from federations import fit, make_client, read_csv
from pfl_lightning.callbacks import RoundLogger, WandbReport
from pfl_lightning.callbacks.trackers import send_figure
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


@pytest.mark.exhaustive
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
    (last,) = [row for row in history(logged) if "selected/val/acc" in row]
    assert last["round"] == 3 and last["selected/val/acc"] == max(row["val/acc"] for row in run.rows)


def kinds(everything: list[Any], kind: str) -> list[Any]:
    return [getattr(record, kind) for record in everything if record.WhichOneof("record_type") == kind]


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    """A run that was stopped after two rounds and goes on for two more, by the command line; its two files in order."""
    root = tmp_path_factory.mktemp("resumed")
    logger = "--trainer.logger WandbLogger --trainer.logger.offline true --trainer.logger.project mine"
    kept = "--trainer.logger.save_dir kept --trainer.logger.group together"
    line = f"fit {QUIET} {logger} {kept} --model FedPer --model.net MLP --data Digits --data.partitioner IID"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        for name in ("CACHE", "CONFIG", "DATA", "ARTIFACT"):
            patch.setenv(f"WANDB_{name}_DIR", str(root / name.lower()))
        patch.setenv("WANDB_SILENT", "true")
        pfl(f"{line} --trainer.max_rounds 2")
        wandb.finish()
        pfl(f"{line} --trainer.max_rounds 4 --ckpt_path last")
        wandb.finish()
        wandb.teardown()
    paths = sorted(root.glob("kept/wandb/offline-run-*/run-*.wandb"), key=lambda path: path.stat().st_mtime)
    return root, [list(records(path)) for path in paths]


@pytest.mark.exhaustive
def test_a_resumed_run_is_the_same_run(resumed):
    root, files = resumed
    ids = [run.run_id for file in files for run in kinds(file, "run")[:1]]
    assert len(ids) == 2 and len(set(ids)) == 1
    # one folder, where the user said, with both halves of the record
    assert [path.relative_to(root).as_posix() for path in root.rglob("rounds.csv")] == [
        f"kept/mine/{ids[0]}/rounds.csv"
    ]
    assert [row["round"] for row in read_csv(root / "kept" / "mine" / ids[0] / "rounds.csv")] == ["1", "2", "3", "4"]


def test_a_resumed_run_has_all_rows_in_order(resumed):
    root, files = resumed
    (path,) = root.rglob("rounds.csv")
    for file, rounds in zip(files, (2, 4), strict=True):
        rows = [items(history.item) for history in kinds(file, "history")]
        steps = [row["_step"] for row in rows]
        assert steps == list(range(len(rows)))
        logged = [row for row in rows if "val/acc" in row]
        assert [row["round"] for row in logged] == list(range(1, rounds + 1))
        expected = [float(row["val/acc"]) for row in read_csv(path)][:rounds]
        assert [row["val/acc"] for row in logged] == pytest.approx(expected)


def test_the_project_and_the_group_are_those_that_were_asked_for(resumed):
    for file in resumed[1]:
        run = kinds(file, "run")[0]
        assert (run.project, run.run_group) == ("mine", "together")


def test_files_of_the_run_stay_together(logged):
    run, _, folder = logged
    assert run.folder.is_relative_to(folder.parent.parent)
    assert (run.folder / "rounds.csv").exists() and run.last.exists()


def test_a_figure_is_sent_where_nothing_has_imported_pyplot(monkeypatch, tmp_path):
    import matplotlib
    from matplotlib.figure import Figure

    class Seen(WandbLogger):
        def log_image(self, key, images, *args, **kwargs):
            seen.append((key, len(images), hasattr(matplotlib, "pyplot")))

    seen: list[tuple[str, int, bool]] = []
    monkeypatch.delitem(sys.modules, "matplotlib.pyplot", raising=False)
    monkeypatch.delattr(matplotlib, "pyplot", raising=False)
    send_figure(Seen(save_dir=tmp_path, offline=True), "partition", Figure())
    assert seen == [("partition", 1, True)]
