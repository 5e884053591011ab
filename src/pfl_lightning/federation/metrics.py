"""The row of metrics of a round."""

from collections.abc import Mapping, Sequence
from typing import Any

from pfl_lightning.engines import Outcome
from pfl_lightning.federation.summary import over_clients
from pfl_lightning.messages import num_bytes


def new_row(round: int, cohort: Sequence[int], lr: float) -> dict[str, Any]:
    """The row as a round begins it, with the columns that every round has.

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
    """What local training adds to the row: the clients that count, the bytes they send, and means as ``train/NAME``.

    Args:
        taken: outcomes that the aggregator gets, by client.
        sizes: training samples, by client.
    """
    trained = {client: outcome.metrics for client, outcome in taken.items() if outcome.metrics}
    return {
        "clients": len(taken),
        "bytes/up": sum(num_bytes(outcome.update) for outcome in taken.values()),
        **{f"train/{name}": value for name, value in over_clients(trained, sizes).items()},
    }
