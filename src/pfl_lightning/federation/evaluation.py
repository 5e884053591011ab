"""Evaluation of a federation: every client's model on its own parts, and the server's on the central test set."""

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.seed import isolate_rng

from pfl_lightning.data import Split
from pfl_lightning.engines import ClientState, Evaluated, Job
from pfl_lightning.federation.summary import summarise
from pfl_lightning.messages import StateDict
from pfl_lightning.seeds import derive_seed

if TYPE_CHECKING:
    from pfl_lightning.federation.federation import Federation

Metrics: TypeAlias = dict[str, dict[str, float]]
"""A client's metrics by the part that they were computed on."""


class Evaluations:
    """The last evaluation of a federation's clients, and the metrics that are kept of their own models.

    Args:
        federation: the federation.
    """

    def __init__(self, federation: "Federation") -> None:
        self.federation = federation
        self.after: dict[int, Metrics] = {}
        """Metrics of the model that each client had after its last training, on all parts; before its first training,
        those of the initial model as it received it. A model that doesn't train stays what it is, and so do its
        metrics. Empty before the first round, and where the Trainer's ``evaluate`` is ``before``."""
        self.begin()

    def begin(self, clients: int = 0) -> None:
        """Forgets the last evaluation.

        Args:
            clients: how many will be evaluated, in the order of their ids.
        """
        self.results: dict[str, dict[int, dict[str, float]]] = {}
        """Metrics by part and client; parts are named as in records: ``val``, ``test_after``, …"""
        self._coming = range(clients)
        self._stream: Iterator[Evaluated] | None = None
        self._ahead: dict[int, Metrics] = {}

    def evaluate(self, client: int, stages: tuple[Split, ...]) -> None:
        """Puts a client's metrics into the results; nobody trains for it.

        Args:
            client: its id, the next of those that are coming.
            stages: the parts to evaluate on.
        """
        options = self.federation.options
        received = self._received(client, stages) if options.evaluate != "after" or client not in self.after else {}
        if options.evaluate != "after":
            self._add(client, received)
        if options.evaluate != "before":
            kept = self.after.get(client, received)
            self._add(client, {options.after_name(part): kept[part] for part in kept if split_of(part) in stages})

    def _add(self, client: int, metrics: Metrics) -> None:
        for part, values in metrics.items():
            self.results.setdefault(part, {})[client] = values

    def _received(self, client: int, stages: tuple[Split, ...]) -> Metrics:
        """Metrics of the model that a client receives."""
        self._stream = self._stream or self._evaluated(self._coming, stages, self.federation.job)
        with undisturbed():
            # an engine may evaluate many at once, and be done with them in any order
            while client not in self._ahead:
                self._ahead.update([next(self._stream)])
        return self._ahead.pop(client)

    def _evaluated(
        self, clients: Sequence[int], stages: tuple[Split, ...], job: Callable[[int, tuple[Split, ...]], Job]
    ) -> Iterator[Evaluated]:
        """Evaluates clients, as their engines like it best; nothing happens before somebody asks."""
        federation = self.federation
        for kind, engine in enumerate(federation.engines):
            own = (client for client in clients if federation.architecture_of(client) == kind)
            yield from engine.evaluate_all(job(client, stages) for client in own)

    def keep_initial(self, trained: Container[int]) -> None:
        """Keeps the metrics of clients that have none yet: in the first round, of those that haven't trained in it.

        Args:
            trained: ids of those that have, whose metrics are known.
        """
        stages = self.federation.options.splits_after
        clients = range(self.federation.data.num_clients) if stages else ()
        others = [client for client in clients if client not in trained and client not in self.after]
        with undisturbed():
            self.after.update(self._evaluated(others, stages, self.federation.job))

    def evaluate_all(self, stage: Split) -> dict[int, dict[str, float]]:
        """Metrics of every client on one part, of the models that the Trainer's ``evaluate`` names first."""
        clients = self.federation.data.num_clients
        self.begin(clients)
        for client in range(clients):
            self.evaluate(client, (stage,))
        return self.results.get(stage, {})

    def evaluate_global(self, model: StateDict | None = None) -> dict[str, float]:
        """Metrics of the server's model on the central test set, as ``test/global_METRIC``; empty without the two.

        Args:
            model: a ``state_dict`` that holds it; None takes the server's own.
        """
        federation = self.federation
        own = federation.aggregator.global_model()
        whole = all(f"net.{name}" in own for name, _ in federation.client.net.named_parameters())
        part = federation.data.central_data() if whole else None
        if part is None:
            return {}
        with undisturbed():
            values = federation.engines[0].evaluate_model(model or federation.initial[0] | own, part)
        return {f"test/global_{name}": value for name, value in values.items()}

    def test_at(self, checkpoint: Mapping[str, Any], round: int) -> dict[str, float]:
        """Test metrics of the models in a checkpoint, summarised; of the federation itself nothing is used or changed.

        Args:
            checkpoint: as it was saved.
            round: the round that it must be of, from 1; nothing is returned for a checkpoint of another.
        """
        saved, federation = checkpoint["federation"], self.federation
        if saved["round"] != round:
            return {}
        with undisturbed():
            metrics: Mapping[int, Metrics] = (
                saved["after"]
                if federation.options.evaluate == "after"
                else dict(self._evaluated(range(federation.data.num_clients), ("test",), partial(self._job_at, saved)))
            )
        tested = {client: parts["test"] for client, parts in metrics.items() if "test" in parts}
        return self.summary_of("test", tested) | self.evaluate_global(checkpoint["state_dict"])

    def _job_at(self, saved: Mapping[str, Any], client: int, stages: tuple[Split, ...]) -> Job:
        """A client's job in the round after a saved state of the federation."""
        federation = self.federation
        own = saved["clients"].get(client, {"personal": saved["initial"][federation.architecture_of(client)]})
        payload, data = saved["payloads"][client], federation.data.client(client)
        seed = derive_seed(saved["seed"], "train", saved["round"], client)
        return Job(client, saved["round"], ClientState(**own), payload, data, seed, saved["lr_factor"], stages)

    def load(self, saved: Mapping[str, Any]) -> None:
        """Takes the metrics that are kept from a saved state of the federation.

        Raises:
            MisconfigurationException: if they are asked for and aren't there.
        """
        when = self.federation.options.evaluate
        if when != "before" and saved["round"] and not saved["after"]:
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
        """Summary over clients of one part.

        Args:
            name: ``val`` or ``test``, with ``_received`` or ``_after`` behind it where the evaluation has more parts.
            results: metrics by client.
        """
        sizes = {client: self.federation.data.size(client, split_of(name)) for client in results}
        return {f"{name}/{metric}": value for metric, value in summarise(results, sizes).items()}


def split_of(part: str) -> Split:
    """Which of a client's samples a part of an evaluation is about.

    >>> split_of("val_received")
    'val'
    """
    return cast(Split, part.split("_")[0])


@contextmanager
def undisturbed() -> Iterator[None]:
    """A context without gradients, that leaves random numbers and Lightning's inference mode as they are."""
    with torch.inference_mode(False), torch.no_grad(), isolate_rng():
        yield
