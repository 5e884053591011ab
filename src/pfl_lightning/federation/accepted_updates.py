"""Select a round's outcomes for aggregation."""

from collections.abc import Mapping

from lightning.pytorch.utilities import rank_zero_warn

from pfl_lightning.engines import Outcome


class TrainingDiverged(RuntimeError):
    """The loss or the weights of every client in a round became NaN or infinite."""


def unrefused(outcomes: Mapping[int, Outcome], round: int) -> dict[int, Outcome]:
    """Return the outcomes not refused by the engine, by id, and warn of refused ones.

    Args:
        outcomes: the outcomes of the round, by client.
        round: the round's number, from 1.
    """
    for client, outcome in sorted(outcomes.items()):
        if outcome.refused:
            rank_zero_warn(f"round {round}: client {client} is left out of the aggregation: {outcome.refused}.")
    return {client: outcome for client, outcome in outcomes.items() if not outcome.refused}


def finite(outcomes: Mapping[int, Outcome], round: int, expected: int) -> dict[int, Outcome]:
    """Return the outcomes without NaN and infinities, by id, and warn of diverged clients.

    Args:
        outcomes: the outcomes of the round, by client.
        round: the round's number, from 1.
        expected: the number of clients in the cohort; 0 never raises.

    Raises:
        TrainingDiverged: if all expected clients diverged.
    """
    diverged = sorted(client for client, outcome in outcomes.items() if not outcome.finite)
    if diverged and len(diverged) == expected:
        raise TrainingDiverged(
            f"round {round}: the loss or the weights of every client became NaN or infinite; "
            "earlier checkpoints stand; try a smaller learning rate or trainer.gradient_clip_val."
        )
    if diverged:
        rank_zero_warn(
            f"round {round}: left out of the aggregation, because their loss or weights became NaN or "
            f"infinite: clients {', '.join(map(str, diverged))}."
        )
    # Sorted, because engines finish clients in different orders, and sums of floats depend on the order.
    return {client: outcomes[client] for client in sorted(outcomes) if outcomes[client].finite}


def enough(outcomes: dict[int, Outcome], round: int, least: int) -> dict[int, Outcome]:
    """Return the outcomes, or none if a round has fewer than needed, with a warning.

    Args:
        outcomes: the usable outcomes, by client.
        round: the round's number, from 1.
        least: the number of outcomes that a round needs.
    """
    if len(outcomes) >= least:
        return outcomes
    rank_zero_warn(
        f"round {round} leaves the federation as it is: {len(outcomes)} updates are fewer than trainer.min_clients="
        f"{least}."
    )
    return {}
