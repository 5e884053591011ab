import pickle
import re
import warnings
import weakref

import numpy as np
import pytest
import torch
from jsonargparse import ArgumentParser
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer

from pfl_lightning.data import (
    IID,
    Digits,
    Dirichlet,
    FederatedDataModule,
    Partitioner,
    Samples,
    gather,
    put_together,
    whole_of,
)
from pfl_lightning.data import division as pools
from pfl_lightning.data.samples import Parts
from pfl_lightning.data.splits import stratified_rows
from pfl_lightning.messages import num_bytes
from pfl_lightning.tasks import Classification

SPLITS = ("train", "val", "test")


class Numbered(FederatedDataModule):
    """Each input is its own position in the pool, so that it can be followed."""

    num_classes = 5
    input_shape = (1,)
    n = 1003
    loads = 0

    def load(self):
        self.loads += 1
        return torch.arange(self.n).unsqueeze(1), torch.arange(self.n) % 5


class Sizes(Partitioner):
    """Clients of given sizes."""

    def __init__(self, *sizes):
        self.sizes = sizes

    def split(self, classes, num_clients, rng):
        rows = np.concatenate(classes)
        return np.split(rows, np.cumsum(self.sizes))[:num_clients]


class Floats(Numbered):
    def transform(self, x):
        return x.float()


def ready(data=Numbered, **kwargs):
    kwargs = {"num_clients": 7, "partitioner": Dirichlet(alpha=0.5, min_size=10), **kwargs}
    dm = data(**kwargs)
    dm.setup()
    return dm


def rows(dm, client, split):
    return dm.part(client, split).x.flatten()


def all_rows(dm):
    return [rows(dm, client, split) for client in range(dm.num_clients) for split in SPLITS]


def test_parts_are_disjoint_and_cover_the_pool():
    pool = torch.cat(all_rows(ready()))
    assert torch.equal(pool.sort().values, torch.arange(1003))


def test_labels_stay_with_their_inputs():
    dm = ready()
    for client in range(7):
        part = dm.part(client, "train")
        assert torch.equal(part.y, part.x.flatten() % 5)


@pytest.mark.parametrize(
    ("n", "test_fraction", "val_fraction", "sizes"),
    [
        (100, 0.25, 0.0, (75, 0, 25)),
        (101, 0.25, 0.0, (75, 0, 26)),
        (100, 0.25, 0.1, (67, 8, 25)),
        (100, 0.0, 0.1, (90, 10, 0)),
        (100, 0.0, 0.0, (100, 0, 0)),
        (3, 0.25, 0.1, (1, 1, 1)),
        (3, 0.99, 0.99, (1, 1, 1)),
        (2, 0.99, 0.0, (1, 0, 1)),
        (1, 0.0, 0.0, (1, 0, 0)),
    ],
)
def test_part_sizes(n, test_fraction, val_fraction, sizes):
    dm = ready(num_clients=1, partitioner=Sizes(n), test_fraction=test_fraction, val_fraction=val_fraction)
    assert tuple(dm.size(0, split) for split in SPLITS) == sizes
    assert tuple(len(dm.part(0, split)) for split in SPLITS) == sizes
    assert tuple(int(dm.class_counts(split).sum()) for split in SPLITS) == sizes


@pytest.mark.parametrize(("n", "val_fraction", "least"), [(2, 0.1, 3), (1, 0.0, 2)])
def test_refuses_clients_that_are_too_small(n, val_fraction, least):
    sentence = (
        rf"^Sizes left client 1 with {n} of 1003 samples, too few for {least} non-empty parts; .*at least {least}"
    )
    with pytest.raises(MisconfigurationException, match=sentence):
        ready(num_clients=2, partitioner=Sizes(50, n), val_fraction=val_fraction)


def test_counts_are_those_of_the_train_parts():
    dm = ready()
    expected = torch.stack([torch.bincount(rows(dm, c, "train") % 5, minlength=5) for c in range(7)])
    assert torch.equal(dm.counts, expected)
    assert torch.equal(torch.stack([dm.client(c).class_counts for c in range(7)]), expected)
    assert not torch.equal(dm.counts, dm.class_counts("test"))


def test_client_holds_its_three_parts():
    dm = ready()
    client = dm.client(3)
    assert client.task == Classification(5)
    for split in SPLITS:
        part = getattr(client, split)
        assert torch.equal(part.x.flatten(), rows(dm, 3, split))
        assert len(part) == dm.size(3, split)


@pytest.fixture
def asked(monkeypatch):
    """What data modules were asked for."""
    found = []

    def spied(self, clients, split, device="cpu", parts=FederatedDataModule.parts):
        found.append((list(clients), split, torch.device(device).type))
        return parts(self, clients, split, device)

    monkeypatch.setattr(FederatedDataModule, "parts", spied)
    return found


def test_client_moves_and_gathers_each_part_once(asked):
    client = ready(Floats).client(3).to("meta")
    assert client.size("train") and asked == []
    assert client.train.x.device.type == "meta"
    assert client.train is client.train
    assert asked == [([3], "train", "meta")]
    assert client.to("cpu", torch.float64).val.x.dtype == torch.float64


def test_several_clients_are_gathered_at_once_and_keep_their_parts(asked):
    dm, other = ready(Floats), ready(num_clients=2)
    alone = [dm.part(c, "train") for c in (2, 0)] + [other.part(1, "train")]
    clients = [dm.client(2).to("cpu", torch.float64), dm.client(0).to("cpu", torch.float64), other.client(1)]
    early = other.client(1)
    early.train  # noqa: B018 - asked for already
    asked.clear()
    parts = gather([*clients, early], "train")
    assert asked == [([2, 0], "train", "cpu"), ([1], "train", "cpu")]
    assert all(client.train is part for client, part in zip([*clients, early], parts, strict=True))
    assert parts[0].x.dtype == torch.float64
    for part, expected in zip(parts, [*alone, alone[-1]], strict=True):
        assert torch.equal(part.x.to(expected.x.dtype), expected.x) and torch.equal(part.y, expected.y)


def test_class_counts_are_of_those_put_together_and_of_nobody_else_s_making():
    dm = ready(Floats)
    clients = [dm.client(c) for c in (2, 0, 3)]
    put_together(clients)
    for client in clients:
        expected = torch.bincount(dm.part(client.client, "train").y, minlength=dm.num_classes)
        assert torch.equal(client.class_counts, expected)
        client.class_counts.zero_()
        assert torch.equal(client.class_counts, expected)
        assert client.classes == torch.nonzero(expected).flatten().tolist()


def test_a_class_out_of_range_isn_t_counted_as_another_client_s():
    dm = ready(Floats)
    clients = [dm.client(c) for c in (0, 1)]
    put_together(clients)
    clients[0].train.y[0] = dm.num_classes
    with pytest.raises(IndexError, match="out of bounds"):
        clients[1].class_counts  # noqa: B018 - refused


def test_those_put_together_are_gathered_when_one_is_asked_for_and_go_with_their_last_reference(asked):
    dm = ready(Floats)
    clients = [dm.client(c) for c in (2, 0, 3)]
    put_together(clients)
    assert asked == []
    for client in clients:
        assert torch.equal(client.train.x, dm.part(client.client, "train").x)
    assert sorted(asked[0][0]) == [0, 2, 3] and all(len(again) == 1 for again, *_ in asked[1:])
    gone = weakref.ref(clients[0].train)
    del clients, client
    # at once, and not when the collector comes by
    assert gone() is None


@pytest.mark.parametrize("room", [True, False])
def test_the_pool_is_copied_once_to_a_device_with_room_for_it(monkeypatch, room):
    dm = ready()
    pool = num_bytes((dm._pool.samples.x, dm._pool.samples.y))
    monkeypatch.setattr(pools, "free_memory", lambda device: 4 * pool - (not room))
    where = []
    monkeypatch.setattr(dm, "transform", lambda x: where.append(x.device.type) or x)
    for client in (0, 1):
        dm.client(client).to("meta").train  # noqa: B018
        dm.client(client).train  # noqa: B018
    assert where == ["meta" if room else "cpu", "cpu"] * 2
    assert len(dm._pool.copies) == 1
    dm.teardown("fit")
    assert not dm._pool.copies


def test_split_is_shuffled_and_differs_between_clients():
    dm = ready(num_clients=2, partitioner=Sizes(100, 100))
    first, second = (rows(dm, c, "test").argsort() for c in range(2))
    assert not torch.equal(first, torch.arange(25))
    assert not torch.equal(first, second)


def test_depends_on_its_seed_alone_and_leaves_global_randomness():
    def draw(training_seed, **kwargs):
        torch.manual_seed(training_seed)
        np.random.seed(training_seed)
        before = torch.get_rng_state(), np.random.get_state()[1].copy()
        drawn = all_rows(ready(max_samples=800, **kwargs))
        assert torch.equal(before[0], torch.get_rng_state())
        assert np.array_equal(before[1], np.random.get_state()[1])
        return torch.cat(drawn)

    assert torch.equal(draw(0), draw(1))
    assert not torch.equal(draw(0, seed=1), draw(0, seed=2))


def test_seed_moves_the_partition():
    def owned(seed):
        dm = ready(seed=seed)
        return set(torch.cat([rows(dm, 0, split) for split in SPLITS]).tolist())

    assert owned(1) == owned(1) != owned(2)


def test_stratified_rows_keep_the_pool_order():
    # pathological partitions cut in pool order, which a subset must not change
    kept = stratified_rows(torch.arange(1000) % 3, 100, 3, seed=1)
    assert torch.equal(kept, kept.sort().values)


def test_setup_loads_once():
    dm = ready()
    before = torch.cat(all_rows(dm))
    dm.setup("test")
    assert dm.loads == 1
    assert torch.equal(before, torch.cat(all_rows(dm)))


def test_max_samples_keeps_proportions():
    class Skewed(Numbered):
        def load(self):
            x, _ = super().load()
            return x, torch.bucketize(x.flatten(), torch.tensor([499, 749, 899, 979]))

    dm = Skewed(num_clients=2, partitioner=IID(), max_samples=100)
    dm.setup()
    chosen = torch.cat(all_rows(dm))
    assert len(chosen.unique()) == 100
    # 500, 250, 150, 80 and 23 of 1,003: quotas 49.85, 24.93, 14.96, 7.98 and 2.29
    assert sum(dm.class_counts(split) for split in SPLITS).sum(0).tolist() == [50, 25, 15, 8, 2]
    # a random choice, not the first of each class
    assert chosen[chosen < 500].max() > 400


@pytest.mark.parametrize("max_samples", [1003, 5000, None])
def test_max_samples_beyond_the_data_uses_all(max_samples):
    assert len(torch.cat(all_rows(ready(max_samples=max_samples)))) == 1003


def test_max_samples_below_the_classes_is_refused():
    with pytest.raises(MisconfigurationException, match=r"data.max_samples=4 must be at least the 5 classes"):
        ready(num_clients=1, partitioner=IID(), max_samples=4)


@pytest.mark.parametrize(
    ("setting", "value", "works"),
    [
        ("num_clients", 0, "at least 1"),
        ("batch_size", 0, "at least 1"),
        ("last_batch", "pad", "one of keep, drop, wrap"),
        ("test_fraction", 1.0, "at least 0 and below 1"),
        ("test_fraction", -0.1, "at least 0 and below 1"),
        ("val_fraction", 1.0, "at least 0 and below 1"),
        ("val_fraction", float("nan"), "at least 0 and below 1"),
        ("max_samples", 19, "at least num_clients=20"),
        ("seed", -1, "from 0 to"),
        ("seed", 2**32, "from 0 to"),
    ],
)
def test_refuses_bad_settings_at_construction(setting, value, works):
    with pytest.raises(MisconfigurationException, match=rf"^data\.{setting}={value!r} must be {works}"):
        Numbered(**{setting: value})


@pytest.mark.parametrize(
    ("setting", "value", "works"),
    [
        ("num_clients", 2.0, "an integer"),
        ("num_clients", True, "an integer"),
        ("batch_size", "8", "an integer"),
        ("batch_size", None, "an integer"),
        ("max_samples", float("nan"), "an integer"),
        ("public_samples", 2.5, "an integer"),
        ("seed", 1.0, "an integer"),
        ("test_fraction", "0.1", "a number"),
        ("val_fraction", None, "a number"),
        ("server_fraction", "all", "a number"),
        ("root", None, "a folder"),
        ("partitioner", IID, "a partitioner, such as"),
        ("partitioner", "IID", "a partitioner, such as"),
        ("public", "CIFAR100", "a data module, such as"),
    ],
)
def test_refuses_other_types_than_a_setting_has(setting, value, works):
    with pytest.raises(MisconfigurationException, match=rf"^data\.{setting}={re.escape(repr(value))} must be {works}"):
        Numbered(**{setting: value})


def test_numbers_of_numpy_are_numbers():
    data = ready(num_clients=np.int64(3), val_fraction=np.float32(0.2), seed=np.int64(1))
    assert data.size(2, "val") > 0


@pytest.mark.parametrize(("label", "warned"), [(3, True), (None, False)])
def test_data_of_one_class_are_warned_of(label, warned):
    class Labelled(Numbered):
        def load(self):
            x, y = super().load()
            return x, y if label is None else torch.full_like(y, label)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ready(Labelled, partitioner=IID())
    said = [str(warning.message) for warning in caught]
    sentence = "Labelled: all 1003 samples are of class 3, so that every method has an accuracy of 1."
    assert said == ([sentence] if warned else [])


def test_refuses_bad_pools():
    class Bad(Numbered):
        pool = (torch.zeros(3, 1), torch.tensor([0, 1, 5]))

        def load(self):
            return self.pool

    dm = Bad(num_clients=1, partitioner=IID())
    for y, sentence in [
        (torch.tensor([0, 1, 5]), r"targets from 0 to 5; task Classification\(num_classes=5\) allows 0 to 4"),
        (torch.tensor([0, -1, 2]), "targets from -1 to 2"),
        (torch.tensor([0, 1]), r"load\(\) returned tensors of 3, 2 rows"),
        (torch.zeros(3), "torch.float32 targets"),
    ]:
        dm.pool = (torch.zeros(3, 1), y)
        with pytest.raises(MisconfigurationException, match=sentence):
            dm.setup()


@pytest.mark.parametrize("use", [lambda dm: dm.counts, lambda dm: dm.client(0), lambda dm: dm.size(0, "val")])
def test_refuses_use_before_setup(use):
    with pytest.raises(MisconfigurationException, match=r"call prepare_data\(\) and setup\(\) first"):
        use(Numbered())


def test_load_is_required():
    with pytest.raises(TypeError, match="abstract"):
        FederatedDataModule()


def test_loaders_give_client_ids():
    dm = Numbered(num_clients=3)
    for loader in (dm.train_dataloader(), dm.val_dataloader(), dm.test_dataloader()):
        assert list(loader) == [[0, 1, 2]]
        assert list(loader) == [[0, 1, 2]]
        assert len(loader) == 1
    assert len(Numbered(val_fraction=0.0).val_dataloader()) == 0
    assert len(Numbered(test_fraction=0.0).test_dataloader()) == 0


class Recorder(LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.seen = {split: [] for split in SPLITS}

    def configure_optimizers(self):
        return None

    def training_step(self, batch):
        self.seen["train"].append(batch)

    def validation_step(self, batch):
        self.seen["val"].append(batch)

    def test_step(self, batch):
        self.seen["test"].append(batch)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("val_fraction", [0.1, 0.0])
def test_trainer_runs_on_the_loaders(tmp_path, val_fraction):
    trainer = Trainer(
        default_root_dir=tmp_path,
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        num_sanity_val_steps=0,
    )
    model, dm = Recorder(), Digits(num_clients=3, val_fraction=val_fraction)
    trainer.fit(model, datamodule=dm)
    trainer.test(model, datamodule=dm, verbose=False)
    assert model.seen["train"] == [[0, 1, 2]] * 2
    assert model.seen["val"] == ([[0, 1, 2]] * 2 if val_fraction else [])
    assert model.seen["test"] == [[0, 1, 2]]


def test_hyperparameters_are_plain():
    assert dict(Digits(batch_size=16).hparams) == {
        "root": "data",
        "num_clients": 10,
        "batch_size": 16,
        "last_batch": "keep",
        "test_fraction": 0.25,
        "val_fraction": 0.1,
        "max_samples": None,
        "client_test": "own",
        "central_test": None,
        "server_fraction": 0.0,
        "public_samples": 3000,
        "seed": 1,
        "download": True,
        "new_clients": 0,
        "client_split": None,
        "resident": None,
        "val_fold": None,
    }


def test_settings_can_be_printed_and_read_as_yaml():
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(FederatedDataModule, "data")
    options = [
        "--data=Digits",
        "--data.num_clients=4",
        "--data.partitioner.alpha=0.7",
        "--data.last_batch=wrap",
    ]
    printed = parser.dump(parser.parse_args(options))
    dm = parser.instantiate(parser.parse_string(printed)).data
    assert isinstance(dm, Digits)
    assert (dm.num_clients, dm.partitioner.alpha, dm.last_batch, dm.batch_size) == (4, 0.7, "wrap", 10)


def test_server_has_no_data_by_default():
    assert ready().server_data() is None


def test_part_moves_and_compares():
    part = Samples(torch.zeros(2, 1), torch.tensor([0, 1]))
    moved = part.to("meta")
    assert moved.x.device.type == moved.y.device.type == "meta"
    # would raise if the dataclass compared tensors
    assert part == part
    assert part != moved


def test_survives_pickling():
    dm = ready()
    copy = pickle.loads(pickle.dumps(dm))
    assert torch.equal(torch.cat(all_rows(dm)), torch.cat(all_rows(copy)))


def test_clients_side_by_side_are_what_was_gathered_and_nobody_is_lost():
    dm, other = ready(Floats), ready(num_clients=2)
    clients = [dm.client(c) for c in (2, 0, 3)]
    whole = whole_of(clients, "train")
    ends = torch.tensor([client.size("train") for client in clients]).cumsum(0).tolist()
    for client, begin, end in zip(clients, [0, *ends], ends, strict=False):
        # the same memory, of which each has a part
        assert client.train.x.data_ptr() == whole.x[begin:end].data_ptr()
        assert torch.equal(client.train.y, whole.y[begin:end])
    for some in (clients[::-1], clients[:2], [*clients, other.client(1)], [dm.client(1), *clients]):
        found = whole_of(some, "train")
        assert torch.equal(found.y, torch.cat([client.source.part(client.client, "train").y for client in some]))
    assert whole_of([dm.client(0).to("cpu", torch.float64)], "train").x.dtype == torch.float64


def test_parts_are_views_by_their_place():
    parts = Parts(Samples(torch.arange(6.0), torch.arange(6)), [1, 0, 5])
    assert [part.y.tolist() for part in parts] == [[0], [], [1, 2, 3, 4, 5]] and len(parts) == 3
    assert parts[-1].x.data_ptr() == parts.whole.x[1:].data_ptr()
    assert [len(part) for part in parts[1:]] == [0, 5]
    assert parts.to("cpu", torch.float64)[0].x.dtype == torch.float64
    with pytest.raises(IndexError):
        parts[3]


class Flipped(Numbered):
    def load(self):
        x, y = super().load()
        return x.float(), y

    def transform(self, x):
        return x * (1 - 2 * (torch.rand(len(x), 1) < 0.5))


def test_a_random_transform_is_refused():
    with pytest.raises(MisconfigurationException, match=r"Flipped\.transform .*training_step"):
        ready(Flipped)
