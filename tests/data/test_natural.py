"""Clients as a data set names them."""

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from federations import fit
from pfl_lightning.data import IID, Dirichlet, FederatedDataModule, Loaded, Natural
from pfl_lightning.data.sample_proxy import sample_proxy
from pfl_lightning.methods import FedAvg
from pfl_lightning.nets import MLP
from pfl_lightning.tasks import Classification, Regression

SPLITS = ("train", "val", "test")
OWNERS = np.array(["c", "a", "b", "a", "c", "c", "a", "b", "c", "a"] * 6)

QUANTITY = Regression()


class Owned(FederatedDataModule):
    """Samples that are their own numbers, of clients a (24), b (12) and c (24)."""

    input_shape = (1,)

    def __init__(self, task=QUANTITY, client=OWNERS, split=None, time=None, order=None, **settings):
        settings = {"num_clients": None, "partitioner": Natural(), "val_fraction": 0.25, **settings}
        super().__init__(**settings)
        self.given, self.columns, self.order = task, (client, split, time), order

    @property
    def task(self):
        return self.given

    def load(self):
        x = torch.arange(60.0).unsqueeze(1)
        y = x.flatten() / 60 if self.given == Regression() else torch.arange(60) % 3
        if self.order is None:
            return Loaded(x, y, *self.columns)
        columns = [None if column is None else np.asarray(column)[self.order.numpy()] for column in self.columns]
        return Loaded(x[self.order], y[self.order], *columns)


def ready(**settings):
    data = Owned(**settings)
    data.setup()
    return data


def numbers(data, client, *splits):
    return {int(x) for split in splits or SPLITS for x in data.part(client, split).x}


def rows_of(name):
    return set(np.flatnonzero(name == OWNERS).tolist())


@pytest.mark.parametrize("task", [Regression(), Classification(3)], ids=str)
def test_each_client_has_its_own_samples(task):
    data = ready(task=task)
    assert data.num_clients == 3 and data.client_names == ["a", "b", "c"]
    assert [numbers(data, client) for client in range(3)] == [rows_of(name) for name in "abc"]
    assert list(data.train_dataloader()) == [[0, 1, 2]]


def test_the_order_of_the_samples_does_not_matter():
    order = torch.randperm(60, generator=torch.Generator().manual_seed(0))
    for count in (None, 2):
        one, other = ready(num_clients=count), ready(num_clients=count, order=order)
        assert one.client_names == other.client_names
        assert all(numbers(one, k) == numbers(other, k) for k in range(one.num_clients))


def test_a_number_of_clients_is_a_draw_by_the_seed():
    owners = np.arange(60) // 3
    drawn = [ready(client=owners, num_clients=4, seed=seed).client_names for seed in range(8)]
    assert drawn[0] == ready(client=owners, num_clients=4, seed=0).client_names
    assert all(len(names) == 4 == len(set(names)) for names in drawn)
    # neither the first nor the last ones
    assert len(set(map(tuple, drawn))) > 4 and len({name for names in drawn for name in names}) > 10
    assert drawn[0] == sorted(drawn[0], key=int)


def test_small_clients_are_left_out():
    assert ready(partitioner=Natural(min_samples=13)).client_names == ["a", "c"]


KINDS = {
    "tensor": torch.arange(60) % 4,
    "integers": list(range(10, 14)) * 15,
    "texts": [*"wxyz"] * 15,
    "pairs": [("a", k) for k in range(4)] * 15,
    "array": np.array([1.5, 2.5, 3.5] * 20),
}


@pytest.mark.parametrize("kind", KINDS)
def test_owners_are_of_any_kind_that_sorts(kind):
    assert ready(client=KINDS[kind]).num_clients == (3 if kind == "array" else 4)


def test_the_record_names_clients(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = Owned()
    client = FedAvg(MLP, data.input_shape, task=data.task)
    ended = fit(client, data, tmp_path, max_rounds=1, logger=True)
    rows = list(csv.DictReader(Path(ended.folder, "clients.csv").open()))
    assert [(row["client"], row["name"]) for row in rows] == [("0", "a"), ("1", "b"), ("2", "c")]


def test_a_subset_and_central_samples_come_first():
    data = ready(max_samples=40, central_test=0.25, server_fraction=0.4)
    central, server = ({int(x) for x in part.x} for part in (data.central_data(), data.server_data()))
    held = set().union(*(numbers(data, client) for client in range(3)))
    assert (len(central), len(server), len(held)) == (6, 4, 30)
    assert not (central & server or central & held or server & held)
    assert numbers(data, 0) < rows_of("a")


class Halves(Owned):
    """Two groups, by the half of the quantity, of very different size."""

    def strata(self, y):
        return (y > 0.8).long()


def test_strata_of_a_quantity_are_kept():
    data = Halves(partitioner=Dirichlet(alpha=100), num_clients=2, max_samples=30, central_test=0.2)
    data.setup()
    assert sum(len(numbers(data, client)) for client in range(2)) == 24
    assert sum(int(x) > 48 for x in data.central_data().x) == 1
    lent = sample_proxy(data, 0.5, torch.Generator().manual_seed(0))
    trained = sum(data.size(client, "train") for client in range(2))
    upper = sum(int(data.strata_of(client, "train").sum()) for client in range(2))
    assert int((lent.x > 48).sum()) == min(upper, round(0.5 * trained / 2))


def test_clients_lend_samples_without_classes():
    data = ready()
    lent = sample_proxy(data, 0.5, torch.Generator().manual_seed(0))
    trained = [numbers(data, client, "train") for client in range(3)]
    assert len(lent) == round(0.5 * sum(map(len, trained))) and {int(x) for x in lent.x} < set().union(*trained)
    assert torch.equal(lent.y, lent.x.flatten() / 60)


def test_public_samples_without_classes():
    data = ready(public=Owned(), public_samples=7)
    assert len(data.server_data()) == 7 == len({int(x) for x in data.server_data().x})


MISSING = [None, float("nan"), np.datetime64("NaT"), ""]


@pytest.mark.parametrize("missing", MISSING, ids=repr)
def test_a_sample_of_nobody_is_refused(missing):
    owners = [*OWNERS[:7], missing, missing, *OWNERS[9:]]
    said = "the client of 2 of 60 samples is missing, first in row 7; fill it in"
    with pytest.raises(MisconfigurationException, match=said):
        ready(client=owners)


def test_a_nan_among_numbers_is_refused():
    owners = np.arange(60.0)
    owners[5] = np.nan
    with pytest.raises(MisconfigurationException, match="the client of 1 of 60 samples is missing, first in row 5"):
        ready(client=owners)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"client": None}, "Natural: Owned .*; return Loaded"),
        ({"client": OWNERS[:59]}, r"60 samples and a client column of shape \[59\]"),
        ({"client": OWNERS.reshape(60, 1)}, r"60 samples and a client column of shape \[60, 1\]"),
        ({"time": range(61)}, r"60 samples and a time column of shape \[61\]"),
        ({"num_clients": 4}, "data.num_clients=4 is more than the 3 clients that have at least 1 samples; .* null"),
        ({"partitioner": Natural(25)}, "min_samples=25 leaves none of 3 clients, whose largest has 24 samples"),
        ({"client": [*OWNERS[:-1], "lonely"]}, "Natural left client 3 with 1 of 60 samples.* min_samples=3"),
        ({"partitioner": IID()}, "num_clients=null takes all clients .* IID doesn't know; give a number, or take Nat"),
        ({"num_clients": 0}, "num_clients=0 must be at least 1"),
        ({"partitioner": Dirichlet(), "num_clients": 2}, "Dirichlet tells samples apart by their class"),
    ],
    ids=lambda value: value if isinstance(value, str) else "with",
)
def test_what_cannot_be_is_refused_in_a_sentence(settings, says):
    with pytest.raises(MisconfigurationException, match=says):
        ready(**settings)


@pytest.mark.parametrize("number", [0, 1.5, True])
def test_min_samples_is_a_number(number):
    with pytest.raises(MisconfigurationException, match="Natural min_samples="):
        Natural(min_samples=number)


def test_load_returns_samples():
    class Nothing(Owned):
        def load(self):
            return torch.zeros(3)

    with pytest.raises(MisconfigurationException, match=r"load\(\) returned a Tensor; return inputs and targets"):
        Nothing().setup()
