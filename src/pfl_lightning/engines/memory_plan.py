"""Compute the memory of a client's training from shapes alone, without weights and without training."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pfl_lightning.client import Batch, ClientModule
from pfl_lightning.data.trees import take
from pfl_lightning.engines.evaluation import rows_at_once
from pfl_lightning.engines.steps import Layout, step_values
from pfl_lightning.internals.of_torch import DispatchMode, entry_tables, shapes_alone, take_step
from pfl_lightning.messages import num_bytes, tensors
from pfl_lightning.nets.modes import kept_modes


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one client's training and evaluation, one client at a time.

    Args:
        frozen: frozen weights and buffers, which exist once for all clients.
        trained: trained weights of the client module, such as adapters.
        personal: what a client keeps between rounds of its model.
        shared: what an update has of it.
        gradients: gradients of the trained weights.
        optimizer: the optimizer's state.
        activations: the most that layers below the output layer keep for the backward pass.
        logits: what the output layer, the loss and the backward pass add to it at their largest.
        evaluation: the most that an evaluation takes.
    """

    frozen: int
    trained: int
    personal: int
    shared: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    evaluation: int

    @property
    def step(self) -> int:
        """Bytes of a training step beside the weights."""
        return self.gradients + self.optimizer + self.activations + self.logits

    @property
    def peak(self) -> int:
        """Bytes of the weights, and of a step or an evaluation, whichever takes more."""
        return self.frozen + self.trained + max(self.step, self.optimizer + self.evaluation)


class Living(DispatchMode):  # type: ignore[no-untyped-call]
    """Count the bytes of all tensors made by operations and still in use.

    Args:
        known: tensors that exist already, whose views are no new memory.
    """

    def __init__(self, known: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = self.peak = 0
        # held, so that no later one has its id
        self._known = {id(t.untyped_storage()): t.untyped_storage() for t in tensors(known)}
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and count the bytes of its results."""
        made = func(*args, **(kwargs or {}))
        for tensor in tensors(list(made) if isinstance(made, (list, tuple)) else [made]):
            storage = tensor.untyped_storage()
            if id(storage) in self._sizes or id(storage) in self._known:
                continue
            self._sizes[id(storage)] = storage.nbytes()
            self.bytes += storage.nbytes()
            self.peak = max(self.peak, self.bytes)
            weakref.finalize(storage, self._gone, id(storage))
        return made

    def _gone(self, key: int) -> None:
        """Take off the bytes of memory in use no longer."""
        self.bytes -= self._sizes.pop(key)


@contextmanager
def weightless(module: nn.Module) -> Iterator[None]:
    """Put tensors without memory in the places of a module's parameters and buffers, inside this context.

    Args:
        module: the module, on any device, as a module built on the device ``meta``.
    """
    memo: dict[int, Tensor] = {}
    before: list[tuple[dict[str, Any], dict[str, Any]]] = []
    mode = shapes_alone()
    for layer in module.modules():
        for table in entry_tables(layer):
            before.append((table, dict(table)))
            for name, entry in table.items():
                if entry is None:
                    continue
                # flags and counters stay real, as methods look at them, but not weights held in bytes
                with mode if entry.is_floating_point() or entry.dtype == torch.int8 else nullcontext():
                    table[name] = memo.setdefault(id(entry), emptied(entry))
    try:
        yield
    finally:
        for table, entries in before:
            table.update(entries)


def emptied(entry: Tensor) -> Tensor:
    """Return a tensor of zeros on the CPU, of the same shape and kind; without memory in `shapes_alone`."""
    made = torch.empty_strided(entry.size(), entry.stride(), dtype=entry.dtype, device="cpu").zero_()
    return nn.Parameter(made, entry.requires_grad) if isinstance(entry, nn.Parameter) else made


def planned(
    module: ClientModule, batch: Batch, forward_context: Callable[[], AbstractContextManager[None]]
) -> MemoryPlan:
    """Return the memory of a client's training by a batch's shapes.

    The method's own ``training_step``, the backward pass and the optimizer's step run on tensors without memory, so
    that each operation's results count from when they are made to when nothing needs them any more.

    Args:
        module: the client module, on any device, such as ``meta``; it stays as it is.
        batch: inputs and targets of a full batch. Integers are real, as steps may look at them.
        forward_context: gives the context of a forward pass, such as autocast.
    """
    with weightless(module), kept_modes(module):
        return _planned(module, batch, forward_context)


def _planned(
    module: ClientModule, batch: Batch, forward_context: Callable[[], AbstractContextManager[None]]
) -> MemoryPlan:
    """Return the plan of a module without memory; arguments as for `planned`."""
    layout, state = Layout.of(module), module.state_dict()
    own = [*module.parameters(), *module.buffers()]
    trained = {id(parameter) for parameter in layout.parameters.values()}
    # activations, the rest of the peak, gradients and the optimizer's state of the phase that takes most
    largest = (0, 0, 0, 0)
    module.train()
    for phase in module.local_phases():
        module.phase = phase
        with layout.training(phase) as parameters:
            largest = max(largest, of_step(module, batch, list(parameters.values()), own, forward_context), key=sum)
    activations, logits, gradients, optimizer = largest
    module.eval()
    living = Living([own, list(batch)])
    with torch.no_grad(), living:
        x, target = take(batch, slice(rows_at_once(module.task, batch[1])))
        with forward_context():
            outputs = module(x)
        outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
        module.task.loss(outputs, target, "sum")
    return MemoryPlan(
        frozen=num_bytes([entry for entry in own if id(entry) not in trained]),
        trained=num_bytes([entry for entry in own if id(entry) in trained]),
        personal=num_bytes([state[name] for name in layout.personal]),
        shared=num_bytes([entry for name, entry in state.items() if module.is_shared(name)]),
        gradients=gradients,
        optimizer=optimizer,
        activations=activations,
        logits=logits,
        evaluation=living.peak,
    )


def of_step(
    module: ClientModule,
    batch: Batch,
    parameters: list[nn.Parameter],
    own: list[Tensor],
    forward_context: Callable[[], AbstractContextManager[None]],
) -> tuple[int, int, int, int]:
    """Return the bytes of a training step: activations, temporary tensors, gradients and optimizer.

    Args:
        module: the client module, in its phase and without memory.
        batch: inputs and targets.
        parameters: the phase's trained parameters.
        own: all parameters and buffers.
        forward_context: gives the context of a forward pass.
    """
    living, below = Living([own, list(batch)]), [0]
    hook = module.net.features.register_forward_hook(lambda *_: below.append(living.bytes))
    try:
        with living:
            with forward_context():
                loss = step_values(module, batch, 0)["loss"]
            loss.backward()  # type: ignore[no-untyped-call]
    finally:
        hook.remove()
    # after the backward pass only gradients are left of the step
    gradients = num_bytes([parameter.grad for parameter in parameters if parameter.grad is not None])
    optimizer = module.local_optimizer(module.phase, parameters)
    take_step(optimizer)
    moments = num_bytes(optimizer.state_dict()["state"])
    for parameter in parameters:
        parameter.grad = None
    activations = max(below)
    # gradients come while activations go, and are in the peak of the backward pass
    return activations, max(living.peak - activations - gradients, 0), gradients, moments
