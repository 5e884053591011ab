"""Evaluate stacked clients: one forward pass for many clients."""

from collections.abc import Iterator
from itertools import chain
from typing import TypeAlias

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.func import vmap

from pfl_lightning.client.hooks import overrides
from pfl_lightning.data import Samples, TargetScale, gather
from pfl_lightning.data.trees import Tree, padded, split
from pfl_lightning.engines.client_metrics import ClientMetrics, Columns, Evaluated
from pfl_lightning.engines.errors import reason_of
from pfl_lightning.engines.evaluation import evaluate_padded, rows_at_once
from pfl_lightning.engines.sequential import Sequential
from pfl_lightning.engines.vmap.block import Member
from pfl_lightning.engines.vmap.checks import SharedAttributes
from pfl_lightning.engines.vmap.layers import Layers
from pfl_lightning.engines.vmap.merged import EVALUATION, FEW, Merged
from pfl_lightning.internals.of_torch import BatchNorm
from pfl_lightning.messages import StateDict, tree_map

Blocks: TypeAlias = list[tuple[list[int], Columns]]
"""Rows of clients that were evaluated together, and their metrics."""
Scales: TypeAlias = list[TargetScale | None]
"""Scales of the targets of stacked clients."""
CLIENTS = 8
"""Clients per forward pass if each has as many samples as one pass may have; more if clients have fewer samples."""


class BlockEvaluator:
    """Compute the metrics of `evaluate` for many clients at once.

    Clients with fewer samples are padded. Padding changes no result of a net that treats samples separately, as all
    nets do in evaluation mode except for BatchNorm without running statistics.

    Args:
        sequential: the engine of one client, with the module.
        attributes: the module's attributes, which forward passes must not change.
        merged: parts of nets that take the samples of all clients as one batch.
    """

    def __init__(self, sequential: Sequential, attributes: SharedAttributes, merged: Merged) -> None:
        self.sequential = sequential
        self.module = sequential.module
        self.attributes = attributes
        self.merged = merged
        # Such a layer normalises over a batch, which padding would change.
        normalises = any(isinstance(m, BatchNorm) and m.running_mean is None for m in self.module.modules())
        adapts = overrides(self.module, "evaluation_phases")
        self.usable = not normalises and not adapts and not self.module.measures_itself
        """Whether clients can be evaluated at once, as far as known."""

    def evaluate(self, members: list[Member], entries: StateDict) -> Evaluated | None:
        """Return the metrics of stacked clients; None if each client must be evaluated alone.

        Args:
            members: the clients.
            entries: parameters and buffers, a row per client.
        """
        parts = list(dict.fromkeys(chain.from_iterable(member.job.evaluate for member in members)))
        results: dict[str, ClientMetrics] = {}
        clients = [member.job.client for member in members]
        if not parts:
            return Evaluated(clients, results)
        if not self.usable:
            return None
        self.sequential.set_mode(training=False)
        try:
            with self.attributes.without_turn():
                before = self.attributes.look()
                for part in parts:
                    samples = gather([member.data for member in members], part)
                    blocks = self._measure(samples, entries, [member.data.target_scale for member in members])
                    measured = ClientMetrics([([clients[row] for row in rows], columns) for rows, columns in blocks])
                    asked = {member.job.client for member in members if part in member.job.evaluate}
                    if len(asked) < len(members):
                        measured = measured.of_clients(asked.intersection(measured))
                    if measured:
                        results[part] = measured
                self.attributes.refuse_changes(before, "its forward pass changes {}")
        except torch.cuda.OutOfMemoryError:
            # Memory ran out for a single client beside the stack; another time it may suffice.
            return None
        except Exception as error:
            # Evaluate each client alone instead: an error in the module's own code is raised there, with its own
            # traceback.
            self.usable = False
            reason = reason_of(error)
            if isinstance(error, AttributeError) and error.name in self.module.caches:
                reason = (
                    f"its forward pass reads {type(self.module).__name__}.{error.name}, which differs between clients"
                )
            rank_zero_info(f"clients are evaluated one by one from now on: {reason}.")
            return None
        return Evaluated(clients, results)

    @torch.no_grad()
    def _measure(self, samples: list[Samples], entries: StateDict, scales: Scales) -> Blocks:
        """Return the metrics of clients on their samples, without clients that have none."""
        sizes = [len(of_one) for of_one in samples]
        if not any(sizes):
            return []
        at_once = rows_at_once(self.module.task, next(of_one.y for of_one in samples if len(of_one)))
        groups = [
            rows
            for chosen in rows_of_one_course(entries, len(samples))
            for rows in rows_alike([size * (row in chosen) for row, size in enumerate(sizes)], CLIENTS * at_once)
        ]
        return [*chain.from_iterable(self._measure_rows(rows, samples, entries, at_once, scales) for rows in groups)]

    def _measure_rows(
        self, rows: list[int], samples: list[Samples], entries: StateDict, at_once: int, scales: Scales
    ) -> Blocks:
        """Return the metrics of some rows, evaluated together or, if memory is short, in halves."""
        try:
            return [(rows, self._measure_together(rows, samples, entries, at_once, scales))]
        except torch.cuda.OutOfMemoryError:
            if len(rows) == 1:
                raise
        # Outside the except block, because the error's traceback keeps the tensors alive.
        half = -(-len(rows) // 2)
        parts = [self._measure_rows(part, samples, entries, at_once, scales) for part in (rows[:half], rows[half:])]
        return [*chain.from_iterable(parts)]

    def _measure_together(
        self, rows: list[int], samples: list[Samples], entries: StateDict, at_once: int, scales: Scales
    ) -> Columns:
        """Return the metrics of some rows, with ``at_once`` samples of each row per forward pass."""
        chosen = entries
        if rows != list(range(len(samples))):
            # Indexing copies the stack, so all rows together are used as they are.
            at = torch.tensor(rows, device=self.module.device)
            chosen = {name: stack[at] for name, stack in entries.items()}
        self.merged.see(chosen)
        x = padded([samples[row].x for row in rows])
        with self.sequential.forward_context():
            outputs = torch.cat([self._forward(chosen, chunk) for chunk in split(x, at_once, dim=1)], 1)
        targets, own = [samples[row].y for row in rows], [scales[row] for row in rows]
        return evaluate_padded(outputs, targets, self.sequential.metrics, self.module.task, own)

    def _forward(self, entries: StateDict, x: Tree) -> Tensor:
        """Return outputs ``[clients, n, ...]`` of inputs ``[clients, n, ...]``."""
        if self.merged.parts and EVALUATION not in self.merged.checked:
            self._check_merged(entries, x)
        # flags are the same for all rows, so that a forward pass may choose by them
        rows = {name: None if is_flag(stack) else 0 for name, stack in entries.items()}
        given = {name: stack if rows[name] == 0 else stack[0] for name, stack in entries.items()}
        with Layers() as layers, self.merged.at_once(layers):
            run = vmap(lambda e, x: self.attributes.slots.call(self.module.forward, e, x), in_dims=(rows, 0))
            outputs: Tensor = run(given, x)
        return outputs

    def _check_merged(self, entries: StateDict, x: Tree) -> None:
        """Refuse nets in parts for all clients at once if the first client alone has other outputs."""
        self.merged.checked.add(EVALUATION)
        try:
            outputs = self._forward(
                {name: stack[:FEW] for name, stack in entries.items()}, tree_map(lambda stack: stack[:FEW], x)
            )[0]
            with self.attributes.slots.holding({name: stack[0].clone() for name, stack in entries.items()}):
                expected = self.module(tree_map(lambda stack: stack[0], x))
        except torch.cuda.OutOfMemoryError:
            raise
        # Of any type: peft, transformers and layers of the user fail in their own ways.
        except Exception as error:
            self.merged.refuse(f"its net can't take all clients' samples as one batch ({reason_of(error)})")
            return
        exact = expected.double()
        # The last digit of bfloat16 is about a hundredth of a value.
        if bool((outputs.double() - exact).norm() > 0.1 * exact.norm()):
            self.merged.refuse("its net gives other outputs for all clients' samples as one batch")


def is_flag(stack: Tensor) -> bool:
    """Return whether a stack has one truth value per client, such as ``has_personal`` of `PersonalNet`."""
    return stack.dtype == torch.bool and stack.dim() == 1


def rows_of_one_course(entries: StateDict, clients: int) -> list[set[int]]:
    """Return groups of rows with equal flags, as a forward pass may take another course by each.

    >>> rows_of_one_course({"trained": torch.tensor([True, False, True]), "w": torch.ones(3, 2)}, 3)
    [{0, 2}, {1}]

    Args:
        entries: parameters and buffers, a row per client.
        clients: the number of rows.
    """
    flags = [stack.tolist() for stack in entries.values() if is_flag(stack)]
    groups: dict[tuple[bool, ...], set[int]] = {}
    for row in range(clients):
        groups.setdefault(tuple(flag[row] for flag in flags), set()).add(row)
    return [*groups.values()]


def rows_alike(sizes: list[int], limit: int) -> Iterator[list[int]]:
    """Yield groups of rows for one forward pass: at most doubled in size by padding, and within the limit.

    >>> list(rows_alike([3, 8, 0, 5, 8], 100))
    [[1, 3, 4], [0]]

    Args:
        sizes: samples of each row; rows without samples are left out.
        limit: the largest number of samples of a group, with padding.
    """
    rows = sorted((row for row, size in enumerate(sizes) if size), key=lambda row: -sizes[row])
    while rows:
        longest = sizes[rows[0]]
        # Rows are sorted by size, so the condition holds for the first ones, and the sum is their number.
        together = sum(2 * sizes[row] >= longest for row in rows[: max(limit // longest, 1)])
        yield sorted(rows[:together])
        rows = rows[together:]
