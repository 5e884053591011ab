"""Call a function of one client for many clients or samples: ``torch.func.vmap`` without the checks at each call."""

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


def mapped_by_sample(step: Step, entries: StateDict, batch: Batch, count: int, size: int) -> dict[str, Tensor]:
    """Compute a function of one client and a batch of a single sample, for all clients and samples.

    What is computed of a sample can't depend on other samples. Entries are shared by a client's samples, so that
    gradients of single samples don't exist in memory.

    Args:
        step: the function of one client.
        entries: parameters and buffers, a row per client.
        batch: inputs and targets ``[clients, size, ...]``.
        count: the number of clients.
        size: the number of samples of each client.

    Returns:
        Values ``[clients, size]``.
    """
    load_decompositions()
    level = enter_vmap(count, "error")
    try:
        rows = {name: row_of(stack, 0, level) for name, stack in entries.items()}
        inner = enter_vmap(size, "error")
        try:
            values = step(rows, tree_map(lambda t: row_of(row_of(t.unsqueeze(2), 0, level), 0, inner), batch))
            values = {name: stack_of(value, inner, size, 0) for name, value in values.items()}
        finally:
            leave_vmap()
        return {name: stack_of(value, level, count, 0) for name, value in values.items()}
    finally:
        leave_vmap()
