"""Optimizers of stacks of clients."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
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
SKIPPING = (SGD, Adam, AdamW, Adadelta, RMSprop)
"""Optimizers whose counter may differ by row, and that begin at zero with all that they keep."""


class StackOptimizers:
    """The optimizers of a stack in one phase: a single one, unless clients come back after different numbers of steps.

    Args:
        new: makes an optimizer with the settings of a row's.
        saved: what each row's holds of parameters, by their numbers, on the CPU.
        entries: the stack, from which parameters are taken, and in which they are changed.
        names: the parameters' names in it.
        skips: whether single rows may leave out steps, each of which then counts its own; the optimizer `can_skip`.
    """

    def __init__(
        self,
        new: Callable[[int], Optimizer],
        saved: Sequence[SavedStates],
        entries: StateDict,
        names: Mapping[nn.Parameter, str],
        skips: bool,
    ) -> None:
        self._parts: list[RowsOptimizer] = []
        first = 0
        for _, alike in groupby(saved, partial(in_common, skips=skips)):
            self._parts.append(RowsOptimizer(new(first), list(alike), first, entries, names, skips))
            first += self._parts[-1].rows

    def step(self, gradients: Mapping[str, Tensor], left_out: Tensor | None = None) -> None:
        """Makes a step of the rows that are left.

        Args:
            gradients: by name, a row for each row of the stack up to the last one that makes the step; a parameter
                without one stands still.
            left_out: which of these rows stand still; None, where no row ever skips, lets all move.
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
        saved: what those of the rows hold of parameters, with the same `in_common`.
        first: the first row.
        entries: the stack.
        names: the parameters' names in it.
        skips: whether single rows may leave out steps.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        saved: list[SavedStates],
        first: int,
        entries: StateDict,
        names: Mapping[nn.Parameter, str],
        skips: bool,
    ) -> None:
        self.optimizer, self.first, self.rows, self.skips = optimizer, first, len(saved), skips
        end = first + self.rows
        self.leaves: dict[str, Tensor] = {}
        leaves = []
        for group in optimizer.param_groups:
            for index, parameter in enumerate(group["params"]):
                name = names[parameter]
                self.leaves[name] = group["params"][index] = entries[name][first:end].detach().requires_grad_()
                leaves.append(self.leaves[name])
        optimizer.state.clear()
        # as a row's own has them
        self._groups = optimizer.state_dict()["param_groups"]
        if skips and isinstance(optimizer, (Adam, AdamW)):
            for group in optimizer.param_groups:
                # how they compute with the count as a tensor, here one that broadcasts, on any device
                group.update(differentiable=True, foreach=False, fused=False)
        states = stacked(saved, leaves, optimizer.param_groups, skips)
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
        before = [
            (leaf.detach().clone(), {name: value.clone() for name, value in self._by_row(leaf).items()})
            for leaf in self.leaves.values()
        ]
        self.optimizer.step()
        for leaf, (values, kept) in zip(self.leaves.values(), before, strict=True):
            still = left_out[rows].view(-1, *[1] * (leaf.dim() - 1))
            torch.where(still, values, leaf.data, out=leaf.data)
            for name, value in self._by_row(leaf).items():
                # what a first step begins to keep is as good as zero; the count that it begins, a number on the CPU, is
                # spread over the rows by a product, which needs no copy to the device
                spread = value if value.dim() else value * still.logical_not()
                self.optimizer.state[leaf][name] = torch.where(still, kept.get(name, 0), spread)

    def _by_row(self, leaf: Tensor) -> dict[str, Tensor]:
        """What the optimizer keeps of a parameter for each row."""
        state = self.optimizer.state.get(leaf, {})
        return {name: value for name, value in state.items() if of_rows(name, value, self.skips)}

    def narrow(self, end: int) -> None:
        """Lets go of the stack's rows from ``end`` on."""
        rows = min(max(end - self.first, 0), self.rows)
        if rows == self.rows:
            return
        for leaf in self.leaves.values():
            leaf.grad = None
            leaf.data = leaf.data[:rows]
            kept = {name: value[:rows] for name, value in self._by_row(leaf).items()}
            self.optimizer.state.get(leaf, {}).update(kept)
        self.rows = rows

    def state_dicts(self, end: int, work: LocalWork) -> Iterator[tuple[int, State]]:
        """As `StackOptimizers.state_dicts`."""
        leaving = range(max(end - self.first, 0), self.rows)
        if not leaving:
            return
        packed = self.optimizer.state_dict()["state"]
        by_row = {
            (number, name): (value.flatten() if name in COUNTERS else value)[leaving.start : leaving.stop]
            for number, state in packed.items()
            for name, value in state.items()
            if of_rows(name, value, self.skips)
        }
        # the clients' own count on the CPU
        travel = [place for place in by_row if place[1] in COUNTERS or not work.keeps_on_device]
        by_row.update(zip(travel, moved([by_row[place] for place in travel], CPU), strict=True))
        for row in leaving:
            state = {
                number: {
                    name: by_row[number, name][row - leaving.start] if (number, name) in by_row else value
                    for name, value in state.items()
                }
                for number, state in packed.items()
            }
            yield self.first + row, work.kept({"state": state, "param_groups": self._groups})


def can_skip(optimizer: Optimizer) -> bool:
    """Whether single rows can leave out a step, without a trace.

    Args:
        optimizer: of a stack.
    """
    # a first step isn't dampened: its momentum couldn't begin at zero
    return type(optimizer) in SKIPPING and not any(group.get("dampening") for group in optimizer.param_groups)


def of_rows(name: str, value: Any, skips: bool) -> bool:
    """Whether an entry of the state of a stack's optimizer has values for each row: all tensors, or all but counters.

    Args:
        name: the entry's.
        value: the entry.
        skips: whether single rows may leave out steps.
    """
    return isinstance(value, Tensor) and (skips or name not in COUNTERS)


def in_common(saved: SavedStates, skips: bool) -> list[Any]:
    """What the states of optimizers must have in common to be stacked: the same entries, and what isn't `of_rows`."""
    return [
        (number, name, None if of_rows(name, value, skips) else value if value is None else float(value))
        for number, state in saved.items()
        for name, value in state.items()
    ]


def stacked(saved: list[SavedStates], leaves: list[Tensor], groups: list[dict[str, Any]], skips: bool) -> SavedStates:
    """States of several clients as states of their stack, where its parameters are, as ``load_state_dict`` has them.

    Args:
        saved: of each client what its optimizer has kept, with the same `in_common`.
        leaves: the stacked parameters, by their numbers.
        groups: the optimizer's groups of parameters.
        skips: whether single clients may leave out steps.
    """
    # steps are counted on the CPU, unless a kernel counts them
    on_device = any(group.get("capturable") or group.get("fused") for group in groups)
    result: SavedStates = {number: dict(state) for number, state in saved[0].items()}
    tensors: dict[tuple[int, str], Tensor] = {}
    for number, state in saved[0].items():
        for name, value in state.items():
            if of_rows(name, value, skips):
                stack = side_by_side([states[number][name] for states in saved], leaves[number].device)
                # a counter of each row broadcasts
                stack = stack.view(*stack.shape, *[1] * (leaves[number].dim() - stack.dim()))
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
