"""A LightningDataModule for each client."""

import math
from functools import partial

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.nn import functional as F
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    StackDataset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from federations import CLASSES, FEATURES, blobs, equal, fit, make_client, make_trainer, points
from pfl_lightning.data import ClientDatasets
from pfl_lightning.methods import FedPer
from pfl_lightning.tasks import Classification

NAMES = ("Bremen", "Ulm")


class Own(L.LightningDataModule):
    """Training, validation and test rows of one client, and rows to predict for."""

    def __init__(self, seed=0, **train):
        super().__init__()
        self.seed, self.train = seed, {"batch_size": 5, "shuffle": True, **train}
        self.called = []

    def prepare_data(self):
        self.called.append("prepare")

    def setup(self, stage):
        self.called.append(stage)
        if stage == "fit":
            self.rows, self.held = (TensorDataset(*points(n, self.seed)) for n in (20, 6))
        elif stage == "test":
            self.tested = TensorDataset(*points(8, self.seed + 1))

    def train_dataloader(self):
        return DataLoader(self.rows, **self.train)

    def val_dataloader(self):
        return DataLoader(self.held, batch_size=50)

    def test_dataloader(self):
        return [DataLoader(self.tested)]


class Predicting(Own):
    def predict_dataloader(self):
        return DataLoader(TensorDataset(points(3, self.seed + 2)[0]))


class Lit(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(FEATURES, CLASSES)

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", F.cross_entropy(self(x), y))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def modules(kind=Own, **train):
    return {name: kind(seed, **train) for seed, name in enumerate(NAMES)}


def by_hand():
    sets = {}
    for seed, name in enumerate(NAMES):
        own = Own(seed)
        own.setup("fit"), own.setup("test")
        sets[name] = (own.rows, own.held, own.tested)
    return ClientDatasets(sets, Classification(CLASSES), batch_size=5)


def test_they_train_as_the_same_datasets_given_by_hand():
    client = partial(make_client, FedPer)
    one, other = fit(client(), by_hand()), fit(client(), modules())
    assert equal(one.weights, other.weights)
    assert one.trainer.results.client_rows == other.trainer.results.client_rows
    assert [row["name"] for row in other.trainer.results.client_rows] == list(NAMES)


def test_a_lightning_module_trains_on_them_and_each_is_set_up_once():
    given = modules()
    trainer = make_trainer(max_rounds=2)
    model = Lit()
    trainer.fit(model, datamodule=given)
    first, *_, last = trainer.results.rows
    assert last["val/loss"] < first["val/loss"]
    trainer.test(model, datamodule=given)
    assert all(own.called == ["prepare", "fit", "test"] for own in given.values())
    assert trainer.datamodule.batch_size == 5 and trainer.datamodule.part(0, "val").y.shape == (6,)


def test_a_list_numbers_the_clients_and_may_stand_in_the_place_of_a_loader():
    trainer = make_trainer(max_rounds=1)
    trainer.fit(make_client(), list(modules().values()))
    assert [row["client"] for row in trainer.results.client_rows] == [0, 1]


def test_rows_to_predict_for_come_from_predict_loaders():
    given = {"Bremen": Predicting(0), "Celle": Own(3), "Ulm": Predicting(1)}
    trainer = make_trainer(max_rounds=1)
    model = make_client()
    trainer.fit(model, datamodule=given)
    predicted = trainer.predict(model, datamodule=given)
    assert {name: len(each) for name, each in predicted.items()} == {"Bremen": 3, "Ulm": 3}
    own = trainer.client("Ulm").eval()(points(3, 3)[0])
    assert torch.allclose(predicted["Ulm"].outputs, own)
    assert len(trainer.predict(model, datamodule=given, clients=["Celle"])["Celle"]) == 8


def test_settings_of_the_loaders_are_kept():
    def collate(items):
        x, y = default_collate(items)
        return -x, y

    class Collated(Own):
        def train_dataloader(self):
            return DataLoader(self.rows, batch_size=4, shuffle=True, drop_last=True, collate_fn=collate)

        def val_dataloader(self):
            return DataLoader(self.held, collate_fn=collate)

        def test_dataloader(self):
            return DataLoader(self.tested, collate_fn=collate)

    data = ClientDatasets.of_modules(modules(Collated), Classification(CLASSES))
    data.prepare_data()
    data.setup()
    assert (data.batch_size, data.last_batch) == (4, "drop")
    own = Own(0)
    own.setup("test")
    assert torch.equal(data.part(0, "test").x, -own.tested.tensors[0])
    assert ClientDatasets.of_modules(modules(), Classification(CLASSES), batch_size=7).batch_size == 7


def test_lightning_s_own_way_to_make_one_is_taken_with_shuffling():
    made = {
        name: L.LightningDataModule.from_datasets(TensorDataset(*points(20, seed)), batch_size=5)
        for seed, name in enumerate(NAMES)
    }
    trainer = make_trainer(max_rounds=1)
    trainer.fit(make_client(), datamodule=made)
    assert len(trainer.results.client_rows) == 2


def test_items_of_any_form_are_taken():
    class Named(Own):
        def setup(self, stage):
            self.rows = self.held = self.tested = StackDataset(past=torch.randn(20, 4), next=torch.randn(20, 4))

    class Forecaster(Lit):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(4, 4)

        def training_step(self, batch, batch_idx):
            return F.mse_loss(self(batch["past"]), batch["next"])

        def validation_step(self, batch, batch_idx):
            self.log("val_loss", self.training_step(batch, batch_idx))

    trainer = make_trainer(max_rounds=1)
    with pytest.warns(match="also in its training rows"):
        trainer.fit(Forecaster(), datamodule=modules(Named))
    assert all(math.isfinite(row["val/loss"]) for row in trainer.results.rows)


class Stream(IterableDataset):
    def __iter__(self):
        return iter([])


class Streamed(Own):
    def train_dataloader(self):
        return DataLoader(Stream(), batch_size=5)


class Several(Own):
    def val_dataloader(self):
        return [DataLoader(self.held), DataLoader(self.tested)]


class Moved(Own):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch


class Untrained(L.LightningDataModule):
    def test_dataloader(self):
        return DataLoader(TensorDataset(*points(8, 0)))


class Bound(Own):
    def collate(self, items):
        return default_collate(items)

    def train_dataloader(self):
        return DataLoader(self.rows, batch_size=5, shuffle=True, collate_fn=self.collate)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (partial(modules, shuffle=False), r"Bremen.*train_dataloader.*shuffle=True"),
        (partial(modules, shuffle=False, sampler=WeightedRandomSampler([1.0] * 20, 20)), "WeightedRandomSampler"),
        (partial(modules, shuffle=False, sampler=SubsetRandomSampler([1, 2])), "SubsetRandomSampler"),
        (partial(modules, batch_size=None, shuffle=False), "batch_size=None"),
        (lambda: {"Bremen": Own(), "Ulm": Own(batch_size=7)}, r"batch_size=5 of client 'Bremen' and 7 of client 'Ulm'"),
        (lambda: {"Bremen": Own(), "Ulm": Own(drop_last=True)}, "drop_last"),
        (partial(modules, Streamed), "Stream"),
        (partial(modules, Several), r"val_dataloader gives 2 loaders"),
        (partial(modules, Moved), "on_after_batch_transfer"),
        (partial(modules, Bound), "collate_fn"),
        (lambda: {"Bremen": Untrained()}, r"Bremen.*train_dataloader"),
        (lambda: [blobs(), blobs()], "holds clients itself"),
        (lambda: {"Bremen": 3}, "LightningDataModule"),
        (lambda: [], "LightningDataModule"),
        (Own, "dict with a LightningDataModule"),
    ],
)
def test_what_cannot_be_carried_on_is_refused_by_name(made, said):
    with pytest.raises(MisconfigurationException, match=said):
        make_trainer().fit(make_client(), datamodule=made())
