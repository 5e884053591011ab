"""What a record from elsewhere should look like, and whether it does."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from reprlib import repr as shown
from typing import Any

import torch
from torch import Tensor

from pfl_lightning.messages import Message

ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
"""Commands to a terminal, as ANSI has them: colours, moves, titles."""


class Refused(ValueError):
    """What came from elsewhere is not what it should be; the text is one sentence."""


def plain(text: str, most: int = 500) -> str:
    r"""A text of a site's as it may be shown: one line, without commands to a terminal.

    >>> plain("the disk\n is \x1b[31mfull\x1b[0m")
    'the disk is full'

    Args:
        text: anything.
        most: characters that are left at most.
    """
    # a text that is far too long isn't looked at to its end
    line = ESCAPES.sub("", text[: 4 * most])
    return " ".join("".join(letter if letter.isprintable() else " " for letter in line).split())[:most]


@dataclass(frozen=True)
class Spec:
    """A tensor that hasn't been made yet.

    Args:
        dtype: its type.
        shape: its shape.
        start: where its bytes begin in the message's.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int = 0

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


def check(record: Any, like: Any, keys: int = 0, where: str = "record") -> None:
    """Refuses a record that doesn't look like its template: entries, nesting, types and shapes, but not values.

    >>> check({"loss": 0.5, "acc": 1.0}, {str: float})
    >>> check({"w": torch.zeros(3)}, {"w": torch.ones(2)})
    Traceback (most recent call last):
    pfl_lightning.flower.template.Refused: record.w is float32 [3] and should be float32 [2].

    Args:
        record: tensors, or `Spec` in their place, in dicts, lists and tuples, beside numbers, texts and None.
        like: the same with any values. A type, such as ``float``, stands for its values; a dict whose only key is
            ``str`` for one with any names; and one whose keys are all integers for one with any of 0 to ``keys`` - 1.
        keys: how many classes or clients there are.
        where: the record's name, for the sentence.

    Raises:
        Refused: if it doesn't.
    """
    if isinstance(like, Tensor | Spec):
        found, wanted = spec_of(record), spec_of(like)
        if found is None or wanted is None or (found.dtype, found.shape) != (wanted.dtype, wanted.shape):
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


def check_type(value: Any, wanted: type, where: str) -> None:
    """Refuses what isn't of a type itself: a bool is no int.

    Args:
        value: a part of a record.
        wanted: the type.
        where: its name, for the sentence.

    Raises:
        Refused: if it isn't.
    """
    if type(value) is not wanted:
        found = spec_of(value) or type(value).__name__
        raise Refused(f"{where} is {found} and should be {wanted.__name__}.")


def check_dict(record: Mapping[Any, Any], like: Mapping[Any, Any], keys: int, where: str) -> None:
    """The same as `check` for dicts."""
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
    """A tensor's type and shape; None of anything else."""
    if isinstance(value, Tensor):
        return Spec(value.dtype, tuple(value.shape))
    return value if isinstance(value, Spec) else None


def check_finite(record: Any, where: str = "record") -> None:
    """Refuses a record with a tensor that holds a NaN or an infinity.

    Args:
        record: what came.
        where: its name, for the sentence.

    Raises:
        Refused: if there is one.
    """
    if isinstance(record, Tensor):
        # not by a sum, which overflows for finite float16
        if record.is_floating_point() and not torch.isfinite(record).all():
            raise Refused(f"{where} has a NaN or an infinity.")
    elif isinstance(record, Mapping | list | tuple):
        for key, part in record.items() if isinstance(record, Mapping) else enumerate(record):
            check_finite(part, f"{where}.{key}")


def check_norm(update: Message, payload: Message, max_norm: float) -> None:
    """Refuses an update that changes more than a bound allows.

    Args:
        update: what a client sent.
        payload: what it had received. From a floating tensor that stands in the same place of both, with one shape,
            the received one is subtracted; others count as they are.
        max_norm: the largest Euclidean norm of all floating tensors together.

    Raises:
        Refused: if the norm is above it, or isn't a number.
    """
    norm = norm_of(update, payload)
    if not norm <= max_norm:
        raise Refused(f"the update's change has the norm {norm:.3g}, which is more than max_norm={max_norm:.3g}.")


def norm_of(update: Message, payload: Message) -> float:
    """How much an update changes: the Euclidean norm of all floating tensors together, as `check_norm` takes it."""
    return math.hypot(*norms(update, payload))


def norms(record: Any, base: Any) -> list[float]:
    """The norm of each floating tensor's difference from what stands in its place in another record."""
    if isinstance(record, Tensor):
        if not record.is_floating_point():
            return []
        wide = record.double()
        if isinstance(base, Tensor) and base.shape == record.shape:
            wide = wide - base.detach().cpu()
        return [torch.linalg.vector_norm(wide).item()]
    if isinstance(record, Mapping):
        under = base if isinstance(base, Mapping) else {}
        return [norm for key, part in record.items() for norm in norms(part, under.get(key))]
    if isinstance(record, list | tuple):
        beside = base if isinstance(base, list | tuple) and len(base) == len(record) else [None] * len(record)
        return [norm for part, other in zip(record, beside, strict=True) for norm in norms(part, other)]
    return []


def check_counts(update: Message, samples: int, noisy: bool = False) -> None:
    """Refuses an update that counts other samples than its client said that it has.

    Args:
        update: what a client sent; ``num_samples`` and ``class_counts`` are looked at where they are.
        samples: the client's training samples, as its site told at first.
        noisy: whether class counts have noise, and so another sum.

    Raises:
        Refused: if it does.
    """
    if "num_samples" in update and int(update["num_samples"]) != samples:
        raise Refused(f"num_samples is {int(update['num_samples'])}, and was {samples} at first.")
    counts = update.get("class_counts")
    if counts is not None and (int(counts.min()) < 0 or (not noisy and int(counts.sum()) != samples)):
        raise Refused(f"class_counts are no counts of the {samples} samples that there were at first.")
