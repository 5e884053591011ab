"""Records on their way from a forked process to the one that forked it: their tensors in memory that both reach."""

import io
import mmap
import os
import pickle
import struct
import tempfile
from typing import Any

import torch
from torch import Tensor

KEPT = 16 * 2**20
"""Bytes that a shelf keeps from one worker to the next: of more, new pages are little beside the work."""


class Shelf:
    """A file in memory where a worker puts the tensors of its records, and the process that forked it fetches them.

    It is written and read by calls and never mapped: to touch a page for the first time since a fork costs more than
    to copy what is on it. What was fetched makes place for what comes next.
    """

    def __init__(self) -> None:
        # systems that know no such files have temporary ones
        create = getattr(os, "memfd_create", None)
        self._file = os.fdopen(create("shelf"), "w+b") if create else tempfile.TemporaryFile()
        # records that were fetched; of both processes, as it was mapped before the fork
        self._fetched = mmap.mmap(-1, struct.calcsize("Q"))
        self._packed = 0
        self._end = 0

    def clear(self) -> None:
        """Makes it ready for another worker, when the one before is gone."""
        struct.pack_into("Q", self._fetched, 0, 0)
        if os.fstat(self._file.fileno()).st_size > KEPT:
            os.ftruncate(self._file.fileno(), KEPT)

    def pack(self, record: Any) -> bytes:
        """A record, pickled but for its tensors, which are on the shelf until it is unpacked; for the worker."""
        if struct.unpack_from("Q", self._fetched) == (self._packed,):
            self._end = 0
        self._packed += 1
        Packer(rest := io.BytesIO(), self).dump(record)
        return rest.getvalue()

    def unpack(self, rest: bytes) -> Any:
        """The record, its tensors as copies with the same strides; for the process that forked the worker."""
        record = Unpacker(io.BytesIO(rest), self).load()
        (fetched,) = struct.unpack_from("Q", self._fetched)
        struct.pack_into("Q", self._fetched, 0, fetched + 1)
        return record

    def put(self, tensor: Tensor) -> int:
        """Puts a tensor behind what is there, and says where."""
        start = self._end
        left = bytes_of(tensor).numpy().data
        while left:
            # a call takes 2 GiB at most
            done = os.pwritev(self._file.fileno(), [left], self._end)
            self._end, left = self._end + done, left[done:]
        return start

    def fetch(self, tensor: Tensor, start: int) -> None:
        """Fills a tensor with what is there."""
        left = bytes_of(tensor).numpy().data
        while left:
            done = os.preadv(self._file.fileno(), [left], start)
            start, left = start + done, left[done:]


class Packer(pickle.Pickler):
    """Pickles a record, a tensor as its place on a shelf.

    Args:
        file: what the record is written to.
        shelf: where tensors go.
    """

    def __init__(self, file: io.BytesIO, shelf: Shelf) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.shelf = shelf

    def persistent_id(self, value: Any) -> Any:
        """The place of a tensor that was put on the shelf, None for all else."""
        return (self.shelf.put(value), value.dtype, tuple(value.shape), value.stride()) if is_plain(value) else None


class Unpacker(pickle.Unpickler):
    """Reads what a `Packer` has written.

    Args:
        file: what the record is read from.
        shelf: the packer's.
    """

    def __init__(self, file: io.BytesIO, shelf: Shelf) -> None:
        super().__init__(file)
        self.shelf = shelf

    def persistent_load(self, place: Any) -> Tensor:
        """The tensor of a place."""
        start, dtype, shape, stride = place
        self.shelf.fetch(tensor := torch.empty_strided(shape, stride, dtype=dtype), start)
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
