"""Clients that hold PyTorch Datasets."""

import random

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, TensorDataset, random_split

from federations import (
    CLASSES,
    FEATURES,
    equal,
    fit,
    known_by_place,
    make_client,
    near,
    plain,
    points,
    same_end,
    untimed,
)
from pfl_lightning.data import ClientDatasets, Natural, TensorData
from pfl_lightning.data.sources import client_datasets
from pfl_lightning.methods import Ditto, FedAvg, FedPer, PACClient
from pfl_lightning.nets import Net
from pfl_lightning.tasks import Classification, Regression

TASK = Classification(CLASSES)


class Noted(Dataset):
    """Items with a transform, which notes what is read."""

    def __init__(self, count, seed=0, transform=None):
        self.x, self.y = points(count, seed)
        self.transform = transform
        self.read = []

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        self.read.append(index)
        x = self.x[index]
        return (x if self.transform is None else self.transform(x)), int(self.y[index])


class Listed(Noted):
    """The same, with a list of targets."""

    @property
    def targets(self):
        return self.y.tolist()


def shaken(x):
    """Draw from all three generators that transforms draw from."""
    return x + 0.1 * (torch.rand(1) + float(np.random.rand()) + random.random())


def named(transform=None, cls=Noted, **settings):
    clients = {
        name: (cls(20 + seed, seed, transform), cls(7, 100 + seed)) for seed, name in enumerate(("Ulm", "Bremen"))
    }
    return ClientDatasets(clients, TASK, **{"batch_size": 5, **settings})


def test_clients_have_their_names_and_sets():
    clients = {"Ulm": (Noted(20, 1), Noted(5, 2), Noted(6, 3)), "Bremen": (Noted(30, 4), Noted(7, 5), Noted(8, 6))}
    data = ClientDatasets(clients, TASK)
    data.setup()
    assert data.client_names == ["Bremen", "Ulm"] and data.num_clients == 2
    for client, name in enumerate(data.client_names):
        for split, held in zip(("train", "val", "test"), clients[name], strict=True):
            part = data.part(client, split)
            assert torch.equal(part.x, held.x) and torch.equal(part.y, held.y)


@pytest.mark.parametrize("method", [FedAvg, Ditto, PACClient], ids=lambda method: method.__name__)
@pytest.mark.parametrize("engine", ["sequential", "processes", "vectorised"])
@pytest.mark.by_default("sequential-PACClient", "processes-FedAvg", "vectorised-Ditto")
def test_items_in_memory_are_trained_on_as_tensors_are(method, engine):
    x, y = points(60, 0)
    owners = np.arange(60) % 3
    sets = {f"client {k}": TensorDataset(x[owners == k], y[owners == k]) for k in range(3)}
    tensors = TensorData(x, y, TASK, client=[f"client {k}" for k in owners], batch_size=5)
    one = fit(make_client(method, net=plain), ClientDatasets(sets, TASK, batch_size=5), engine=engine)
    # positions in the pool differ: the tensors' clients are mixed
    by_client = [torch.cat([torch.arange(60)[owners == k] for k in range(3)])]
    tensors._x, tensors._y = x[by_client[0]], y[by_client[0]]
    tensors._columns = [f"client {k}" for k in np.repeat(np.arange(3), 20)], None, None
    other = fit(make_client(method, net=plain), tensors, engine=engine)
    assert same_end(one, other)


def test_a_batch_at_a_time_gives_what_memory_gives():
    memory, batches = (fit(make_client(net=plain), named(resident=resident)) for resident in (True, False))
    assert equal(known_by_place(memory), known_by_place(batches))
    assert near(untimed(memory.rows), untimed(batches.rows))


def test_random_transforms_give_other_inputs_each_epoch_and_none_on_test():
    data = named(shaken)
    assert not data.resident and data.val_fraction == 0
    data.setup()
    train, test = data.part(0, "train"), data.part(0, "test")
    assert not torch.equal(train.x, train.x) and torch.equal(test.x, test.x)
    state = torch.get_rng_state()
    first, second = (torch.cat([x for x, _ in train.chunks(5)]) for _ in range(2))
    torch.set_rng_state(state)
    assert torch.equal(first, torch.cat([x for x, _ in train.chunks(5)])) and not torch.equal(first, second)


@pytest.mark.parametrize("engine", ["sequential", "processes", "auto"])
@pytest.mark.parametrize("method", [FedAvg, Ditto], ids=lambda method: method.__name__)
@pytest.mark.by_default("FedAvg-processes", "Ditto-auto")
def test_random_transforms_depend_on_seed_round_and_client_alone(method, engine, tmp_path):
    whole = fit(make_client(method, net=plain), named(shaken), max_rounds=3)
    assert same_end(whole, fit(make_client(method, net=plain), named(shaken), max_rounds=3, engine=engine))
    fit(make_client(method, net=plain), named(shaken), tmp_path, max_rounds=2, engine=engine)
    resumed = fit(
        make_client(method, net=plain), named(shaken), tmp_path, max_rounds=3, engine=engine, ckpt_path="last"
    )
    assert same_end(whole, resumed)
    assert not same_end(whole, fit(make_client(method, net=plain), named(), max_rounds=3))


@pytest.mark.parametrize("engine", ["sequential", "processes"])
@pytest.mark.parametrize("transform", [None, shaken])
@pytest.mark.by_default("shaken-sequential")
def test_workers_read_the_same(transform, engine):
    settings = {"resident": False, "batch_size": 5}
    runs = [
        fit(make_client(net=plain), named(transform, num_workers=n, **settings), engine=engine, max_rounds=2)
        for n in (0, 2)
    ]
    assert same_end(*runs)


def test_what_is_listed_is_not_read():
    data = named(cls=Listed, resident=False, val_fraction=0.0)
    before = [len(dataset.read) for dataset in data._reader.datasets]
    data.setup()
    data.class_counts("train")
    assert sum(len(dataset.read) for dataset in data._reader.datasets) - sum(before) <= 16 * 4
    assert torch.equal(data.part(0, "train").y, data._reader.datasets[2].y)


def test_large_items_stay_where_they_are(monkeypatch):
    monkeypatch.setattr(client_datasets, "SMALL", 99 * 4 * FEATURES)
    data = ClientDatasets([Listed(100)], TASK)
    data.setup()
    assert not data.resident and len(set(data._reader.datasets[0].read)) < 50


def test_a_list_of_targets_that_items_do_not_have_is_not_believed():
    class Shifted(Listed):
        def __getitem__(self, index):
            x, y = super().__getitem__(index)
            return x, (y + 1) % CLASSES

    data = ClientDatasets([(Shifted(30), Shifted(9))], TASK, resident=False, val_fraction=0.0)
    data.setup()
    assert torch.equal(data.part(0, "train").y, (points(30, 0)[1] + 1) % CLASSES)


def test_subsets_concatenations_and_arrays_are_datasets():
    whole = Listed(60)
    one, two = random_split(whole, [40, 20], torch.Generator().manual_seed(0))
    joined = ConcatDataset([Subset(whole, [3, 1]), Noted(10, 5)])
    arrays = {
        split: dict(zip("xy", map(np.asarray, points(n, n)), strict=True)) for split, n in (("train", 9), ("test", 4))
    }
    data = ClientDatasets([(one, two), (joined, Noted(5)), arrays], TASK, val_fraction=0.0)
    data.setup()
    assert data.client_names == ["0", "1", "2"]
    assert torch.equal(data.part(0, "test").y, whole.y[two.indices])
    assert torch.equal(data.part(1, "train").x[:2], whole.x[[3, 1]])
    assert torch.equal(data.part(2, "train").x, points(9, 9)[0])


def test_names_and_a_function():
    data = ClientDatasets(["Ulm", "Bremen"], TASK, read=lambda name: Noted(len(name) * 10))
    data.setup()
    assert data.client_names == ["Bremen", "Ulm"]
    assert [sum(data.size(k, split) for split in ("train", "val", "test")) for k in range(2)] == [60, 30]


def test_a_collate_function_makes_batches():
    class Texts(Dataset):
        def __len__(self):
            return 12

        def __getitem__(self, index):
            return {"words": list(range(1 + index % 4)), "label": index % CLASSES}

    def padded(items):
        rows = [item["words"] + [0] * (FEATURES - len(item["words"])) for item in items]
        return torch.tensor(rows, dtype=torch.float32), torch.tensor([item["label"] for item in items])

    for resident in (True, False):
        data = ClientDatasets([Texts(), Texts()], TASK, collate_fn=padded, resident=resident, batch_size=5)
        assert data.input_shape == (FEATURES,)
        assert len(fit(make_client(net=plain), data).rows) == 3


def test_inputs_may_be_trees_and_targets_quantities():
    class Pairs(Noted):
        def __getitem__(self, index):
            x, y = super().__getitem__(index)
            return {"a": x.double().numpy(), "b": 2 * x}, float(y)

    class Both(Net):
        def forward(self, x):
            return super().forward(x["a"] + x["b"])

    def both(input_shape, num_classes):
        net = plain(input_shape, num_classes)
        return Both(net.features, net.classifier)

    for resident in (True, False):
        data = ClientDatasets([Pairs(20), Pairs(12, 1)], Regression(), resident=resident)
        data.setup()
        part = data.part(0, "train")
        assert part.y.dtype == torch.float32 and part.x["a"].dtype == torch.float32


class Stream(IterableDataset):
    def __iter__(self):
        return iter(())


@pytest.mark.parametrize(
    ("clients", "settings", "words"),
    [
        ({"Ulm": Stream()}, {}, "train of client 'Ulm' is a Stream"),
        ({"Ulm": DataLoader(Noted(3))}, {}, "DataLoader; give its dataset"),
        ({"Ulm": "train.csv"}, {}, "train of client 'Ulm' is a str"),
        ({}, {}, "at least one client"),
        ({"Ulm": (None, Noted(3))}, {}, "'Ulm' has nothing to train on"),
        ({"Ulm": {"training": Noted(3)}}, {}, "'training'; name Datasets train, val and test"),
        ({"Ulm": TensorDataset(torch.zeros(5, 2))}, {}, "an item of train of client 'Ulm' is a tuple of 1"),
        ({"Ulm": Noted(30, transform=shaken)}, {}, "train of client 'Ulm' gives other items at each reading"),
        ({"Ulm": (Noted(9), Noted(9, transform=shaken))}, {}, "test of client 'Ulm' gives other items"),
        ({"Ulm": (Noted(9, transform=shaken), Noted(9))}, {"resident": True}, "resident=true"),
        ({"Ulm": (Noted(9, transform=shaken), Noted(9))}, {"val_fraction": 0.2}, "val_fraction=0.2"),
        ({"Ulm": Noted(9)}, {"num_workers": -1}, "num_workers=-1"),
        ({"Ulm": [torch.zeros(2), torch.zeros(3)]}, {}, "Tensor"),
        (["Ulm", "Ulm"], {"read": lambda name: Noted(9)}, "'Ulm' is the name of two clients"),
        ({1: Noted(9), "1": Noted(9)}, {}, "1 and '1'"),
        ({"Ulm": Noted(9), "ulm ": Noted(9)}, {}, "'Ulm' and 'ulm '"),
        ({"Ulm": Noted(9)}, {"collate_fn": lambda items: torch.zeros(3)}, "returned a Tensor"),
    ],
)
def test_what_clients_cannot_hold_is_refused(clients, settings, words):
    with pytest.raises(MisconfigurationException) as refused:
        ClientDatasets(clients, TASK, **settings)
    assert words in str(refused.value)


def test_items_of_several_shapes_are_refused():
    class Odd(Noted):
        def __getitem__(self, index):
            x, y = super().__getitem__(index)
            return x[: 1 + index % 3], y

    with pytest.raises(MisconfigurationException, match="make no batch"):
        ClientDatasets({"Ulm": Odd(9)}, TASK).setup()


class Given(Dataset):
    """Given items, with another length or a transform of inputs."""

    def __init__(self, items, length=None, transform=None):
        self.items, self.length, self.transform = items, len(items) if length is None else length, transform

    def __len__(self):
        if isinstance(self.length, Exception):
            raise self.length
        return self.length

    def __getitem__(self, index):
        x, y = self.items[index]
        return (x if self.transform is None else self.transform(x)), y


def items(count=20, seed=0, kind=lambda x: x, label=int):
    x, y = points(count, seed)
    return [(kind(row), label(target)) for row, target in zip(x, y, strict=True)]


def as_bytes(x):
    return (x.abs() * 60 + 100).to(torch.uint8)


@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize("kinds", [(as_bytes, torch.Tensor), (lambda x: x.double().numpy(), as_bytes)])
def test_bytes_at_one_client_and_floats_at_another_are_refused(kinds, resident):
    sets = {name: Given(items(kind=kind)) for name, kind in zip(("Ulm", "Jena"), kinds, strict=True)}
    with pytest.raises(MisconfigurationException) as refused:
        ClientDatasets(sets, TASK, resident=resident).setup()
    assert all(word in str(refused.value) for word in ("uint8", "float", "'Ulm'", "'Jena'"))


@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize(("first", "later"), [(as_bytes, torch.Tensor), (torch.Tensor, as_bytes)])
def test_bytes_beside_floats_in_one_set_are_refused(first, later, resident):
    held = items(1, kind=first) + items(9, 1, kind=first) + items(10, 2, kind=later)
    with pytest.raises(MisconfigurationException) as refused:
        ClientDatasets({"Ulm": Given(items(kind=first)), "Jena": Given(held)}, TASK, resident=resident).setup()
    assert all(word in str(refused.value) for word in ("uint8", "float32", "item 10 of train of client 'Jena'"))


def same_either_way(sets, task=TASK):
    memory, batches = (ClientDatasets(sets, task, resident=resident, val_fraction=0.0) for resident in (True, False))
    memory.setup()
    batches.setup()
    for client in range(2):
        one, other = memory.part(client, "train"), batches.part(client, "train")
        streamed = list(other.chunks(4))
        assert torch.equal(one.y, other.y) and one.y.dtype == other.y.dtype
        assert torch.equal(one.y, torch.cat([y for _, y in streamed]))
        assert all(y.dtype == one.y.dtype for _, y in streamed)
        for key, part in one.x.items() if isinstance(one.x, dict) else [(None, one.x)]:
            found = [x if key is None else x[key] for x, _ in streamed]
            assert torch.equal(part, torch.cat(found)) and all(x.dtype == part.dtype for x in found)
    return memory


def test_other_types_become_one():
    halves = {"Ulm": Given(items(kind=lambda x: x.round().int())), "Jena": Given(items(seed=1, kind=torch.Tensor.half))}
    assert same_either_way(halves).part(0, "train").x.dtype == torch.float16
    doubles = {"Ulm": Given(items(kind=lambda x: x.double().numpy())), "Jena": Given(items(seed=1))}
    assert same_either_way(doubles).part(0, "train").x.dtype == torch.float32


def test_labels_may_be_tensors_at_one_client_and_integers_at_another():
    labels = [int, lambda y: y, np.int64, lambda y: y.to(torch.uint8)]
    same_either_way({str(k): Given(items(9, k, label=label)) for k, label in enumerate(labels)})
    quantities = {"Ulm": Given(items(9, label=int)), "Jena": Given(items(9, 1, label=lambda y: float(y) / 3))}
    assert same_either_way(quantities, Regression()).part(1, "train").y.dtype == torch.float32


def test_parts_of_inputs_are_joined_by_name():
    one = Given(items(), transform=lambda x: {"a": x, "b": -x})
    other = Given(items(seed=1), transform=lambda x: {"b": -x, "a": x})
    for client in range(2):
        x = same_either_way({"Ulm": one, "Jena": other}).part(client, "train").x
        assert torch.equal(x["a"], -x["b"])
        assert x["a"].sum() == pytest.approx(sum(float(row.sum()) for row in x["a"]), abs=1e-3)
    with pytest.raises(MisconfigurationException, match=r"inputs\['c'\].*'Jena'|'Jena'.*inputs\['c'\]"):
        ClientDatasets({"Ulm": one, "Jena": Given(items(), transform=lambda x: {"a": x, "c": x})}, TASK)


class Broken(dict):
    """A folder of files that fails for a key."""

    def __missing__(self, key):
        raise OSError(f"no file\nof {key}")


@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize(
    ("given", "words"),
    [
        (Given(items(), length=23), ["item 20 of train of client 'Ulm'", "IndexError", "23"]),
        (Given(Broken(dict(enumerate(items(7)))), length=12), ["item 7 of train of client 'Ulm'", "no file of 7"]),
        (Given(items(), length=NotImplementedError("later")), ["train of client 'Ulm'", "NotImplementedError: later"]),
        (Given(items(), length=-1), ["train of client 'Ulm'", "ValueError"]),
        ((np.ones((4, FEATURES)), np.zeros(4)), ["train of client 'Ulm'", '{"x": ..., "y": ...}']),
        (np.ones((4, FEATURES)), ["train of client 'Ulm'", '{"x": ..., "y": ...}']),
        ({"x": np.ones((4, FEATURES)), "y": np.zeros(5)}, ["train of client 'Ulm'", "4 rows", "5 rows"]),
        ({"x": np.ones((4, FEATURES)), "y": 5}, ["train of client 'Ulm'", "4 rows", "single number"]),
        (Given(items(label=lambda y: y.view(1))), ["'Ulm'", "'Jena'", "[1]", "[]"]),
    ],
)
def test_what_fails_is_told_with_the_client(given, words, resident):
    with pytest.raises(MisconfigurationException) as refused:
        ClientDatasets({"Jena": Given(items()), "Ulm": given}, TASK, resident=resident).setup()
    assert all(word in str(refused.value) for word in words) and "\n" not in str(refused.value)


def test_shapes_of_inputs_may_differ_by_client_where_they_are_not_stacked():
    sets = {"Jena": Given(items()), "Ulm": Given(items(kind=lambda x: x[:2]))}
    ClientDatasets(sets, TASK, resident=False).setup()
    with pytest.raises(MisconfigurationException) as refused:
        ClientDatasets(sets, TASK, resident=True).setup()
    assert all(word in str(refused.value) for word in ("'Ulm'", "'Jena'", "[2]", f"[{FEATURES}]", "resident=false"))


def test_a_function_that_fails_is_told_with_the_client():
    with pytest.raises(MisconfigurationException, match=r"'Jena'.*KeyError: 'Jena'"):
        ClientDatasets(["Ulm", "Jena"], TASK, read=lambda name: {"Ulm": Noted(9)}[name])


@pytest.mark.parametrize("workers", [0, 1])
def test_inputs_that_are_no_numbers_are_named_where_they_are_read(workers):
    class Gap(Listed):
        def __getitem__(self, index):
            x, y = super().__getitem__(index)
            return (x.index_fill(0, torch.tensor(1), torch.nan) if index == 8 else x), y

    # of 99 items, the eighth isn't looked at before
    for sets, split in ((((Gap(99), Listed(9))), "train"), ((Listed(9), Gap(99)), "test")):
        with pytest.raises(MisconfigurationException) as refused:
            data = ClientDatasets({"Ulm": sets}, TASK, resident=False, val_fraction=0.0, num_workers=workers)
            fit(make_client(net=plain), data, max_rounds=1)
        assert all(word in str(refused.value) for word in ("nan", f"item 8 of {split} of client 'Ulm'", "[1]"))
        assert "Traceback" not in str(refused.value)


class Rare(Noted):
    """Items that are turned round in a share of all readings."""

    def __init__(self, count, seed, share, start):
        super().__init__(count, seed)
        self.share, self.start = share, start

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        # the numbers of one generator, shifted: other draws for each start
        return (x.flip(0) if (float(torch.rand(1)) + self.start) % 1 < self.share else x), y


@pytest.mark.parametrize(("clients", "count"), [(1, 40), (3, 9), (20, 5)])
def test_rare_randomness_is_found(clients, count):
    missed = 0
    for start in np.linspace(0, 1, 4, endpoint=False):
        for share in (0.05, 0.02):
            sets = [(Rare(count, k, share, start), Noted(4, k)) for k in range(clients)]
            missed += not ClientDatasets(sets, TASK)._reader.is_random
    # 0.02 are expected
    assert not missed
    with pytest.raises(MisconfigurationException, match=r"test of client .* gives other items"):
        ClientDatasets([(Noted(9), Rare(count, k, 0.1, 0.0)) for k in range(clients)], TASK)


def test_a_late_client_s_random_set_comes_without_those_of_the_federation():
    run = fit(make_client(), named(shaken), max_rounds=1)
    run.trainer.join(None, ClientDatasets({"Jena": (Noted(12, 5, shaken), Noted(7, 6))}, TASK))
    assert len(run.trainer.predict(None, points(3, 0)[0], clients="Jena")["Jena"]) == 3


def test_random_sets_are_refused_by_the_vectorised_engine():
    with pytest.raises(MisconfigurationException, match="vectorised"):
        fit(make_client(net=plain), named(shaken), engine="vectorised")


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_figures_are_of_the_clients_that_have_a_set(engine, tmp_path):
    sets = {"Ulm": (Noted(20), Noted(5, 1), Noted(6, 2)), "Jena": (Noted(9, 3), Noted(3, 4), None)}
    sets["Zwickau"] = (Noted(8, 5), None, Noted(4, 6))
    with pytest.warns(UserWarning, match="without test samples, first client 0 .Jena."):
        data = ClientDatasets(sets, TASK, batch_size=5)
        trainer = fit(make_client(), data, tmp_path, engine=engine, evaluate="both", test_every_round=True).trainer
    found = {name: sorted(values) for name, values in trainer.lightning_module.evaluations.results.items()}
    assert found["test"] == found["test_after"] == [1, 2]
    of_clients = trainer.lightning_module.evaluations.results["test"]
    weighted = (6 * of_clients[1]["acc"] + 4 * of_clients[2]["acc"]) / 10
    assert float(trainer.callback_metrics["test/acc"]) == pytest.approx(weighted)


def test_a_client_can_be_drawn_and_another_partitioner_taken():
    data = named(num_clients=1, partitioner=Natural())
    data.setup()
    assert data.num_clients == 1
    assert len(fit(make_client(FedPer, net=plain), named(max_samples=30)).rows) == 3
