"""Transfers between devices: what arrives, in how many copies, and in whose memory."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pfl_lightning.transfers import moved, rows_of, side_by_side

CPU, META = torch.device("cpu"), torch.device("meta")


class Copies(TorchDispatchMode):
    """Counts copies from one device to another."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._to_copy.default and kwargs.get("device") not in (None, args[0].device):
            self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("shapes", [[(3,)], [(2, 3), (), (4,)], [(0,), (2,)]], ids=["one", "several", "empty"])
def test_many_tensors_of_a_type_travel_in_one_copy_each_to_its_place(shapes):
    floats = [torch.rand(shape) for shape in shapes]
    with Copies() as copies:
        arrived = moved([*floats, torch.arange(3), torch.arange(5)], META)
    assert copies.count == 2
    assert [(t.device, t.dtype, t.shape) for t in arrived] == [
        (META, t.dtype, t.shape) for t in (*floats, torch.arange(3), torch.arange(5))
    ]


def test_what_is_there_already_stays_the_same_tensor():
    here = torch.rand(3)
    with Copies() as copies:
        arrived = moved([here, here], CPU)
    assert copies.count == 0 and all(tensor is here for tensor in arrived)


def test_nothing_is_moved_without_tensors():
    assert moved([], CPU) == []


def test_values_arrive_in_the_order_in_which_they_were_given_and_own_their_memory():
    # to torch it is another device than "cpu"
    there = torch.device("cpu", 0)
    sent = [torch.rand(2, 3), torch.arange(4), torch.rand(()), torch.tensor([True]), torch.rand(3, 2).t()]
    arrived = moved(sent, there)
    assert all(torch.equal(one, other) and one.shape == other.shape for one, other in zip(arrived, sent, strict=True))
    assert len({tensor.untyped_storage().data_ptr() for tensor in arrived}) == len(sent)


def test_tensors_side_by_side_are_on_the_device_if_one_of_them_is():
    here, there = torch.rand(3), torch.rand(3).to(META)
    assert torch.equal(side_by_side([here, here + 1], META), torch.stack([here, here + 1]))
    mixed = side_by_side([here, there], META)
    assert mixed.device == META and mixed.shape == (2, 3)


def test_rows_of_stacks_are_tensors_of_their_own():
    stacks = {"w": torch.rand(3, 2), "n": torch.arange(3)}
    rows = rows_of(stacks, 3, CPU)
    assert [row["n"].item() for row in rows] == [0, 1, 2]
    assert all(torch.equal(row["w"], own) for row, own in zip(rows, stacks["w"], strict=True))
    assert {row["w"].untyped_storage().nbytes() for row in rows} == {8}
    assert rows_of({}, 2, CPU) == [{}, {}]
