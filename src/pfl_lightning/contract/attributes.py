"""What objects hold in plain attributes: compared before and after, since nothing there is saved or kept apart."""

import random
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Set
from enum import Enum
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Look: TypeAlias = dict[str, Any]
"""Contents of attributes by their shown names, such as ``FedDyn.h``."""


class Attributes:
    """The plain attributes of some objects: tensors, numbers, texts, containers of them, and what draws or learns.

    Other objects count as themselves, whatever is in them.

    Args:
        owners: the objects by the names that they are shown under.
        left_out: names of attributes that may change.
        known: tells tensors that are somebody else's and may change in place, such as a module's parameters.
    """

    def __init__(
        self, owners: Mapping[str, object], left_out: Set[str], known: Callable[[Tensor], bool] = lambda tensor: False
    ) -> None:
        self._tables = [(owner, vars(thing)) for owner, thing in owners.items()]
        self._left_out = left_out
        self._known = known

    def look(self) -> Look:
        """What they hold now."""
        return {
            f"{owner}.{name}": content(value)
            for owner, table in self._tables
            for name, value in table.items()
            if name not in self._left_out
        }

    def changed(self, before: Look, now: Look, allowed: Set[str] = frozenset()) -> str | None:
        """The first attribute that came, went or changed in between, if there is one.

        Args:
            before: a look.
            now: a later one.
            allowed: shown names of those that may.
        """
        for name in {**before, **now}:
            known = name in before and name in now
            if not (known and self._same(before[name], now[name])) and name not in allowed:
                return name
        return None

    def _same(self, one: Any, other: Any) -> bool:
        # NaN is itself
        if one is other:
            return True
        if isinstance(one, _InPlace) and isinstance(other, _InPlace):
            return one.thing is other.thing and (one.mark == other.mark or self._known(one.thing))
        if type(one) is not type(other):
            return False
        if isinstance(one, tuple):
            return len(one) == len(other) and all(map(self._same, one, other))
        return isinstance(one, VALUES) and bool(one == other)


VALUES = (bool, int, float, complex, str, bytes, frozenset, Enum, np.generic, torch.Size, torch.dtype, torch.device)
"""What is compared by its value."""
PLAIN = {type(None), bool, int, float, str}
"""What most of it is, and of one glance."""


class _InPlace:
    """Something that can change in place, and a mark that changes with it."""

    def __init__(self, thing: Any, mark: Any) -> None:
        self.thing, self.mark = thing, mark


def content(value: Any) -> Any:
    """A value as it is now, to be compared later: in-place changes of it show."""
    if type(value) in PLAIN or isinstance(value, VALUES):
        return value
    if isinstance(value, Tensor):
        return _InPlace(value, version(value))
    if isinstance(value, Mapping):
        return tuple(content(part) for pair in value.items() for part in pair)
    if isinstance(value, (list, tuple, deque)):
        return tuple(map(content, value))
    if isinstance(value, (set, np.ndarray, torch.Generator, np.random.Generator, np.random.RandomState, random.Random)):
        return _InPlace(value, drawn(value))
    if isinstance(value, nn.Module):
        return (value, *map(content, tensors_of(value)))
    if isinstance(value, Optimizer):
        return value, content(value.state_dict()["state"])
    return value


def tensors_of(module: nn.Module) -> Iterable[Tensor]:
    """Parameters and buffers of a module."""
    yield from module.parameters()
    yield from module.buffers()


def version(tensor: Tensor) -> int:
    """How often a tensor was changed in place; -1 for one that doesn't count."""
    try:
        return tensor._version
    except RuntimeError:  # a tensor of inference mode, or of a vmap that has ended
        return -1


def drawn(value: Any) -> Any:
    """The state of what is drawn from; of a set its members, of an array a checksum."""
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return repr(value.get_state())
    if isinstance(value, random.Random):
        return value.getstate()
    return set(value) if isinstance(value, set) else (value.shape, zlib.crc32(np.ascontiguousarray(value).data))
