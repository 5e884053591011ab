"""Where a client module keeps its parameters and buffers, and how a computation gets others in their places."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor, nn

from pfl_lightning.messages import StateDict

Result = TypeVar("Result")


@dataclass
class Place:
    """Where a parameter or buffer is: its name, the module's table, the key in it, and what was there at first."""

    name: str
    table: dict[str, Any]
    key: str
    tensor: Tensor | None

    @property
    def current(self) -> Tensor | None:
        """What is there now."""
        tensor: Tensor | None = self.table[self.key]
        return tensor


class Places:
    """All places of a module; what is tied has one name, its first.

    Args:
        module: the module.
    """

    def __init__(self, module: nn.Module) -> None:
        names: dict[int, str] = {}
        self.all = [
            Place(name if tensor is None else names.setdefault(id(tensor), name), table, key, tensor)
            for path, m in module.named_modules()
            for table in (m._parameters, m._buffers)
            for key, tensor in table.items()
            for name in [f"{path}.{key}".lstrip(".")]
        ]
        self.first = list({place.name: place for place in reversed(self.all)}.values())[::-1]

    def __iter__(self) -> Iterator[Place]:
        """One place a name."""
        return iter(self.first)

    def current(self) -> StateDict:
        """What is there now, by name."""
        return {place.name: place.current.detach() for place in self if place.current is not None}

    def call(self, function: Callable[..., Result], entries: StateDict, *args: Any) -> Result:
        """Calls a function with other tensors in their places.

        As `torch.func.functional_call`, which takes as long as a small net's step.

        Args:
            function: what computes with the module.
            entries: the tensors by name.
            *args: of the function.

        Raises:
            RuntimeError: if the function itself puts tensors into the places.
        """
        before = [place.current for place in self.all]
        put = [entries.get(place.name, tensor) for place, tensor in zip(self.all, before, strict=True)]
        try:
            for place, tensor in zip(self.all, put, strict=True):
                place.table[place.key] = tensor
            result = function(*args)
            if any(place.current is not tensor for place, tensor in zip(self.all, put, strict=True)):
                raise RuntimeError(
                    f"{function.__name__} puts another tensor in the place of a buffer, which must change in place"
                )
            return result
        finally:
            for place, tensor in zip(self.all, before, strict=True):
                place.table[place.key] = tensor
