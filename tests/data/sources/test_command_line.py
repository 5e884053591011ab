"""Sources by their class names, on the command line."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from command import QUIET, pfl, refusal, summary

MODEL = "--model FedAvg --model.net MLP --model.optimizer SGD --model.optimizer.lr 0.1"


def tensors(folder):
    rng = np.random.default_rng(0)
    np.save(folder / "x.npy", rng.normal(size=(40, 3)))
    np.save(folder / "y.npy", rng.normal(size=40))
    np.save(folder / "who.npy", np.array(["a", "b"] * 20))
    return "TensorData --data.x x.npy --data.y y.npy --data.client who.npy --data.task Regression"


def leaf(folder):
    users = ["a", "b"]
    held = {user: {"x": [[float(k), 1.0] for k in range(12)], "y": [k % 2 for k in range(12)]} for user in users}
    (folder / "all.json").write_text(json.dumps({"users": users, "num_samples": [12, 12], "user_data": held}))
    return "LeafData --data.root . --data.task Classification --data.task.num_classes 2"


def folders(folder):
    for client in "ab":
        for name in ("cat", "dog"):
            (folder / client / name).mkdir(parents=True)
            for k in range(6):
                Image.fromarray(np.full((4, 4), k, np.uint8)).save(folder / client / name / f"{k}.png")
    return "FolderData --data.root . --data.channels 1"


def vision(folder):
    (folder / "sample_owners.py").write_text("def owner(position):\n    return 'ab'[position % 2]\n")
    dataset = "torchvision.datasets.FakeData --data.dataset.size 30 --data.dataset.image_size [3,4,4]"
    task = "--data.task Classification --data.task.num_classes 10"
    return f"VisionData --data.dataset {dataset} --data.client sample_owners.owner {task}"


@pytest.mark.parametrize("write", [tensors, leaf, folders, vision], ids=lambda write: write.__name__)
@pytest.mark.by_default("tensors")
def test_a_source_by_its_name(write, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    line = write(tmp_path)
    pfl(f"fit {MODEL} --data {line} --trainer.max_rounds 1 {QUIET}")
    (run,) = Path("runs").glob("*/version_0")
    assert [row["name"] for row in csv.DictReader((run / "clients.csv").open())] == ["a", "b"]
    assert summary(str(run.relative_to("runs")))["final"]["round"] == 1


def test_natural_by_its_name(capsys):
    said = refusal(f"fit {MODEL} --data Digits --data.partitioner Natural {QUIET}", capsys)
    assert said.startswith("data.partitioner=Natural: Digits ")


def test_a_number_of_clients_is_drawn(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    natural = "--data.partitioner Natural --data.partitioner.min_samples 25 --data.num_clients 3"
    pfl(f"fit {MODEL} --data Diabetes {natural} --trainer.max_rounds 1 {QUIET}")
    rows = list(csv.DictReader(Path("runs/FedAvg-Diabetes/version_0/clients.csv").open()))
    assert len({row["name"] for row in rows}) == 3 == len(rows)
