"""Keys of rows, digests of splits, and rows that are held twice."""

import time
import warnings

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from federations import points
from pfl_lightning.data import IID, ClientDatasets, Natural, TableData, TensorData
from pfl_lightning.data.identity import keys_of_texts, keys_of_tree, may_coincide
from pfl_lightning.tasks import Classification

SPLITS = ("train", "val", "test")
TASK = Classification(2)


def told(data):
    """Return the warnings of rows that are held twice."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        data.setup()
    return [str(each.message) for each in caught if " rows of client" in str(each.message)]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.float16, torch.bfloat16, torch.int64, torch.float64])
def test_equal_rows_have_equal_keys_and_others_have_others(dtype):
    rows = torch.randint(0, 2, (200, 3, 11)).to(dtype)
    rows[7], rows[9] = rows[150], rows[150]
    keys = keys_of_tree((rows, torch.zeros(200)))
    different = torch.unique(rows, dim=0)
    assert len(np.unique(keys)) == len(different) and keys[7] == keys[9] == keys[150]
    assert (keys_of_tree((rows.clone().roll(1, 0), torch.zeros(200))) == np.roll(keys, 1)).all()


def test_signs_and_places_of_values_count():
    rows = torch.tensor([[1.0, 2.0], [-1.0, 2.0], [1.0, -2.0], [-1.0, -2.0], [2.0, 1.0]])
    assert len(np.unique(keys_of_tree(rows))) == len(rows)
    assert keys_of_tree((rows, rows.flip(1))).tolist() != keys_of_tree((rows.flip(1), rows)).tolist()
    assert len(keys_of_texts(["a", "b", "a"]).unique()) == 2


def test_keys_of_many_rows_cost_little():
    x, y = torch.randint(0, 256, (60_000, 784), dtype=torch.uint8), torch.randint(0, 10, (60_000,))
    data = TensorData(x, y, Classification(10), partitioner=IID(), num_clients=10_000, val_fraction=0.2)
    data.setup()
    start = time.process_time()
    keys_of_tree((x, y))
    data.split_digests()
    assert time.process_time() - start < 1


def ready(order=None, **settings):
    x, y = points(60, seed=0)
    client = np.array(["Bremen", "Ulm", "Jena"]).repeat(20)
    split = np.array(["train", "train", "val", "test"])[np.arange(60) % 4]
    order = np.arange(60) if order is None else order
    data = TensorData(x[order], y[order], Classification(4), client=client[order], split=split[order], **settings)
    data.setup()
    return data


def test_digests_tell_contents_and_order():
    one, same, moved = ready(), ready(), ready(np.arange(60)[::-1].copy())
    assert torch.equal(one.split_digests(), same.split_digests())
    assert torch.equal(one.split_digests()[..., 0], moved.split_digests()[..., 0])
    assert not (one.split_digests()[..., 1:] == moved.split_digests()[..., 1:]).any()
    other = ready(client_split="random", seed=2).split_digests()[..., 0]
    assert not (other == ready(client_split="random").split_digests()[..., 0]).any()


def test_a_client_keeps_its_digests_beside_other_clients():
    whole, some = ready(), ready(np.r_[40:60, 0:20])
    places = [whole.client_id(name) for name in some.client_names]
    assert torch.equal(whole.split_digests()[places], some.split_digests())


def test_raw_columns_tell_rows_apart_and_not_what_is_fitted():
    pandas = pytest.importorskip("pandas", reason="needs the extra tables")
    table = pandas.DataFrame(
        {
            "age": np.arange(40) / 7,
            "day": range(40),
            "sex": ["f", "m"] * 20,
            "site": ["Ulm", "Jena"] * 20,
            "flu": np.arange(40) // 2 % 2,
        }
    )
    found = []
    for changed in (table, table.assign(age=table["age"] + 1), table[table["site"] == "Ulm"]):
        data = TableData(changed, "flu", TASK, client="site", client_split="time", time="day", preprocessing="auto")
        data.setup()
        found.append(data.split_digests()[data.client_id("Ulm"), :, 0])
    assert torch.equal(found[0], found[2]) and not (found[0] == found[1]).any()


def normal(count):
    return TensorDataset(torch.randn(count, 3), torch.arange(count) % 2)


@pytest.mark.parametrize("resident", [True, False])
def test_a_data_set_as_its_own_test_set_is_told_with_numbers(resident):
    whole = normal(40)
    # val is drawn from train, and so of no use to compare with here
    data = ClientDatasets({"Ulm": (whole, whole), "Jena": normal(9)}, TASK, resident=resident, val_fraction=0.0)
    (line,) = told(data)
    assert "40 of 40 test rows of client 1 (Ulm)" in line


@pytest.mark.parametrize("resident", [True, False])
def test_overlapping_subsets_are_told_with_numbers(resident):
    whole = normal(40)
    parts = {"Ulm": Subset(whole, range(25)), "Jena": ConcatDataset([Subset(whole, range(20, 40)), normal(5)])}
    (line,) = told(ClientDatasets(parts, TASK, resident=resident))
    assert "10 of 50 rows" in line and "(Jena)" in line and "(Ulm)" in line


def test_overlapping_subsets_of_one_client_are_told(recwarn):
    whole = normal(40)
    pair = Subset(whole, range(30)), Subset(whole, range(25, 40))
    data = ClientDatasets({"Jena": (normal(9), normal(3)), "Ulm": pair}, TASK, val_fraction=0.0)
    (line,) = told(data)
    assert "5 of 15 test rows of client 1 (Ulm)" in line


def patients(group=None, **settings):
    """Coin flips by patient, and three equal rows of each."""
    drawn = np.random.default_rng(0)
    x = drawn.normal(size=(40, 2)).repeat(3, 0)
    y, patient = drawn.integers(0, 2, 40).repeat(3), np.arange(40).repeat(3)
    client = np.array(["Ulm", "Jena"]).repeat(60)
    return TensorData(x, y, TASK, client=client, group=patient if group is None else group, **settings)


def test_equal_rows_are_told_unless_a_group_keeps_them_together():
    data = patients()
    data._columns = (*data._columns[:3], None)
    (line,) = told(data)
    assert "of 15 test rows of client" in line and "of 1 more" in line
    assert told(patients()) == []


@pytest.mark.parametrize("val_fold", [None, 1])
def test_a_group_is_on_one_side_and_splits_have_their_sizes(val_fold):
    data = patients(val_fraction=0.2, val_fold=val_fold)
    data.setup()
    for held in data.division.clients:
        sides = [set((held[split] // 3).tolist()) for split in SPLITS]
        assert not (sides[0] & sides[1] or sides[0] & sides[2] or sides[1] & sides[2])
        assert sorted(torch.cat(list(held.values())).tolist()) in (list(range(60)), list(range(60, 120)))
        assert len(held["test"]) == 15 and 9 <= len(held["val"]) <= 12 and len(held["train"]) >= 33


def test_a_large_group_does_not_swallow_a_split():
    data = patients(group=np.r_[np.zeros(50), 1:11, np.zeros(50), 1:11])
    with pytest.warns(UserWarning, match="11 of 11 values of data.group have rows at several clients"):
        data.setup()
    assert all(len(held["train"]) >= 50 for held in data.division.clients)


def test_given_splits_keep_groups_or_are_refused():
    split = np.where(np.arange(120) % 60 < 42, "train", "test")
    data = patients(split=split, val_fraction=0.2)
    data.setup()
    for held in data.division.clients:
        assert len(held["val"]) and not set((held["val"] // 3).tolist()) & set((held["train"] // 3).tolist())
    split[1] = "test"
    with pytest.raises(MisconfigurationException, match="1 groups of client 1 have both train and test"):
        patients(split=split).setup()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"client_split": "stratified"}, "client_split=stratified"),
        ({"partitioner": IID(), "num_clients": 2}, "partitioner=IID"),
        ({"central_test": 0.2}, r"central_test=0\.2"),
        ({"group": np.arange(120) // 60}, "client 0 has samples of 1 groups, too few for train, test and val"),
    ],
)
def test_what_would_part_a_group_is_refused(settings, words):
    with pytest.raises(MisconfigurationException, match=rf"data\.group.*{words}"):
        patients(**{"partitioner": Natural(), **settings}).setup()


def test_the_column_of_a_table_names_the_group():
    pandas = pytest.importorskip("pandas", reason="needs the extra tables")
    table = pandas.DataFrame({"age": np.arange(48) / 7, "flu": np.arange(48) % 2, "site": "Ulm"})
    data = TableData(table.assign(who=np.arange(48) // 4), "flu", TASK, client="site", group="who")
    data.setup()
    held = data.division.clients[0]
    assert data.input_shape == (1,) and not set((held["test"] // 4).tolist()) & set((held["train"] // 4).tolist())


def test_rows_that_are_equal_by_chance_are_not_told():
    answers = torch.randint(0, 2, (300, 5)).float()
    assert told(TensorData(answers, torch.randint(0, 2, (300,)), TASK, client=np.arange(300) % 3)) == []
    assert may_coincide((answers, answers), 300) and not may_coincide(torch.randn(300, 1), 300)
    assert may_coincide(torch.randint(20, 90, (300, 1)) / 2, 300)


def test_a_sample_that_two_clients_are_tested_on_is_one_row():
    data = ready(client_split="random")
    data = TensorData(*points(60, seed=0), Classification(4), partitioner=IID(), num_clients=3, drift={2: IID()})
    assert told(data) == []
