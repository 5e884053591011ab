"""Who takes part in a round, and what is asked of clients for it."""

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
"""What a number takes that a client tells."""


class Participation:
    """Has a `Selection` choose the clients of rounds, and asks clients for it.

    Args:
        selection: what chooses.
        measure: metrics of clients, as `Evaluations.measure` gives them.
        job_of: a client's job as the federation stands.
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
        """Bytes down and up that have been asked for since the round began."""

    def cohort(self, clients: Sequence[int], size: int, seed: int, round: int) -> list[int]:
        """The ids of the clients that take part in a round, sorted.

        Args:
            clients: ids of all.
            size: how many shall take part.
            seed: the federation's.
            round: the round's number, from 0.

        Raises:
            MisconfigurationException: if the selection chooses somebody twice, or somebody who isn't there.
        """
        self.sent = self.told = 0
        stream = random.Random(derive_seed(seed, "cohort", round))
        chosen = sorted(self.selection.choose(RoundStart(round, clients, size, stream, self._losses)))
        if len(set(chosen)) < len(chosen) or not set(chosen) <= set(clients):
            raise MisconfigurationException(
                f"trainer.cohort={type(self.selection).__name__} chose clients {' '.join(map(str, chosen))} in round "
                f"{round + 1}; let its choose() return ids from 0 to {len(clients) - 1}, each once."
            )
        return chosen

    def _losses(self, clients: Sequence[int]) -> dict[int, float]:
        """Losses of the models that clients receive, on their training samples, by id."""

        def job_of(client: int, splits: tuple[Split, ...]) -> Job:
            job = self.job_of(client, splits)
            self.sent += num_bytes(job.travelling)
            return job

        measured = self.measure(clients, ("train",), job_of)
        # where a method trains before it is evaluated, the received model is the one that it had until then
        received = {client: metrics.get("train_received", metrics.get("train")) for client, metrics in measured.items()}
        losses = {client: values["loss"] for client, values in received.items() if values is not None}
        self.told += NUMBER_BYTES * len(losses)
        # one that isn't a number has no place in an order
        return {client: loss for client, loss in losses.items() if not math.isnan(loss)}

    def remember(self, outcomes: Mapping[int, Outcome], round: int) -> None:
        """Tells the selection what clients tell of a round.

        Args:
            outcomes: those that count, by id.
            round: the round's number, from 0.
        """
        asks = sorted(self.selection.asks)
        told = {
            # whatever a site may claim
            client: {name: values[name] for name in asks if math.isfinite(values.get(name, math.nan))}
            for client, outcome in outcomes.items()
            for values in [outcome.metrics | {"seconds": outcome.seconds}]
        }
        self.told += NUMBER_BYTES * sum(map(len, told.values()))
        self.selection.remember(told, round)


def check_tells(client: ClientModule, selection: Selection) -> None:
    """Refuses a selection that asks for what clients don't tell.

    Raises:
        MisconfigurationException: if it does.
    """
    if missing := sorted(selection.asks - client.tells):
        raise MisconfigurationException(
            f"trainer.cohort={type(selection).__name__} asks clients for {' and '.join(missing)}, which "
            f"{type(client).__name__} doesn't tell; add to its `tells`, or take Uniform."
        )
