"""Evaluate the clients of a federation, all in one pass of each engine, and summarise their metrics."""

import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from random import Random
from types import MappingProxyType
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.seed import isolate_rng
from numpy.typing import NDArray
from torchmetrics import Metric

from pfl_lightning.client import ClientModule
from pfl_lightning.data import CHUNK, Split
from pfl_lightning.engines import ClientMetrics, ClientState, Engine, Evaluated, Job
from pfl_lightning.engines.base import identities
from pfl_lightning.engines.client_metrics import by_client, by_split
from pfl_lightning.engines.evaluation import POOLED, ROWS, is_of_all, pooled_of, pooled_value
from pfl_lightning.federation.options import FederationOptions
from pfl_lightning.messages import Message
from pfl_lightning.tasks import Monitor

Metrics: TypeAlias = dict[str, dict[str, float]]
"""A client's metrics by split."""
EnginesOf: TypeAlias = Callable[[Sequence[int]], Iterable[tuple[Engine, list[int]]]]
"""Returns pairs of an engine and the clients that the engine runs."""
SizesOf: TypeAlias = Callable[[Iterable[int], Split], Mapping[int, int]]
"""Returns the number of samples of each client in a split."""
JobOf: TypeAlias = Callable[..., Job]
"""Returns the job of a client, to be evaluated on some splits; with the result of a `ReceivedOf`, if there is one, as a
third argument."""
Received: TypeAlias = tuple[ClientState, Message]
"""The state and the payload of a client's job."""
ReceivedOf: TypeAlias = Callable[[int], Received]
"""Returns a client's state and payload, as the same objects for clients to which they are common."""
Further: TypeAlias = Callable[[Engine, Sequence[int], tuple[Split, ...], JobOf], Mapping[int, Metrics]]
"""Returns further metrics of clients, measured by an engine on splits; empty where there are none."""
OPEN = 8
"""Different models for which clients are gathered at the same time, which bounds the payloads in memory."""
NORMAL = 1.96
"""Quantile of the normal distribution for an interval of 95 %."""


class Evaluations:
    """The results of the last evaluation, and each client's metrics after the client's last training.

    Args:
        options: the Trainer's federated settings.
        engines_of: returns the engines that run some clients.
        job_of: returns a client's job in the federation's current state.
        received_of: returns a client's state and payload in the federation's current state.
        common: returns the state and payload of all clients, or None where they differ.
        sizes_of: returns clients' numbers of samples.
        client: the client module, for `pooled_of`.
        monitor: the metric that selects the best round.
    """

    def __init__(
        self,
        options: FederationOptions,
        engines_of: EnginesOf,
        job_of: JobOf,
        received_of: ReceivedOf,
        common: Callable[[], Received | None],
        sizes_of: SizesOf,
        client: ClientModule,
        monitor: Monitor,
    ) -> None:
        self.options = options
        self.engines_of = engines_of
        self.job_of = job_of
        self.received_of = received_of
        self.common = common
        self.sizes_of = sizes_of
        self.monitor = monitor
        self.client = client
        self.after: dict[int, Metrics] = {}
        """Metrics, on all splits, of the model that each client had after its last training; before the first training,
        metrics of the initial model as received. A model that doesn't train doesn't change, so its metrics stay valid.
        Empty before the first round, and with ``evaluate="before"``."""
        self.results: dict[str, ClientMetrics] = {}
        """Metrics of the last evaluation by split and client; splits have the names of the record's columns: ``val``,
        ``test_after``, …"""
        self.groups: dict[str, set[int]] = {}
        """Sets of clients by the group's name; each gets a summary of its own, as ``GROUP/NAME/METRIC``."""
        self.further: list[Further] = []
        """What callbacks measure of each evaluated model, beside the metrics of outputs and targets."""

    @cached_property
    def pooled(self) -> dict[str, Metric]:
        """The metrics of all clients' samples, made when there are results, as engines settle how clients send them."""
        return pooled_of(self.client)

    def sample(self, clients: Sequence[int], splits: tuple[Split, ...], seed: int) -> Sequence[int]:
        """Return the clients that a round evaluates, rising: all, or a sample of those with samples.

        Args:
            clients: ids of all clients.
            splits: the splits to evaluate on.
            seed: the seed of the sample.
        """
        size = self.options.evaluation_size(len(clients))
        if size == len(clients):
            return clients
        able = [client for client, rows in self._largest(clients, splits).items() if rows]
        return able if len(able) <= size else sorted(Random(seed).sample(able, size))

    def margins(self, clients: Sequence[int]) -> dict[str, float]:
        """Return the number of evaluated clients, and `margin` of the monitored metric as ``NAME/METRIC_margin``.

        A metric of all clients' samples (`is_of_all`) has the margin of its plain mean, ``NAME/METRIC_mean_margin``.

        Empty without results, and if each round evaluates all clients.

        Args:
            clients: ids of all clients.
        """
        if self.options.evaluation_size(len(clients)) == len(clients) or not self.results:
            return {}
        metric = self.monitor.metric
        margins: dict[str, float] = {"clients_evaluated": len(set().union(*self.results.values()))}
        for name, results in self.results.items():
            column = results.column(metric)
            known = ~np.isnan(column)
            values, valued = column[known], results.clients[known].tolist()
            sizes = self.sizes_of(clients, split_of(name))
            held = sum(size > 0 for size in sizes.values())
            # Clients without a value, such as an AUROC of one class, are taken to be as frequent among all clients.
            able = held * len(values) / max(len(results), 1)
            weights = [sizes[client] for client in valued]
            if metric in self.pooled and is_of_all(self.pooled[metric]):
                margins[f"{name}/{metric}_mean_margin"] = margin(values, [1] * len(values), able)
            else:
                margins[f"{name}/{metric}_margin"] = margin(values, weights, able)
        return margins

    def evaluate(self, clients: Sequence[int], splits: tuple[Split, ...]) -> None:
        """Evaluate clients into `results`, which replaces earlier results; no client trains.

        Args:
            clients: the clients' ids.
            splits: the splits to evaluate on.
        """
        when = self.options.evaluate
        # Clients with kept metrics need no pass when only the trained models count.
        unknown = [c for c in clients if c not in self.after] if when == "after" else clients
        evaluated = self.measure(unknown, splits, self.job_of, self.received_of, self.common())
        received = by_split(evaluated)
        if when == "before":
            self.results = received
            return
        # beside metrics from before local training, these have names of their own
        ending = "" if when == "after" else "_after"
        own = by_client(evaluated)
        trained = []
        for client in clients:
            kept = self.after[client] if client in self.after else own.get(client, {})
            named = {f"{name}{ending}": values for name, values in kept.items() if split_of(name) in splits}
            trained.append(Evaluated.of(client, named))
        self.results = (received if when == "both" else {}) | by_split(trained)

    def measure(
        self,
        clients: Sequence[int],
        splits: tuple[Split, ...],
        job_of: JobOf,
        received_of: ReceivedOf | None = None,
        common: Received | None = None,
    ) -> list[Evaluated]:
        """Return the metrics of the received models, without absent clients; `by_split` gives them by split.

        Args:
            clients: the clients' ids.
            splits: the splits to evaluate on.
            job_of: returns each client's job, with state and payload.
            received_of: returns each client's state and payload alone, by which clients with the same model are
                evaluated together, and clients without samples not at all; None evaluates each by itself.
            common: the state and payload of all of them, if they are the same; then ``received_of`` isn't called.
        """
        results: list[Evaluated] = []
        with undisturbed():
            for engine, own in self.engines_of(clients):
                if received_of is not None and engine.takes_alike:
                    sizes = self._largest(own, splits)
                    if not all(sizes.values()):
                        sizes = {client: size for client, size in sizes.items() if size}
                    jobs = (
                        alike(sizes, splits, job_of, received_of)
                        if common is None
                        else all_alike(sizes, splits, job_of, common)
                    )
                else:
                    jobs = (job_of(client, splits) for client in own)
                evaluated: Iterable[Evaluated] = engine.complete("evaluation", jobs)
                for measured in self.further:
                    # all at first: the engine has a single module, which both load with clients
                    evaluated = list(evaluated)
                    if more := measured(engine, own, splits, job_of):
                        evaluated = [each.with_further(more) for each in evaluated]
                results += evaluated
        return results

    def _largest(self, clients: Sequence[int], splits: tuple[Split, ...]) -> Mapping[int, int]:
        """Return each client's number of samples in its largest split."""
        first, *others = [self.sizes_of(clients, split) for split in splits]
        return {k: max(size, *(own[k] for own in others)) for k, size in first.items()} if others else first

    def keep_initial(self, clients: Iterable[int], trained: Container[int]) -> None:
        """Evaluate the initial model of each client without kept metrics or training this round, and keep the result.

        Args:
            clients: ids of all clients.
            trained: ids of the clients that trained, whose metrics are known.
        """
        if splits := self.options.splits_after:
            others = [client for client in clients if client not in trained and client not in self.after]
            # with those that have answered without a sample, who needn't be asked again
            self.after.update(by_client(self.measure(others, splits, self.job_of, self.received_of, self.common())))

    def load(self, saved: Mapping[str, Any]) -> None:
        """Take the kept metrics from a saved federation.

        Raises:
            MisconfigurationException: if ``trainer.evaluate`` asks for kept metrics and the checkpoint has none.
        """
        when = self.options.evaluate
        # An empty record alone is no error: in a deployment, perhaps no site has answered yet.
        then = saved.get("settings", {}).get("trainer.evaluate", "before")
        if when != "before" and then == "before" and saved["round"] and not saved["after"]:
            raise MisconfigurationException(
                f"trainer.evaluate={when}: the checkpoint is of a run with evaluate=before, which kept no metrics of "
                "clients after their training; take before."
            )
        self.after = {} if when == "before" else dict(saved["after"])

    def summary(self) -> dict[str, float]:
        """Return the summary over clients of all results, as ``NAME/METRIC``."""
        summary: dict[str, float] = {}
        for name, results in self.results.items():
            summary |= self.summary_of(name, results)
        return summary

    def summary_of(self, name: str, results: ClientMetrics) -> dict[str, float]:
        """Return the summary of one split over all clients, and over the clients of each group.

        Args:
            name: ``val`` or ``test``, with the suffix ``_received`` or ``_after`` if the evaluation has several models.
            results: metrics by client.
        """
        sizes = self.sizes_of(results, split_of(name))
        groups = {group: members.intersection(results) for group, members in self.groups.items()}
        chosen = {f"{group}/{name}": results.of_clients(members) for group, members in groups.items() if members}
        summary: dict[str, float] = {}
        for title, own in {name: results, **chosen}.items():
            values = over_clients(own, sizes, self.monitor, self.pooled)
            summary |= {f"{title}/{metric}": value for metric, value in values.items()}
        return summary


def alike(sizes: Mapping[int, int], splits: tuple[Split, ...], job_of: JobOf, received_of: ReceivedOf) -> Iterator[Job]:
    """Yield a job for each group of clients with the same state and payload, of at most `CHUNK` samples a split.

    The groups depend on the clients alone, and not on the engine.

    Args:
        sizes: clients with samples, each with the number in its largest split.
        splits: the splits to evaluate on.
        job_of: returns a client's job.
        received_of: returns a client's state and payload.
    """
    # The key is by identity, for which the first client's job keeps the objects alive: a new object may get the number
    # of one that is gone.
    groups: dict[tuple[object, ...], tuple[Job, list[int], list[int]]] = {}

    def closed(key: tuple[object, ...]) -> Job:
        job, clients, _ = groups.pop(key)
        others = tuple(clients[1:])
        return job._replace(alike=others, job_of=lambda client: job_of(client, splits)) if others else job

    for client, size in sizes.items():
        received = state, payload = received_of(client)
        key = identities(state, payload)
        if key in groups and groups[key][2][0] + size > CHUNK:
            yield closed(key)
        # Taken out and put in again, so that the groups are in the order of their last clients.
        job, clients, rows = groups.pop(key) if key in groups else (job_of(client, splits, received), [], [0])
        clients.append(client)
        rows[0] += size
        groups[key] = job, clients, rows
        if len(groups) > OPEN:
            yield closed(next(iter(groups)))
    for key in list(groups):
        yield closed(key)


def all_alike(sizes: Mapping[int, int], splits: tuple[Split, ...], job_of: JobOf, common: Received) -> Iterator[Job]:
    """Yield the jobs of `alike` for clients that all have the same state and payload.

    Args:
        sizes: as for `alike`.
        splits: the splits to evaluate on.
        job_of: returns a client's job.
        common: the state and payload.
    """
    # `alike` looks at each client's state and payload, which takes longer than to evaluate it
    clients, ends = list(sizes), np.cumsum(np.fromiter(sizes.values(), np.int64))
    begin = 0
    while begin < len(clients):
        before = int(ends[begin]) - sizes[clients[begin]]
        stop = max(int(np.searchsorted(ends, before + CHUNK, side="right")), begin + 1)
        first, *others = clients[begin:stop]
        job = job_of(first, splits, common)
        yield job._replace(alike=tuple(others), job_of=lambda client: job_of(client, splits)) if others else job
        begin = stop


def margin(values: Sequence[float] | NDArray[np.float64], weights: Sequence[float], num_clients: float) -> float:
    r"""Return half the width of the 95 % interval of a weighted mean over all clients, estimated from a sample of them.

    With clients' values :math:`y_i`, weights :math:`w_i` and their mean :math:`\bar y = \sum_i w_i y_i / \sum_i w_i`,

    .. math:: 1.96 \sqrt{\Bigl(1 - \frac nN\Bigr) \frac{n}{n - 1} \sum_i w_i^2 (y_i - \bar y)^2} \Big/ \sum_i w_i

    for a sample of n of N clients: 0 where all are in the sample, and NaN for a sample of one. It is too small for
    samples of a few clients.
    Source: Cochran, 1977, Sampling Techniques, section 6.4 (the ratio of two means).

    >>> round(margin([0.5, 0.7, 0.9, 0.7], [1, 1, 1, 1], 100), 4), margin([0.5, 0.7], [1, 3], 2)
    (0.1568, 0.0)

    Args:
        values: the metric of each client of the sample.
        weights: the clients' weights in the mean.
        num_clients: N, the number of clients that the sample is drawn from.
    """
    y, w = np.asarray(values, dtype=np.float64), np.asarray(weights, dtype=np.float64)
    if len(y) >= num_clients:
        return 0.0
    if len(y) < 2:
        return math.nan
    squares = np.square(w * (y - (w * y).sum() / w.sum())).sum() * len(y) / (len(y) - 1)
    return float(NORMAL * math.sqrt((1 - len(y) / num_clients) * squares) / w.sum())


def over_clients(
    results: ClientMetrics,
    sizes: Mapping[int, int],
    monitor: Monitor = Monitor(),  # noqa: B008 - immutable
    pooled: Mapping[str, Metric] = MappingProxyType({}),
) -> dict[str, float]:
    """Return the weighted mean of each metric over clients, and the spread of the monitored metric.

    Clients without a value, or with NaN (a metric undefined for the client's samples), are left out of the metric.

    >>> results = ClientMetrics([([0, 1], {"acc": [1.0, 0.5], "f1": [math.nan, 0.25]})])
    >>> summary = over_clients(results, {0: 30, 1: 10})
    >>> summary["acc"], summary["acc_mean"], summary["acc_std"], summary["acc_worst"]
    (0.875, 0.75, 0.25, 0.5)
    >>> summary["f1"], summary["f1_clients"]
    (0.25, 1)

    Args:
        results: metrics of clients; ``NAME_pooled`` is a client's state of a metric over all samples.
        sizes: numbers of evaluated samples, by client.
        monitor: the metric with a spread, and its direction.
        pooled: the metrics over all samples, by name.

    Returns:
        For each metric ``NAME``, the mean weighted by samples, or for a metric `is_of_all` the value of all samples,
            with the plain mean as ``NAME_mean``; for the monitored metric also `Monitor.spread`;
            ``NAME_clients``, the number of clients with a value, if some have none; ``NAME_pooled``, with its largest
            possible error as ``NAME_pooled_error`` if there is one. A metric is NaN if no client has a value.
    """
    weights = np.fromiter(map(sizes.__getitem__, results), np.float64, len(results))
    summary: dict[str, float] = {}
    for name in results.names:
        if name == ROWS:
            continue
        if name.endswith(POOLED):
            base = name.removesuffix(POOLED)
            value, error = pooled_value(pooled[base], results.states(name))
            summary[base if is_of_all(pooled[base]) else name] = value
            if error:
                summary[f"{name}_error"] = error
            continue
        values = results.column(name)
        valued = ~np.isnan(values)
        # Without any value keep the NaNs, so that the mean is NaN and not an error.
        taken = valued if valued.any() else ~valued
        values, shares = values[taken], weights[taken]
        if name in pooled and is_of_all(pooled[name]):
            # the value comes with the states of clients, which may be refused
            summary |= {name: math.nan, f"{name}_mean": float(values.mean())}
        else:
            summary[name] = float((values * shares).sum() / shares.sum())
        if name == monitor.metric:
            summary |= monitor.spread(values)
        if not valued.all():
            summary[f"{name}_clients"] = int(valued.sum())
    return summary


def split_of(name: str) -> Split:
    """Return the split of a column's name.

    >>> split_of("val_received")
    'val'
    """
    return cast(Split, name.split("_")[0])


@contextmanager
def undisturbed() -> Iterator[None]:
    """Evaluate inside this context without gradients; random states and Lightning's inference mode stay unchanged."""
    # Tensors made in inference mode can't be used in a later training step, so plain no_grad takes its place.
    with torch.inference_mode(False), torch.no_grad(), isolate_rng():
        yield
