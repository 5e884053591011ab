"""Which outcomes of a round count."""

from collections.abc import Mapping

from lightning.pytorch.utilities import rank_zero_warn

from pfl_lightning.engines import Outcome


class TrainingDiverged(RuntimeError):
    """Every client of a round ended with a NaN or an infinity."""


def unrefused(outcomes: Mapping[int, Outcome], round: int) -> dict[int, Outcome]:
    """The outcomes by id, without those that the engine has refused, of which it warns.

    Args:
        outcomes: of the round, by client.
        round: the round's number, from 1.
    """
    for client, outcome in sorted(outcomes.items()):
        if outcome.refused:
            rank_zero_warn(f"round {round}: client {client} is left out of the aggregation: {outcome.refused}.")
    return {client: outcome for client, outcome in outcomes.items() if not outcome.refused}


def finite(outcomes: Mapping[int, Outcome], round: int, expected: int) -> dict[int, Outcome]:
    """The outcomes by id, without those of clients that diverged, of which it warns.

    Args:
        outcomes: of the round, by client.
        round: the round's number, from 1.
        expected: clients that were to take part.

    Raises:
        TrainingDiverged: if all of them diverged.
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
    return {client: outcomes[client] for client in sorted(outcomes) if outcomes[client].finite}


def enough(outcomes: dict[int, Outcome], round: int, least: int) -> dict[int, Outcome]:
    """The outcomes, or none where there are fewer than a round needs, of which it warns.

    Args:
        outcomes: those that count, by client.
        round: the round's number, from 1.
        least: how many a round needs.
    """
    if len(outcomes) >= least:
        return outcomes
    rank_zero_warn(
        f"round {round} leaves the federation as it is: {len(outcomes)} updates are fewer than trainer.min_clients="
        f"{least}."
    )
    return {}
