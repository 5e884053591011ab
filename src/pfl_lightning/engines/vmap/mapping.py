"""Call a function of one client for many clients: ``torch.func.vmap`` without the checks at each call."""

from collections.abc import Callable

from torch import Tensor

from pfl_lightning.client.module import Batch
from pfl_lightning.internals.of_torch import enter_vmap, leave_vmap, load_decompositions, row_of, stack_of
from pfl_lightning.messages import StateDict, tree_map

Step = Callable[[StateDict, Batch], dict[str, Tensor]]
"""A function of a client's entries and batch."""


def mapped(step: Step, entries: StateDict, batch: Batch, count: int) -> dict[str, Tensor]:
    """Compute ``vmap(step)(entries, batch)`` with a fifth of the overhead, which otherwise equals a small net's layer.

    Args:
        step: the function of one client.
        entries: parameters and buffers, a row per client.
        batch: inputs and targets, a row per client.
        count: the number of clients.
    """
    # Some operations have a rule for vmap only after this call, which does nothing when repeated.
    load_decompositions()
    # "error" refuses random functions, apart from those that `Streams` replaces.
    level = enter_vmap(count, "error")

    def row(stack: Tensor) -> Tensor:
        return row_of(stack, 0, level)

    try:
        values = step({name: row(stack) for name, stack in entries.items()}, tree_map(row, batch))
        # A value without a row per client is repeated for each.
        return {name: stack_of(value, level, count, 0) for name, value in values.items()}
    finally:
        leave_vmap()
