"""Records on Flower's wire: their tensors as bytes, their nesting as JSON; nothing is pickled, and NumPy reads nothing.

`pack` makes a message's content of all its records at once, so that equal tensors travel once; `unpack` gives one of
them, after everything that it claims has been compared with its bytes and with its template.
"""

import json
import math
from collections.abc import Iterator, Mapping
from reprlib import repr as shown
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pfl_lightning.flower.template import Refused, Spec, check, check_finite

if TYPE_CHECKING:
    from flwr.app import RecordDict

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
"""Types of tensors that travel, by name."""
TENSORS, RECORD, STYPE = "tensors", "record/", "pfl_lightning.bytes"
DEPTH, DIMENSIONS = 16, 16
TREE_BYTES = 1 << 20
"""Characters that a record's nesting takes at most: some 10,000 tensors."""
ANY_NAMES = 256
"""Entries of a dict whose template lets them have any names."""
LIMIT = 1 << 36
"""Bytes that a record without a template takes at most, if no other limit is given."""


def pack(records: Mapping[str, Any]) -> "RecordDict":
    """A message's content.

    Args:
        records: by name, such as ``"3/update"``: tensors in dicts (by texts or integers), lists and tuples, beside
            numbers, texts, truth values and None. Tensors of the same bits travel once, in one record or in several.

    Raises:
        TypeError: if there is something else in a record.
        ValueError: if a record has too many parts.
    """
    # an extra, which no other module of the package needs
    from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

    content = RecordDict()
    table = Table()
    for name, record in records.items():
        tree = json.dumps(encode(record, table, name), separators=(",", ":"))
        if len(tree) > TREE_BYTES:
            raise ValueError(f"{name}: names and nesting take {len(tree)} characters, {TREE_BYTES} at most can travel.")
        content[RECORD + name] = ConfigRecord({"tree": tree})
    data = table.data()
    content[TENSORS] = ArrayRecord({TENSORS: Array("uint8", (len(data),), STYPE, data)})
    return content


def names(content: "RecordDict") -> list[str]:
    """Names of the records in a message's content."""
    return [name.removeprefix(RECORD) for name in content.config_records if name.startswith(RECORD)]


def unpack(content: "RecordDict", name: str, like: Any = None, keys: int = 0, limit: int = LIMIT) -> Any:
    """One of the records of a message, with tensors of its own.

    Nothing is made before all that the record claims has been checked: its names, nesting, types and shapes, and that
    the bytes are there.

    Args:
        content: the message's.
        name: the record's name.
        like: its template, as for `template.check`; its tensors must then be finite too. None takes any record.
        keys: how many classes or clients there are, for dicts by integers.
        limit: the most bytes that its tensors may take.

    Raises:
        Refused: if there is no such record, or it isn't what it should be, whatever is wrong with it.
    """
    try:
        data = sent_bytes(content)
        if RECORD + name not in content.config_records:
            raise Refused(f"the message has no record {name}.")
        tree = content.config_records[RECORD + name]["tree"]
        room = TREE_BYTES if like is None else min(TREE_BYTES, room_for(like, keys))
        if not isinstance(tree, str) or len(tree) > room:
            raise Refused(f"{name}: names and nesting are no text of at most {room} characters.")
        record = decode(json.loads(tree), len(data))
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
        # a sender decides what fails here and how: deep brackets, say, are a RecursionError
        raise Refused(f"{name} can't be read ({type(error).__name__}: {shown(str(error))}).") from error


class Table:
    """The bytes of a message's tensors, one after another, each once."""

    def __init__(self) -> None:
        self._starts: dict[bytes, int] = {}
        self._end = 0

    def place(self, data: bytes) -> int:
        """Where some bytes begin; added if they are new."""
        if data not in self._starts:
            self._starts[data] = self._end
            self._end += len(data)
        return self._starts[data]

    def data(self) -> bytes:
        """All of them."""
        return b"".join(self._starts)


def encode(value: Any, table: Table, where: str) -> list[Any]:
    """A record as JSON has it, its tensors in a table.

    Args:
        value: the record.
        table: takes the bytes of its tensors.
        where: its name, for the message.

    Raises:
        TypeError: if there is something in it that can't travel.
    """
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        if dtype not in DTYPES or value.layout != torch.strided:
            raise TypeError(f"{where}: a tensor of {dtype} and {value.layout} can't travel.")
        # as bytes, since NumPy has no bfloat16; a view of one element may have a stride that can't be seen so
        flat = value.detach().cpu().flatten().clone(memory_format=torch.contiguous_format)
        return ["t", dtype, list(value.shape), table.place(flat.view(torch.uint8).numpy().tobytes())]
    if isinstance(value, Mapping):
        if wrong := [key for key in value if type(key) not in (str, int)]:
            raise TypeError(f"{where}: the key {wrong[0]!r} is neither a text nor an integer and can't travel.")
        return ["d", [[key, encode(part, table, f"{where}.{key}")] for key, part in value.items()]]
    if isinstance(value, list | tuple):
        parts = [encode(part, table, f"{where}.{index}") for index, part in enumerate(value)]
        return ["l" if isinstance(value, list) else "u", parts]
    if value is None or type(value) in (bool, int, float, str):
        return ["v", value]
    raise TypeError(f"{where}: a {type(value).__name__} can't travel.")


def sent_bytes(content: "RecordDict") -> bytes:
    """The bytes of a message's tensors.

    Raises:
        Refused: if they aren't there as `pack` puts them.
    """
    arrays = content.array_records.get(TENSORS)
    if arrays is None or list(arrays) != [TENSORS] or arrays[TENSORS].stype != STYPE:
        raise Refused(f"the message has no array of {STYPE} called {TENSORS}.")
    return arrays[TENSORS].data


def room_for(like: Any, keys: int) -> int:
    """The most characters that the nesting of a record may take: so many are read before it is compared.

    Args:
        like: the record's template.
        keys: how many classes or clients there are.
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
    """A record with a `Spec` in the place of each tensor.

    Args:
        node: what JSON gave.
        available: bytes that were sent.
        depth: how deep in the record it is.

    Raises:
        Refused: if it is unsound in itself.
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
            if type(key) not in (str, int) or key in record:
                raise Refused(f"the nesting has the key {shown(key)} twice, or it can't be one.")
            record[key] = decode(part, available, depth + 1)
        return record
    raise Refused(f"the nesting has a part of the kind {shown(kind)}.")


def claimed(dtype: Any, shape: Any, start: Any, available: int) -> Spec:
    """What a message says of a tensor.

    Raises:
        Refused: if it can't be, or its bytes weren't sent.
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
    """Whether a value can be a length or a place: an integer of at most 48 bits."""
    return type(value) is int and 0 <= value < 1 << 48


def num_bytes(spec: Spec) -> int:
    """Bytes that a tensor takes."""
    return math.prod(spec.shape) * spec.dtype.itemsize


def specs(record: Any) -> Iterator[Spec]:
    """What stands for tensors in a record, at any depth."""
    if isinstance(record, Spec):
        yield record
    elif isinstance(record, dict | list | tuple):
        for part in record.values() if isinstance(record, dict) else record:
            yield from specs(part)


def made(record: Any, data: bytes) -> Any:
    """The record with its tensors, each with memory of its own.

    Args:
        record: what `decode` gave.
        data: the message's bytes.

    Raises:
        Refused: if a truth value is neither 0 nor 1.
    """
    if isinstance(record, Spec):
        own = bytearray(memoryview(data)[record.start : record.start + num_bytes(record)])
        if not own:
            return torch.empty(record.shape, dtype=record.dtype)
        if record.dtype == torch.bool and max(own) > 1:
            raise Refused("a truth value is neither 0 nor 1.")
        return torch.frombuffer(own, dtype=record.dtype).reshape(record.shape)
    if isinstance(record, dict):
        return {key: made(part, data) for key, part in record.items()}
    if isinstance(record, list | tuple):
        return type(record)(made(part, data) for part in record)
    return record
