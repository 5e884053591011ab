"""Evaluation of stacked clients: one forward pass for many of them."""

from collections.abc import Iterator
from itertools import chain

import torch
from torch import Tensor
from torch.func import vmap
from torch.nn.modules.batchnorm import _BatchNorm

from pfl_lightning.client.hooks import overrides
from pfl_lightning.data import Samples, gather
from pfl_lightning.data.trees import Tree, padded, split
from pfl_lightning.engines.evaluation import evaluate_padded, rows_at_once
from pfl_lightning.engines.sequential import Sequential
from pfl_lightning.engines.slots import Slots
from pfl_lightning.engines.vmap.block import Member
from pfl_lightning.engines.vmap.checks import SharedAttributes
from pfl_lightning.engines.vmap.layers import Layers
from pfl_lightning.messages import StateDict

CLIENTS = 8
"""Clients that go through the net at once, if each has as many samples as one may have; more where they have fewer."""


class BlockEvaluator:
    """Computes for many clients at once what `evaluate` does for one.

    Samples of clients with fewer are padded, which changes nothing of a net that looks at each by itself, as in
    evaluation mode all do but BatchNorm without running statistics.

    Args:
        sequential: the engine of one client, whose module it is.
        attributes: the module's, which its forward pass must not change.
    """

    def __init__(self, sequential: Sequential, attributes: SharedAttributes) -> None:
        self.sequential = sequential
        self.module = sequential.module
        self.attributes = attributes
        normalises = any(isinstance(m, _BatchNorm) and m.running_mean is None for m in self.module.modules())
        self.usable = not normalises and not overrides(self.module, "evaluation_phases")
        """Whether clients can be evaluated at once, as far as is known."""

    def evaluate(
        self, members: list[Member], entries: StateDict, slots: Slots
    ) -> list[dict[str, dict[str, float]]] | None:
        """Metrics of stacked clients, by the parts that their jobs name; None where it must be done client by client.

        Args:
            members: the clients.
            entries: their parameters and buffers, a row for each client.
            slots: the module's.
        """
        parts = list(dict.fromkeys(chain.from_iterable(member.job.evaluate for member in members)))
        results: list[dict[str, dict[str, float]]] = [{} for _ in members]
        if not parts:
            return results
        if not self.usable:
            return None
        self.sequential.set_mode(training=False)
        try:
            with self.attributes.without_turn():
                before = self.attributes.look()
                for part in parts:
                    samples = gather([member.data for member in members], part)
                    measured = self._measure(samples, entries, slots)
                    for member, result, values in zip(members, results, measured, strict=True):
                        if values and part in member.job.evaluate:
                            result[part] = values
                self.attributes.refuse_changes(before, "its forward pass changes {}")
        except torch.cuda.OutOfMemoryError:
            # of one client beside the stack: for this time only
            return None
        except Exception:
            # if it is wrong in any way, it is so client by client, and says so there
            self.usable = False
            return None
        return results

    @torch.no_grad()
    def _measure(self, samples: list[Samples], entries: StateDict, slots: Slots) -> list[dict[str, float]]:
        """Metrics of each client on its samples; none where there are none."""
        result: list[dict[str, float]] = [{} for _ in samples]
        sizes = [len(of_one) for of_one in samples]
        if not any(sizes):
            return result
        at_once = rows_at_once(self.module.task, next(of_one.y for of_one in samples if len(of_one)))
        for rows in rows_alike(sizes, CLIENTS * at_once):
            measured = self._measure_rows(rows, samples, entries, slots, at_once)
            for row, values in zip(rows, measured, strict=True):
                result[row] = values
        return result

    def _measure_rows(
        self, rows: list[int], samples: list[Samples], entries: StateDict, slots: Slots, at_once: int
    ) -> list[dict[str, float]]:
        """Metrics of some rows, at once or, where memory is short, of their halves."""
        try:
            return self._measure_together(rows, samples, entries, slots, at_once)
        except torch.cuda.OutOfMemoryError:
            if len(rows) == 1:
                raise
        # not in the handler: while the error lives, so do the tensors
        half = -(-len(rows) // 2)
        parts = [self._measure_rows(part, samples, entries, slots, at_once) for part in (rows[:half], rows[half:])]
        return [*chain.from_iterable(parts)]

    def _measure_together(
        self, rows: list[int], samples: list[Samples], entries: StateDict, slots: Slots, at_once: int
    ) -> list[dict[str, float]]:
        """Metrics of some rows, whose samples go through the net so many of each at once."""
        chosen = entries
        if rows != list(range(len(samples))):
            at = torch.tensor(rows, device=self.module.device)
            chosen = {name: stack[at] for name, stack in entries.items()}
        x = padded([samples[row].x for row in rows])
        with self.sequential.forward_context():
            outputs = torch.cat([self._forward(chosen, chunk, slots) for chunk in split(x, at_once, dim=1)], 1)
        return evaluate_padded(outputs, [samples[row].y for row in rows], self.sequential.metrics, self.module.task)

    def _forward(self, entries: StateDict, x: Tree, slots: Slots) -> Tensor:
        """Outputs ``[clients, n, ...]`` of inputs ``[clients, n, ...]``."""
        with Layers():
            outputs: Tensor = vmap(lambda e, x: slots.call(self.module.forward, e, x))(entries, x)
        return outputs


def rows_alike(sizes: list[int], limit: int) -> Iterator[list[int]]:
    """Rows that go through the net together: with padding at most twice their samples, and not too many of them.

    >>> list(rows_alike([3, 8, 0, 5, 8], 100))
    [[1, 3, 4], [0]]

    Args:
        sizes: samples of each row; rows without any are left out.
        limit: samples of all rows together.
    """
    rows = sorted((row for row, size in enumerate(sizes) if size), key=lambda row: -sizes[row])
    while rows:
        longest = sizes[rows[0]]
        together = sum(2 * sizes[row] >= longest for row in rows[: max(limit // longest, 1)])
        yield sorted(rows[:together])
        rows = rows[together:]
