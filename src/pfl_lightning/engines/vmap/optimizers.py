"""Optimizers of stacks of clients."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop

from pfl_lightning.engines.base import LocalWork
from pfl_lightning.messages import CPU, StateDict
from pfl_lightning.transfers import moved, side_by_side

State: TypeAlias = dict[str, Any]
SavedStates: TypeAlias = dict[int, State]
"""What an optimizer has kept of its parameters, by their numbers."""

ELEMENTWISE = {ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop}
"""Optimizers that treat each element by itself, so that one for a stack does what one for each of its rows would."""
COUNTERS = {"eta", "mu", "mu_product", "step"}
"""What their states hold of a parameter as a whole: how many steps were made, and what follows from it."""


class StackOptimizers:
    """The optimizers of a stack in one phase: a single one, unless clients come back after different numbers of steps.

    Args:
        new: makes an optimizer with the settings of a row's.
        saved: what each row's holds of parameters, by their numbers, on the CPU.
        entries: the stack, from which parameters are taken, and in which they are changed.
        names: the parameters' names in it.
    """

    def __init__(
        self,
        new: Callable[[int], Optimizer],
        saved: Sequence[SavedStates],
        entries: StateDict,
        names: Mapping[nn.Parameter, str],
    ) -> None:
        self._parts: list[RowsOptimizer] = []
        first = 0
        for _, alike in groupby(saved, counters):
            self._parts.append(RowsOptimizer(new(first), list(alike), first, entries, names))
            first += self._parts[-1].rows

    def step(self, gradients: Mapping[str, Tensor], left_out: Tensor | None = None) -> None:
        """Makes a step of the rows that are left.

        Args:
            gradients: by name, a row for each row of the stack up to the last one that makes the step; a parameter
                without one stands still.
            left_out: which of these rows stand still, where they `can_skip`; None lets all move.
        """
        for part in self._parts:
            part.step(gradients, left_out)

    def narrow(self, end: int) -> None:
        """Lets go of rows.

        Args:
            end: the stack's row from which on all have made their steps.
        """
        for part in self._parts:
            part.narrow(end)

    def state_dicts(self, end: int, work: LocalWork) -> Iterator[tuple[int, State]]:
        """The rows that `narrow` would let go, each with the ``state_dict`` of what its own optimizer would be now.

        Args:
            end: as for `narrow`.
            work: says where they are kept.
        """
        for part in self._parts:
            yield from part.state_dicts(end, work)


class RowsOptimizer:
    """One optimizer for neighbouring rows of a stack, in the place of one for each row.

    Rows leave it from its end, and what is left of its own state stands still.

    Args:
        optimizer: a new one, which is taken over.
        saved: what those of the rows hold of parameters; their `counters` must be the same.
        first: the first row.
        entries: the stack.
        names: the parameters' names in it.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        saved: list[SavedStates],
        first: int,
        entries: StateDict,
        names: Mapping[nn.Parameter, str],
    ) -> None:
        self.optimizer, self.first, self.rows = optimizer, first, len(saved)
        end = first + self.rows
        self.leaves: dict[str, Tensor] = {}
        leaves = []
        for group in optimizer.param_groups:
            for index, parameter in enumerate(group["params"]):
                name = names[parameter]
                self.leaves[name] = group["params"][index] = entries[name][first:end].detach().requires_grad_()
                leaves.append(self.leaves[name])
        optimizer.state.clear()
        states = stacked(saved, leaves, optimizer.param_groups)
        optimizer.state.update({leaves[number]: state for number, state in states.items()})

    def step(self, gradients: Mapping[str, Tensor], left_out: Tensor | None = None) -> None:
        """Makes a step of the rows that are left, as `StackOptimizers.step`."""
        if not self.rows:
            return
        rows = slice(self.first, self.first + self.rows)
        for name, leaf in self.leaves.items():
            gradient = gradients.get(name)
            leaf.grad = None if gradient is None else gradient[rows]
        if left_out is None:
            self.optimizer.step()
            return
        before = [(leaf.detach().clone(), self._kept_of(leaf)) for leaf in self.leaves.values()]
        self.optimizer.step()
        for leaf, (values, kept) in zip(self.leaves.values(), before, strict=True):
            still = left_out[rows].view(-1, *[1] * (leaf.dim() - 1))
            torch.where(still, values, leaf.data, out=leaf.data)
            for name, value in self._kept_of(leaf).items():
                # what the first step has begun to keep is as good as zero
                self.optimizer.state[leaf][name] = torch.where(still, kept.get(name, 0), value)

    def _kept_of(self, leaf: Tensor) -> dict[str, Tensor]:
        """Copies of what the optimizer keeps of each element of a parameter."""
        state = self.optimizer.state.get(leaf, {})
        return {name: value.clone() for name, value in state.items() if of_elements(name, value)}

    def narrow(self, end: int) -> None:
        """Lets go of the stack's rows from ``end`` on."""
        rows = min(max(end - self.first, 0), self.rows)
        if rows == self.rows:
            return
        for leaf in self.leaves.values():
            leaf.grad = None
            leaf.data = leaf.data[:rows]
            state = self.optimizer.state.get(leaf, {})
            state.update({name: value[:rows] for name, value in state.items() if of_elements(name, value)})
        self.rows = rows

    def state_dicts(self, end: int, work: LocalWork) -> Iterator[tuple[int, State]]:
        """As `StackOptimizers.state_dicts`."""
        leaving = range(max(end - self.first, 0), self.rows)
        if not leaving:
            return
        packed = self.optimizer.state_dict()
        places = [(n, name) for n, state in packed["state"].items() for name in state if of_elements(name, state[name])]
        columns = [packed["state"][n][name][leaving.start : leaving.stop] for n, name in places]
        columns = columns if work.keeps_on_device else moved(columns, CPU)
        elements = dict(zip(places, columns, strict=True))
        for row in leaving:
            state = {
                number: {
                    name: elements[number, name][row - leaving.start] if (number, name) in elements else value
                    for name, value in state.items()
                }
                for number, state in packed["state"].items()
            }
            yield self.first + row, work.kept(packed | {"state": state})


def can_skip(optimizer: Optimizer) -> bool:
    """Whether single rows can leave out a step: nothing counts steps, and what a first one keeps could begin at zero.

    Args:
        optimizer: of a stack.
    """
    return type(optimizer) is SGD and not any(group["dampening"] for group in optimizer.param_groups)


def of_elements(name: str, value: Any) -> bool:
    """Whether an entry of an optimizer's state has a value for each element of a parameter."""
    return isinstance(value, Tensor) and name not in COUNTERS


def counters(saved: SavedStates) -> list[Any]:
    """What the states of optimizers must have in common to be stacked: the same entries, and the same counts."""
    return [
        (number, name, None if of_elements(name, value) else value if value is None else float(value))
        for number, state in saved.items()
        for name, value in state.items()
    ]


def stacked(saved: list[SavedStates], leaves: list[Tensor], groups: list[dict[str, Any]]) -> SavedStates:
    """States of several clients as states of their stack, where its parameters are, as ``load_state_dict`` has them.

    Args:
        saved: of each client what its optimizer has kept; their `counters` are the same.
        leaves: the stacked parameters, by their numbers.
        groups: the optimizer's groups of parameters.
    """
    # steps are counted on the CPU, unless a kernel counts them
    on_device = any(group.get("capturable") or group.get("fused") for group in groups)
    result: SavedStates = {number: dict(state) for number, state in saved[0].items()}
    tensors: dict[tuple[int, str], Tensor] = {}
    for number, state in saved[0].items():
        for name, value in state.items():
            if of_elements(name, value):
                stack = side_by_side([states[number][name] for states in saved], leaves[number].device)
                tensors[number, name] = stack.to(leaves[number].dtype)
            elif isinstance(value, Tensor):
                # a copy: it is counted in place
                result[number][name] = value.clone()
                if name != "step" or on_device:
                    tensors[number, name] = result[number][name]
    if leaves:
        for (number, name), value in zip(tensors, moved([*tensors.values()], leaves[0].device), strict=True):
            result[number][name] = value
    return result
