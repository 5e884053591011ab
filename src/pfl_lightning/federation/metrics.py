"""The columns of a round's row of metrics."""

from collections.abc import Mapping, Sequence
from typing import Any

from pfl_lightning.engines import Outcome
from pfl_lightning.federation.summary import over_clients
from pfl_lightning.messages import num_bytes


def new_row(round: int, cohort: Sequence[int], lr: float) -> dict[str, Any]:
    """Return the row at the start of a round, with the columns of every round.

    Args:
        round: the round's number, from 1.
        cohort: ids of the clients that take part.
        lr: the round's learning rate.
    """
    return {
        "round": round,
        "clients": 0,
        "clients_diverged": 0,
        "clients_refused": 0,
        "clients_absent": 0,
        "cohort": " ".join(map(str, cohort)),
        "lr": lr,
        "bytes/up": 0,
        "bytes/down": 0,
    }


def training_metrics(taken: Mapping[int, Outcome], sizes: Mapping[int, int]) -> dict[str, Any]:
    """Return the columns from local training: number of updates, bytes up, and means over clients as ``train/NAME``.

    Args:
        taken: the aggregated outcomes, by client.
        sizes: numbers of training samples, by client.
    """
    # A client whose method doesn't train has an update but no training metrics.
    trained = {client: outcome.metrics for client, outcome in taken.items() if outcome.metrics}
    return {
        "clients": len(taken),
        "bytes/up": sum(num_bytes(outcome.update) for outcome in taken.values()),
        **{f"train/{name}": value for name, value in over_clients(trained, sizes).items()},
    }
