"""Write and read messages of Flower: tensors as bytes, nesting as JSON; without pickle and without NumPy's reader.

`pack` writes all records of a message at once, so that equal tensors travel once; `unpack` reads one record, after
comparing the record's nesting with the bytes and with a template.
"""

import json
import math
import mmap
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from reprlib import repr as shown
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pfl_lightning.flower.template import Refused, Spec, check, check_finite
from pfl_lightning.messages import Restored

if TYPE_CHECKING:
    from flwr.app import RecordDict

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
"""Size in bytes below which a tensor gets no file of its own."""
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
    # one array for all records, which may share the bytes of a tensor
    data = table.data()
    content[TENSORS] = ArrayRecord({TENSORS: Array("uint8", (len(data),), STYPE, data)})
    return content


def names(content: "RecordDict") -> list[str]:
    """Return the names of the records in a message's content."""
    return [name.removeprefix(RECORD) for name in content.config_records if name.startswith(RECORD)]


def unpack(content: "RecordDict", name: str, like: Any = None, keys: int = 0, limit: int = LIMIT) -> Any:
    """Return a record of a message, with tensors in new memory.

    No tensor is allocated before names, nesting, types, shapes and the number of bytes have been checked.

    Args:
        content: the message's content.
        name: the record's name.
        like: the record's template, as for `template.check`; tensors must then be finite too. None accepts any record.
        keys: number of classes or clients, for dicts with integers as keys.
        limit: largest number of bytes of the record's tensors.

    Raises:
        Refused: if the message has no such record, or the record can't be read or breaks a rule.
    """
    try:
        data = sent_bytes(content)
        if RECORD + name not in content.config_records:
            raise Refused(f"the message has no record {name}.")
        tree = content.config_records[RECORD + name]["tree"]
        # before JSON is read: a short text may stand for a great many objects
        room = TREE_BYTES if like is None else min(TREE_BYTES, room_for(like, keys))
        if not isinstance(tree, str) or len(tree) > room:
            raise Refused(f"{name}: names and nesting are no text of at most {room} characters.")
        record = decode(json.loads(tree), len(data))
        # tensors may share bytes, so that a small message could claim any amount of memory
        if (size := sum(num_bytes(spec) for spec in specs(record))) > limit:
            raise Refused(f"{name} has {size} bytes, and may have {limit}.")
        if like is not None:
            check(record, like, keys, name)
        record = made(record, data)
        if like is not None:
            check_finite(record, name)
        return record
    except Refused:
        raise
    except Exception as error:
        # any kind of error, since a sender decides which: deep brackets, for one, raise RecursionError
        raise Refused(f"{name} can't be read ({type(error).__name__}: {shown(str(error))}).") from error


def on_disk(record: Any, folder: Path) -> Any:
    """Return a record with its large tensors in files without a name, mapped into memory; a file goes with its tensor.

    The system takes the memory of mapped files back where it needs it. Changing such a tensor changes no file.

    Args:
        record: dicts, lists and tuples with tensors on the CPU.
        folder: a folder for the files, on a disk.

    Raises:
        OSError: if a file can't be written.
    """
    if isinstance(record, Restored):
        return Restored(on_disk(dict(record), folder), record.travelled)
    if isinstance(record, Mapping):
        return {name: on_disk(part, folder) for name, part in record.items()}
    if isinstance(record, list | tuple):
        return type(record)(on_disk(part, folder) for part in record)
    if not isinstance(record, Tensor) or record.nbytes < SMALL:
        return record
    with tempfile.TemporaryFile(dir=folder) as file:
        # written and not copied into the mapping, where a full disk would end the process
        file.write(record.contiguous().flatten().view(torch.uint8).numpy().data)
        file.flush()
        mapped = mmap.mmap(file.fileno(), record.nbytes, access=mmap.ACCESS_COPY)
    return torch.frombuffer(mapped, dtype=record.dtype).view(record.shape)


class Table:
    """Collects the bytes of a message's tensors; equal bytes are stored once."""

    def __init__(self) -> None:
        self._starts: dict[bytes, int] = {}
        self._end = 0

    def place(self, data: bytes) -> int:
        """Return the position of some bytes, added at the end if new."""
        if data not in self._starts:
            self._starts[data] = self._end
            self._end += len(data)
        return self._starts[data]

    def data(self) -> bytes:
        """Return all bytes in the order of their positions."""
        return b"".join(self._starts)


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
        # viewed as bytes, since NumPy has no bfloat16; cloned, as the stride of a one-element view can forbid that
        flat = value.detach().cpu().flatten().clone(memory_format=torch.contiguous_format)
        return ["t", dtype, list(value.shape), table.place(flat.view(torch.uint8).numpy().tobytes())]
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


def sent_bytes(content: "RecordDict") -> bytes:
    """Return the bytes of a message's tensors.

    Raises:
        Refused: if the message has no array of bytes as from `pack`.
    """
    arrays = content.array_records.get(TENSORS)
    if arrays is None or list(arrays) != [TENSORS] or arrays[TENSORS].stype != STYPE:
        raise Refused(f"the message has no array of {STYPE} called {TENSORS}.")
    return arrays[TENSORS].data


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
    """Return a record with a `Spec` in the place of each tensor.

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
    found = Spec(DTYPES[dtype], tuple(shape), start)
    if start + num_bytes(found) > available:
        raise Refused(
            f"a tensor {found} takes {num_bytes(found)} bytes, of which {max(0, available - start)} were sent."
        )
    return found


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


def made(record: Any, data: bytes) -> Any:
    """Return a record with tensors, each in new memory, in the place of each `Spec`.

    Args:
        record: a record from `decode`.
        data: the message's bytes.

    Raises:
        Refused: if a truth value is neither 0 nor 1.
    """
    if isinstance(record, Spec):
        own = bytearray(memoryview(data)[record.start : record.start + num_bytes(record)])
        # frombuffer refuses an empty buffer
        if not own:
            return torch.empty(record.shape, dtype=record.dtype)
        # torch's behaviour is undefined for other bytes in a bool tensor
        if record.dtype == torch.bool and max(own) > 1:
            raise Refused("a truth value is neither 0 nor 1.")
        return torch.frombuffer(own, dtype=record.dtype).reshape(record.shape)
    if isinstance(record, dict):
        return {key: made(part, data) for key, part in record.items()}
    if isinstance(record, list | tuple):
        return type(record)(made(part, data) for part in record)
    return record
