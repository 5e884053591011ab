"""Snapshots of objects' plain attributes, to find changes in them.

Plain attributes are neither saved in checkpoints nor kept apart for each client, so a change of one is a mistake.
"""

import random
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Set
from enum import Enum
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pfl_lightning.internals.of_torch import version

Look: TypeAlias = dict[str, Any]
"""A snapshot: contents of attributes by displayed name, such as ``FedDyn.h``."""


class Attributes:
    """Snapshots of some objects' plain attributes, which show in-place changes.

    Tensors, numbers, texts, containers, modules, optimizers and random generators are compared by content; all other
    objects by identity.

    Args:
        owners: the objects, by the name that errors give them.
        left_out: names of attributes that may change.
        known: tells tensors that have another owner and may change in place, such as a module's parameters.
        parts: modules whose own tensors aren't attributes of the owners but their state.
    """

    def __init__(
        self,
        owners: Mapping[str, object],
        left_out: Set[str],
        known: Callable[[Tensor], bool] = lambda tensor: False,
        parts: Set[nn.Module] = frozenset(),
    ) -> None:
        self._tables = [(owner, vars(thing)) for owner, thing in owners.items()]
        self._left_out = left_out
        self._known = known
        self._parts = parts

    def look(self) -> Look:
        """Return a snapshot."""
        return {
            f"{owner}.{name}": content(value, self._parts)
            for owner, table in self._tables
            for name, value in table.items()
            if name not in self._left_out
        }

    def changed(self, before: Look, now: Look, allowed: Set[str] = frozenset()) -> str | None:
        """Return the first attribute with a difference between two snapshots, in value or existence; None without any.

        Args:
            before: a snapshot.
            now: a later one.
            allowed: displayed names of attributes that may change.
        """
        for name in {**before, **now}:
            known = name in before and name in now
            if not (known and self._same(before[name], now[name])) and name not in allowed:
                return name
        return None

    def _same(self, one: Any, other: Any) -> bool:
        # identity first: a NaN isn't equal to itself
        if one is other:
            return True
        if isinstance(one, _InPlace) and isinstance(other, _InPlace):
            return one.thing is other.thing and (one.mark == other.mark or self._known(one.thing))
        # True == 1 == 1.0, and yet a counter has become something else
        if type(one) is not type(other):
            return False
        if isinstance(one, tuple):
            return len(one) == len(other) and all(map(self._same, one, other))
        return isinstance(one, VALUES) and bool(one == other)


VALUES = (bool, int, float, complex, str, bytes, frozenset, Enum, np.generic, torch.Size, torch.dtype, torch.device)
"""Types that are compared by value."""
PLAIN = {type(None), bool, int, float, str}
"""The commonest types of `VALUES`, for a quick test before ``isinstance``."""


class _InPlace:
    """An object open to in-place changes, with a mark of the content.

    Args:
        thing: the object, kept alive so that another one can't take its identity.
        mark: a version number, or a copy or checksum of its content.
    """

    def __init__(self, thing: Any, mark: Any) -> None:
        self.thing, self.mark = thing, mark


def content(value: Any, parts: Set[nn.Module] = frozenset()) -> Any:
    """Return a value in a form for later comparison: in-place changes of the original show.

    Args:
        value: the value.
        parts: modules whose own tensors don't count where a module in the value has them inside.
    """
    if type(value) in PLAIN or isinstance(value, VALUES):
        return value
    if isinstance(value, Tensor):
        return _InPlace(value, version(value))
    if isinstance(value, Mapping):
        return tuple(content(each, parts) for each in chain.from_iterable(value.items()))
    if isinstance(value, (list, tuple, deque)):
        return tuple(content(each, parts) for each in value)
    if isinstance(value, (set, np.ndarray, torch.Generator, np.random.Generator, np.random.RandomState, random.Random)):
        return _InPlace(value, drawn(value))
    # identity, and the versions of all tensors: training in place shows
    if isinstance(value, nn.Module):
        # not `state_dict()`, which leaves out buffers with persistent=False
        return (value, *map(content, tensors_of(value, parts)))
    if isinstance(value, Optimizer):
        # moments, but not learning rates, which a schedule changes
        return value, content(value.state_dict()["state"])
    return value


def tensors_of(module: nn.Module, parts: Set[nn.Module]) -> Iterable[Tensor]:
    """Yield a module's parameters and buffers.

    Args:
        module: the module.
        parts: modules whose own tensors are left out.
    """
    for each in module.modules():
        if each not in parts:
            yield from each.parameters(recurse=False)
            yield from each.buffers(recurse=False)


def drawn(value: Any) -> Any:
    """Return the state of a random generator, the members of a set, or an array's shape and checksum.

    Args:
        value: the generator, set or array.
    """
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return repr(value.get_state())
    if isinstance(value, random.Random):
        return value.getstate()
    return set(value) if isinstance(value, set) else (value.shape, zlib.crc32(np.ascontiguousarray(value).data))
