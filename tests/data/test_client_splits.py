"""Splits of a client's samples by its label mix, by time, and as given."""

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from test_natural import OWNERS, SPLITS, Owned, numbers, ready, rows_of

from pfl_lightning.data.splits import (
    fold_of,
    generators,
    given_split,
    split_client,
    split_clients,
    stratified_split,
    time_split,
)
from pfl_lightning.tasks import Classification

ROWS = torch.arange(40) * 2


def sizes(parts):
    return [len(parts[split]) for split in SPLITS]


def test_stratified_splits_have_the_client_s_mix():
    strata = (torch.arange(80) % 20 >= 10).long() + (torch.arange(80) % 20 >= 16)
    parts = stratified_split(ROWS, 3, strata, test_fraction=0.25, val_fraction=1 / 3, seed=1)
    mixes = [torch.bincount(strata[parts[split]], minlength=3).tolist() for split in SPLITS]
    assert mixes == [[10, 6, 4], [5, 3, 2], [5, 3, 2]]
    assert torch.cat(list(parts.values())).sort().values.equal(ROWS)
    assert sizes(parts) == sizes(split_client(ROWS, 3, 0.25, 1 / 3, 1))
    other = stratified_split(ROWS, 3, strata, test_fraction=0.25, val_fraction=1 / 3, seed=2)
    assert set(other["test"].tolist()) != set(parts["test"].tolist())


def test_time_goes_forward():
    times = torch.arange(80).flip(0)
    parts = time_split(ROWS, times, test_fraction=0.25, val_fraction=0.1)
    assert times[parts["train"]].max() < times[parts["val"]].min()
    assert times[parts["val"]].max() < times[parts["test"]].min()
    assert sizes(parts) == sizes(split_client(ROWS, 0, 0.25, 0.1, 1))


def test_ties_in_time_are_in_the_order_of_the_pool():
    parts = time_split(ROWS.flip(0), torch.zeros(80, dtype=torch.int64), test_fraction=0.25, val_fraction=0.1)
    assert torch.cat([parts[split] for split in SPLITS]).equal(ROWS)


@pytest.mark.parametrize(
    "times",
    [
        np.datetime64("2024-01-01") + np.arange(60),
        [f"2024-01-{day:03}" for day in range(60)],
        torch.arange(60.0),
        list(range(60)),
    ],
    ids=lambda times: type(times[0]).__name__,
)
def test_times_are_of_any_kind_that_sorts(times):
    data = ready(time=times, client_split="time")
    for client in range(3):
        train, val, test = (numbers(data, client, split) for split in SPLITS)
        assert max(train) < min(val) <= max(val) < min(test)


def test_given_splits_are_taken():
    named = np.array(["train", "train", "val", "test"] * 15)
    data = ready(split=named)
    for client, name in enumerate("abc"):
        for split in SPLITS:
            assert numbers(data, client, split) == rows_of(name) & set(np.flatnonzero(named == split).tolist())
    assert len(data.val_dataloader()) == len(data.test_dataloader()) == 1


def test_val_is_drawn_from_train_where_it_is_not_given():
    named = np.array(["train", "train", "test"] * 20)
    parts = given_split(torch.arange(60), 0, named, val_fraction=0.25, seed=1)
    assert sizes(parts) == [30, 10, 20] and (named[parts["val"]] == "train").all()
    data = ready(split=named, val_fraction=0.0)
    assert len(data.val_dataloader()) == 0 and data.size(0, "val") == 0


def test_without_test_samples_nobody_is_tested():
    data = ready(split=["train"] * 60)
    assert len(data.test_dataloader()) == 0 and len(data.val_dataloader()) == 1


def test_the_subset_keeps_columns_at_their_samples():
    named = np.where(np.arange(60) < 40, "train", "test")
    data = ready(split=named, max_samples=45, val_fraction=0.0)
    for client in range(3):
        assert max(numbers(data, client, "train")) < 40 <= min(numbers(data, client, "test"))


def test_classes_are_kept_in_a_data_module():
    data = ready(task=Classification(3), client_split="stratified")
    for client in range(3):
        whole = sum(data.class_counts(split)[client] for split in SPLITS) / 24
        assert ((data.class_counts("test")[client] / data.size(client, "test")) - whole).abs().max() < 0.5


A = np.flatnonzero(OWNERS == "a")


def named(default="train", **places):
    splits = np.full(60, default, dtype="<U9")
    for split, rows in places.items():
        splits[rows] = split
    return splits


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"client_split": "time"}, "data.client_split=time: load.. gives no times"),
        ({"client_split": "given"}, "data.client_split=given: load.. gives no splits"),
        ({"client_split": "stratified"}, "data.client_split=stratified: samples have no class"),
        ({"client_split": "Time"}, "data.client_split='Time' must be one of random, stratified, time, given"),
        ({"split": named(Train=[4, 9])}, "the split of 2 of 60 samples is none of train, val, test, .* row 4, 'Train'"),
        ({"split": [None] * 60}, "the split of 60 of 60 samples is missing, first in row 0"),
        ({"split": named(test=A)}, r"leaves 1 of 3 clients without train samples, first client 0 \(a\)"),
        ({"split": named(test=range(60))}, "leaves 3 of 3 clients without train samples"),
        ({"split": named(), "client_test": "original"}, "has no test half of its own"),
        ({"time": [float("nan")] * 60, "client_split": "time"}, "the time of 60 of 60 samples is missing"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_in_a_sentence(settings, says):
    with pytest.raises(MisconfigurationException, match=says):
        ready(**settings)


@pytest.mark.parametrize(("split", "rows"), [("test", A[:3]), ("val", A[1:])])
def test_clients_may_lack_test_or_validation_samples_which_a_line_tells(split, rows):
    with pytest.warns(UserWarning, match=f"2 of 3 clients without {split} samples, first client 1 .b."):
        data = ready(split=named(**{split: rows}), val_fraction=0.0)
    assert [data.size(client, split) > 0 for client in range(3)] == [True, False, False]


def test_the_data_say_what_clients_are_tested_on_but_once():
    class Both(Owned):
        original_test = torch.arange(50, 60)

    data = Both(split=named(test=range(40, 60)), client_test="original")
    with pytest.raises(MisconfigurationException, match=r"data.client_test=original: data.client_split=given"):
        data.setup()


def test_what_is_not_looked_at_may_be_missing():
    assert ready(time=[None] * 60, split=[None] * 60, client_split="random").num_clients == 3


@pytest.mark.parametrize("seed", [0, 5, 2**32, 2**70 + 3, 2**160 + 1])
def test_generators_made_together_draw_the_bits_of_numpy_s_own(seed):
    for client, generator in enumerate(generators(seed, 1, 20), 1):
        own = np.random.default_rng((seed, client))
        assert generator.permutation(13).tolist() == own.permutation(13).tolist()
        assert generator.integers(2**50) == own.integers(2**50)


def test_clients_split_together_are_those_split_one_by_one():
    shares = torch.split(torch.randperm(60, generator=torch.Generator().manual_seed(0)), [3, 20, 30, 7])
    for client, parts in enumerate(split_clients(shares, 0.25, 0.1, seed=4)):
        alone = split_client(shares[client], client, 0.25, 0.1, seed=4)
        assert all(parts[split].equal(alone[split]) for split in ("train", "val", "test"))


NAMED = np.array(["train", "train", "train", "test"] * 15)


@pytest.mark.parametrize(
    "settings",
    [{}, {"client_split": "stratified", "task": Classification(3)}, {"split": NAMED}, {"split": NAMED, "seed": 7}],
    ids=str,
)
def test_each_row_outside_test_validates_in_one_fold(settings):
    folds = [ready(val_fraction=0.2, val_fold=fold, **settings) for fold in range(5)]
    plain = ready(val_fraction=0.2, **settings)
    for client in range(3):
        held = [[numbers(data, client, split) for split in SPLITS] for data in folds]
        rest, test = numbers(plain, client, "train", "val"), numbers(plain, client, "test")
        assert all(train == rest - val and val and own == test for train, val, own in held)
        assert sorted(row for _, val, _ in held for row in val) == sorted(rest)
        assert max(len(val) for _, val, _ in held) - min(len(val) for _, val, _ in held) <= 1


def test_folds_keep_a_client_s_label_mix():
    for fold in range(4):
        data = ready(val_fraction=0.25, val_fold=fold, client_split="stratified", task=Classification(3))
        counts = data.class_counts("val")
        whole = counts + data.class_counts("train")
        assert (counts - whole / 4).abs().max() < 1.5


def test_clients_of_less_rows_than_folds_validate_in_some_folds():
    given = np.array(["train"] * 60)
    given[A[2:]] = given[np.flatnonzero(OWNERS == "b")[1:]] = "test"
    folds = [ready(split=given, val_fraction=0.2, val_fold=fold) for fold in range(5)]
    sizes = [[data.size(client, "val") for client in range(3)] for data in folds]
    # two rows at a, and one at b, which always trains
    assert sorted(a for a, _, _ in sizes) == [0, 0, 0, 1, 1] and {b for _, b, _ in sizes} == {0}
    assert all(data.size(1, "train") == 1 for data in folds)


def test_the_small_clients_of_a_fold_differ():
    parts = [
        {"train": torch.tensor([client, client + 10]), "val": torch.empty(0, dtype=torch.int64)} for client in range(5)
    ]
    sizes = [[len(each["val"]) for each in fold_of(parts, fold, 5)] for fold in range(5)]
    assert [sum(each) for each in sizes] == [2] * 5
    with pytest.raises(MisconfigurationException, match=r"data.val_fold=3: none of the 1 clients has a sample"):
        fold_of(parts[:1], 3, 5)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"val_fold": 5}, "data.val_fold=5 must be at least 0 and below the number of folds"),
        ({"val_fold": -1}, "data.val_fold=-1 must be at least 0"),
        ({"val_fold": 0, "val_fraction": 0.0}, "data.val_fold=0 needs folds"),
        ({"val_fold": 0, "val_fraction": 0.7}, "data.val_fold=0 needs two folds"),
        ({"val_fold": True}, "data.val_fold=True must be an integer"),
        ({"val_fold": 0, "time": range(60), "client_split": "time"}, "data.val_fold=0: data.client_split=time"),
        ({"val_fold": 0, "split": ["train", "val", "test"] * 20}, "data.val_fold=0: load.. names the val samples"),
    ],
    ids=str,
)
def test_folds_that_cannot_be_are_refused(settings, says):
    with pytest.raises(MisconfigurationException, match=says):
        ready(**{"val_fraction": 0.2, **settings})
