"""Records on their way from a forked process to the one that forked it: their tensors in memory that both see."""

import io
import mmap
import pickle
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 64
"""What the places of tensors are multiples of, in bytes."""


class Packer(pickle.Pickler):
    """Pickles a record, but for tensors that find a place in a room; what doesn't fit is pickled as well.

    Args:
        file: what the record is written to.
        room: memory that was there before the fork; None has place for nothing.
    """

    def __init__(self, file: io.BytesIO, room: mmap.mmap | None) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.room = room
        self.needed = 0
        """Bytes that all tensors of what was pickled would find place in."""

    def persistent_id(self, value: Any) -> Any:
        """The place of a tensor that was copied into the room, None for all else."""
        if not is_plain(value):
            return None
        start = self.needed
        self.needed += -(-value.nbytes // ALIGNMENT) * ALIGNMENT
        if self.room is None or self.needed > len(self.room):
            return None
        bytes_at(self.room, start, value.nbytes).copy_(bytes_of(value))
        return start, value.dtype, tuple(value.shape), value.stride()


class Unpacker(pickle.Unpickler):
    """Reads what a `Packer` has written; tensors are copies, of the same strides, and the room is free again.

    Args:
        record: the record.
        room: the packer's.
    """

    def __init__(self, record: bytes, room: mmap.mmap | None) -> None:
        super().__init__(io.BytesIO(record))
        self.room = room

    def persistent_load(self, place: Any) -> Tensor:
        """The tensor of a place."""
        start, dtype, shape, stride = place
        assert self.room is not None, "nothing is put into no room"
        tensor = torch.empty_strided(shape, stride, dtype=dtype)
        bytes_of(tensor).copy_(bytes_at(self.room, start, tensor.nbytes))
        return tensor


def is_plain(value: Any) -> bool:
    """Whether something is a tensor on the CPU that says all by its bytes, shape and strides."""
    return (
        type(value) is Tensor
        and value.layout is torch.strided
        and value.device.type == "cpu"
        and not (value.requires_grad or value.is_quantized or value.is_complex())
        # all of its storage, and not a part of other tensors'
        and 0 < value.nbytes == value.untyped_storage().nbytes()
    )


def bytes_of(tensor: Tensor) -> Tensor:
    """The storage of a tensor as bytes, in their order."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def bytes_at(room: mmap.mmap, start: int, count: int) -> Tensor:
    """Some bytes of a room."""
    return torch.frombuffer(room, dtype=torch.uint8, count=count, offset=start)
