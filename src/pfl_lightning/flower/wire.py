"""Write and read messages of Flower: tensors as bytes, nesting as JSON; without pickle and without NumPy's reader.

`pack` writes all records of a message at once, so that equal tensors travel once; `unpack` reads one record, after
comparing the record's nesting with the bytes and with a template.
"""

import hashlib
import json
import math
import mmap
import tempfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from reprlib import repr as shown
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pfl_lightning.flower.template import Refused, Spec, check, check_finite
from pfl_lightning.messages import Restored

if TYPE_CHECKING:
    from flwr.app import Array, RecordDict

# a fixed list and no lookup in torch, which has attributes of many kinds under names that a sender chooses
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}
"""Types of tensors in messages, by name."""
TENSORS, RECORD, STYPE = "tensors", "record/", "pfl_lightning.bytes"
# deeper nesting could exhaust the stack, and torch has a limit of dimensions too
DEPTH, DIMENSIONS = 16, 16
TREE_BYTES = 1 << 20
"""Largest number of characters of a record's nesting, for some 10,000 tensors."""
ANY_NAMES = 256
"""Largest number of entries to make room for in a dict with any names."""
SMALL = 1 << 16
"""Size in bytes below which a tensor stays in memory."""
LARGE = 1 << 24
"""Size in bytes from which a record is put into a file."""
PIECE = 1 << 24
"""Largest number of bytes in one of Flower's arrays. Flower sends an array in parts of 20 MiB, and joins the parts in
twice the array's memory, so that one array for all would take three times the message's."""
ALIGNED = 64
"""Tensors in a file begin at multiples of this, in bytes, for which processors load fastest."""
LIMIT = 1 << 36
"""Default of the largest number of bytes of a record's tensors: 64 GiB."""


def pack(records: Mapping[str, Any]) -> "RecordDict":
    """Return the content of a message with all given records.

    Args:
        records: records by name, such as ``"3/update"``: tensors in dicts (with texts or integers as keys), lists and
            tuples, beside numbers, texts, truth values and None. Tensors of the same bits travel once, in one record or
            in several.

    Raises:
        TypeError: if a record has a value of another type.
        ValueError: if a record's nesting takes too many characters.
    """
    # imported late: Flower is an extra, and reading and writing nestings works without
    from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

    content = RecordDict()
    table = Table()
    for name, record in records.items():
        tree = json.dumps(encode(record, table, name), separators=(",", ":"))
        if len(tree) > TREE_BYTES:
            raise ValueError(f"{name}: names and nesting take {len(tree)} characters, {TREE_BYTES} at most can travel.")
        content[RECORD + name] = ConfigRecord({"tree": tree})
    # the same arrays for all records, which may share the bytes of a tensor
    arrays = {piece_name(place): Array("uint8", (len(data),), STYPE, data) for place, data in enumerate(table.pieces())}
    content[TENSORS] = ArrayRecord(arrays)
    return content


def piece_name(place: int) -> str:
    """Return the name of one of a message's arrays: ``tensors``, ``tensors.1``, ``tensors.2`` and so on."""
    return f"{TENSORS}.{place}" if place else TENSORS


def names(content: "RecordDict") -> list[str]:
    """Return the names of the records in a message's content."""
    return [name.removeprefix(RECORD) for name in content.config_records if name.startswith(RECORD)]


def message_digest(content: "RecordDict") -> str:
    """Return a digest of a message's content, equal for a message that is sent twice."""
    digest = hashlib.blake2b(digest_size=16)
    for name in names(content):
        digest.update(json.dumps([name, content.config_records[RECORD + name]["tree"]]).encode())
    for array in content.array_records[TENSORS].values():
        digest.update(array.data)
    return digest.hexdigest()


def unpack(
    content: "RecordDict", name: str, like: Any = None, keys: int = 0, limit: int = LIMIT, folder: Path | None = None
) -> Any:
    """Return a record of a message, with tensors in new memory, or in a file as by `on_disk`.

    No tensor is allocated before names, nesting, types, shapes and the number of bytes have been checked.

    Args:
        content: the message's content.
        name: the record's name.
        like: the record's template, as for `template.check`; tensors must then be finite too. None accepts any record.
        keys: number of classes or clients, for dicts with integers as keys.
        limit: largest number of bytes of the record's tensors.
        folder: a folder on a disk, for tensors of a record of at least `LARGE` bytes; None keeps them in memory, and so
            does a disk without room.

    Raises:
        Refused: if the message has no such record, or the record can't be read or breaks a rule.
    """
    with readable(name):
        record, data = outline(content, name, TREE_BYTES if like is None else room_for(like, keys))
        # tensors may share bytes, so that a small message could claim any amount of memory
        if (size := sum(num_bytes(spec) for spec in specs(record))) > limit:
            raise Refused(f"{name} has {size} bytes, and may have {limit}.")
        if like is not None:
            check(record, like, keys, name)
        record = made(record, data) if folder is None or size < LARGE else made_on_disk(record, data, folder)
        if like is not None:
            check_finite(record, name)
        return record


def unpack_as_sent(content: "RecordDict", name: str, check_outline: Callable[[Any], None]) -> Any:
    """Return a record of a message in no more memory than the record's bytes in the message.

    Tensors of the same bytes share their memory, so that nobody may write into them.

    Args:
        content: the message's content.
        name: the record's name.
        check_outline: refuses the record with a `Spec` in place of each tensor, before a tensor is made.

    Raises:
        Refused: if the message has no such record, the record can't be read, or tensors overlap, as in none of `pack`.
    """
    with readable(name):
        record, data = outline(content, name, TREE_BYTES)
        check_outline(record)
        spans = sorted({(spec.start, spec.start + num_bytes(spec)) for spec in specs(record) if num_bytes(spec)})
        # with overlaps allowed, few bytes would stand for any number of tensors
        if any(start < end for (_, end), (start, _) in pairwise(spans)):
            raise Refused(f"{name} has tensors that overlap in the message's bytes.")
        parts = {start: bytearray().join(data.parts(start, end - start)) for start, end in spans}

        def shared(spec: Spec) -> Tensor:
            check_truth(spec, data)
            return tensor_in(parts[spec.start] if num_bytes(spec) else bytearray(), spec)

        return replaced(shared, record)


@contextmanager
def readable(name: str) -> Iterator[None]:
    """Turn any error of reading a record into a refusal.

    Args:
        name: the record's name.
    """
    try:
        yield
    except Refused:
        raise
    except Exception as error:
        # any kind of error, since a sender decides which: deep brackets, for one, raise RecursionError
        raise Refused(f"{name} can't be read ({type(error).__name__}: {shown(str(error))}).") from error


def outline(content: "RecordDict", name: str, room: int) -> tuple[Any, "Pieces"]:
    """Return a record with a `Spec` in place of each tensor, and the bytes of the message's tensors.

    Args:
        content: the message's content.
        name: the record's name.
        room: largest number of characters of the record's nesting, of `TREE_BYTES` at most.

    Raises:
        Refused: if the message has no such record, or the nesting has another form.
    """
    data = sent_bytes(content)
    if RECORD + name not in content.config_records:
        raise Refused(f"the message has no record {name}.")
    tree, room = content.config_records[RECORD + name]["tree"], min(TREE_BYTES, room)
    # before JSON is read: a short text may stand for a great many objects
    if not isinstance(tree, str) or len(tree) > room:
        raise Refused(f"{name}: names and nesting are no text of at most {room} characters.")
    return decode(json.loads(tree), len(data)), data


def on_disk(record: Any, folder: Path) -> Any:
    """Return a record with its large tensors in one file without a name, mapped into memory.

    The file goes with the last tensor. The system takes the memory of mapped files back where it needs it. Changing a
    mapped tensor changes no file. A tensor that is in the record twice is so in the result.

    Args:
        record: dicts, lists and tuples with tensors; those on a GPU stay there.
        folder: a folder for the file, on a disk.

    Raises:
        OSError: if the file can't be written.
    """
    kept: dict[int, Spec] = {}
    # one file for all: a process may have some thousand files open, and large nets have some hundred tensors
    with tempfile.TemporaryFile(dir=folder) as file:

        def moved(tensor: Tensor) -> Tensor | Spec:
            # a parameter, or a quantised tensor, is more than its bytes
            if type(tensor) is not Tensor or tensor.device.type != "cpu" or tensor.nbytes < SMALL:
                return tensor
            if id(tensor) not in kept:
                kept[id(tensor)] = written(file, tensor.dtype, tuple(tensor.shape), [bytes_of(tensor)])
            return kept[id(tensor)]

        return mapped(replaced(moved, record), file)


def made_on_disk(record: Any, data: "Pieces", folder: Path) -> Any:
    """Return a record with tensors, the large ones in a file as by `on_disk`, in place of each `Spec`.

    Args:
        record: a record from `decode`.
        data: the message's bytes.
        folder: a folder for the file, on a disk. Without room there, all tensors are in memory.

    Raises:
        Refused: if a truth value is neither 0 nor 1.
    """
    with suppress(OSError):
        # a run's first round may come before its first file
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:

            def moved(spec: Spec) -> Tensor | Spec:
                if num_bytes(spec) < SMALL:
                    return tensor_of(spec, data)
                check_truth(spec, data)
                return written(file, spec.dtype, spec.shape, data.parts(spec.start, num_bytes(spec)))

            return mapped(replaced(moved, record), file)
    return made(record, data)


def written(file: Any, dtype: torch.dtype, shape: tuple[int, ...], parts: Iterable[memoryview]) -> Spec:
    """Write a tensor's bytes at the end of a file, and return the tensor's type, shape and position in the file."""
    file.write(bytes(-file.tell() % ALIGNED))
    start = file.tell()
    # written and not copied into a mapping, where a full disk would end the process
    for part in parts:
        file.write(part)
    return Spec(dtype, shape, start)


def mapped(record: Any, file: Any) -> Any:
    """Return a record with tensors in a file, mapped into memory, in place of each `Spec`."""
    if not file.tell():
        return record
    file.flush()
    memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    known: dict[int, Tensor] = {}

    def tensor(leaf: Tensor | Spec) -> Tensor:
        if isinstance(leaf, Tensor):
            return leaf
        if leaf.start not in known:
            flat = torch.frombuffer(memory, dtype=leaf.dtype, count=math.prod(leaf.shape), offset=leaf.start)
            known[leaf.start] = flat.view(leaf.shape)
        return known[leaf.start]

    return replaced(tensor, record)


def replaced(function: Callable[[Any], Any], record: Any) -> Any:
    """Return a record with a function applied to each tensor and `Spec`.

    Args:
        function: maps a tensor or `Spec` to its replacement.
        record: dicts, lists and tuples, at any depth.
    """
    if isinstance(record, Tensor | Spec):
        return function(record)
    if isinstance(record, Restored):
        return Restored(replaced(function, dict(record)), record.travelled)
    if isinstance(record, Mapping):
        # the state of an aggregator may have these too
        kind = type(record) if isinstance(record, OrderedDict | Counter) else dict
        return kind({key: replaced(function, part) for key, part in record.items()})
    if isinstance(record, list | tuple):
        return type(record)(replaced(function, part) for part in record)
    return record


def bytes_of(tensor: Tensor) -> memoryview:
    """Return a tensor's bytes, without a copy if the tensor is contiguous and on the CPU."""
    flat = tensor.detach().cpu().reshape(-1)
    # a view of one element can have a stride that forbids a view of bytes
    flat = flat if flat.stride() == (1,) else flat.clone(memory_format=torch.contiguous_format)
    # viewed as bytes, since NumPy has no bfloat16
    return flat.view(torch.uint8).numpy().data


class Table:
    """Collects the bytes of a message's tensors, without a copy; equal bytes are stored once."""

    def __init__(self) -> None:
        self._starts: dict[bytes, int] = {}
        self._parts: list[memoryview] = []
        self._end = 0

    def place(self, data: memoryview) -> int:
        """Return the position of some bytes, added at the end if new."""
        # a fingerprint, where the bytes themselves as a key would be a copy of the whole message
        name = hashlib.blake2b(data, digest_size=32).digest()
        if name not in self._starts:
            self._starts[name] = self._end
            self._parts.append(data)
            self._end += len(data)
        return self._starts[name]

    def pieces(self) -> Iterator[bytes]:
        """Yield all bytes in the order of their positions, in pieces of at most `PIECE`; an empty one without bytes."""
        piece = bytearray()
        for part in self._parts:
            while part:
                room = PIECE - len(piece)
                piece += part[:room]
                part = part[room:]
                if len(piece) == PIECE:
                    yield bytes(piece)
                    piece.clear()
        if piece or not self._end:
            yield bytes(piece)


class Pieces:
    """The bytes of a message's tensors, in one or several pieces.

    Args:
        pieces: the bytes, in order.
    """

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = [memoryview(piece) for piece in pieces]

    def __len__(self) -> int:
        return sum(map(len, self._pieces))

    def parts(self, start: int, size: int) -> Iterator[memoryview]:
        """Yield some of the bytes, piece by piece.

        Args:
            start: position of the first byte.
            size: number of bytes.
        """
        for piece in self._pieces:
            if start < len(piece) and size:
                part = piece[start : start + size]
                yield part
                start, size = 0, size - len(part)
            else:
                start = max(0, start - len(piece))


def encode(value: Any, table: Table, where: str) -> list[Any]:
    """Return a record as lists for JSON, with the bytes of tensors added to a table.

    Args:
        value: the record.
        table: the table of the message.
        where: the record's name, for error texts.

    Raises:
        TypeError: if the record has a value of another type than `pack` allows.
    """
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        if dtype not in DTYPES or value.layout != torch.strided:
            raise TypeError(f"{where}: a tensor of {dtype} and {value.layout} can't travel.")
        return ["t", dtype, list(value.shape), table.place(bytes_of(value))]
    if isinstance(value, Mapping):
        if wrong := [key for key in value if type(key) not in (str, int)]:
            raise TypeError(f"{where}: the key {wrong[0]!r} is neither a text nor an integer and can't travel.")
        # pairs and no JSON object, which would turn integer keys into texts
        return ["d", [[key, encode(part, table, f"{where}.{key}")] for key, part in value.items()]]
    if isinstance(value, list | tuple):
        parts = [encode(part, table, f"{where}.{index}") for index, part in enumerate(value)]
        return ["l" if isinstance(value, list) else "u", parts]
    if value is None or type(value) in (bool, int, float, str):
        return ["v", value]
    raise TypeError(f"{where}: a {type(value).__name__} can't travel.")


def sent_bytes(content: "RecordDict") -> Pieces:
    """Return the bytes of a message's tensors.

    Raises:
        Refused: if the message has no arrays of bytes as from `pack`.
    """
    arrays: Mapping[str, Array] = content.array_records.get(TENSORS) or {}
    # by name, as the sender decides on the order
    expected = [piece_name(place) for place in range(len(arrays))]
    if not arrays or set(arrays) != set(expected) or any(array.stype != STYPE for array in arrays.values()):
        raise Refused(f"the message has no array of {STYPE} called {TENSORS}.")
    return Pieces([arrays[name].data for name in expected])


def room_for(like: Any, keys: int) -> int:
    """Return the largest number of characters of a record's nesting, for a template.

    More characters are refused unread.

    Args:
        like: the record's template.
        keys: number of classes or clients.
    """
    if isinstance(like, Mapping):
        rooms = [len(json.dumps(key)) + room_for(part, keys) for key, part in like.items() if key is not str]
        if any_name := like.get(str):
            return ANY_NAMES * (128 + room_for(any_name, keys))
        return 64 + (keys * (32 + max(rooms)) if rooms and all(type(key) is int for key in like) else sum(rooms))
    if isinstance(like, list | tuple):
        return 64 + sum(room_for(part, keys) for part in like)
    if isinstance(like, Tensor):
        return 64 + 20 * like.ndim
    return 4096 if isinstance(like, str) or like is str else 64


def decode(node: Any, available: int, depth: int = 0) -> Any:
    """Return a record with a `Spec` in place of each tensor.

    Args:
        node: lists from JSON, as from `encode`.
        available: number of bytes in the message.
        depth: depth of the node within the record, from 0.

    Raises:
        Refused: if the nesting has another form, or a tensor's bytes are missing.
    """
    if depth > DEPTH or not isinstance(node, list) or len(node) not in (2, 4):
        raise Refused(f"the nesting is no record's, or deeper than {DEPTH}.")
    kind, *parts = node
    if kind == "t" and len(node) == 4:
        return claimed(parts[0], parts[1], parts[2], available)
    if kind == "v" and (parts[0] is None or type(parts[0]) in (bool, int, float, str)):
        return parts[0]
    if kind in ("l", "u") and isinstance(parts[0], list):
        values = [decode(part, available, depth + 1) for part in parts[0]]
        return values if kind == "l" else tuple(values)
    if kind == "d" and isinstance(parts[0], list):
        record = {}
        for key, part in parts[0]:
            # the later of two equal keys would win in silence
            if type(key) not in (str, int) or key in record:
                raise Refused(f"the nesting has the key {shown(key)} twice, or it can't be one.")
            record[key] = decode(part, available, depth + 1)
        return record
    raise Refused(f"the nesting has a part of the kind {shown(kind)}.")


def claimed(dtype: Any, shape: Any, start: Any, available: int) -> Spec:
    """Return the type, shape and position of a tensor from a message's nesting.

    Raises:
        Refused: if type, shape or position are impossible, or bytes are missing.
    """
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise Refused(f"a tensor has the type {shown(dtype)}, which doesn't travel.")
    if not isinstance(shape, list) or len(shape) > DIMENSIONS or not all(map(is_size, [*shape, start])):
        raise Refused(f"a tensor has the shape {shown(shape)}, which none can have, or begins at {shown(start)}.")
    spec = Spec(DTYPES[dtype], tuple(shape), start)
    if start + num_bytes(spec) > available:
        raise Refused(f"a tensor {spec} takes {num_bytes(spec)} bytes, of which {max(0, available - start)} were sent.")
    return spec


def is_size(value: Any) -> bool:
    """Return True for a possible length or position: an integer from 0, of at most 48 bits."""
    return type(value) is int and 0 <= value < 1 << 48


def num_bytes(spec: Spec) -> int:
    """Return the number of bytes of a tensor."""
    return math.prod(spec.shape) * spec.dtype.itemsize


def specs(record: Any) -> Iterator[Spec]:
    """Yield each `Spec` in a record, at any depth."""
    if isinstance(record, Spec):
        yield record
    elif isinstance(record, dict | list | tuple):
        for part in record.values() if isinstance(record, dict) else record:
            yield from specs(part)


def made(record: Any, data: Pieces) -> Any:
    """Return a record with tensors, each in new memory, in place of each `Spec`.

    Args:
        record: a record from `decode`.
        data: the message's bytes.

    Raises:
        Refused: if a truth value is neither 0 nor 1.
    """
    return replaced(lambda spec: tensor_of(spec, data), record)


def tensor_of(spec: Spec, data: Pieces) -> Tensor:
    """Return a tensor of a message in new memory; arguments and errors as for `made`."""
    check_truth(spec, data)
    return tensor_in(bytearray().join(data.parts(spec.start, num_bytes(spec))), spec)


def tensor_in(own: bytearray, spec: Spec) -> Tensor:
    """Return a tensor that lies in some bytes."""
    # frombuffer refuses an empty buffer
    if not own:
        return torch.empty(spec.shape, dtype=spec.dtype)
    return torch.frombuffer(own, dtype=spec.dtype).reshape(spec.shape)


def check_truth(spec: Spec, data: Pieces) -> None:
    """Refuse bytes of a bool tensor other than 0 and 1, for which torch's behaviour is undefined."""
    if spec.dtype == torch.bool and any(max(part) > 1 for part in data.parts(spec.start, num_bytes(spec))):
        raise Refused("a truth value is neither 0 nor 1.")
