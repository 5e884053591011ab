"""A function of one client, called once for many: ``torch.func.vmap`` without what it looks at in each call."""

from collections.abc import Callable

from torch import Tensor
from torch._C._functorch import (
    _add_batch_dim,
    _remove_batch_dim,
    _vmap_decrement_nesting,
    _vmap_increment_nesting,
)
from torch._functorch.vmap import lazy_load_decompositions  # type: ignore[attr-defined]

from pfl_lightning.client.module import Batch
from pfl_lightning.messages import StateDict, tree_map

Step = Callable[[StateDict, Batch], dict[str, Tensor]]
"""What is computed of a client's entries and of its batch."""


def mapped(step: Step, entries: StateDict, batch: Batch, count: int) -> dict[str, Tensor]:
    """As ``vmap(step)(entries, batch)``, in a fifth of its own time, which is as long as a small net's layer takes.

    Args:
        step: of one client.
        entries: parameters and buffers, a row for each client.
        batch: inputs and targets, a row for each client.
        count: how many clients there are.
    """
    lazy_load_decompositions()
    level = _vmap_increment_nesting(count, "error")

    def row(stack: Tensor) -> Tensor:
        return _add_batch_dim(stack, 0, level)

    try:
        values = step({name: row(stack) for name, stack in entries.items()}, tree_map(row, batch))
        # spread over the rows where it is the same for all
        return {name: _remove_batch_dim(value, level, count, 0) for name, value in values.items()}
    finally:
        _vmap_decrement_nesting()
