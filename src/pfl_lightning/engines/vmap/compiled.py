"""Compiled steps of stacked clients."""

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch._dynamo import lookup_backend
from torch._inductor import config
from torch.func import grad, vmap

from pfl_lightning.client import Batch, ClientModule
from pfl_lightning.engines.slots import Slots
from pfl_lightning.engines.steps import reason_of
from pfl_lightning.messages import StateDict

Values: TypeAlias = tuple[dict[str, Tensor], StateDict]
"""What a step returns, and the gradients of its losses, a row for each client."""

CHECKED = 3
"""Steps that are made both ways before a compiled one is trusted."""


@dataclass
class Version:
    """What one run of the compiler has made: how often it was used, and which entries its loss depends on."""

    uses: int = 0
    names: Set[str] = frozenset()


class Compiled:
    """Steps of stacked clients, forwards and backwards, that ``torch.compile`` has made one computation.

    A compiler follows a step's code once for each course that it takes. What the code asks of its tensors may then have
    another answer than in the step as it is, so the first steps of each version are made both ways and compared.

    On a GPU a version is captured as a CUDA graph, so that a step is one start instead of one for each of its kernels.
    Its results are in the graph's own memory, which the next step overwrites: who keeps one beyond its step copies it.

    Args:
        module: the client module.
        precision: the Trainer's precision plugin.
    """

    backend = "inductor"
    captured_on = frozenset({"cuda"})
    """Types of devices on which steps are captured as graphs."""

    def __init__(self, module: ClientModule, precision: Precision) -> None:
        # of its own: a compiler follows it to the module's tables, which stay the same objects
        slots = Slots(module)

        def loss(leaves: StateDict, others: StateDict, batch: Batch, index: int) -> tuple[Tensor, Values]:
            # copies, as what is mapped must not be changed in place
            moved = {name: entry.clone() for name, entry in others.items()}
            with precision.forward_context():
                values = slots.call(module.training_step, {**leaves, **moved}, batch, index)
            return values["loss"], (values, moved)

        def step(leaves: StateDict, others: StateDict, batch: Batch, index: int) -> tuple[StateDict, Values]:
            return vmap(grad(loss, has_aux=True), (0, 0, 0, None))(leaves, others, batch, index)  # type: ignore[no-any-return]

        # compilers allow a code object few versions, and modules of several kinds shall not share them
        step.__code__ = step.__code__.replace(co_name=f"step_of_{type(module).__name__}")
        self._module = module
        self._step = torch.compile(step, fullgraph=True, backend=self._compile)
        # of bfloat16 and its like the last digit is a hundredth
        self._tolerance = 1e-3 if str(precision.precision).startswith(("32", "64")) else 0.05
        self._method = type(module).__name__
        self._version = Version()
        self.trusted = True

    @property
    def _captured(self) -> bool:
        return self._module.device.type in self.captured_on

    def _compile(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        """Compiles, and notes which version is used."""
        with config.patch({"triton.cudagraphs": self._captured}):
            compiled, version = lookup_backend(self.backend)(graph, inputs), Version()

        def used(*args: Any) -> Any:
            self._version = version
            return compiled(*args)

        return used

    def differentiate(
        self,
        plain: Callable[[StateDict], Values],
        entries: StateDict,
        batch: Batch,
        index: int,
        trained: list[str],
    ) -> Values | None:
        """Values and gradients of a step; None, from then on, where it can't be compiled or computes something else.

        Gradients, and entries that are replaced, hold until the next step.

        Args:
            plain: the step as it is, of entries, which may change.
            entries: the stack; those that aren't trained are replaced where they change.
            batch: inputs and targets, a row for each client.
            index: the batch's number.
            trained: the entries that gradients are taken to.
        """
        leaves = {name: entries[name] for name in trained}
        others = {name: entry for name, entry in entries.items() if name not in leaves}
        if self._captured:
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        try:
            with torch.no_grad():
                gradients, (values, moved) = self._step(leaves, others, batch, index)
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:
            self._give_up(reason_of(error).split(" Explanation:")[0])
            return None
        version = self._version
        version.uses += 1
        if version.uses <= CHECKED:
            copies = {name: entry.detach().clone() for name, entry in entries.items()}
            expected = plain(copies)
            # what a loss doesn't depend on has no gradient, which is something else than one of zeros
            version.names = expected[1].keys()
            found = values, {name: gradients[name] for name in version.names}
            kept = {name: copies[name] for name in moved}
            if not all(map(self._near, (*found, moved), (*expected, kept))):
                self._give_up("compiled they would compute something else")
                return None
        entries.update(moved)
        # the record keeps them
        values = {name: value.clone() for name, value in values.items()}
        return values, {name: gradients[name] for name in trained if name in version.names}

    def _give_up(self, reason: str) -> None:
        self.trusted = False
        rank_zero_warn(f"trainer.compile: steps of {self._method} stay as they are: {reason}.")

    def _near(self, found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> bool:
        """Whether tensors of the same names are the same but for rounding, each as a whole."""

        def differs(one: Tensor, other: Tensor) -> bool:
            exact = other.double()
            # NaN, where a client has diverged, says nothing
            return bool((one.double() - exact).norm() > self._tolerance * exact.norm() + 1e-5)

        return found.keys() == expected.keys() and not any(differs(found[name], expected[name]) for name in expected)
