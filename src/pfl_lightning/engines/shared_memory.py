"""Send records from a forked process to the parent, with tensors in shared memory."""

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
"""Bytes that a shelf keeps between workers; the new pages of a larger record cost little beside the work."""


class Shelf:
    """A file in memory, for tensors from a worker to the parent.

    The file is accessed by read and write calls and never mapped, because touching a page for the first time after a
    fork costs more than copying the page. Fetched tensors make room for the next ones.
    """

    def __init__(self) -> None:
        # Systems without memfd use a temporary file.
        create = getattr(os, "memfd_create", None)
        self._file = os.fdopen(create("shelf"), "w+b") if create else tempfile.TemporaryFile()
        # The number of fetched records, shared by both processes because it was mapped before the fork.
        self._fetched = mmap.mmap(-1, struct.calcsize("Q"))
        self._packed = 0
        self._end = 0

    def clear(self) -> None:
        """Prepare the shelf for another worker, after the last one has ended."""
        struct.pack_into("Q", self._fetched, 0, 0)
        if os.fstat(self._file.fileno()).st_size > KEPT:
            os.ftruncate(self._file.fileno(), KEPT)

    def pack(self, record: Any) -> bytes:
        """Pickle a record, with tensors stored on the shelf until `unpack`; called by the worker."""
        # The parent has fetched everything, so the space can be reused.
        if struct.unpack_from("Q", self._fetched) == (self._packed,):
            self._end = 0
        self._packed += 1
        Packer(rest := io.BytesIO(), self).dump(record)
        return rest.getvalue()

    def unpack(self, rest: bytes) -> Any:
        """Return the record, with tensors copied with the same strides; called by the worker's parent."""
        record = Unpacker(io.BytesIO(rest), self).load()
        (fetched,) = struct.unpack_from("Q", self._fetched)
        struct.pack_into("Q", self._fetched, 0, fetched + 1)
        return record

    def put(self, tensor: Tensor) -> int:
        """Append a tensor to the shelf, and return the position."""
        start = self._end
        left = bytes_of(tensor).numpy().data
        while left:
            # A call writes at most 2 GiB.
            done = os.pwritev(self._file.fileno(), [left], self._end)
            self._end, left = self._end + done, left[done:]
        return start

    def fetch(self, tensor: Tensor, start: int) -> None:
        """Fill a tensor with the bytes from a position."""
        left = bytes_of(tensor).numpy().data
        while left:
            done = os.preadv(self._file.fileno(), [left], start)
            start, left = start + done, left[done:]


class Packer(pickle.Pickler):
    """Pickle a record, with each tensor replaced by a place on a shelf.

    Args:
        file: the file to write to.
        shelf: the shelf for tensors.
    """

    def __init__(self, file: io.BytesIO, shelf: Shelf) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.shelf = shelf

    def persistent_id(self, value: Any) -> Any:
        """Put a tensor on the shelf and return the place; None for other objects, which are pickled as usual."""
        return (self.shelf.put(value), value.dtype, tuple(value.shape), value.stride()) if is_plain(value) else None


class Unpacker(pickle.Unpickler):
    """Read a record written by `Packer`.

    Args:
        file: the file to read from.
        shelf: the packer's shelf.
    """

    def __init__(self, file: io.BytesIO, shelf: Shelf) -> None:
        super().__init__(file)
        self.shelf = shelf

    def persistent_load(self, place: Any) -> Tensor:
        """Return the tensor at a place."""
        start, dtype, shape, stride = place
        self.shelf.fetch(tensor := torch.empty_strided(shape, stride, dtype=dtype), start)
        return tensor


def is_plain(value: Any) -> bool:
    """Return True for a tensor on the CPU fully described by bytes, shape and strides."""
    return (
        type(value) is Tensor
        and value.layout is torch.strided
        and value.device.type == "cpu"
        and not (value.requires_grad or value.is_quantized or value.is_complex())
        # The tensor must fill its whole storage; views of other tensors would send too much.
        and 0 < value.nbytes == value.untyped_storage().nbytes()
    )


def bytes_of(tensor: Tensor) -> Tensor:
    """Return a tensor's storage as bytes."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
