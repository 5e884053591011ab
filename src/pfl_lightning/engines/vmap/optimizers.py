"""Optimizers for stacks of clients."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop

from pfl_lightning.engines.base import LocalWork
from pfl_lightning.internals.of_torch import take_step
from pfl_lightning.messages import CPU, StateDict
from pfl_lightning.transfers import moved, side_by_side

State: TypeAlias = dict[str, Any]
SavedStates: TypeAlias = dict[int, State]
"""An optimizer's states of parameters, by the parameters' numbers."""

ELEMENTWISE = {ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop}
"""Optimizers that treat each element separately, so that one optimizer of a stack equals one per row."""
COUNTERS = {"eta", "mu", "mu_product", "step"}
"""State entries that concern a parameter as a whole: the number of steps, and values computed from it."""
SKIPPING = (SGD, Adam, AdamW, Adadelta, RMSprop)
"""Optimizers whose step count may differ by row, and whose other states start at zero."""


def rows_optimizers(
    new: Callable[[int], Optimizer],
    saved: Sequence[SavedStates],
    entries: StateDict,
    names: Mapping[nn.Parameter, str],
    skips: bool,
) -> "list[RowsOptimizer]":
    """Return the optimizers of a stack in a phase: one, or several if clients return with different numbers of steps.

    Args:
        new: makes an optimizer with the settings of a row's client.
        saved: each row's saved states, by parameter number, on the CPU.
        entries: the stacked entries, which include the parameters and are changed in place.
        names: the parameters' names.
        skips: whether single rows may skip steps, so that each row counts its own; needs `can_skip`.
    """
    optimizers: list[RowsOptimizer] = []
    first = 0
    # Neighbouring rows only, as each optimizer is of a slice of the stack.
    for _, alike in groupby(saved, partial(in_common, skips=skips)):
        optimizers.append(RowsOptimizer(new(first), list(alike), first, entries, names, skips))
        first += optimizers[-1].rows
    return optimizers


class RowsOptimizer:
    """One optimizer for neighbouring rows of a stack, instead of one optimizer per row.

    Rows leave from the end; their part of the state no longer changes.

    Args:
        optimizer: a new optimizer, which is modified.
        saved: the rows' saved states, equal in `in_common`.
        first: the first row.
        entries: the stacked entries.
        names: the parameters' names.
        skips: whether single rows may skip steps.
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
                # A view of the stack, which the optimizer thus changes in place.
                self.leaves[name] = group["params"][index] = entries[name][first:end].detach().requires_grad_()
                leaves.append(self.leaves[name])
        optimizer.state.clear()
        # Parameter groups as in the optimizer of a single row.
        self._groups = optimizer.state_dict()["param_groups"]
        if skips and isinstance(optimizer, (Adam, AdamW)):
            for group in optimizer.param_groups:
                # These settings make Adam compute with the step count as a tensor, here one per row, on any device.
                group.update(differentiable=True, foreach=False, fused=False)
        states = stacked(saved, leaves, optimizer.param_groups, skips)
        optimizer.state.update({leaves[number]: state for number, state in states.items()})

    def step(self, gradients: Mapping[str, Tensor], left_out: Tensor | None = None) -> None:
        """Take a step of the remaining rows.

        Args:
            gradients: gradients by name, with rows up to the last that takes the step; a parameter without gradient
                stays.
            left_out: a mask of rows that skip the step; None if rows never skip.
        """
        if not self.rows:
            return
        rows = slice(self.first, self.first + self.rows)
        for name, leaf in self.leaves.items():
            gradient = gradients.get(name)
            leaf.grad = gradient if gradient is None or len(gradient) == self.rows else gradient[rows]
        if left_out is None:
            self._take_step()
            return
        # Every row takes the step, then skipping rows are restored: a mask inside torch's optimizers isn't possible.
        before = [
            (leaf.detach().clone(), {name: value.clone() for name, value in self._by_row(leaf).items()})
            for leaf in self.leaves.values()
        ]
        self._take_step()
        for leaf, (values, kept) in zip(self.leaves.values(), before, strict=True):
            still = left_out[rows].view(-1, *[1] * (leaf.dim() - 1))
            torch.where(still, values, leaf.data, out=leaf.data)
            for name, value in self._by_row(leaf).items():
                # A state that a first step creates counts as zero before. The step count that it creates is a number on
                # the CPU; multiplying spreads it over the rows without a copy to the device.
                spread = value if value.dim() else value * still.logical_not()
                self.optimizer.state[leaf][name] = torch.where(still, kept.get(name, 0), spread)

    def _take_step(self) -> None:
        """Take torch's step, and let go of the gradients."""
        take_step(self.optimizer)
        for leaf in self.leaves.values():
            leaf.grad = None

    def _by_row(self, leaf: Tensor) -> dict[str, Tensor]:
        """Return the optimizer's state entries of a parameter with a value per row."""
        state = self.optimizer.state.get(leaf, {})
        return {name: value for name, value in state.items() if of_rows(name, value, self.skips)}

    def narrow(self, end: int) -> None:
        """Release rows from the end of the stack.

        Args:
            end: the first row to release.
        """
        rows = min(max(end - self.first, 0), self.rows)
        if rows == self.rows:
            return
        for leaf in self.leaves.values():
            # A shorter view; the stack itself keeps the released rows.
            leaf.data = leaf.data[:rows]
            kept = {name: value[:rows] for name, value in self._by_row(leaf).items()}
            self.optimizer.state.get(leaf, {}).update(kept)
        self.rows = rows

    def state_dicts(self, end: int, work: LocalWork) -> Iterator[tuple[int, State]]:
        """Yield the rows to be released by `narrow`, each with the ``state_dict`` of the row's own optimizer.

        Args:
            end: as for `narrow`.
            work: the settings of local training, for the storage device.
        """
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
        # torch's optimizers keep step counts on the CPU, and so do clients' states.
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
    """Return True if single rows of an optimizer can skip a step without a trace.

    Args:
        optimizer: the optimizer of a stack.
    """
    # torch doesn't dampen a first step, so a momentum buffer can't start at zero.
    return type(optimizer) in SKIPPING and not any(group.get("dampening") for group in optimizer.param_groups)


def of_rows(name: str, value: Any, skips: bool) -> bool:
    """Return True if an optimizer's state entry has a value per row: all tensors, or all tensors except counters.

    Args:
        name: the entry's name.
        value: the entry's value.
        skips: whether single rows may skip steps.
    """
    return isinstance(value, Tensor) and (skips or name not in COUNTERS)


def in_common(saved: SavedStates, skips: bool) -> list[Any]:
    """Return the properties shared by all optimizer states of a stack: entry names, and values common to all rows."""
    return [
        (number, name, None if of_rows(name, value, skips) else value if value is None else float(value))
        for number, state in saved.items()
        for name, value in state.items()
    ]


def stacked(saved: list[SavedStates], leaves: list[Tensor], groups: list[dict[str, Any]], skips: bool) -> SavedStates:
    """Return the stacked state of several clients' optimizers, on the parameters' device, as after ``load_state_dict``.

    Args:
        saved: each client's saved states, equal in `in_common`.
        leaves: the stacked parameters, by number.
        groups: the optimizer's parameter groups.
        skips: whether single clients may skip steps.
    """
    # torch counts steps on the CPU, except for capturable and fused kernels.
    on_device = any(group.get("capturable") or group.get("fused") for group in groups)
    result: SavedStates = {number: dict(state) for number, state in saved[0].items()}
    tensors: dict[tuple[int, str], Tensor] = {}
    for number, state in saved[0].items():
        for name, value in state.items():
            if of_rows(name, value, skips):
                stack = side_by_side([states[number][name] for states in saved], leaves[number].device)
                # Give a counter per row the dimensions to broadcast.
                stack = stack.view(*stack.shape, *[1] * (leaves[number].dim() - stack.dim()))
                tensors[number, name] = stack.to(leaves[number].dtype)
            elif isinstance(value, Tensor):
                # A copy, since steps count in place.
                result[number][name] = value.clone()
                if name != "step" or on_device:
                    tensors[number, name] = result[number][name]
    if leaves:
        for (number, name), value in zip(tensors, moved([*tensors.values()], leaves[0].device), strict=True):
            result[number][name] = value
    return result
