"""Evaluate clients with the same model together: one download, and one forward pass for the samples of many clients."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from pfl_lightning.client.hooks import overrides
from pfl_lightning.data.samples import Parts, Samples
from pfl_lightning.data.streamed import Streamed
from pfl_lightning.data.target_scale import TargetScale, source_scale
from pfl_lightning.engines.base import Engine, Job, ReadsClient
from pfl_lightning.engines.client_metrics import ClientMetrics, Columns, Evaluated
from pfl_lightning.engines.errors import reason_of
from pfl_lightning.engines.evaluation import computed_on, evaluate, evaluate_outputs, rows_at_once
from pfl_lightning.internals.of_torch import BatchNorm


class SamplesMeet(ReadsClient):
    """A client's outputs or metrics depend on the samples of others in a forward pass."""


class Alike:
    """Evaluate the clients of a job with `Job.alike`, whose states and payloads are the same.

    Their models are the same if the download reads neither samples nor the client's id and draws no random numbers.
    Their samples can share a forward pass if it treats samples separately and draws no random numbers either. The first
    evaluation compares two clients with `evaluate`; where any of this doesn't hold, clients are evaluated one by one.

    Args:
        engine: the engine of one client, with the module.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.module = module = engine.module
        normalises = any(isinstance(m, BatchNorm) and m.running_mean is None for m in module.modules())
        adapts = overrides(module, "evaluation_phases")
        self.usable = not normalises and not adapts and not module.measures_itself
        """Whether clients can be evaluated together, as far as known."""
        self.samples_meet = False
        """Whether a comparison has shown that a client's outputs depend on the pass that they are made in."""
        self._compared = False

    def evaluate(self, job: Job) -> Evaluated | None:
        """Return the metrics of the job's clients by its splits; None if they must be evaluated one by one.

        Args:
            job: the job of several clients.
        """
        if not self.usable:
            return None
        clients, source = [job.client, *job.alike], job.data.source
        results: dict[str, ClientMetrics] = {}
        try:
            # Either all clients have a scale or none has.
            some = source_scale(source, job.client) is not None
            scales = [source_scale(source, client) for client in clients] if some else [None] * len(clients)
            with torch.no_grad(), self.engine.common(job):
                for split in job.evaluate:
                    gathered = source.parts(clients, split, self.engine.device)
                    if not isinstance(gathered, Parts):
                        if any(isinstance(part, Streamed) for part in gathered):
                            # Samples that stay in files are read a batch at a time.
                            self.usable = False
                            return None
                        gathered = Parts(Samples.joined(gathered), [len(part) for part in gathered])
                    parts = gathered.to(self.engine.device, cast(torch.dtype, self.module.dtype))
                    if any(parts.sizes):
                        results[split] = ClientMetrics(self._measured(clients, parts, scales))
        except torch.cuda.OutOfMemoryError:
            return None
        except SamplesMeet:
            self.usable, self.samples_meet = False, True
            return None
        except ReadsClient:
            self.usable = False
            return None
        # Evaluated one by one, clients raise an error of their own code with its traceback and the client's name.
        except Exception as error:
            self.usable = False
            rank_zero_info(f"clients with one model are evaluated one by one from now on: {reason_of(error)}.")
            return None
        return Evaluated(clients, results)

    def _measured(
        self, clients: Sequence[int], parts: Parts, scales: Sequence[TargetScale | None]
    ) -> Iterator[tuple[list[int], Columns]]:
        """Yield the clients with samples and their metrics, those of a forward pass together.

        Args:
            clients: the clients.
            parts: their samples.
            scales: the scales of their targets.
        """
        rows = [row for row, size in enumerate(parts.sizes) if size]
        sizes = [parts.sizes[row] for row in rows]
        ends, at_once = np.cumsum(sizes), rows_at_once(self.module.task, parts.whole.y)
        first = begin = 0
        while first < len(rows):
            # So many clients that one forward pass computes all their samples.
            last = int(np.searchsorted(ends, begin + at_once, side="right"))
            is_alone, last = last == first, max(last, first + 1)
            samples = parts.whole.take(slice(begin, int(ends[last - 1])))
            own = [scales[row] for row in rows[first:last]]
            values = self._alone(samples, own[0]) if is_alone else self._together(samples, sizes[first:last], own)
            yield [clients[row] for row in rows[first:last]], values
            first, begin = last, int(ends[last - 1])

    def _alone(self, samples: Samples, scale: TargetScale | None) -> Columns:
        values = evaluate(self.module, samples, self.engine.metrics, self.engine.forward_context, scale=scale)
        return {name: [value] for name, value in values.items()}

    def _together(self, samples: Samples, sizes: Sequence[int], scales: Sequence[TargetScale | None]) -> Columns:
        """Return the metrics of several clients, from one forward pass.

        Args:
            samples: the clients' samples, client after client.
            sizes: number of samples of each client.
            scales: the scale of each client's targets.

        Raises:
            SamplesMeet: if they aren't those of each client's own forward pass.
        """
        with self.engine.forward_context():
            outputs = self.module(samples.x)
        values = evaluate_outputs(outputs, samples.y, sizes, self.engine.metrics, self.module.task, scales)
        if not self._compared:
            for index in {0, len(sizes) - 1}:
                end = sum(sizes[: index + 1])
                rows = slice(end - sizes[index], end)
                own = {name: column[index] for name, column in values.items()}
                self._compare(samples.take(rows), outputs[rows], own, scales[index])
            self._compared = True
        return values

    def _compare(self, samples: Samples, outputs: Tensor, values: dict[str, Any], scale: TargetScale | None) -> None:
        """Compare a client's outputs and metrics with those of the client alone.

        Args:
            samples: the client's samples.
            outputs: its outputs among those of others.
            values: its metrics.
            scale: the scale of its targets.

        Raises:
            SamplesMeet: if they differ by more than rounding.
        """
        with self.engine.forward_context():
            alone = self.module(samples.x)
        close = torch.finfo(outputs.dtype).eps ** 0.5 * max(1.0, float(alone.abs().max()))
        if outputs.shape != alone.shape or not torch.allclose(outputs, alone, rtol=0, atol=close, equal_nan=True):
            raise SamplesMeet
        # From the same outputs, as those of the other pass may fall into another class or bin.
        wide = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
        wide, target = (wide, samples.y) if scale is None else map(scale.undone, (wide, samples.y))
        metrics = computed_on(self.engine.metrics, wide, target)
        task = self.module.task
        metrics["loss"] = float(task.loss(wide, target, "sum")) / float(task.weight(target) or math.nan)
        if metrics.keys() != values.keys() or not all(map(same, metrics.values(), (values[name] for name in metrics))):
            raise SamplesMeet


def same(one: Any, other: Any) -> bool:
    """Return whether two values of a metric, or two of its states, are equal up to rounding."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    one, other = (torch.as_tensor(value, dtype=torch.float64) for value in (one, other))
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-4, atol=1e-6, equal_nan=True)
