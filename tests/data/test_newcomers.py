"""New clients, whom the data module holds out."""

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from federations import Blobs, Sizes, equal

PARTS = (24, 16, 30, 20, 15, 15)


def ready(num_clients, **settings):
    data = Blobs(num_clients=num_clients, partitioner=Sizes(*PARTS), **settings)
    data.setup()
    return data


def drawn(data, parts):
    """Which of some parts the clients of a data module hold."""
    return [next(k for k, part in enumerate(parts) if equal(part, held)) for held in data.division.clients]


@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_the_others_keep_their_order_and_new_clients_are_behind_them(seed):
    parts = ready(6, seed=seed).division.clients
    data = ready(4, seed=seed, new_clients=2)
    found = drawn(data, parts)
    assert sorted(found) == list(range(6))
    assert found[:4] == sorted(found[:4]) and found[4:] == sorted(found[4:])
    assert list(data.newcomers) == [4, 5]
    assert [data.size(4, "train"), len(data.part(5, "test"))] == [len(parts[found[4]]["train"]), 4]


def test_who_is_new_is_drawn_by_the_seed():
    def who(seed):
        return tuple(drawn(ready(4, seed=seed, new_clients=2), ready(6, seed=seed).division.clients)[4:])

    assert who(1) == who(1)
    assert len({who(seed) for seed in range(8)}) > 3
    assert any(who(seed) != (4, 5) for seed in range(3))


def test_no_loader_and_no_count_knows_them():
    data = ready(4, new_clients=2, val_fraction=0.2)
    for loader in (data.train_dataloader(), data.val_dataloader(), data.test_dataloader()):
        assert list(map(list, loader)) == [[0, 1, 2, 3]]
    assert data.counts.tolist() == [data.client(k).class_counts.tolist() for k in range(4)]


def test_none_is_what_it_was():
    data = ready(6)
    assert list(data.newcomers) == []
    assert equal(ready(6, new_clients=0).division.clients, data.division.clients)


def test_a_share_is_of_all():
    assert len(ready(3, new_clients=0.5).newcomers) == 3
    assert len(ready(5, new_clients=0.01).newcomers) == 1


def test_they_hold_what_nobody_else_holds():
    held = [torch.cat(list(parts.values())) for parts in ready(4, new_clients=2).division.clients]
    assert sorted(torch.cat(held).tolist()) == list(range(120))


@pytest.mark.parametrize("wrong", [-1, 1.0, 0.0, 2.5, True, "2"])
def test_another_value_is_refused(wrong):
    with pytest.raises(MisconfigurationException, match=r"data\.new_clients=.* must be a number of clients"):
        Blobs(new_clients=wrong)


def test_more_than_there_are_samples_for_are_refused():
    with pytest.raises(MisconfigurationException, match="Sizes"):
        ready(6, new_clients=5)
