"""Select a round's outcomes for aggregation."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from pfl_lightning.engines import Outcome
from pfl_lightning.messages import Message
from pfl_lightning.privacy.secure_sum import Encoding, NoiseShare, SecureSum, Unsummable


class TrainingDiverged(RuntimeError):
    """The loss or the weights of every client in a round became NaN or infinite."""


def sound(
    outcomes: Mapping[int, Outcome], round: int, expected: int, label: Callable[[int], str] = str
) -> tuple[dict[int, Outcome], int]:
    """Return the outcomes that are neither refused nor diverged, by id, and the number of diverged ones; warn of both.

    Args:
        outcomes: the outcomes of the round, by client.
        round: the round's number, from 1.
        expected: the number of clients in the cohort; 0 never raises.
        label: returns a client's id and name for messages.

    Raises:
        TrainingDiverged: if all expected clients diverged.
    """
    left: dict[int, Outcome] = {}
    diverged: list[int] = []
    # Sorted, because engines finish clients in different orders, and sums of floats depend on the order.
    for client, outcome in sorted(outcomes.items()):
        if outcome.refused:
            rank_zero_warn(f"round {round}: client {label(client)} is left out of the aggregation: {outcome.refused}.")
        elif outcome.finite:
            left[client] = outcome
        else:
            diverged.append(client)
    if diverged and len(diverged) == expected:
        raise TrainingDiverged(
            f"round {round}: the loss or the weights of every client became NaN or infinite; "
            "earlier checkpoints stand; try a smaller learning rate or trainer.gradient_clip_val."
        )
    if diverged:
        rank_zero_warn(
            f"round {round}: left out of the aggregation, because their loss or weights became NaN or "
            f"infinite: clients {', '.join(map(label, diverged))}."
        )
    return left, len(diverged)


def summed(
    outcomes: Mapping[int, Outcome],
    settings: SecureSum,
    sizes: Mapping[int, int],
    weighted: bool,
    received: Message,
    noise: NoiseShare | None,
    draw: Callable[[int, int], Tensor],
    round: int,
) -> tuple[dict[int, Outcome], dict[str, Any]]:
    """Return outcomes whose updates are the mean of all, as a deployment's server gets it, and a record of the sum.

    Masks cancel in a sum, so that a simulation has no need to draw any.

    Args:
        outcomes: of the round, by client.
        settings: of the sum.
        sizes: training samples of each client of the cohort, by id.
        weighted: whether clients count by these.
        received: the payload that clients' changes are from; only used where there is noise.
        noise: each client's share, where the sum is to be differentially private.
        draw: gives standard normal numbers of a client, and so many.
        round: the round's number, from 1.
    """
    start, clients = time.perf_counter(), len(sizes)
    sound = {k: outcome for k, outcome in sorted(outcomes.items()) if outcome.finite and not outcome.refused}
    taken = {k: outcome for k, outcome in outcomes.items() if k not in sound}
    if not sound:
        return taken, {}
    like = next(iter(sound.values())).update
    encoding = Encoding(settings, like, clients, max(sizes.values()) if weighted else None, noise)
    total, sent = torch.zeros(encoding.length, dtype=torch.int64), []
    for client, outcome in sound.items():
        try:
            # added at once: all vectors together would take as much as all updates
            total += encoding.vector(outcome.update, received, lambda count, k=client: draw(k, count))  # type: ignore[misc]
            sent.append(client)
        except Unsummable as reason:
            taken[client] = outcome._replace(update={}, refused=str(reason))
    up, down = encoding.bytes_up(clients, len(sent)), encoding.bytes_down(clients, len(sent))
    row: dict[str, Any] = {"bytes/up": up, "bytes/down": down}
    if enough_to_sum(len(sent), clients, settings, round):
        total = encoding.total([total])
        stand_ins = encoding.stand_ins(total, {client: sizes[client] for client in sent}, received)
        taken |= {client: sound[client]._replace(update=update) for client, update in stand_ins.items()}
        row["secure_sum/clipped"] = int(total[0])
    return taken, row | {"time/secure_sum": time.perf_counter() - start}


def enough_to_sum(sent: int, clients: int, settings: SecureSum, round: int) -> bool:
    """Return whether so many clients are left that their sum may be known, and warn if not.

    Args:
        sent: clients that have sent a vector.
        clients: of the round.
        settings: of the sum.
        round: the round's number, from 1.
    """
    if sent >= settings.least(clients):
        return True
    rank_zero_warn(
        f"round {round} has no sum: {sent} of {clients} clients are left, and trainer.secure_sum.threshold="
        f"{settings.threshold:.3g} asks for {settings.least(clients)}."
    )
    return False
