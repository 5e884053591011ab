"""The base class of callbacks with hooks into a round."""

from collections.abc import Callable
from typing import TypeVar

from lightning.pytorch import Callback, Trainer

from pfl_lightning.engines import Outcome
from pfl_lightning.federation.federation import Federation
from pfl_lightning.federation.final_test import FinalTest
from pfl_lightning.federation.stages import Stage
from pfl_lightning.messages import Updates

Hook = TypeVar("Hook", bound=Callable[..., None])


def empty(hook: Hook) -> Hook:
    """Mark a hook that does nothing, so that the federation spends no call per client on the hook.

    Args:
        hook: the hook; a subclass overrides the mark together with the hook.
    """
    vars(hook)["does_nothing"] = True
    return hook


class FederatedCallback(Callback, Stage):
    """Lightning's `Callback` with further hooks for a round and for a run's end, listed in the order of their calls.

    It is a `Stage` as well: it may decide who takes part (`on_plan`), and change what goes down (`on_send`), what comes
    up (`on_upload`), and what the server takes (`on_collect`) and aggregates (`on_deliver`).

    An epoch is a round, so Lightning's own epoch hooks are called once per round. A plain `Callback` works too: a
    method with a name from below is called on any callback.
    """

    reads_updates: bool = True
    """Whether `on_client_fit_end` or `on_aggregate_start` looks at updates; if so, or if a callback doesn't say, every
    rank of ``trainer.client_states=rank`` gets each client's update and not sums alone."""

    @empty
    def on_round_start(self, trainer: Trainer, federation: Federation, cohort: list[int]) -> None:
        """Called once the cohort is drawn.

        Args:
            trainer: the trainer.
            federation: the federation; ``federation.round`` is the round's number, from 0.
            cohort: sorted ids of the participating clients.
        """

    @empty
    def on_client_fit_start(self, trainer: Trainer, federation: Federation, client: int) -> None:
        """Called when a client's job is handed to the engine."""

    @empty
    def on_client_fit_end(self, trainer: Trainer, federation: Federation, client: int, outcome: Outcome) -> None:
        """Called after a client's training; engines may finish clients in any order."""

    @empty
    def on_aggregate_start(self, trainer: Trainer, federation: Federation, updates: Updates) -> None:
        """Called before aggregation, with the clients' updates by id."""

    @empty
    def on_aggregate_end(self, trainer: Trainer, federation: Federation, logs: dict[str, float]) -> None:
        """Called after aggregation, with the aggregator's logged values; payloads and client states are already new."""

    @empty
    def on_final_test(self, trainer: Trainer, federation: Federation, tested: FinalTest) -> None:
        """Called at the end of ``fit``, after the test of the last and of the selected models."""
