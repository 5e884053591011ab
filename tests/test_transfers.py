"""Transfers between devices: what arrives, in how many copies, and in whose memory."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pfl_lightning.transfers import moved

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
