"""Check records from other machines against templates: entries, types, shapes and sizes of changes."""

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from reprlib import repr as shown
from typing import Any

import torch
from torch import Tensor

from pfl_lightning.messages import Message

ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
"""ANSI commands to a terminal: colours, moves, titles."""
BLOCK = 1 << 18
"""Largest number of elements to check at once."""


class Refused(ValueError):
    """Raised for a message from another machine that breaks a rule, with one sentence."""


def plain(text: str, most: int = 500) -> str:
    r"""Return a site's text in a form safe to print: one line without commands to a terminal.

    >>> plain("the disk\n is \x1b[31mfull\x1b[0m")
    'the disk is full'

    Args:
        text: any text.
        most: largest number of characters to return.
    """
    # cut first: a site may send gigabytes, and the pattern needs time for each character
    line = ESCAPES.sub("", text[: 4 * most])
    return " ".join("".join(letter if letter.isprintable() else " " for letter in line).split())[:most]


@dataclass(frozen=True)
class Spec:
    """Type and shape of a tensor not read yet.

    Args:
        dtype: the tensor's type.
        shape: the tensor's shape.
        start: position of the tensor's first byte in the message's bytes.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int = 0

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


def check(record: Any, like: Any, keys: int = 0, where: str = "record") -> None:
    """Refuse a record with other entries, nesting, types or shapes than a template; values are not compared.

    >>> check({"loss": 0.5, "acc": 1.0}, {str: float})
    >>> check({"w": torch.zeros(3)}, {"w": torch.ones(2)})
    Traceback (most recent call last):
    pfl_lightning.flower.template.Refused: record.w is float32 [3] and should be float32 [2].

    A tensor of the template without elements stands for any size along its dimensions of size 0.

    Args:
        record: tensors, or `Spec` in place of tensors, in dicts, lists and tuples, beside numbers, texts and None.
        like: the template, a record with any values. A type, such as ``float``, stands for any value of the type; a
            dict with the only key ``str`` for a dict with any names; a dict with integers as keys for a dict with any
            keys from 0 to ``keys`` - 1.
        keys: number of classes or clients.
        where: the record's name, for error texts.

    Raises:
        Refused: if the record differs from the template.
    """
    if isinstance(like, Tensor | Spec):
        found, wanted = spec_of(record), spec_of(like)
        if found is None or wanted is None or found.dtype != wanted.dtype or not fits(found.shape, wanted.shape):
            raise Refused(f"{where} is {found or type(record).__name__} and should be {wanted}.")
    elif isinstance(like, type):
        check_type(record, like, where)
    elif isinstance(like, Mapping):
        check_type(record, dict, where)
        check_dict(record, like, keys, where)
    elif isinstance(like, list | tuple):
        check_type(record, list if isinstance(like, list) else tuple, where)
        if len(record) != len(like):
            raise Refused(f"{where} has {len(record)} parts and should have {len(like)}.")
        for index, (part, of) in enumerate(zip(record, like, strict=True)):
            check(part, of, keys, f"{where}.{index}")
    else:
        check_type(record, type(like), where)


def fits(shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Return whether a shape is another one, where a size of 0 in the other stands for any size.

    >>> fits((5, 2), (5, 0)), fits((4, 2), (5, 0)), fits((5,), (5, 0))
    (True, False, False)

    Args:
        shape: the shape.
        wanted: the other one.
    """
    return len(shape) == len(wanted) and all(want in (0, size) for size, want in zip(shape, wanted, strict=True))


def check_type(value: Any, wanted: type, where: str) -> None:
    """Refuse a value of another type, subclasses included: a bool is no int.

    Args:
        value: a part of a record.
        wanted: the type.
        where: the part's name, for error texts.

    Raises:
        Refused: if the value is of another type.
    """
    if type(value) is not wanted:
        found = spec_of(value) or type(value).__name__
        raise Refused(f"{where} is {found} and should be {wanted.__name__}.")


def check_dict(record: Mapping[Any, Any], like: Mapping[Any, Any], keys: int, where: str) -> None:
    """Refuse a dict with other keys or values than a template; see `check`."""
    # such templates have one value for all keys, as a sender chooses names and how many there are
    any_name = list(like) == [str]
    any_number = bool(like) and all(type(key) is int for key in like)
    for key in record:
        if any_name and type(key) is not str:
            raise Refused(f"{where} has the entry {shown(key)}, which is no name.")
        if any_number and (type(key) is not int or not 0 <= key < keys):
            raise Refused(f"{where} has the entry {shown(key)}, which is none of 0 to {keys - 1}.")
        if not any_name and not any_number and key not in like:
            raise Refused(f"{where} has an entry {shown(key)}, which isn't wanted.")
    if missing := [] if any_name or any_number else [key for key in like if key not in record]:
        raise Refused(f"{where} has no entry {shown(missing[0])}.")
    first = next(iter(like.values()), None)
    for key, part in record.items():
        check(part, like.get(key, first), keys, f"{where}.{key if key in like else shown(key)}")


def spec_of(value: Any) -> Spec | None:
    """Return the type and shape of a tensor; None for any other value."""
    if isinstance(value, Tensor):
        return Spec(value.dtype, tuple(value.shape))
    return value if isinstance(value, Spec) else None


def check_finite(record: Any, where: str = "record") -> None:
    """Refuse a record with a NaN or an infinity in a tensor.

    Args:
        record: the record.
        where: the record's name, for error texts.

    Raises:
        Refused: if a tensor has a NaN or an infinity.
    """
    if isinstance(record, Tensor):
        # entry by entry: a sum of finite float16 can overflow
        if record.is_floating_point() and not all(bool(torch.isfinite(block).all()) for block in in_parts(record)):
            raise Refused(f"{where} has a NaN or an infinity.")
    elif isinstance(record, Mapping | list | tuple):
        for key, part in record.items() if isinstance(record, Mapping) else enumerate(record):
            check_finite(part, f"{where}.{key}")


def in_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return a tensor's elements in parts of at most `BLOCK`, so that checks copy no large tensor as a whole.

    Args:
        tensor: any tensor; a contiguous one isn't copied.
    """
    return torch.split(tensor.detach().reshape(-1), BLOCK)


def check_norm(update: Message, payload: Message, max_norm: float) -> None:
    """Refuse an update with a change above a norm.

    Args:
        update: the client's update.
        payload: the payload that the client received. Each floating tensor of the update counts minus the payload's
            tensor in the same place with the same shape; without such a tensor it counts whole.
        max_norm: largest Euclidean norm of all floating tensors together.

    Raises:
        Refused: if the norm is above ``max_norm``, or NaN.
    """
    norm = norm_of(update, payload)
    # not by ">", which is false for NaN
    if not norm <= max_norm:
        raise Refused(f"the update's change has the norm {norm:.3g}, which is more than max_norm={max_norm:.3g}.")


def norm_of(update: Message, payload: Message) -> float:
    """Return the Euclidean norm of an update's change, over all floating tensors; see `check_norm`."""
    return math.hypot(*norms(update, payload))


def norms(record: Any, base: Any) -> list[float]:
    """Return the norm of the change of each floating tensor from a base record."""
    if isinstance(record, Tensor):
        if not record.is_floating_point():
            return []
        # squares of large float16 or float32 overflow
        wide = (block.double() for block in in_parts(record))
        if isinstance(base, Tensor) and base.shape == record.shape:
            wide = (block - start for block, start in zip(wide, in_parts(base.cpu()), strict=True))
        return [math.hypot(*(torch.linalg.vector_norm(block).item() for block in wide))]
    if isinstance(record, Mapping):
        under = base if isinstance(base, Mapping) else {}
        return [norm for key, part in record.items() for norm in norms(part, under.get(key))]
    if isinstance(record, list | tuple):
        # in lists of other lengths places don't correspond
        beside = base if isinstance(base, list | tuple) and len(base) == len(record) else [None] * len(record)
        return [norm for part, other in zip(record, beside, strict=True) for norm in norms(part, other)]
    return []


def check_received(payload: Any, shared: Mapping[str, Spec], entries: Collection[str], source: str) -> None:
    """Refuse a payload that isn't one of the method, by what a site's own client module and aggregator say.

    Of entries beside ``weights`` the names alone are known: a server may send one model or one for each client.

    Args:
        payload: the payload, with `Spec` in place of tensors.
        shared: the entries of the model that travel. A server may send floats of another type.
        entries: names of entries that the method's payloads may have.
        source: the method's client and server side, for the error.

    Raises:
        Refused: with the first entry that differs.
    """
    check_type(payload, dict, "payload")
    if strange := [name for name in payload if name not in entries]:
        raise Refused(
            f"the server sends {shown(strange[0])}, which {source} doesn't have in its payloads; give both the same "
            "method."
        )
    if "weights" not in payload:
        return
    check_type(payload["weights"], dict, "payload.weights")
    like = dict(shared)
    for name, own in shared.items():
        given = spec_of(payload["weights"].get(name))
        if given is not None and given.dtype.is_floating_point and own.dtype.is_floating_point:
            like[name] = Spec(given.dtype, own.shape)
    check(payload["weights"], like, where="payload.weights")


def check_counts(update: Message, samples: int, noisy: bool = False) -> None:
    """Refuse an update with other numbers of samples than the client's site has reported at first.

    A client could else raise its weight in the mean at any round.

    Args:
        update: the client's update; ``num_samples`` and ``class_counts`` are checked if present.
        samples: number of the client's training samples, as reported at first.
        noisy: True for class counts with noise, and so with another sum.

    Raises:
        Refused: if the numbers differ.
    """
    if "num_samples" in update and int(update["num_samples"]) != samples:
        raise Refused(f"num_samples is {int(update['num_samples'])}, and was {samples} at first.")
    counts = update.get("class_counts")
    if counts is not None and (int(counts.min()) < 0 or (not noisy and int(counts.sum()) != samples)):
        raise Refused(f"class_counts are no counts of the {samples} samples that there were at first.")
