"""Hold many alike records, such as clients' states in a checkpoint, as columns: one tensor for each entry."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from pfl_lightning.messages import Row

COLUMNS = "records in columns"
"""Key of a dict that holds records by columns."""
FEW = 16
"""Fewest alike records for which columns pay."""
SMALL = 16 * 2**10
"""Largest tensor, in bytes, that is copied into a column. Pickling a tensor takes some 50 microseconds and 300 bytes,
the copy a few microseconds."""
INTEGERS = (torch.uint8, torch.int16, torch.int32, torch.int64)
CONTAINERS: dict[type, str] = {dict: "dict", Row: "dict", list: "list", tuple: "tuple"}
NUMBERS = (int, float)
CONSTANTS = (str, bool, bytes, type(None))


class Unlike:
    """The form of a record that fits no column, equal to no other form."""


def in_columns(record: Any, known: list[Tensor] | None = None) -> Any:
    """Return a record in which alike records are columns; `in_rows` gives them back.

    Records are alike if they have the same keys, shapes and types, and differ in tensors and numbers only. Their
    columns are tensors ``[records, ...]``, or lists of tensors above `SMALL`. Equal columns are the same tensor, of
    which a file has one.

    >>> in_rows(in_columns({client: {"steps": client % 7} for client in range(20)}))[18]
    {'steps': 4}

    Args:
        record: dicts and lists of tensors and plain values.
        known: columns of other records for the same file; new ones are added.
    """
    known = [] if known is None else known
    if type(record) not in (dict, list):
        return record
    if type(record) is list and len(record) >= FEW and type(numbers := packed(record)) is Tensor:
        return {COLUMNS: numbers}
    keys: list[Any] = list(record) if type(record) is dict else list(range(len(record)))
    values = list(record.values()) if type(record) is dict else record
    groups: dict[Any, tuple[list[int], list[list[Any]]]] = {}
    for place, value in enumerate(values if len(values) >= FEW else ()):
        leaves: list[Any] = []
        # single tensors are no records: they may be the layers of a net
        kind = Unlike() if type(value) is Tensor else form(value, leaves)
        places, rows = groups.setdefault(kind if leaves else Unlike(), ([], []))
        places.append(place)
        rows.append(leaves)
    many = {kind: group for kind, group in groups.items() if len(group[0]) >= FEW}
    alike = {place for places, _ in many.values() for place in places}
    others = {place: in_columns(value, known) for place, value in enumerate(values) if place not in alike}
    if not many:
        return dict(zip(keys, others.values(), strict=True)) if type(record) is dict else list(others.values())
    return {
        COLUMNS: {
            "keys": packed(keys) if type(record) is dict else None,
            "groups": [
                {
                    "places": packed(places),
                    "form": kind,
                    "columns": [column(values, known) for values in zip(*rows, strict=True)],
                }
                for kind, (places, rows) in many.items()
            ],
            "others": others,
        }
    }


def in_rows(record: Any) -> Any:
    """Return a record as it was before `in_columns`; each tensor has memory of its own.

    Args:
        record: the record, read from a file.
    """
    kind = type(record)
    if kind is list:
        return [in_rows(value) for value in record]
    if kind is not dict:
        return record
    if record.keys() != {COLUMNS}:
        return {key: in_rows(value) for key, value in record.items()}
    held = record[COLUMNS]
    if type(held) is Tensor:
        return held.tolist()
    values: dict[int, Any] = {place: in_rows(value) for place, value in held["others"].items()}
    for group in held["groups"]:
        rows = zip(*map(entries, group["columns"]), strict=True)
        for place, row in zip(unpacked(group["places"]), rows, strict=True):
            values[place] = rebuilt(group["form"], iter(row))
    ordered = [values[place] for place in range(len(values))]
    return ordered if held["keys"] is None else dict(zip(unpacked(held["keys"]), ordered, strict=True))


def form(record: Any, leaves: list[Any]) -> Any:
    """Return what a record has in common with alike ones, and add its tensors and numbers to ``leaves``.

    Args:
        record: the record.
        leaves: the list to extend.
    """
    kind = type(record)
    if kind is Tensor:
        if record.layout is not torch.strided or record.requires_grad or record.device.type != "cpu":
            return Unlike()
        leaves.append(record)
        return "tensor", tuple(record.shape), record.dtype
    if kind in NUMBERS:
        leaves.append(record)
        return (kind.__name__,)
    if kind in CONTAINERS:
        values = record.values() if CONTAINERS[kind] == "dict" else record
        keys = tuple(record) if CONTAINERS[kind] == "dict" else None
        return CONTAINERS[kind], keys, tuple([form(value, leaves) for value in values])
    return ("constant", record) if kind in CONSTANTS else Unlike()


def rebuilt(kind: Any, leaves: Iterator[Any]) -> Any:
    """Return the record of a form.

    Args:
        kind: the record's form.
        leaves: the record's tensors and numbers, in the order of `form`.
    """
    name = kind[0]
    if name == "constant":
        return kind[1]
    if name not in CONTAINERS.values():
        return next(leaves)
    values = [rebuilt(each, leaves) for each in kind[2]]
    if name == "dict":
        return dict(zip(kind[1], values, strict=True))
    return values if name == "list" else tuple(values)


def column(values: tuple[Any, ...], known: list[Tensor]) -> Any:
    """Return an entry of all records: numbers and small tensors as one tensor, large tensors as a list.

    Args:
        values: the entry's tensors or numbers.
        known: earlier columns, one of which is returned if it is equal; a new one is added.
    """
    if type(values[0]) is not Tensor:
        return {"numbers": packed(list(values))}
    if values[0].nbytes > SMALL:
        return list(values)
    stack = torch.stack(values)
    for other in known:
        # by bytes: -0.0 is equal to 0.0, and NaN to nothing
        if (other.shape, other.dtype) == (stack.shape, stack.dtype) and torch.equal(bytes_of(other), bytes_of(stack)):
            return other
    known.append(stack)
    return stack


def bytes_of(tensor: Tensor) -> Tensor:
    """Return a tensor's memory as bytes."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def entries(held: Any) -> Any:
    """Return the entries of a column, one for each record."""
    if isinstance(held, dict):
        return unpacked(held["numbers"])
    # copies: a file written later would have the whole column for each row
    return [row.clone() for row in held]


def packed(values: list[Any]) -> Any:
    """Return numbers of one type as a tensor, integers in the smallest type; other values as they are."""
    kinds = set(map(type, values))
    if kinds == {float}:
        return torch.tensor(values, dtype=torch.float64)
    if kinds != {int}:
        return values
    fitting = (t for t in INTEGERS if torch.iinfo(t).min <= min(values) and max(values) <= torch.iinfo(t).max)
    smallest = next(fitting, None)
    return values if smallest is None else torch.tensor(values, dtype=smallest)


def unpacked(values: Any) -> list[Any]:
    """Return the numbers of `packed`."""
    found: list[Any] = values.tolist() if isinstance(values, Tensor) else values
    return found
