"""Compute nets with low-rank adapters for the samples of all clients as one batch."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn

from pfl_lightning.client.module import ClientModule
from pfl_lightning.data.trees import Tree
from pfl_lightning.engines.slots import Slot, Slots
from pfl_lightning.engines.vmap.layers import Layers
from pfl_lightning.internals.of_torch import (
    BatchNorm,
    entry_tables,
    is_wrapped,
    level_of,
    outside_vmap,
    row_dimension,
    row_of,
    unwrapped,
    version,
)
from pfl_lightning.messages import StateDict, num_bytes, tensors, tree_map

CACHE = 2**20
"""Bytes of hidden states of one batch of all clients at most, on a CPU: what a core's own cache holds. Larger batches
spare operations and wait for memory: of 8 clients with 8 texts of 32 tokens each and a hidden size of 256, four at once
train in 0.93 of the time of one after another, and all eight in 1.08."""
ACTIVATIONS = 2**26
"""Bytes of all layers' outputs for such a batch at most, so that clients at once don't take much more memory than one:
64 MiB, a sixth of a base of 100 million parameters."""
FEW = 2
"""Clients of a comparison with one alone."""
EVALUATION = "evaluation"
"""Name of the evaluation among compared phases, which no phase has."""


class Part(NamedTuple):
    """A part of a net, with the buffers in it.

    Args:
        module: the features or the classifier of a net.
        buffers: places of its buffers that are in no ``state_dict``, such as frequencies of positions.
    """

    module: nn.Module
    buffers: list[Slot]


class Merged:
    """Parts of nets that take the samples of all clients as one batch.

    With low-rank adapters, all layers but the adapters are common to clients, and can take all clients' samples as one
    batch ``[clients * n, ...]``. The linear layers of adapters, whose weights are stacks, are products of stacks:
    ``[clients, n, in] @ [clients, in, r]``. Dropout draws from each client's stream. Everything else of a training
    step, such as the loss, stays under ``vmap``.

    A layer that computes with several samples together, or with another order of dimensions, would give other results.
    The first step of each phase and the first evaluation are therefore compared with those of a client alone.

    Args:
        module: the client module.
    """

    def __init__(self, module: ClientModule) -> None:
        self.module = module
        self.parts: list[Part] = []
        self.refused = False
        """Whether results differed, or a part couldn't be computed in this way."""
        self.checked: set[str] = set()
        """Names of phases, and of the evaluation, whose results were compared."""
        self.reason = ""
        """Why a part with adapters isn't among ``parts``; empty if there is no such part."""
        self._reasons: set[str] = set()
        self._of_block: list[Part] = []

    def settle(self, slots: Slots) -> None:
        """Find the parts, which a federation may change between rounds by freezing layers.

        Args:
            slots: the module's slots.
        """
        self.parts = []
        if self.refused:
            return
        self.reason = ""
        places: dict[int, list[Slot]] = {}
        for slot in slots.all:
            places.setdefault(id(slot.table), []).append(slot)
        persistent = self.module.state_dict().keys()
        for net in self.module.children():
            # A copy of features alone has no such parts.
            parts = [getattr(net, name) for name in ("features", "classifier") if hasattr(net, name)] or [net]
            if not any(hasattr(layer, "lora_A") for layer in parts[0].modules()):
                continue
            for part in parts:
                # A classifier may be merged without any adapter in it, but not alone.
                if (found := self._part(part, places, persistent)) is None:
                    break
                self.parts.append(found)

    def see(self, entries: StateDict) -> None:
        """Note the parts with the same buffers for all clients of a block; others stay under ``vmap``.

        Args:
            entries: parameters and buffers, a row per client.
        """
        self._of_block = [
            part
            for part in self.parts
            if all(bool((entries[slot.name] == entries[slot.name][:1]).all()) for slot in part.buffers)
        ]

    @torch.no_grad()
    def clients_at_once(self, x: Tree, activations: int) -> int:
        """Return the number of clients whose samples shall be one batch on a CPU, at least 1; 0 if nothing is merged.

        Args:
            x: a batch of one client.
            activations: bytes of all layers' outputs for it.
        """
        features = self.module.net.features
        if not any(part.module is features for part in self.parts):
            return 0
        return max(1, min(CACHE // max(num_bytes(features(x)), 1), ACTIVATIONS // max(activations, 1)))

    def tell(self) -> None:
        """Log once why adapters are computed under ``vmap``."""
        if self.reason and self.reason not in self._reasons:
            self._reasons.add(self.reason)
            rank_zero_info(f"trainer.engine='vectorised' takes vmap for adapters: {self.reason}.")

    def refuse(self, reason: str) -> None:
        """Leave all parts to ``vmap`` from now on.

        Args:
            reason: the reason, a sentence without full stop.
        """
        self.parts, self.refused, self.reason = [], True, reason
        self.tell()

    def _part(self, module: nn.Module, places: dict[int, list[Slot]], persistent: Any) -> Part | None:
        """Return a part of a net; None if clients differ in more than linear layers."""
        buffers: list[Slot] = []
        for path, layer in module.named_modules():
            parameters, own_buffers = (places.get(id(table), []) for table in entry_tables(layer))
            if isinstance(layer, BatchNorm):
                self.reason = f"layer {path} computes with several samples together"
                return None
            own = [slot.name for slot in parameters if slot.tensor is not None]
            if own and type(layer).forward is not nn.Linear.forward:
                self.reason = f"clients differ in {own[0]}, which is no weight of a linear layer"
                return None
            if moving := [slot.name for slot in own_buffers if slot.name in persistent]:
                self.reason = f"clients may differ in the buffer {moving[0]}"
                return None
            buffers += [slot for slot in own_buffers if slot.tensor is not None]
        return Part(module, buffers)

    @contextmanager
    def at_once(self, layers: Layers) -> Iterator[None]:
        """Let the parts take the samples of all clients as one batch, inside this context.

        Args:
            layers: the layers of the step.
        """
        # A check may have refused them since.
        parts = self._of_block if self.parts else []
        tables = [vars(part.module) for part in parts]
        before = [table.get("forward") for table in tables]
        for part, table in zip(parts, tables, strict=True):
            table["forward"] = partial(forward, part, part.module.forward, layers)
        try:
            yield
        finally:
            for table, own in zip(tables, before, strict=True):
                if own is None:
                    del table["forward"]
                else:
                    table["forward"] = own


def forward(part: Part, function: Callable[..., Any], layers: Layers, *args: Any, **kwargs: Any) -> Any:
    """Return a part's outputs under ``vmap``, computed for all clients as one batch.

    Args:
        part: the part.
        function: its own ``forward``.
        layers: the layers of the step.
        *args: inputs under ``vmap``.
        **kwargs: further inputs.

    Raises:
        RuntimeError: if the part changes a buffer.
    """
    given = list(tensors((args, kwargs)))
    # inputs that clients have in common stay under vmap
    if not given or any(row_dimension(t) < 0 or not t.dim() or is_wrapped(unwrapped(t)) for t in given):
        return function(*args, **kwargs)
    level = level_of(given[0])

    def batch(row: Tensor) -> Tensor:
        stack = unwrapped(row).movedim(row_dimension(row), 0)
        layers.clients = len(stack)
        return stack.flatten(0, 1)

    def row(stack: Tensor) -> Tensor:
        return row_of(stack.reshape(layers.clients, -1, *stack.shape[1:]), 0, level)

    args, kwargs = tree_map(batch, (args, kwargs))
    rows = [slot.current for slot in part.buffers]
    stacks = [unwrapped(own) for own in rows if own is not None]
    versions = [version(stack) for stack in stacks]
    try:
        with outside_vmap():
            for slot, stack in zip(part.buffers, stacks, strict=True):
                slot.table[slot.key] = stack[0]
            outputs = function(*args, **kwargs)
        if [version(stack) for stack in stacks] != versions:
            raise RuntimeError("it changes a buffer")
        return tree_map(row, outputs)
    finally:
        layers.clients = 0
        for slot, own in zip(part.buffers, rows, strict=True):
            slot.table[slot.key] = own
