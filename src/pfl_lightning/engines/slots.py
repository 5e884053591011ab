"""The slots of a client module's parameters and buffers, and how a computation gets other tensors into them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor, nn

from pfl_lightning.client.module import ClientModule
from pfl_lightning.messages import StateDict

Result = TypeVar("Result")


@dataclass
class Slot:
    """Where a module keeps a parameter or buffer.

    Args:
        name: of the parameter or buffer.
        table: the module's own, of parameters or of buffers.
        key: its key in the table.
        tensor: what was there at first.
    """

    name: str
    table: dict[str, Any]
    key: str
    tensor: Tensor | None

    @property
    def current(self) -> Tensor | None:
        """What is there now."""
        tensor: Tensor | None = self.table[self.key]
        return tensor


class Slots:
    """All slots of a client module but those of common parameters; what is tied has one name, its first.

    What is common stays in its place, the same tensor for all clients that are computed at once.

    Args:
        module: the client module.
    """

    def __init__(self, module: ClientModule) -> None:
        names: dict[int, str] = {}
        places = {
            f"{path}.{key}".lstrip("."): (table, key, tensor)
            for path, m in module.named_modules(remove_duplicate=False)
            for table in (m._parameters, m._buffers)
            for key, tensor in table.items()
        }
        slots = [
            Slot(name if place[2] is None else names.setdefault(id(place[2]), name), *place)
            for name, place in places.items()
        ]
        self.first_names = dict(zip(places, (slot.name for slot in slots), strict=True))
        self.all = [slot for slot in slots if slot.name not in module.common_names]
        self.first = list({slot.name: slot for slot in reversed(self.all)}.values())[::-1]

    def __iter__(self) -> Iterator[Slot]:
        """One slot for each name."""
        return iter(self.first)

    def current(self) -> StateDict:
        """What is there now, by name."""
        return {slot.name: slot.current.detach() for slot in self if slot.current is not None}

    def call(self, function: Callable[..., Result], entries: StateDict, *args: Any) -> Result:
        """Calls a function with other tensors in the slots.

        As ``torch.func.functional_call``, which takes as long as a small net's step.

        Args:
            function: what computes with the module.
            entries: the tensors by name.
            *args: of the function.

        Raises:
            RuntimeError: if the function itself puts tensors into the slots.
        """
        before = [slot.current for slot in self.all]
        put = [entries.get(slot.name, tensor) for slot, tensor in zip(self.all, before, strict=True)]
        try:
            for slot, tensor in zip(self.all, put, strict=True):
                slot.table[slot.key] = tensor
            result = function(*args)
            if any(slot.current is not tensor for slot, tensor in zip(self.all, put, strict=True)):
                raise RuntimeError(
                    f"{function.__name__} puts another tensor in the place of a buffer, which must change in place"
                )
            return result
        finally:
            for slot, tensor in zip(self.all, before, strict=True):
                slot.table[slot.key] = tensor

    @contextmanager
    def holding(self, entries: StateDict) -> Iterator[None]:
        """Puts tensors into the slots while it is entered: what the module's hooks change is changed in them.

        Args:
            entries: the tensors by name, of the slots' shapes.
        """
        before = [slot.current for slot in self.all]
        put: StateDict = {}
        for slot, tensor in zip(self.all, before, strict=True):
            if slot.name not in entries:
                continue
            if slot.name not in put:
                entry = entries[slot.name]
                # a module tells its parameters by their type
                own = nn.Parameter(entry, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else entry
                put[slot.name] = own
            slot.table[slot.key] = put[slot.name]
        try:
            yield
        finally:
            for slot, tensor in zip(self.all, before, strict=True):
                slot.table[slot.key] = tensor

    def copy_row(self, entries: StateDict, row: int) -> None:
        """Copies one client's entries into the module.

        Args:
            entries: a stack, ``[clients, ...]``.
            row: the client's.
        """
        for slot in self:
            if slot.name not in entries:
                continue
            entry = entries[slot.name][row]
            if slot.tensor is not None and slot.current is slot.tensor and slot.tensor.shape == entry.shape:
                slot.tensor.copy_(entry)
            else:
                # put there by a hook, and maybe the server's own
                slot.table[slot.key] = entry.clone()
