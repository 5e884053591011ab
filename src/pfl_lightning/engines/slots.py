"""Access to a client module's parameters and buffers, to run the module with other tensors in their places."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor, nn

from pfl_lightning.client.module import ClientModule
from pfl_lightning.internals.of_torch import entry_tables
from pfl_lightning.messages import StateDict

Result = TypeVar("Result")


@dataclass
class Slot:
    """The place of a parameter or buffer in a module.

    Args:
        name: the name of the parameter or buffer.
        table: the module's dict of parameters or of buffers.
        key: the key in the dict.
        tensor: the original tensor.
    """

    name: str
    table: dict[str, Any]
    key: str
    tensor: Tensor | None

    @property
    def current(self) -> Tensor | None:
        """The tensor in this place now."""
        tensor: Tensor | None = self.table[self.key]
        return tensor


class Slots:
    """All places of a client module's parameters and buffers, except common parameters.

    Tied parameters share one name, the first. Common parameters stay in place: all clients computed at once use the
    same tensor.

    Args:
        module: the client module.
    """

    def __init__(self, module: ClientModule) -> None:
        self.all: list[Slot] = []
        self.first_names: dict[str, str] = {}
        names: dict[int, str] = {}
        # A shared submodule appears under each of its paths.
        for path, m in module.named_modules(remove_duplicate=False):
            for table in entry_tables(m):
                for key, tensor in table.items():
                    place = f"{path}.{key}".lstrip(".")
                    # Tied weights are the same object, so the first name found for the object is used for all places.
                    name = place if tensor is None else names.setdefault(id(tensor), place)
                    self.first_names[place] = name
                    if name not in module.common_names:
                        self.all.append(Slot(name, table, key, tensor))
        # In a dict the last value wins, so going backwards keeps the first slot of each name.
        self.first = list({slot.name: slot for slot in reversed(self.all)}.values())[::-1]

    def __iter__(self) -> Iterator[Slot]:
        """Iterate over one slot per name."""
        return iter(self.first)

    def current(self) -> StateDict:
        """Return the current tensors by name, detached."""
        return {slot.name: slot.current.detach() for slot in self if slot.current is not None}

    def call(self, function: Callable[..., Result], entries: StateDict, *args: Any) -> Result:
        """Call a function with other tensors in the places.

        Does the work of ``torch.func.functional_call``, which takes as long as a small net's step.

        Args:
            function: computes with the module.
            entries: the tensors by name; other places keep their tensors.
            *args: arguments of the function.

        Raises:
            RuntimeError: if the function itself replaces a tensor.
        """
        before = [slot.table[slot.key] for slot in self.all]
        put = [entries.get(slot.name, tensor) for slot, tensor in zip(self.all, before, strict=True)]
        try:
            for slot, tensor in zip(self.all, put, strict=True):
                slot.table[slot.key] = tensor
            result = function(*args)
            for slot, tensor in zip(self.all, put, strict=True):
                # A replaced buffer would be lost below, when the originals are put back.
                if slot.table[slot.key] is not tensor:
                    raise RuntimeError("its code replaces a buffer by another tensor, but must change it in place")
            return result
        finally:
            for slot, tensor in zip(self.all, before, strict=True):
                slot.table[slot.key] = tensor

    @contextmanager
    def holding(self, entries: StateDict) -> Iterator[None]:
        """Put tensors into the places inside this context, for the module's hooks to change.

        Args:
            entries: the tensors by name, of the original shapes.
        """
        before = [slot.current for slot in self.all]
        put: StateDict = {}
        for slot, tensor in zip(self.all, before, strict=True):
            if slot.name not in entries:
                continue
            if slot.name not in put:
                entry = entries[slot.name]
                # nn.Module recognises parameters by their type.
                own = nn.Parameter(entry, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else entry
                put[slot.name] = own
            slot.table[slot.key] = put[slot.name]
        try:
            yield
        finally:
            for slot, tensor in zip(self.all, before, strict=True):
                slot.table[slot.key] = tensor
