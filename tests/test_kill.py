"""Runs that are killed, and go on."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from federations import equal, load, read_csv, untimed
from pfl_lightning.cli import main


def write_config(root: Path, max_rounds: int, local_epochs: int) -> Path:
    config = {
        "seed_everything": 1,
        "model": {
            "class_path": "FedPer",
            "init_args": {
                "net": {"class_path": "MLP", "init_args": {"hidden": [16]}},
                "optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.05, "momentum": 0.9}},
                "optimizer_lifetime": "run",
            },
        },
        "data": {"class_path": "Digits", "init_args": {"num_clients": 6, "max_samples": 360}},
        "trainer": {
            "max_rounds": max_rounds,
            "local_epochs": local_epochs,
            "clients_per_round": 0.5,
            "default_root_dir": str(root / "runs"),
            "accelerator": "cpu",
            "enable_progress_bar": False,
            "enable_model_summary": False,
        },
    }
    config["data"]["init_args"]["partitioner"] = {"class_path": "Dirichlet", "init_args": {"alpha": 1.0, "min_size": 8}}
    root.mkdir(exist_ok=True)
    path = root / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def run_folder(root: Path, version: int = 0) -> Path:
    return root / "runs" / "FedPer-Digits" / f"version_{version}"


def rows(folder: Path) -> list[Any]:
    path = folder / "rounds.csv"
    return read_csv(path) if path.exists() else []


def start_and_kill(config: Path, when: Callable[[], bool], after: float = 0.0) -> None:
    """Starts a run in another process, and kills it some seconds after a condition holds."""
    command = [sys.executable, "-m", "pfl_lightning.cli", "fit", "--config", str(config)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not when():
            assert process.poll() is None and time.monotonic() < deadline, "the run ended before it was to be killed"
            time.sleep(0.005)
        time.sleep(after)
    finally:
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, "the run ended before it was killed; give it more rounds"


def end_of(folder: Path) -> tuple[Any, Any, Any]:
    checkpoint = load(folder / "checkpoints" / "last.ckpt")
    return checkpoint["state_dict"], checkpoint["federation"], untimed(rows(folder))


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("whole")
    main(["fit", "--config", str(write_config(root, max_rounds=30, local_epochs=4))])
    return run_folder(root)


@pytest.mark.parametrize("moment", range(3))
def test_a_run_killed_at_any_moment_goes_on_to_the_same_end(moment, uninterrupted, tmp_path):
    config = write_config(tmp_path, max_rounds=30, local_epochs=4)
    folder = run_folder(tmp_path)
    start_and_kill(config, lambda: len(rows(folder)) >= 2, after=random.Random(moment).uniform(0, 0.4))
    assert 2 <= len(rows(folder)) < 30
    main(["fit", "--config", str(config), "--ckpt_path", "last"])
    for one, other in zip(end_of(uninterrupted), end_of(folder), strict=True):
        assert equal(one, other)
    assert read_csv(folder / "clients.csv") == read_csv(uninterrupted / "clients.csv")
    assert not list(folder.rglob("*.partial"))
    assert not run_folder(tmp_path, 1).exists()


def test_a_run_killed_before_any_checkpoint_starts_anew(uninterrupted, tmp_path):
    endless = write_config(tmp_path, max_rounds=30, local_epochs=100_000)
    folder = run_folder(tmp_path)
    start_and_kill(endless, (folder / "config.yaml").exists)
    assert not list(folder.rglob("*.ckpt"))
    config = write_config(tmp_path, max_rounds=30, local_epochs=4)
    main(["fit", "--config", str(config), "--ckpt_path", "last"])
    (finished,) = (path.parent for path in folder.parent.glob("*/summary.json"))
    for one, other in zip(end_of(uninterrupted), end_of(finished), strict=True):
        assert equal(one, other)
