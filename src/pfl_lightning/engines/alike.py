"""Evaluate clients with the same model together: one download, and one forward pass for the samples of many clients."""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, cast

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info
from numpy.typing import NDArray
from torch import Tensor

from pfl_lightning.client.hooks import overrides
from pfl_lightning.data.samples import CHUNK, Parts, Samples
from pfl_lightning.data.streamed import Streamed
from pfl_lightning.data.target_scale import TargetScale, source_scale
from pfl_lightning.data.trees import take
from pfl_lightning.engines.base import Engine, Job, ReadsClient, identities
from pfl_lightning.engines.client_metrics import ClientMetrics, Columns, Evaluated
from pfl_lightning.engines.errors import reason_of
from pfl_lightning.engines.evaluation import (
    ON_GPU,
    computed_on,
    evaluate,
    evaluate_outputs,
    rows_at_once,
    rows_of_outputs,
)
from pfl_lightning.internals.of_torch import BatchNorm
from pfl_lightning.messages import tensors

INPUTS = 2**22
"""Input values of jobs that are evaluated together on a CPU, if they are several: 16 MiB in single precision."""


class SamplesMeet(ReadsClient):
    """A client's outputs or metrics depend on the samples of others in a forward pass."""


class Alike:
    """Evaluate the clients of jobs with `Job.alike`, whose states and payloads are the same.

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

    def neighbours(self, jobs: Iterable[Job]) -> Iterator[list[Job]]:
        """Yield the jobs, those of clients with one state and payload that follow one another together.

        Args:
            jobs: the jobs.
        """
        shape = self.module.input_shape
        values = math.prod(shape) if shape.example is None else sum(leaf[0].numel() for leaf in tensors(shape.example))
        most = max(1, (INPUTS if self.engine.device.type == "cpu" else ON_GPU * INPUTS) // (CHUNK * max(1, values)))
        several: list[Job] = []
        for job in jobs:
            can_join = self.usable and bool(job.alike) and most > 1
            first = several[0] if several else job
            is_same = can_join and identities(job.state, job.payload) == identities(first.state, first.payload)
            if several and (not is_same or len(several) == most):
                yield several
                several = []
            if can_join:
                several.append(job)
            else:
                # as it comes: each payload is made when its job is taken
                yield [job]
        if several:
            yield several

    def evaluate(self, jobs: Sequence[Job]) -> Evaluated | None:
        """Return the metrics of the jobs' clients by split; None if they must be evaluated one by one.

        Args:
            jobs: the jobs of several clients, all with one state and payload.
        """
        if not self.usable:
            return None
        job, numbers = jobs[0], [1 + len(job.alike) for job in jobs]
        clients, source = [client for job in jobs for client in (job.client, *job.alike)], job.data.source
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
                        results[split] = ClientMetrics(self._measured(clients, parts, scales, numbers))
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
        self, clients: Sequence[int], parts: Parts, scales: Sequence[TargetScale | None], numbers: Sequence[int]
    ) -> Iterator[tuple[Sequence[int], Columns]]:
        """Yield the clients with samples and their metrics, those computed at once together.

        Args:
            clients: the clients.
            parts: their samples.
            scales: the scales of their targets.
            numbers: the number of clients of each job.
        """
        sizes, task = parts.sizes, self.module.task
        if not all(sizes):
            held = [place for place, size in enumerate(sizes) if size]
            owners = np.repeat(np.arange(len(numbers)), numbers)[held]
            numbers = np.bincount(owners, minlength=len(numbers)).tolist()
            clients, sizes = [clients[place] for place in held], [sizes[place] for place in held]
            scales = [scales[place] for place in held]
        at_once, most = rows_at_once(task, parts.whole.y), rows_of_outputs(task, parts.whole.y)
        ends = np.cumsum(sizes)
        for passes in together(cut(ends, numbers, at_once), ends, most):
            own = slice(passes[0].start, passes[-1].stop)
            rows = [slice(int(ends[one.start]) - sizes[one.start], int(ends[one.stop - 1])) for one in passes]
            if sizes[own.start] > at_once:
                values = self._alone(parts.whole.take(rows[0]), scales[own.start])
            else:
                values = self._together(parts.whole, rows, sizes[own], scales[own])
            yield clients[own], values

    def _alone(self, samples: Samples, scale: TargetScale | None) -> Columns:
        values = evaluate(self.module, samples, self.engine.metrics, self.engine.forward_context, scale=scale)
        return {name: [value] for name, value in values.items()}

    def _together(
        self, whole: Samples, passes: Sequence[slice], sizes: Sequence[int], scales: Sequence[TargetScale | None]
    ) -> Columns:
        """Return the metrics of several clients, from one forward pass or several.

        Args:
            whole: the samples of these and other clients, client after client.
            passes: the rows of each forward pass, one after another.
            sizes: number of samples of each client.
            scales: the scale of each client's targets.

        Raises:
            SamplesMeet: if they aren't those of each client's own forward pass.
        """
        made = []
        for rows in passes:
            with self.engine.forward_context():
                made.append(self.module(take(whole.x, rows)))
        outputs = made[0] if len(made) == 1 else torch.cat(made)
        samples = whole.take(slice(passes[0].start, passes[-1].stop))
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


def cut(ends: NDArray[np.int64], numbers: Sequence[int], at_once: int) -> Iterator[slice]:
    """Yield the clients of each forward pass, as places: of one job, with as many samples as a pass may have.

    >>> [(one.start, one.stop) for one in cut(np.array([2, 4, 9, 10]), [3, 1], at_once=4)]
    [(0, 2), (2, 3), (3, 4)]

    Args:
        ends: each client's number of samples, added to those of the clients before.
        numbers: the number of clients of each job.
        at_once: the number of samples per pass; a client with more is alone.
    """
    place = begin = 0
    for stop in accumulate(numbers):
        while place < stop:
            last = min(stop, max(place + 1, int(np.searchsorted(ends, begin + at_once, side="right"))))
            yield slice(place, last)
            place, begin = last, int(ends[last - 1])


def together(passes: Iterable[slice], ends: NDArray[np.int64], most: int) -> Iterator[list[slice]]:
    """Yield the passes whose metrics are computed at once.

    Args:
        passes: the clients of each pass, as from `cut`.
        ends: as for `cut`.
        most: the number of samples whose metrics may be computed at once.
    """
    several: list[slice] = []
    begin = end = 0
    for one in passes:
        before, end = end, int(ends[one.stop - 1])
        if several and end - begin > most:
            yield several
            several, begin = [], before
        several.append(one)
    yield several


def same(one: Any, other: Any) -> bool:
    """Return whether two values of a metric, or two of its states, are equal up to rounding."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    one, other = (torch.as_tensor(value, dtype=torch.float64) for value in (one, other))
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-4, atol=1e-6, equal_nan=True)
