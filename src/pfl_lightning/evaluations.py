"""Evaluation of a federation: every client's model on its own parts, and the server's on the central test set."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, cast

import torch
from lightning.pytorch.utilities.seed import isolate_rng

from pfl_lightning.data import Stage
from pfl_lightning.engines import Evaluated
from pfl_lightning.evaluation import summarise

if TYPE_CHECKING:
    from pfl_lightning.federation import Federation


class Evaluations:
    """The last evaluation of a federation's clients.

    Args:
        federation: the federation.
    """

    def __init__(self, federation: "Federation") -> None:
        self.federation = federation
        self.results: dict[str, dict[int, dict[str, float]]] = {}
        """Metrics by part and client; parts are named as in records: ``val``, ``test_after``, …"""
        self.begin(0)

    def begin(self, clients: int) -> None:
        """Forgets what an earlier evaluation has computed ahead.

        Args:
            clients: how many will be evaluated, in the order of their ids.
        """
        self._coming = range(clients)
        self._stream: Iterator[Evaluated] | None = None
        self._ahead: dict[int, dict[str, dict[str, float]]] = {}

    def evaluate(self, client: int, stages: tuple[Stage, ...], fitting: bool = False) -> None:
        """Puts a client's metrics into the results.

        Args:
            client: its id, the next of those that are coming.
            stages: the parts to evaluate on.
            fitting: whether metrics after training are there already, from the round's own training.
        """
        federation, when = self.federation, self.federation.rounds.evaluate
        if when != "after":
            self._stream = self._stream or self._evaluate_ahead(stages)
            with torch.inference_mode(False), torch.no_grad(), isolate_rng():
                # an engine may evaluate many at once, and be done with them in any order
                while client not in self._ahead:
                    self._ahead.update([next(self._stream)])
            for part, values in self._ahead.pop(client).items():
                self.results.setdefault(part, {})[client] = values
        if when != "before" and not fitting:
            with torch.inference_mode(False), torch.enable_grad(), isolate_rng():
                (outcome,) = federation.engines[federation.kind_of(client)].run([federation.task(client, stages)])
            self.add_after(client, outcome.after)

    def add_after(self, client: int, after: Mapping[str, dict[str, float]]) -> None:
        """Puts a client's metrics after its training into the results, under their names there."""
        for stage, values in after.items():
            self.results.setdefault(self.federation.rounds.after_name(stage), {})[client] = values

    def _evaluate_ahead(self, stages: tuple[Stage, ...]) -> Iterator[Evaluated]:
        """Evaluates the coming clients, as their engines like it best; nothing happens before somebody asks."""
        federation = self.federation
        for kind, engine in enumerate(federation.engines):
            clients = (client for client in self._coming if federation.kind_of(client) == kind)
            yield from engine.evaluate_all(federation.task(client, stages) for client in clients)

    def evaluate_all(self, stage: Stage) -> dict[int, dict[str, float]]:
        """Metrics of every client on one part, of the models that the Trainer's ``evaluate`` names first."""
        clients = self.federation.data.num_clients
        self.results = {}
        self.begin(clients)
        for client in range(clients):
            self.evaluate(client, (stage,))
        return self.results.get(stage, {})

    def evaluate_global(self) -> dict[str, float]:
        """Metrics of the server's model on the central test set, as ``test/global_METRIC``; empty without the two."""
        federation = self.federation
        model = federation.aggregator.global_model()
        whole = all(f"net.{name}" in model for name, _ in federation.client.net.named_parameters())
        part = federation.data.central_data() if whole else None
        if part is None:
            return {}
        with torch.inference_mode(False), torch.no_grad(), isolate_rng():
            values = federation.engines[0].evaluate_model(federation.initial[0] | model, part)
        return {f"test/global_{name}": value for name, value in values.items()}

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
        part = cast(Stage, name.split("_")[0])
        sizes = {client: self.federation.data.size(client, part) for client in results}
        return {f"{name}/{metric}": value for metric, value in summarise(results, sizes).items()}
