"""Refuse client modules unable to run for many clients at once, or giving wrong results in silence."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, TypeVar

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from pfl_lightning.client.hooks import overrides
from pfl_lightning.client.module import ClientModule
from pfl_lightning.client.phases import Phase
from pfl_lightning.contract.attributes import Leaks, Look, content
from pfl_lightning.engines.errors import computed, during
from pfl_lightning.engines.slots import Slots
from pfl_lightning.engines.steps import Layout
from pfl_lightning.engines.vmap.block import Member
from pfl_lightning.internals.of_torch import entry_tables, update_flat_weights
from pfl_lightning.messages import StateDict

Result = TypeVar("Result")


class Unvectorisable(MisconfigurationException):
    """A client module's code can't run for many clients at once.

    Args:
        module: the client module.
        reason: the reason, a sentence without full stop.
    """

    def __init__(self, module: ClientModule, reason: str) -> None:
        super().__init__(
            f"trainer.engine='vectorised' can't run {type(module).__name__}: {reason}; take engine='sequential'."
        )
        self.reason = reason


class SharedAttributes(Leaks):
    """The plain attributes of a client module, a single copy for all clients of a block, and the places of entries.

    Args:
        module: the client module.
    """

    def __init__(self, module: ClientModule) -> None:
        super().__init__(module)
        self.differing: frozenset[str] = frozenset()
        """Paths of caches that differ between the block's clients; each client has its own."""
        self.renew()

    def renew(self) -> None:
        """Look for the module's entries, in whose places others may be since the last round."""
        self.layout, self.slots = Layout.of(self.module), Slots(self.module)

    def place(self, path: str) -> tuple[dict[str, Any], str]:
        """Return the attribute dict of a path's submodule, and the attribute's name."""
        owner, _, name = path.rpartition(".")
        return vars(self.module.get_submodule(owner)), name

    @property
    def caches(self) -> dict[str, Any]:
        """The module's current `ClientModule.caches`, by their paths in the module."""
        found = {}
        for path in sorted(self.module.caches):
            table, name = self.place(path)
            if name in table:
                found[path] = table[name]
        return found

    def put(self, caches: Mapping[str, Any]) -> None:
        """Set the module's caches.

        Args:
            caches: values by their paths in the module.
        """
        for path, value in caches.items():
            table, name = self.place(path)
            table[name] = value

    def take(self, paths: Iterable[str]) -> None:
        """Remove caches from the module.

        Args:
            paths: the caches' paths in the module.
        """
        for path in paths:
            table, name = self.place(path)
            del table[name]

    def refuse_changes(self, before: Look, reason: str, caches: bool = True) -> None:
        """Refuse changed attributes.

        Args:
            before: an earlier result of `look`.
            reason: the reason, with ``{}`` for the attribute.
            caches: whether caches count.

        Raises:
            Unvectorisable: if an attribute has changed.
        """
        # Clients of a block may have different caches, which are compared on their own.
        if name := self.changed(before, self.look(), frozenset() if caches else self._caches):
            raise Unvectorisable(self.module, reason.format(name))

    def refuse_references(self) -> None:
        """Refuse lists and dicts of parameters or buffers in attributes.

        Under vmap the module's slots hold other tensors, and such a reference would reach the old ones.

        Raises:
            Unvectorisable: if there is such a reference.
        """
        entries = {id(slot.tensor) for slot in self.slots if slot.tensor is not None}
        for m in self.module.modules():
            tables = set(map(id, entry_tables(m)))
            for name, value in vars(m).items():
                if name == "_flat_weights" and isinstance(m, nn.RNNBase) and update_flat_weights:
                    # torch's own list: such a layer makes a new one for exchanged weights
                    continue
                held = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
                if held and id(value) not in tables and not entries.isdisjoint(map(id, held)):
                    reason = f"{type(m).__name__}.{name} holds parameters or buffers themselves, not their names"
                    raise Unvectorisable(self.module, reason)

    @contextmanager
    def turn_of(self, member: Member, entries: StateDict, phase: str) -> Iterator[None]:
        """Put a client into the module inside this context, and name the client in errors.

        Args:
            member: the client, whose turn, steps and caches the module gets.
            entries: the client's parameters and buffers, which hooks may change.
            phase: as for `during`.
        """
        job, before = member.job, self.caches
        vars(self.module).update(client_id=job.client, round=job.round, steps_done=member.steps)
        self.put(member.caches)
        try:
            with self.slots.holding(entries), during(phase, job.round, job.client):
                yield
        finally:
            self.take(self.caches.keys() - before.keys())
            self.put(before)

    def first_turn(self, first: Member, stacks: StateDict) -> AbstractContextManager[None]:
        """Return the context of the first client's turn, in copies of its entries.

        Args:
            first: the client.
            stacks: parameters and buffers, a row per client.
        """
        return self.turn_of(first, {name: stack[0].detach().clone() for name, stack in stacks.items()}, "training")

    @contextmanager
    def without_turn(self) -> Iterator[None]:
        """Remove a single client's attributes inside this context, as a step would use one client's values for all.

        Raises:
            Unvectorisable: if a step reads a cache that differs between clients.
        """
        taken = {name: vars(self.module).pop(name) for name in ("client_id", "steps_done")}
        caches = {path: value for path, value in self.caches.items() if path in self.differing}
        self.take(caches)
        try:
            yield
        # A step that reads a removed cache fails with an AttributeError; name the cache instead.
        except Unvectorisable as error:
            for path in caches:
                if isinstance(error.__cause__, AttributeError) and f"'{self.place(path)[1]}'" in str(error.__cause__):
                    reason = f"its steps read {self.method}.{path}, which differs between clients"
                    raise Unvectorisable(self.module, reason) from error.__cause__
            raise
        finally:
            vars(self.module).update(taken)
            self.put(caches)


class BlockSignature:
    """The properties shared by all clients of a block; a client with different ones is refused.

    Args:
        attributes: the module's attributes.
        compares: whether attributes are compared after each client; else the end of the round shows their changes.
    """

    def __init__(self, attributes: SharedAttributes, compares: bool) -> None:
        self._attributes = attributes
        self._compares = compares
        self._first: tuple[Any, Any, Look] | None = None
        self._caches: list[tuple[dict[str, Any], Look]] = []

    def admit(self, phases: list[Phase], entries: dict[str, Tensor]) -> None:
        """Compare the client in the module with the block's first client.

        Args:
            phases: the client's local phases.
            entries: the client's parameters and buffers, by name.

        Raises:
            Unvectorisable: if the two differ.
        """
        module = self._attributes.module
        if any(phase.data is not None for phase in phases):
            raise Unvectorisable(module, "it has a phase with samples of its own")
        common = [{**vars(phase), "trains": list(self._attributes.layout.trained(phase))} for phase in phases]
        shapes = {name: tensor.shape for name, tensor in entries.items()}
        caches = self._attributes.caches
        self._caches.append((caches, looked_at(caches)))
        if self._first is None:
            self._first = common, shapes, self._attributes.look() if self._compares else {}
            return
        if common != self._first[0]:
            raise Unvectorisable(module, "clients have different local_phases()")
        if shapes != self._first[1]:
            raise Unvectorisable(module, "clients have parameters or buffers of different shapes")
        if not self._compares:
            return
        reason = "it stores client data in {}, which is no buffer"
        self._attributes.refuse_changes(self._first[2], reason, caches=False)

    def caches(self) -> list[dict[str, Any]]:
        """Return each client's caches, in the order of admission, and record which caches differ.

        Caches that differ are hidden from steps.

        Raises:
            Unvectorisable: if one client's cache has become another's (as if all fill the same list), or if a step
                could read a class attribute in place of a hidden cache.
        """
        attributes, module = self._attributes, self._attributes.module
        for caches, look in self._caches:
            if path := attributes.changed(look, looked_at(caches)):
                reason = f"it stores client data in {type(module).__name__}.{path}, which is the same object"
                raise Unvectorisable(module, f"{reason} for the next client")
        looks = [look for _, look in self._caches]
        paths = dict.fromkeys(path for look in looks for path in look)
        attributes.differing = frozenset(
            path
            for path in paths
            if any(attributes.changed(part(looks[0], path), part(look, path)) for look in looks[1:])
        )
        for path in sorted(attributes.differing):
            owner, _, name = path.rpartition(".")
            if hasattr(type(module.get_submodule(owner)), name):
                # With the client's cache hidden, a step would read the class attribute of the same name.
                reason = f"it stores client data in {type(module).__name__}.{path}, which its class has too"
                raise Unvectorisable(module, reason)
        return [caches for caches, _ in self._caches]


def looked_at(caches: Mapping[str, Any]) -> Look:
    """Return a record of caches, for later comparison."""
    return {path: content(value) for path, value in caches.items()}


def part(look: Look, name: str) -> Look:
    """Return one attribute's part of a look."""
    return {name: look[name]} if name in look else {}


def refuse_gradients_of_one(module: ClientModule) -> None:
    """Refuse hooks on the gradients of a single client, and layers that are computed again in the backward pass.

    Raises:
        Unvectorisable: if the module has such a hook or layer.
    """
    # the name by which transformers has it; under vmap torch fails within the layer, by an unrelated reason
    if any(getattr(layer, "gradient_checkpointing", False) is True for layer in module.modules()):
        raise Unvectorisable(
            module, "its net has gradient_checkpointing=true, which computes layers again for one client at a time"
        )
    if any(getattr(layer, "chunk_tokens", None) for layer in module.modules()):
        raise Unvectorisable(module, "its net has chunk_tokens, and chunks are computed again for one client at a time")
    if overrides(module, "on_after_backward") or overrides(module, "on_before_optimizer_step"):
        raise Unvectorisable(
            module,
            "its on_after_backward or on_before_optimizer_step needs the gradients of a single client, while "
            "adjust_gradients works for all clients at once",
        )


def vectorised(
    attributes: SharedAttributes,
    member: Member,
    entries: StateDict,
    at_once: Callable[[], Result],
    alone: Callable[[], Any],
) -> Result:
    """Run code of the client module for many clients at once, and explain a failure.

    Args:
        attributes: the module's attributes.
        member: the first client.
        entries: parameters and buffers, a row per client.
        at_once: computes the result for all clients.
        alone: runs the same code for the first client, whose entries are then in the module's slots.

    Raises:
        Unvectorisable: if the code fails for many clients at once, but not for the first client alone. An error of the
            first client alone is raised unchanged.
    """
    prepared = partial(attributes.first_turn, member, entries)
    return computed(at_once, alone, partial(Unvectorisable, attributes.module), prepared)
