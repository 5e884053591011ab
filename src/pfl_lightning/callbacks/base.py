"""The base class of callbacks that look into rounds."""

from lightning.pytorch import Callback, Trainer

from pfl_lightning.engines import Outcome
from pfl_lightning.federation.federation import Federation
from pfl_lightning.federation.final_test import FinalTest
from pfl_lightning.messages import Updates


class FederatedCallback(Callback):
    """Lightning's `Callback` with the hooks of a round, and of a run's end, in the order in which they are called.

    A plain `Callback` works as well: its epoch hooks come once a round, and hooks of these names are called on it
    where it has them.
    """

    def on_round_start(self, trainer: Trainer, federation: Federation, cohort: list[int]) -> None:
        """Called when the cohort is drawn.

        Args:
            trainer: the trainer.
            federation: the federation; ``federation.round`` is the round's number, from 0.
            cohort: the ids of the clients that take part, sorted.
        """

    def on_client_fit_start(self, trainer: Trainer, federation: Federation, client: int) -> None:
        """Called when a client's job is handed to the engine."""

    def on_client_fit_end(self, trainer: Trainer, federation: Federation, client: int, outcome: Outcome) -> None:
        """Called when a client's local training is done; engines may finish clients in any order."""

    def on_aggregate_start(self, trainer: Trainer, federation: Federation, updates: Updates) -> None:
        """Called before the aggregator, with the updates that it gets, by client id."""

    def on_aggregate_end(self, trainer: Trainer, federation: Federation, logs: dict[str, float]) -> None:
        """Called after the aggregator, with what it logs; payloads and client states are the new ones."""

    def on_final_test(self, trainer: Trainer, federation: Federation, tested: FinalTest) -> None:
        """Called at the end of ``fit``, when the Trainer has tested the last models and the selected ones."""
