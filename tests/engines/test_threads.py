"""Threads of operations on the CPU: one for small nets, unless somebody says otherwise."""

import pytest
import torch
from torch import nn

from federations import fit, make_client
from pfl_lightning.engines import threads
from pfl_lightning.engines.threads import cores, divide_cores, is_for_one_thread, one_thread
from pfl_lightning.methods import FedAvg


@pytest.fixture(autouse=True)
def three_threads(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


class Counting(FedAvg):
    seen: set[int] = set()

    def training_step(self, batch, batch_idx):
        self.seen.add(torch.get_num_threads())
        return super().training_step(batch, batch_idx)

    def forward(self, x):
        self.seen.add(torch.get_num_threads())
        return super().forward(x)


@pytest.fixture
def seen(monkeypatch):
    monkeypatch.setattr(Counting, "seen", set())
    return lambda **settings: fit(make_client(Counting), max_rounds=1, **settings) and Counting.seen


@pytest.fixture
def seen_vectorised(seen):
    return lambda: seen(engine="vectorised")


def test_a_small_net_trains_and_is_evaluated_in_one(seen):
    assert seen() == {1}
    assert torch.get_num_threads() == 3


def test_a_large_one_has_all(seen, monkeypatch):
    monkeypatch.setattr(threads, "SMALL", 10)
    assert seen() == {3}


def test_a_block_of_small_nets_trains_and_is_evaluated_in_one(seen_vectorised):
    assert seen_vectorised() == {1}
    assert torch.get_num_threads() == 3


def test_a_block_counts_the_weights_of_all_its_clients(seen_vectorised, monkeypatch):
    client = make_client(Counting)
    monkeypatch.setattr(threads, "SMALL", sum(parameter.numel() for parameter in client.parameters()) + 1)
    # the model that all share is evaluated once, in one thread
    assert 3 in seen_vectorised()


def test_so_has_everyone_where_their_number_is_given(seen, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert seen() == {3}


def test_a_net_elsewhere_does_not_matter():
    assert is_for_one_thread(nn.Linear(2, 2))
    assert not is_for_one_thread(nn.Linear(2, 2, device="meta"))


def test_the_number_comes_back_after_an_error():
    with pytest.raises(KeyError), one_thread():
        raise KeyError
    assert torch.get_num_threads() == 3


def test_processes_share_the_cores_and_their_small_nets_train_in_one_thread():
    divide_cores(1)
    assert torch.get_num_threads() == cores()
    divide_cores(10_000)
    assert torch.get_num_threads() == 1
    assert is_for_one_thread(nn.Linear(2, 2))


def test_a_given_number_of_threads_is_not_divided(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    divide_cores(10_000)
    assert torch.get_num_threads() == 3
