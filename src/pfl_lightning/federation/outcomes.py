"""Clients whose training diverged."""

from collections.abc import Mapping

from lightning.pytorch.utilities import rank_zero_warn

from pfl_lightning.engines import Outcome


class TrainingDiverged(RuntimeError):
    """Every client of a round ended with a NaN or an infinity."""


def finite(outcomes: Mapping[int, Outcome], round: int) -> dict[int, Outcome]:
    """The outcomes by id, without those of clients that diverged, of which it warns.

    Args:
        outcomes: of the round, by client.
        round: the round's number, from 1.

    Raises:
        TrainingDiverged: if none is left.
    """
    diverged = sorted(client for client, outcome in outcomes.items() if not outcome.finite)
    if diverged and len(diverged) == len(outcomes):
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
