"""Optimizers of stacks of clients."""

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop

from pfl_lightning.messages import StateDict, detached

State: TypeAlias = dict[str, Any]

ELEMENTWISE = {ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop}
"""Optimizers that treat each element by itself, so that one for a stack does what one for each of its rows would."""
COUNTERS = {"eta", "mu", "mu_product", "step"}
"""What their states hold of a parameter as a whole: how many steps were made, and what follows from it."""


class StackOptimizers:
    """The optimizers of a stack in one phase: a single one, unless clients come back after different numbers of steps.

    Args:
        optimizers: each client's own, in the order of the rows; one may stand for several rows. They are taken over.
        entries: the stack, from which parameters are taken, and in which they are changed.
        names: the parameters' names in it.
    """

    def __init__(self, optimizers: list[Optimizer], entries: StateDict, names: Mapping[nn.Parameter, str]) -> None:
        self._parts: list[RowsOptimizer] = []
        first = 0
        counted = {optimizer: counters(optimizer) for optimizer in dict.fromkeys(optimizers)}
        for _, alike in groupby(optimizers, counted.__getitem__):
            self._parts.append(RowsOptimizer(list(alike), first, entries, names))
            first += self._parts[-1].rows

    def step(self, gradients: Mapping[str, Tensor]) -> None:
        """Makes a step of the rows that are left.

        Args:
            gradients: by name, a row for each row of the stack up to the last one that makes the step; a parameter
                without one stands still.
        """
        for part in self._parts:
            part.step(gradients)

    def narrow(self, end: int) -> None:
        """Lets go of rows.

        Args:
            end: the stack's row from which on all have made their steps.
        """
        for part in self._parts:
            part.narrow(end)

    def state_dicts(self, end: int) -> Iterator[tuple[int, State]]:
        """The rows that `narrow` would let go, each with the ``state_dict`` of what its own optimizer would be now."""
        for part in self._parts:
            yield from part.state_dicts(end)


class RowsOptimizer:
    """One optimizer for neighbouring rows of a stack, in the place of one for each row.

    Rows leave it from its end, and what is left of its own state stands still.

    Args:
        optimizers: those of the rows, whose `counters` must be the same. The first is taken over.
        first: the first row.
        entries: the stack.
        names: the parameters' names in it.
    """

    def __init__(
        self, optimizers: list[Optimizer], first: int, entries: StateDict, names: Mapping[nn.Parameter, str]
    ) -> None:
        self.optimizer, self.first, self.rows = optimizers[0], first, len(optimizers)
        end = first + self.rows
        self.leaves: dict[str, Tensor] = {}
        states = {}
        for group in self.optimizer.param_groups:
            for index, parameter in enumerate(group["params"]):
                name = names[parameter]
                self.leaves[name] = group["params"][index] = entries[name][first:end].detach().requires_grad_()
                if parameter in self.optimizer.state:
                    states[self.leaves[name]] = stacked([o.state[parameter] for o in optimizers])
        self.optimizer.state.clear()
        self.optimizer.state.update(states)

    def step(self, gradients: Mapping[str, Tensor]) -> None:
        """Makes a step of the rows that are left, as `StackOptimizers.step`."""
        if not self.rows:
            return
        for name, leaf in self.leaves.items():
            gradient = gradients.get(name)
            leaf.grad = None if gradient is None else gradient[self.first : self.first + self.rows]
        self.optimizer.step()

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

    def state_dicts(self, end: int) -> Iterator[tuple[int, State]]:
        """The rows that `narrow` would let go, each with the ``state_dict`` of what its own optimizer would be now."""
        leaving = range(max(end - self.first, 0), self.rows)
        packed = self.optimizer.state_dict() if leaving else {}
        for row in leaving:
            state = {
                number: {name: value[row] if of_elements(name, value) else value for name, value in state.items()}
                for number, state in packed["state"].items()
            }
            yield self.first + row, detached(packed | {"state": state})


def of_elements(name: str, value: Any) -> bool:
    """Whether an entry of an optimizer's state has a value for each element of a parameter."""
    return isinstance(value, Tensor) and name not in COUNTERS


def counters(optimizer: Optimizer) -> list[Any]:
    """What the states of optimizers must have in common to be stacked: the same entries, and the same counts."""
    return [
        [
            (name, None if of_elements(name, value) else value if value is None else float(value))
            for name, value in s.items()
        ]
        for s in (optimizer.state.get(p, {}) for group in optimizer.param_groups for p in group["params"])
    ]


def stacked(states: list[State]) -> State:
    """States of one parameter of several clients as a state of their stack."""
    return {
        name: torch.stack([state[name] for state in states]) if of_elements(name, value) else value
        for name, value in states[0].items()
    }
