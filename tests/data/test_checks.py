"""Numbers that no net can take, wherever they come from."""

import json
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from federations import fit
from pfl_lightning.data import IID, FederatedDataModule, FolderData, HFData, LeafData, TensorData, VisionData
from pfl_lightning.methods import FedAvg
from pfl_lightning.nets import MLP
from pfl_lightning.tasks import Classification, NextToken, Regression

COUNT, ROW, COLUMN = 60, 37, 2
OWNERS = np.repeat(["one", "two", "three"], 20)
CLASSES = np.arange(COUNT) % 2
BAD = [np.nan, np.inf, -np.inf, 1e39]


def inputs(value):
    x = np.random.default_rng(0).normal(size=(COUNT, 4))
    x[ROW, COLUMN] = value
    return x


class Reader:
    """Inputs that are read by position."""

    def __init__(self, x):
        self.x = x

    def __len__(self):
        return len(self.x)

    def __getitem__(self, positions):
        return self.x[positions]


class Own(FederatedDataModule):
    """A data set of one's own."""

    input_shape, num_classes = (4,), 2

    def __init__(self, x, **settings):
        super().__init__(num_clients=2, **settings)
        self.x = x

    def load(self):
        return self.x, torch.from_numpy(CLASSES)


def tensors(x, client=OWNERS, **settings):
    return TensorData(x, CLASSES, Classification(2), client, input_shape=(4,), **settings)


def saved(x, folder, suffix):
    path = folder / f"x.{suffix}"
    if suffix == "npy":
        np.save(path, x)
    else:
        torch.save(torch.from_numpy(x), path)
    return tensors(path)


def folders(x, folder):
    for name in np.unique(OWNERS):
        (folder / name).mkdir()
        np.save(folder / name / "x.npy", x[name == OWNERS])
        np.save(folder / name / "y.npy", CLASSES[name == OWNERS])
    return FolderData(str(folder), Classification(2))


def leaf(x, folder):
    held = {"ann": {"x": x.tolist(), "y": CLASSES.tolist()}}
    content = {"users": ["ann"], "num_samples": [COUNT], "user_data": held}
    (folder / "all.json").write_text(json.dumps(content))
    return LeafData(str(folder), Classification(2))


def hugging_face(x, folder):
    datasets = pytest.importorskip("datasets", reason="needs the extra hf")
    table = datasets.Dataset.from_dict({"x": x.tolist(), "y": CLASSES.tolist(), "who": OWNERS.tolist()})
    return HFData(table, "y", Classification(2), features=["x"], client="who")


def vision(x, folder):
    return VisionData([(torch.from_numpy(row), 0) for row in x], Classification(2), OWNERS, targets=CLASSES)


SOURCES = {
    "array": lambda x, folder: tensors(x),
    "tensor": lambda x, folder: tensors(torch.from_numpy(x)),
    "list": lambda x, folder: tensors(x.tolist()),
    "tree": lambda x, folder: tensors({"a": CLASSES, "b": (x,)}),
    "complex": lambda x, folder: tensors(x.astype(complex)),
    "own": lambda x, folder: Own(x),
    "npy": lambda x, folder: saved(x, folder, "npy"),
    "pt": lambda x, folder: saved(x, folder, "pt"),
    "folders": folders,
    "leaf": leaf,
    "hf": hugging_face,
    "vision": vision,
}


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("source", SOURCES)
def test_inputs_that_are_not_finite_are_refused_at_set_up(source, value, tmp_path):
    data = SOURCES[source](inputs(value), tmp_path)
    # folders, and so their samples, are sorted by name
    row = ROW + 20 if source == "folders" else ROW
    with pytest.raises(
        MisconfigurationException, match=rf"x.* (is|has) .*(nan|inf|e\+).* in row {row}, column {COLUMN}"
    ):
        data.setup()


def test_a_refusal_names_the_client():
    with pytest.raises(MisconfigurationException, match=r"TensorData.*number 18 of client two"):
        tensors(inputs(np.nan)).setup()


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
def test_the_first_of_many_blocks_and_types(kind, monkeypatch):
    monkeypatch.setattr("pfl_lightning.data.trees.BLOCK", 10)
    x = inputs(np.nan).astype(kind)
    x[ROW + 5 :, 0] = np.inf
    with pytest.raises(MisconfigurationException, match=f"x is nan in row {ROW}, column {COLUMN}"):
        tensors(x).setup()
    data = tensors(inputs(6e4).astype(kind))
    data.setup()
    assert max(data.part(client, split).x.max() for client in range(3) for split in ("train", "val", "test")) > 5e4


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_targets_that_are_not_finite_are_refused(value):
    y = np.zeros(COUNT)
    y[ROW] = value
    with pytest.raises(MisconfigurationException, match=rf"y is {value} in row {ROW} "):
        TensorData(inputs(0), y, Regression(), OWNERS).setup()


@dataclass(frozen=True)
class Gaps(Regression):
    """Quantities of which some are missing."""

    allows_nan = True

    def check(self, target, owner):
        pass


def test_a_task_may_allow_targets_that_are_missing():
    y = np.zeros(COUNT)
    y[ROW] = np.nan
    data = TensorData(inputs(0), y, Gaps(), OWNERS)
    data.setup()
    assert sum(data.part(2, split).y.isnan().sum() for split in ("train", "val", "test")) == 1


@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize("engine", ["sequential", "processes", "vectorised"])
def test_inputs_in_files_are_refused_when_they_are_read(engine, resident):
    if engine == "vectorised" and not resident:
        pytest.skip("reads whole clients")
    # the first rows are looked at before, when a net is tried
    data = tensors(Reader(inputs(np.nan)), resident=resident, val_fraction=0.0, test_fraction=0.0)
    client = FedAvg(MLP, (4,), task=data.task)
    with pytest.raises(MisconfigurationException, match=f"x is nan in row {ROW}, column {COLUMN}"):
        fit(client, data, max_rounds=1, engine=engine)


def test_a_large_memory_map_is_checked_when_it_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr("pfl_lightning.data.checks.MAPPED", 0)
    data = saved(inputs(np.nan), tmp_path, "npy")
    data.setup()
    with pytest.raises(MisconfigurationException, match=f"x is nan in row {ROW}, column {COLUMN}"):
        for split in ("train", "val", "test"):
            data.part(2, split)


def test_a_row_of_a_part_of_the_pool_has_its_own_number():
    data = tensors(Reader(inputs(np.nan)), max_samples=58)
    data.setup()
    with pytest.raises(MisconfigurationException, match=f"x is nan in row {ROW}, column {COLUMN}"):
        for split in ("train", "val", "test"):
            data.part(2, split)


def test_inputs_without_numbers_are_refused():
    with pytest.raises(MisconfigurationException, match=r"x has the shape \[60, 0\]"):
        TensorData(inputs(0)[:, :0], CLASSES, Classification(2), OWNERS).setup()


@pytest.mark.parametrize("as_dict", [False, True])
def test_targets_that_are_the_inputs_are_refused(as_dict):
    tokens = torch.randint(50, (12, 9), generator=torch.Generator().manual_seed(0))
    masked = tokens.clone()
    masked[:, :4] = -100
    settings = {"task": NextToken(50), "num_clients": 2, "partitioner": IID()}

    def made(x, y):
        x = {"input_ids": x, "kind": torch.zeros(len(x), 2)} if as_dict else x
        TensorData(x, y, input_shape=(9,), **settings).setup()

    for targets in (tokens, masked):
        with pytest.raises(MisconfigurationException, match="100% of the targets"):
            made(tokens, targets)
    made(tokens[:, :-1], tokens[:, 1:])
    # the same token throughout is its own next one
    made(torch.full_like(tokens, 3), torch.full_like(tokens, 3))
