"""What can't be done for many clients at once, and would be wrong in silence."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from pfl_lightning.client import ClientModule
from pfl_lightning.contract.attributes import Look
from pfl_lightning.engines.leaks import attributes_of


class Unvectorisable(MisconfigurationException):
    """What a client module does can't be done for many clients at once.

    Args:
        method: the client module.
        reason: why, as a sentence without its end.
    """

    def __init__(self, method: ClientModule, reason: str) -> None:
        super().__init__(
            f"trainer.engine='vectorised' can't run {type(method).__name__}: {reason}; take engine='sequential'."
        )
        self.reason = reason


class Watch:
    """Watches what a client module keeps besides parameters and buffers, of which each client has its own.

    Args:
        module: the client module.
    """

    def __init__(self, module: ClientModule) -> None:
        self.module = module
        self._attributes = attributes_of(module)

    def attributes(self) -> Look:
        """What the method's modules hold besides parameters and buffers."""
        return self._attributes.look()

    def compare(self, before: Look, reason: str) -> None:
        """Refuses attributes that have changed.

        Args:
            before: what `attributes` gave.
            reason: why, with ``{}`` for the attribute.
        """
        if name := self._attributes.changed(before, self.attributes()):
            self.refuse(reason.format(name))

    def refuse_references(self, tensors: Iterable[Tensor | None]) -> None:
        """Refuses other ways to parameters and buffers than by their names.

        Args:
            tensors: the parameters and buffers; vmap has tensors of its own in their places.
        """
        entries = {id(tensor) for tensor in tensors if tensor is not None}
        for m in self.module.modules():
            for name, value in vars(m).items():
                held = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
                if name not in ("_parameters", "_buffers") and any(id(item) in entries for item in held):
                    self.refuse(f"{type(m).__name__}.{name} refers to parameters or buffers, and not by their names")

    @contextmanager
    def nobody_in_turn(self) -> Iterator[None]:
        """Takes away what says whose turn it is: a step that reads it would take one client's for everybody's."""
        taken = {name: vars(self.module).pop(name) for name in ("client_id", "steps_done")}
        try:
            yield
        finally:
            vars(self.module).update(taken)

    def refuse(self, reason: str) -> NoReturn:
        """Ends in one sentence.

        Raises:
            Unvectorisable: in any case.
        """
        raise Unvectorisable(self.module, reason)


class Alike:
    """Refuses clients that differ in what those of a block must have in common.

    Args:
        watch: watches what else the module keeps of one.
    """

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._first: tuple[Any, ...] | None = None

    def admit(self, phases: list[Any], shapes: dict[str, Any]) -> None:
        """Compares a client with the first one.

        Args:
            phases: what its phases have in common.
            shapes: of its parameters and buffers, by name.
        """
        if self._first is None:
            self._first = phases, shapes, self._watch.attributes()
            return
        if phases != self._first[0]:
            self._watch.refuse("clients have different local_phases()")
        if shapes != self._first[1]:
            self._watch.refuse("clients have parameters or buffers of different shapes")
        self._watch.compare(self._first[2], "it keeps something of a client in {}, which is no buffer")


def reason_of(error: Exception) -> str:
    """The first sentence of an error's message, without its end."""
    return " ".join(str(error).split()).split(". ")[0].rstrip(".")[:200]
