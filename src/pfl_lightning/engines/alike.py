"""Evaluate clients with the same model together: one download, and one forward pass for the samples of many clients."""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from pfl_lightning.client.hooks import overrides
from pfl_lightning.data.samples import Parts, Samples, Split
from pfl_lightning.data.streamed import Streamed
from pfl_lightning.data.target_scale import TargetScale, source_scale
from pfl_lightning.data.trees import Tree, joined
from pfl_lightning.engines.base import Engine, Job, ReadsClient, identities
from pfl_lightning.engines.client_metrics import ClientMetrics, Columns, Evaluated
from pfl_lightning.engines.errors import reason_of
from pfl_lightning.engines.evaluation import computed_on, evaluate, evaluate_outputs, rows_at_once, rows_of_outputs
from pfl_lightning.internals.of_torch import BatchNorm


class SamplesMeet(ReadsClient):
    """A client's outputs or metrics depend on the samples of others in a forward pass."""


class Pass(NamedTuple):
    """What a forward pass gave for several clients.

    Args:
        clients: ids of the clients, each with a sample at least.
        sizes: their numbers of samples.
        scales: the scales of their targets.
        outputs: the outputs, client after client.
        target: the samples' targets.
    """

    clients: Sequence[int]
    sizes: Sequence[int]
    scales: Sequence[TargetScale | None]
    outputs: Tensor
    target: Tree


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
        several: list[Job] = []
        common: tuple[object, ...] | None = None
        for job in jobs:
            own = identities(job.state, job.payload) if self.usable and job.alike else None
            if several and own != common:
                yield several
                several = []
            if own is None:
                # as it comes: each payload is made when its job is taken
                yield [job]
            else:
                several.append(job)
                common = own
        if several:
            yield several

    def evaluate(self, jobs: Sequence[Job]) -> Evaluated | None:
        """Return the metrics of the jobs' clients by split; None if they must be evaluated one by one.

        Args:
            jobs: the jobs of several clients, all with one state and payload.
        """
        if not self.usable:
            return None
        results: dict[str, ClientMetrics] = {}
        try:
            with torch.no_grad(), self.engine.common(jobs[0]):
                for split in jobs[0].evaluate:
                    metrics = ClientMetrics(self._measured(jobs, split))
                    if metrics:
                        results[split] = metrics
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
        return Evaluated([client for job in jobs for client in (job.client, *job.alike)], results)

    def _measured(self, jobs: Sequence[Job], split: Split) -> Iterator[tuple[Sequence[int], Columns]]:
        """Yield the clients with samples and their metrics, those computed at once together.

        Args:
            jobs: as for `evaluate`.
            split: the split.

        Raises:
            SamplesMeet: if the metrics aren't those of each client's own forward pass.
        """
        task = self.module.task
        passes: list[Pass] = []
        rows = 0
        for clients, sizes, scales, samples in chain.from_iterable(self._batches(job, split) for job in jobs):
            if len(samples) > rows_at_once(task, samples.y):
                yield clients, self._alone(samples, scales[0])
                continue
            with self.engine.forward_context():
                one = Pass(clients, sizes, scales, self.module(samples.x), samples.y)
            if not self._compared:
                self._compare_ends(one, samples)
                self._compared = True
            if passes and rows + len(samples) > rows_of_outputs(task, samples.y):
                yield self._together(passes)
                passes, rows = [], 0
            passes.append(one)
            rows += len(samples)
        if passes:
            yield self._together(passes)

    def _batches(
        self, job: Job, split: Split
    ) -> Iterator[tuple[list[int], list[int], list[TargetScale | None], Samples]]:
        """Yield some clients of a job, with sizes, scales and samples, for one forward pass; large ones alone.

        Args:
            job: the job of several clients.
            split: the split.

        Raises:
            ReadsClient: if samples stay in files, which are read a batch at a time.
        """
        clients, source = [job.client, *job.alike], job.data.source
        gathered = source.parts(clients, split, self.engine.device)
        if not isinstance(gathered, Parts):
            if any(isinstance(part, Streamed) for part in gathered):
                raise ReadsClient("samples stay in files")
            gathered = Parts(Samples.joined(gathered), [len(part) for part in gathered])
        parts = gathered.to(self.engine.device, cast(torch.dtype, self.module.dtype))
        held = [place for place, size in enumerate(parts.sizes) if size]
        clients, sizes = [clients[place] for place in held], [parts.sizes[place] for place in held]
        # either all clients have a scale or none has
        some = bool(clients) and source_scale(source, clients[0]) is not None
        ends, first, begin = np.cumsum(sizes), 0, 0
        while first < len(clients):
            # so many clients that one forward pass computes all their samples
            last = int(np.searchsorted(ends, begin + rows_at_once(self.module.task, parts.whole.y), side="right"))
            own = slice(first, max(last, first + 1))
            end = int(ends[own.stop - 1])
            scales = [source_scale(source, client) if some else None for client in clients[own]]
            yield clients[own], sizes[own], scales, parts.whole.take(slice(begin, end))
            first, begin = own.stop, end

    def _alone(self, samples: Samples, scale: TargetScale | None) -> Columns:
        values = evaluate(self.module, samples, self.engine.metrics, self.engine.forward_context, scale=scale)
        return {name: [value] for name, value in values.items()}

    def _together(self, passes: Sequence[Pass]) -> tuple[Sequence[int], Columns]:
        """Return the clients of some passes, and their metrics.

        Args:
            passes: the passes, at least one.
        """
        clients, sizes, scales = (list(chain.from_iterable(column)) for column in list(zip(*passes, strict=True))[:3])
        outputs, target = joined([(one.outputs, one.target) for one in passes]) if len(passes) > 1 else passes[0][3:]
        return clients, evaluate_outputs(outputs, target, sizes, self.engine.metrics, self.module.task, scales)

    def _compare_ends(self, one: Pass, samples: Samples) -> None:
        """Compare the first and the last client of a pass with what each gives alone.

        Args:
            one: the pass.
            samples: its samples.

        Raises:
            SamplesMeet: if outputs or metrics differ by more than rounding.
        """
        _, values = self._together([one])
        for index in {0, len(one.sizes) - 1}:
            end = sum(one.sizes[: index + 1])
            rows = slice(end - one.sizes[index], end)
            own = {name: column[index] for name, column in values.items()}
            self._compare(samples.take(rows), one.outputs[rows], own, one.scales[index])

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
