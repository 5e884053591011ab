"""Records on their way out of a forked process: the same tensors, in memory that was shared before."""

import io
import mmap

import pytest
import torch

from pfl_lightning.engines.shared_memory import ALIGNMENT, Packer, Unpacker

TENSORS = {
    "floats": torch.arange(6.0).view(2, 3),
    "bfloat16": torch.arange(4.0).bfloat16(),
    "counter": torch.tensor(7),
    "turned": torch.arange(6.0).view(3, 2).t(),
    "channels_last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "booleans": torch.tensor([True, False]),
    # of which the tensor in it finds a place
    "parameter": torch.nn.Parameter(torch.ones(2)),
}
OTHERS = {
    "part": torch.arange(6.0)[1:4],
    "repeated": torch.ones(1).expand(3),
    "empty": torch.empty(0),
    "complex": torch.ones(2, dtype=torch.complex64),
    "leaf": torch.ones(2, requires_grad=True),
}


def passed(record, size):
    """A record that went through a room of a size, how many bytes its tensors need, and the length of the rest."""
    room = mmap.mmap(-1, size) if size else None
    packer = Packer(file := io.BytesIO(), room)
    packer.dump(record)
    return Unpacker(file.getvalue(), room).load(), packer.needed, len(file.getvalue())


def same(one, other):
    return (
        one.dtype == other.dtype
        and one.stride() == other.stride()
        and type(one) is type(other)
        and one.requires_grad == other.requires_grad
        and torch.equal(one, other)
    )


@pytest.mark.parametrize("size", [0, 2 * ALIGNMENT, 4096])
@pytest.mark.parametrize("name", [*TENSORS, *OTHERS])
def test_a_tensor_arrives_as_it_was(name, size):
    tensor = (TENSORS | OTHERS)[name]
    record, needed, _ = passed({"client": 3, "weights": [tensor]}, size)
    assert record["client"] == 3
    assert same(record["weights"][0], tensor)
    assert needed == (0 if name in OTHERS else -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT)


def test_what_is_needed_is_enough_and_keeps_tensors_out_of_the_record():
    large = {str(k): torch.full((1000,), float(k)) for k in range(3)}
    _, needed, whole = passed(large, 0)
    record, again, rest = passed(large, needed)
    assert again == needed
    assert all(same(record[k], large[k]) for k in large)
    assert whole > 12_000 and rest < 500


def test_what_finds_no_place_is_in_the_record():
    large = {str(k): torch.full((1000,), float(k)) for k in range(3)}
    record, needed, rest = passed(large, 4096)
    assert all(same(record[k], large[k]) for k in large)
    assert needed > 12_000 and 8_000 < rest < 12_000


def test_a_tensor_that_arrived_is_free_of_the_room():
    room = mmap.mmap(-1, 4096)
    packer = Packer(file := io.BytesIO(), room)
    packer.dump(torch.ones(3))
    arrived = Unpacker(file.getvalue(), room).load()
    room.write(bytes(4096))
    assert torch.equal(arrived, torch.ones(3))
    room.close()
