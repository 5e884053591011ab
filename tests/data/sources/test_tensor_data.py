"""Arrays, tensors and memory maps."""

import lightning
import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from federations import fit
from pfl_lightning.data import CHUNK, IID, Split, TensorData
from pfl_lightning.methods import FedAvg
from pfl_lightning.nets import MLP, Net
from pfl_lightning.tasks import Classification, Regression

OWNERS = np.repeat(["one", "two", "three"], 20)
X = np.random.default_rng(0).normal(size=(60, 4))
Y = X.sum(1)
SPLITS: tuple[Split, ...] = ("train", "val", "test")


def ready(x=X, y=Y, task=None, client=OWNERS, **settings):
    data = TensorData(x, y, task or Regression(), client, **settings)
    data.setup()
    return data


def rows(data):
    return torch.cat([data.part(client, split).x for client in range(data.num_clients) for split in SPLITS])


class Reader:
    """Inputs that are read by position, and remember which."""

    def __init__(self, x):
        self.x, self.asked = x, []

    def __len__(self):
        return len(self.x)

    def __getitem__(self, positions):
        assert (np.diff(positions) > 0).all()
        self.asked += positions.tolist()
        return self.x[positions]


def test_a_federation_learns_from_arrays():
    data = ready()
    client = FedAvg(MLP, data.input_shape, task=data.task)
    ended = fit(client, data, max_rounds=1)
    assert data.input_shape == (4,) and data.client_names == ["one", "three", "two"]
    assert ended.rows[-1]["train/loss"] > 0


@pytest.mark.parametrize(
    "kind",
    [np.asarray, torch.from_numpy, Reader, lambda x: torch.from_numpy(x).float()],
    ids=["array", "tensor", "reader", "single"],
)
def test_all_kinds_give_the_same_samples(kind):
    data, other = ready(x=kind(X)), ready()
    for client in range(3):
        for split in SPLITS:
            part, expected = data.part(client, split), other.part(client, split)
            assert part.x.dtype == torch.float32 == part.y.dtype
            assert part.x.equal(expected.x) and part.y.equal(expected.y)


def test_what_is_read_by_position_is_read_for_the_client_alone():
    reader = Reader(X)
    data = ready(x=reader, max_samples=30, central_test=0.2)
    assert len(reader.asked) <= 1
    data.part(1, "train")
    assert len(set(reader.asked)) <= 1 + data.size(1, "train") < 20
    assert {OWNERS[row] for row in reader.asked[1:]} == {"three"}


def test_a_tree_of_arrays():
    tree = {"a": X[:, :3], "b": Reader(X[:, 3:])}
    data, whole = ready(x=tree), ready()
    part, expected = data.part(0, "train"), whole.part(0, "train")
    assert torch.cat([part.x["a"], part.x["b"]], 1).equal(expected.x)
    assert data.input_shape == (3,) and ready(x=tree, input_shape=(3, 1)).input_shape == (3, 1)


def test_a_mapped_pool_is_never_read_whole(tmp_path, monkeypatch):
    count = 30_000
    stored = np.lib.format.open_memmap(tmp_path / "x.npy", "w+", np.uint8, (count, 8))
    stored[:] = np.arange(count)[:, None] % 251
    stored.flush()
    read = []
    taken = np.memmap.__getitem__

    def watched(self, rows):
        found = taken(self, rows)
        read.append(len(found) if np.ndim(found) else 0)
        return found

    data = TensorData(str(tmp_path / "x.npy"), np.arange(count) % 2, Classification(2), np.arange(count) // 100)
    monkeypatch.setattr(np.memmap, "__getitem__", watched)
    data.setup()
    assert data.num_clients == 300 and isinstance(data._pool.samples.x, np.memmap)
    client = FedAvg(MLP, data.input_shape, task=data.task)
    fit(client, data, max_rounds=1, clients_per_round=3, limit_val_batches=0)
    # a gather is of as many samples as go through the net at once
    assert max(read) <= CHUNK
    part = data.part(7, "train")
    assert sorted(part.x[:, 0].tolist()) == sorted(((data.division.clients[7]["train"] % 251) / 127.5 - 1).tolist())


@pytest.mark.parametrize("engine", ["vectorised", "processes"])
def test_engines_read_the_same(engine):
    rows = []
    for kind, by in ((Reader, engine), (np.asarray, "sequential")):
        data = ready(x=kind(X))
        lightning.seed_everything(0, verbose=False)
        client = FedAvg(MLP, data.input_shape, task=data.task)
        rows.append(fit(client, data, max_rounds=2, engine=by).rows[-1])
    assert rows[0]["val/mae"] == pytest.approx(rows[1]["val/mae"], rel=1e-4)


def test_checkpoints_hold_no_arrays(tmp_path):
    data = ready()
    assert "x" not in data.hparams and "client" not in data.hparams and data.hparams["num_clients"] is None
    client = FedAvg(MLP, data.input_shape, task=data.task)
    ended = fit(client, data, tmp_path, max_rounds=1)
    assert FedAvg.load_from_checkpoint(ended.last, client=1, net=MLP).task == Regression()


def test_files_are_mapped(tmp_path):
    np.save(tmp_path / "x.npy", X)
    torch.save(torch.from_numpy(Y), tmp_path / "y.pt")
    np.save(tmp_path / "client.npy", OWNERS)
    data = ready(*(tmp_path / name for name in ("x.npy", "y.pt")), client=str(tmp_path / "client.npy"))
    assert rows(data).equal(rows(ready()))


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.int64])
def test_integers_are_classes(dtype):
    data = ready(y=(np.arange(60) % 3).astype(dtype), task=Classification(3), partitioner=IID(), num_clients=4)
    assert data.num_clients == 4 and data.num_classes == 3 and data.part(0, "train").y.dtype == torch.int64


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"x": "none.npy"}, "data.x='none.npy' cannot be read"),
        ({"y": "y.txt"}, r"data.y='y.txt' must be a .npy or .pt file"),
        ({"x": X[:0]}, "data.x has no samples"),
        ({"x": X[:59]}, r"tensors of 59, 60 rows"),
        ({"y": np.r_[Y[:59], np.nan]}, "y is nan in row 59"),
        ({"client": None}, "Natural: TensorData .* client"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_in_a_sentence(given, says):
    with pytest.raises(MisconfigurationException, match=says):
        ready(**given)


def test_objects_are_refused(tmp_path):
    np.save(tmp_path / "x.npy", np.array([None, 1], dtype=object), allow_pickle=True)
    with pytest.raises(MisconfigurationException, match="cannot be read"):
        ready(x=tmp_path / "x.npy")


def test_nets_of_trees_are_the_user_s():
    class Joined(Net):
        def __init__(self, input_shape, outputs):
            super().__init__(Concatenated(), torch.nn.Linear(4, outputs))

    class Concatenated(torch.nn.Module):
        def forward(self, x):
            return torch.cat([x["a"], x["b"]], 1)

    data = ready(x={"a": X[:, :3], "b": X[:, 3:]})
    client = FedAvg(Joined, data.input_shape, task=data.task)
    assert fit(client, data, max_rounds=1).rows[-1]["train/loss"] > 0


def test_large_quantities_are_named_with_a_way_to_scale_them():
    y = 300_000 + torch.arange(60.0)
    data = TensorData(torch.randn(60, 3), y, Regression(), client=[0, 1, 2] * 20)
    with pytest.warns(UserWarning, match=r"target 'y' are around 3e\+05, .*TableData.*standardize_target"):
        data.setup()
    assert data.target_scale(0) is None and data.part(0, "train").y.min() >= 300_000
    with pytest.raises(MisconfigurationException, match=r"^data\.standardize_target is a setting .*TableData"):
        TensorData(torch.randn(60, 3), y, Regression(), client=[0, 1, 2] * 20, standardize_target="table")
