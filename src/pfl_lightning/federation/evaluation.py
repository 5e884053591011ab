"""Evaluation of a federation's clients, all of them in one pass of their engines."""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias, cast

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.seed import isolate_rng

from pfl_lightning.data import Split
from pfl_lightning.engines import Engine, Job
from pfl_lightning.federation.options import FederationOptions
from pfl_lightning.federation.summary import over_clients
from pfl_lightning.tasks import Monitor, Task

Metrics: TypeAlias = dict[str, dict[str, float]]
"""A client's metrics by the split that they were computed on."""
EnginesOf: TypeAlias = Callable[[Sequence[int]], Iterable[tuple[Engine, list[int]]]]
"""Gives the engines of some clients, each with those that it runs."""
SizesOf: TypeAlias = Callable[[Iterable[int], Split], Mapping[int, int]]
"""Gives the numbers of samples that some clients have in a split."""
JobOf: TypeAlias = Callable[[int, tuple[Split, ...]], Job]
"""Gives the job of a client that is to be evaluated on some splits."""


class Evaluations:
    """The last evaluation of a federation's clients, and the metrics that are kept of their own models.

    Args:
        options: of the federation.
        engines_of: what runs the clients.
        job_of: a client's job as the federation stands.
        sizes_of: how many samples clients have.
        task: what is predicted.
        monitor: the metric that selects.
    """

    def __init__(
        self,
        options: FederationOptions,
        engines_of: EnginesOf,
        job_of: JobOf,
        sizes_of: SizesOf,
        task: Task,
        monitor: Monitor,
    ) -> None:
        self.options = options
        self.engines_of = engines_of
        self.job_of = job_of
        self.sizes_of = sizes_of
        self.monitor = monitor
        self.pooled = task.pooled()
        self.after: dict[int, Metrics] = {}
        """Metrics of the model that each client had after its last training, on all splits; before its first training,
        those of the initial model as it received it. A model that doesn't train stays what it is, and so do its
        metrics. Empty before the first round, and where the Trainer's ``evaluate`` is ``before``."""
        self.results: dict[str, dict[int, dict[str, float]]] = {}
        """Metrics of the last evaluation by split and client; splits are named as in the row of metrics: ``val``,
        ``test_after``, …"""
        self.groups: dict[str, set[int]] = {}
        """Clients that each summary is made of once more, as ``GROUP/NAME/METRIC``, by the group's name."""

    def evaluate(self, clients: Sequence[int], splits: tuple[Split, ...]) -> None:
        """Evaluates clients into `results`, which forget all others; nobody trains for it.

        Args:
            clients: their ids.
            splits: the splits to evaluate on.
        """
        when = self.options.evaluate
        received = self.measure([c for c in clients if when != "after" or c not in self.after], splits, self.job_of)
        self.results = {}
        for client in clients:
            if when != "after":
                self._add(client, received.get(client, {}))
            if when != "before":
                kept = self.after[client] if client in self.after else received.get(client, {})
                own = {name: values for name, values in kept.items() if split_of(name) in splits}
                self._add(client, {self.options.after_name(name): values for name, values in own.items()})

    def _add(self, client: int, metrics: Metrics) -> None:
        for name, values in metrics.items():
            self.results.setdefault(name, {})[client] = values

    def measure(self, clients: Sequence[int], splits: tuple[Split, ...], job_of: JobOf) -> dict[int, Metrics]:
        """Metrics of the models that clients receive, by id, of those that are there.

        Args:
            clients: their ids.
            splits: the splits to evaluate on.
            job_of: what each client is and receives.
        """
        with undisturbed():
            return {
                client: metrics
                for engine, own in self.engines_of(clients)
                for client, metrics in engine.complete("evaluation", (job_of(client, splits) for client in own))
            }

    def keep_initial(self, clients: Iterable[int], trained: Container[int]) -> None:
        """Keeps the metrics of clients that have none yet: in the first round, of those that haven't trained in it.

        Args:
            clients: ids of all.
            trained: ids of those that have, whose metrics are known.
        """
        if splits := self.options.splits_after:
            others = [client for client in clients if client not in trained and client not in self.after]
            self.after.update(self.measure(others, splits, self.job_of))

    def load(self, saved: Mapping[str, Any]) -> None:
        """Takes the metrics that are kept from a saved federation.

        Raises:
            MisconfigurationException: if they are asked for and aren't there.
        """
        when = self.options.evaluate
        # where clients are at sites, it may be that none has answered yet
        then = saved.get("settings", {}).get("trainer.evaluate", "before")
        if when != "before" and then == "before" and saved["round"] and not saved["after"]:
            raise MisconfigurationException(
                f"trainer.evaluate={when}: the checkpoint is of a run with evaluate=before, which kept no metrics of "
                "clients after their training; take before."
            )
        self.after = {} if when == "before" else dict(saved["after"])

    def summary(self) -> dict[str, float]:
        """Summary over clients of all results, as ``NAME/METRIC``."""
        summary: dict[str, float] = {}
        for name, results in self.results.items():
            summary |= self.summary_of(name, results)
        return summary

    def summary_of(self, name: str, results: Mapping[int, Mapping[str, float]]) -> dict[str, float]:
        """Summary over clients of one split, and over those of each group apart.

        Args:
            name: ``val`` or ``test``, with ``_received`` or ``_after`` behind it where the evaluation has several.
            results: metrics by client.
        """
        sizes = self.sizes_of(results, split_of(name))
        chosen = {f"{group}/{name}": members.intersection(results) for group, members in self.groups.items()}
        summary: dict[str, float] = {}
        for title, clients in {name: results.keys(), **chosen}.items():
            if clients or title == name:
                own = {client: results[client] for client in sorted(clients)}
                values = over_clients(own, sizes, self.monitor, self.pooled)
                summary |= {f"{title}/{metric}": value for metric, value in values.items()}
        return summary


def split_of(name: str) -> Split:
    """Which of a client's samples some results are about.

    >>> split_of("val_received")
    'val'
    """
    return cast(Split, name.split("_")[0])


@contextmanager
def undisturbed() -> Iterator[None]:
    """A context without gradients, that leaves random numbers and Lightning's inference mode as they are."""
    with torch.inference_mode(False), torch.no_grad(), isolate_rng():
        yield
