"""Find memory in plain attributes, which is neither in checkpoints nor apart for each client, and end the run.

A client module's would leak to the next client, and an aggregator's would be lost with the process.
"""

import random
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from enum import Enum
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric

from pfl_lightning.client import ClientModule
from pfl_lightning.client.common import common_parameters
from pfl_lightning.internals.of_lightning import KEPT_ARGUMENTS
from pfl_lightning.internals.of_torch import version
from pfl_lightning.server import Aggregator
from pfl_lightning.server.aggregator_list import parts_of

Look: TypeAlias = dict[str, Any]
"""A snapshot: contents of attributes by displayed name, such as ``FedDyn.h``."""


class Attributes:
    """Snapshots of some objects' plain attributes, which show in-place changes.

    Tensors, numbers, texts, containers, modules, optimizers and random generators are compared by content; all other
    objects by identity.

    Args:
        owners: the objects, by the name that errors give them.
        left_out: names of attributes that may change.
        owned: tells tensors that have another owner and may change in place, such as a module's parameters.
        parts: modules whose own tensors aren't attributes of the owners but their state.
    """

    def __init__(
        self,
        owners: Mapping[str, object],
        left_out: Set[str],
        owned: Callable[[Tensor], bool] = lambda tensor: False,
        parts: Set[nn.Module] = frozenset(),
    ) -> None:
        self._tables = [(owner, vars(thing)) for owner, thing in owners.items()]
        self._left_out = left_out
        self._owned = owned
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
            return one.thing is other.thing and (one.mark == other.mark or self._owned(one.thing))
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


# Client modules

ENGINES_OWN = {
    *vars(LightningModule()),
    *KEPT_ARGUMENTS,
    *(
        "_made_with",
        "_architecture",
        "_given_modes",
        "_batch_idx",
        "_doubts",
        "_logged",
        "client_id",
        "learning_rate",
        "phase",
        "relied_on",
        "round",
        "steps_done",
    ),
    *("training_follows", "evaluation_follows"),
}
"""Attributes of client modules that Lightning, constructors or engines set, and so may change."""

CLOSELY = 2
"""Number of first rounds in which each hook of each client is compared; later rounds are compared as a whole."""


class Leaks(Attributes):
    """The plain attributes of a client module and its submodules, which must not keep one client's data for the next.

    Args:
        module: the client module.
    """

    def __init__(self, module: ClientModule) -> None:
        self.module = module
        self.method = type(module).__name__
        # torch's own layers store no client data in attributes, TorchVision's detection layers keep scales that follow
        # from the net, and metrics of a net are reset after each client.
        owners = {
            f"{self.method}.{path}".rstrip("."): m
            for path, m in module.named_modules()
            if not (isinstance(m, Metric) or type(m).__module__.startswith(("torch.", "torchvision.", "torchmetrics.")))
        }
        # A net may hold a wrapper of its own layers, such as a PeftModel, and under vmap these have other tensors.
        super().__init__(owners, ENGINES_OWN, self._is_entry, set(module.modules()))
        self._common = common_parameters(module)
        self._caches = {f"{self.method}.{path}" for path in module.caches}
        self._rounds = 0

    def _is_entry(self, tensor: Tensor) -> bool:
        """Return True for parameters and buffers, to which an attribute may refer, and which may change."""
        return any(entry is tensor for entry in chain(self.module.parameters(), self.module.buffers()))

    @property
    def is_close(self) -> bool:
        """True in the first rounds, in which each hook of each client is compared."""
        return self._rounds <= CLOSELY

    @contextmanager
    def of(self, hook: str, whole_round: bool = False) -> Iterator[None]:
        """Compare attributes and frozen parameters before and after this context, and stop the run if one has changed.

        In the first rounds each hook of each client is compared, and later only each round as a whole.

        Args:
            hook: the hook's name, for the error.
            whole_round: whether the context is a round, and not one client's hook.
        """
        self._rounds += whole_round
        if whole_round == self.is_close:
            yield
            return
        # The version counter of a tensor rises with each change in place; reading it costs less than comparing values.
        before, versions = self.look(), list(map(version, self._common.values()))
        yield
        now, method = self.look(), self.method
        if list(map(version, self._common.values())) != versions:
            counts = zip(self._common.items(), versions, strict=True)
            moved = next(name for (name, parameter), count in counts if version(parameter) != count)
            raise MisconfigurationException(
                f"{method}: {hook} changes {moved}, which the net has frozen (requires_grad=False) and all clients "
                "share; make it trainable in the net, or a buffer."
            )
        if name := self.changed(before, now, self._caches):
            attribute = name.removeprefix(f"{method}.")
            raise MisconfigurationException(
                f"{method}: {hook} changes the attribute {attribute}, which would leak to the next client and be lost "
                f"with the process; keep it in a buffer (register_buffer), with persistent=False if each round makes "
                f"it anew; in that case, and under engine=vectorised if no step reads it, {attribute!r} may also go "
                f"into {method}.caches."
            )


# Aggregators


class Remembered:
    """Ends a run whose aggregator keeps memory outside ``state``, as a checkpoint would lose such memory.

    Args:
        aggregator: the aggregator, after `Aggregator.setup`.
        modules: the client modules; an aggregator may refer to their parameters, which engines change.
    """

    def __init__(self, aggregator: Aggregator, modules: Iterable[nn.Module]) -> None:
        self._modules = list(modules)
        # each part of a list by itself, so that an error names the part
        self._parts = [(a, Attributes({a.name: a}, {"state", *a.caches}, self._is_entry)) for a in parts_of(aggregator)]
        self._looks = [attributes.look() for _, attributes in self._parts]

    def _is_entry(self, tensor: Tensor) -> bool:
        # engines train in the module, so its parameters change without the aggregator's doing
        entries = chain.from_iterable(chain(module.parameters(), module.buffers()) for module in self._modules)
        return any(entry is tensor for entry in entries)

    def check(self, hook: str) -> None:
        """Compare the aggregator's attributes with those of the last call.

        Args:
            hook: the hooks that the federation has called since then, for the error.

        Raises:
            MisconfigurationException: if an attribute changed.
        """
        # compared by version numbers, not by copies: a look costs no memory of the size of the state
        for place, (aggregator, attributes) in enumerate(self._parts):
            before, self._looks[place] = self._looks[place], attributes.look()
            if name := attributes.changed(before, self._looks[place]):
                attribute = name.removeprefix(f"{aggregator.name}.")
                raise MisconfigurationException(
                    f"{aggregator.name}: {hook} changes the attribute {attribute}, which no checkpoint would have; "
                    f"keep what a server remembers in self.state, or name it in {type(aggregator).__name__}.caches if "
                    "it is made from state alone."
                )
