"""Compile the training steps of stacked clients with ``torch.compile``."""

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.func import grad, vmap

from pfl_lightning.client import Batch, ClientModule
from pfl_lightning.engines.errors import reason_of
from pfl_lightning.engines.slots import Slots
from pfl_lightning.internals.of_torch import compiler_backend, inductor_settings
from pfl_lightning.messages import StateDict

Values: TypeAlias = tuple[dict[str, Tensor], StateDict]
"""A step's returned values and the gradients of the loss, each with a row per client."""

SHARES = (16, 4, 1)
"""Shares of a block's rows that steps are compiled for, as divisors: clients that have finished are left out in steps
of a factor of 4. For log-normal sizes (standard deviation 1) of 100 clients steps then compute 1.8 rows per row needed,
which were 5.1 with one version; a factor of 2 gives 1.4, by six compilations."""
FEWEST = 8
"""Rows that aren't worth a version for fewer."""
VERSIONS = 6
"""Versions for different rows at most, as the compiler allows eight of a step in all."""
CHECKED = 3
"""Steps to run both compiled and uncompiled before a compiled version is trusted."""


@dataclass
class Version:
    """One compiled version of a step: the number of uses, and the entries with a gradient."""

    uses: int = 0
    names: Set[str] = frozenset()


class Compiled:
    """Training steps of stacked clients, forward and backward, compiled by ``torch.compile``.

    The compiler traces a step's code once per path through the code. Conditions on tensors may have another answer
    while tracing than in a plain step, so the first steps of each version run both ways and are compared.

    On a GPU a version is captured as a CUDA graph, so a step needs one launch instead of one per kernel. Results are in
    the graph's own memory, which the next step overwrites, so results to be kept must be copied.

    Args:
        module: the client module.
        precision: the Trainer's precision plugin.
    """

    backend = "inductor"
    captured_on = frozenset({"cuda"})
    """Types of devices on which steps are captured as graphs."""

    def __init__(self, module: ClientModule, precision: Precision) -> None:
        # Slots of its own: the compiled code refers to the module's tables, which stay the same objects.
        slots = Slots(module)

        def loss(leaves: StateDict, others: StateDict, batch: Batch, index: int) -> tuple[Tensor, Values]:
            # Copies, since tensors under vmap must not be changed in place.
            moved = {name: entry.clone() for name, entry in others.items()}
            with precision.forward_context():
                values = slots.call(module.training_step, {**leaves, **moved}, batch, index)
            return values["loss"], (values, moved)

        def step(leaves: StateDict, others: StateDict, batch: Batch, index: int) -> tuple[StateDict, Values]:
            return vmap(grad(loss, has_aux=True), (0, 0, 0, None))(leaves, others, batch, index)  # type: ignore[no-any-return]

        # The compiler limits the versions per code object; a name per class keeps modules of several classes apart.
        step.__code__ = step.__code__.replace(co_name=f"step_of_{type(module).__name__}")
        self._module = module
        self._step = torch.compile(step, fullgraph=True, backend=self._compile)
        # The last digit of bfloat16 is about a hundredth of a value.
        self._tolerance = 1e-3 if str(precision.precision).startswith(("32", "64")) else 0.05
        self._method = type(module).__name__
        self._version = Version()
        self._rows: set[tuple[str, int]] = set()
        self.trusted = True

    def rows(self, phase: str, rows: int, needed: int) -> int:
        """Return the number of a block's first rows to compute: a share of `SHARES`, few of them for few rows needed.

        Args:
            phase: name of the phase.
            rows: rows of the block.
            needed: the first rows with a batch, at least 1.
        """
        for share in SHARES:
            count = max(-(-rows // share), FEWEST)
            known = (phase, count) in self._rows or len(self._rows) < VERSIONS
            if needed <= count < rows and known:
                break
        else:
            count = rows
        self._rows.add((phase, count))
        return count

    @property
    def _captured(self) -> bool:
        """True if steps on the module's device are captured as graphs."""
        return self._module.device.type in self.captured_on

    def _compile(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        """Compile a graph, and record which version runs."""
        # The setting is global to the compiler, so change it for this compilation alone.
        with inductor_settings({"triton.cudagraphs": self._captured}):
            compiled, version = compiler_backend(self.backend)(graph, inputs), Version()

        # The compiler calls _compile once per version, and this function at each step.
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
        """Return values and gradients of a step, or None if the step can't be compiled or gives other results.

        After the first None every later call should be skipped; see ``trusted``. Gradients and replaced entries are
        valid until the next step.

        Args:
            plain: the uncompiled step, as a function of entries, which it may change.
            entries: the stacked entries; changed entries that aren't trained are replaced.
            batch: inputs and targets, a row per client.
            index: the batch's number.
            trained: names of the entries to differentiate with respect to.
        """
        leaves = {name: entries[name] for name in trained}
        others = {name: entry for name, entry in entries.items() if name not in leaves}
        if self._captured:
            # Lets torch overwrite the results of the step before.
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        try:
            with torch.no_grad():
                gradients, (values, moved) = self._step(leaves, others, batch, index)
        # The step isn't at fault; the engine halves the block.
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
            # An entry that the loss doesn't depend on has no gradient, which is not the same as zeros: an optimizer
            # skips it.
            version.names = expected[1].keys()
            found = values, {name: gradients[name] for name in version.names}
            kept = {name: copies[name] for name in moved}
            if not all(map(self._near, (*found, moved), (*expected, kept))):
                self._give_up("the compiled step gives other results")
                return None
        entries.update(moved)
        # Cloned, as the record keeps values beyond the next step.
        values = {name: value.clone() for name, value in values.items()}
        return values, {name: gradients[name] for name in trained if name in version.names}

    def _give_up(self, reason: str) -> None:
        """Stop using compiled steps, and log the reason."""
        self.trusted = False
        rank_zero_warn(f"trainer.compile: steps of {self._method} stay uncompiled: {reason}.")

    def _near(self, tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> bool:
        """Return True if tensors of the same names agree up to rounding, in the norm of each tensor."""

        def differs(one: Tensor, other: Tensor) -> bool:
            exact = other.double()
            # A comparison with NaN is False, so a diverged client doesn't count as a difference. The absolute term is
            # for gradients that are zero up to rounding.
            return bool((one.double() - exact).norm() > self._tolerance * exact.norm() + 1e-5)

        return tensors.keys() == expected.keys() and not any(
            differs(tensors[name], expected[name]) for name in expected
        )
