"""Choose the clients of each round, and take the measurements for the choice."""

import math
import random
from collections.abc import Callable, Mapping, Sequence

from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.client.module import ClientModule
from pfl_lightning.data import Split
from pfl_lightning.engines import Job, Outcome
from pfl_lightning.federation.evaluation import JobOf, Metrics
from pfl_lightning.messages import num_bytes
from pfl_lightning.seeds import derive_seed
from pfl_lightning.selection import RoundStart, Selection

NUMBER_BYTES = 8
"""Bytes counted for a number that a client reports."""


class Participation:
    """Run a `Selection` each round with the clients' losses and reports.

    Args:
        selection: the rule that chooses clients.
        measure: returns metrics of clients, as `Evaluations.measure` does.
        job_of: returns a client's job in the federation's current state.
    """

    def __init__(
        self,
        selection: Selection,
        measure: Callable[[Sequence[int], tuple[Split, ...], JobOf], dict[int, Metrics]],
        job_of: JobOf,
    ) -> None:
        self.selection = selection
        self.measure = measure
        self.job_of = job_of
        self.sent = self.told = 0
        """Bytes sent down and reported up for the selection since the round began."""

    def cohort(self, clients: Sequence[int], size: int, seed: int, round: int) -> list[int]:
        """Return the sorted client ids of a round's cohort.

        Args:
            clients: ids of all clients.
            size: the number of clients to choose.
            seed: the federation's seed.
            round: the round's number, from 0.

        Raises:
            MisconfigurationException: if the selection returns an id twice or an unknown id.
        """
        self.sent = self.told = 0
        # The stream depends on seed and round alone, so that a resumed run draws the same cohorts.
        stream = random.Random(derive_seed(seed, "cohort", round))
        chosen = sorted(self.selection.choose(RoundStart(round, clients, size, stream, self._losses)))
        if len(set(chosen)) < len(chosen) or not set(chosen) <= set(clients):
            raise MisconfigurationException(
                f"trainer.cohort={type(self.selection).__name__} chose clients {' '.join(map(str, chosen))} in round "
                f"{round + 1}; its choose() must return ids from 0 to {len(clients) - 1}, each at most once."
            )
        return chosen

    def _losses(self, clients: Sequence[int]) -> dict[int, float]:
        """Return the training losses of the received models, by client id."""

        def job_of(client: int, splits: tuple[Split, ...]) -> Job:
            job = self.job_of(client, splits)
            self.sent += num_bytes(job.travelling)
            return job

        measured = self.measure(clients, ("train",), job_of)
        # For a method that trains before evaluation, the received model's own loss is under "train_received".
        received = {client: metrics.get("train_received", metrics.get("train")) for client, metrics in measured.items()}
        losses = {client: values["loss"] for client, values in received.items() if values is not None}
        self.told += NUMBER_BYTES * len(losses)
        # NaN has no place in an order; such clients count as silent.
        return {client: loss for client, loss in losses.items() if not math.isnan(loss)}

    def remember(self, outcomes: Mapping[int, Outcome], round: int) -> None:
        """Give the selection the clients' reports of a round.

        Args:
            outcomes: the aggregated outcomes, by id.
            round: the round's number, from 0.
        """
        asks = sorted(self.selection.asks)
        told: dict[int, dict[str, float]] = {}
        for client, outcome in outcomes.items():
            values = outcome.metrics | {"seconds": outcome.seconds}
            # Only finite numbers, whatever a site may report.
            told[client] = {name: values[name] for name in asks if math.isfinite(values.get(name, math.nan))}
        self.told += NUMBER_BYTES * sum(map(len, told.values()))
        self.selection.remember(told, round)


def check_tells(client: ClientModule, selection: Selection) -> None:
    """Refuse a selection based on reports missing from the client module's ``tells``.

    Raises:
        MisconfigurationException: if a report is missing from the client module's ``tells``.
    """
    if missing := sorted(selection.asks - client.tells):
        raise MisconfigurationException(
            f"trainer.cohort={type(selection).__name__} asks clients for {' and '.join(missing)}, which "
            f"{type(client).__name__} doesn't tell; add to its `tells`, or take Uniform."
        )
