"""What can't be done for many clients at once, and would be wrong in silence."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from pfl_lightning.client.hooks import overrides
from pfl_lightning.client.module import ClientModule
from pfl_lightning.client.phases import Phase
from pfl_lightning.contract.attributes import Look
from pfl_lightning.engines.errors import computed, during
from pfl_lightning.engines.layout import Layout
from pfl_lightning.engines.leaks import attributes_of
from pfl_lightning.engines.slots import Slots
from pfl_lightning.engines.vmap.block import Member
from pfl_lightning.messages import StateDict

Result = TypeVar("Result")


class Unvectorisable(MisconfigurationException):
    """What a client module does can't be done for many clients at once.

    Args:
        module: the client module.
        reason: why, as a sentence without its end.
    """

    def __init__(self, module: ClientModule, reason: str) -> None:
        super().__init__(
            f"trainer.engine='vectorised' can't run {type(module).__name__}: {reason}; take engine='sequential'."
        )
        self.reason = reason


class SharedAttributes:
    """The plain attributes of a client module: clients that are computed at once have only one of each.

    Args:
        module: the client module.
    """

    def __init__(self, module: ClientModule) -> None:
        self.module = module
        self._attributes = attributes_of(module)

    def look(self) -> Look:
        """What the attributes hold now."""
        return self._attributes.look()

    def refuse_changes(self, before: Look, reason: str) -> None:
        """Refuses attributes that have changed.

        Args:
            before: what `look` gave.
            reason: why, with ``{}`` for the attribute.

        Raises:
            Unvectorisable: if there is one.
        """
        if name := self._attributes.changed(before, self.look()):
            raise Unvectorisable(self.module, reason.format(name))

    def refuse_references(self, tensors: Iterable[Tensor | None]) -> None:
        """Refuses other ways to parameters and buffers than by their names.

        Args:
            tensors: the parameters and buffers; vmap has tensors of its own in their slots.

        Raises:
            Unvectorisable: if there is one.
        """
        entries = {id(tensor) for tensor in tensors if tensor is not None}
        for m in self.module.modules():
            for name, value in vars(m).items():
                held = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
                if held and name not in ("_parameters", "_buffers") and any(id(item) in entries for item in held):
                    reason = f"{type(m).__name__}.{name} refers to parameters or buffers, and not by their names"
                    raise Unvectorisable(self.module, reason)

    @contextmanager
    def without_turn(self) -> Iterator[None]:
        """Takes away what says whose turn it is: a step that reads it would take one client's for everybody's."""
        taken = {name: vars(self.module).pop(name) for name in ("client_id", "steps_done")}
        try:
            yield
        finally:
            vars(self.module).update(taken)


class BlockSignature:
    """What the clients of a block must have in common; those that differ are refused.

    Args:
        attributes: the module's.
        layout: the module's.
    """

    def __init__(self, attributes: SharedAttributes, layout: Layout) -> None:
        self._attributes = attributes
        self._layout = layout
        self._first: tuple[Any, Any, Look] | None = None

    def admit(self, phases: list[Phase], entries: dict[str, Tensor]) -> None:
        """Compares the client that the module is with the first one.

        Args:
            phases: its local phases.
            entries: its parameters and buffers, by name.

        Raises:
            Unvectorisable: if it differs.
        """
        module = self._attributes.module
        if any(phase.data is not None for phase in phases):
            raise Unvectorisable(module, "it has a phase with samples of its own")
        common = [{**vars(phase), "trains": list(self._layout.trained(phase))} for phase in phases]
        shapes = {name: tensor.shape for name, tensor in entries.items()}
        if self._first is None:
            self._first = common, shapes, self._attributes.look()
            return
        if common != self._first[0]:
            raise Unvectorisable(module, "clients have different local_phases()")
        if shapes != self._first[1]:
            raise Unvectorisable(module, "clients have parameters or buffers of different shapes")
        self._attributes.refuse_changes(self._first[2], "it keeps something of a client in {}, which is no buffer")


def refuse_gradients_of_one(module: ClientModule) -> None:
    """Refuses what is done with the gradients of one client.

    Raises:
        Unvectorisable: if there is something.
    """
    if overrides(module, "on_after_backward") or overrides(module, "on_before_optimizer_step"):
        raise Unvectorisable(
            module,
            "its on_after_backward or on_before_optimizer_step sees the gradients of one client, where "
            "adjust_gradients sees those of any",
        )


def vectorised(
    module: ClientModule,
    slots: Slots,
    member: Member,
    entries: StateDict,
    at_once: Callable[[], Result],
    alone: Callable[[], Any],
) -> Result:
    """Return what code of the client module gives for many clients at once.

    Args:
        module: the client module.
        slots: the module's.
        member: the first client.
        entries: parameters and buffers, a row for each client.
        at_once: computes the result.
        alone: runs the same code for the first client, whose entries are then in the module's slots.

    Raises:
        Unvectorisable: if the code can't be run so, and can for the first client by itself. An error that this client
            has too is raised as it is.
    """

    def first() -> None:
        job = member.job
        vars(module).update(client_id=job.client, round=job.round, steps_done=member.steps)
        with slots.holding({name: stack[0].detach().clone() for name, stack in entries.items()}):
            with during("training", job.round, job.client):
                alone()

    return computed(at_once, first, partial(Unvectorisable, module))
