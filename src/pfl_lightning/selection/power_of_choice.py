"""Power-of-Choice: of some candidates, those who fare worst take part."""

import math
from collections.abc import Mapping
from typing import Literal

from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.choices import check_choices, check_least
from pfl_lightning.selection.base import RoundStart, Selection, Told, drawn_by_weight


class PowerOfChoice(Selection):
    r"""Draws :math:`d` candidates, and takes the :math:`m` of them whose losses :math:`F_k(x)` are the largest.

    Candidates are drawn without replacement by their training samples, :math:`p_k \propto n_k`. With :math:`d = m`
    nothing is asked, and all of them take part. Equal losses go by the lower id, and a candidate who gives none (it is
    gone, or holds no sample) comes last.

    With ``losses="asked"`` every candidate receives its payload, takes the loss of all of its training samples in
    evaluation mode, and answers with one number; both ways are counted, and the models of the chosen are sent once more
    to train from. With ``losses="remembered"`` (the paper's rpow-d) it is the mean loss of a client's last local
    training, which only those who trained tell, and who never has comes first.

    Its paper's server counts all clients alike, as they were drawn by their samples already: take
    ``aggregator.weighting=uniform`` where the aggregator has it, or draw candidates by ``weights="uniform"``.
    Source: Cho, Wang and Joshi, 2020 (https://arxiv.org/abs/2010.01243); the numbers of candidates that it tries could
    not be verified.

    Args:
        candidates: d, from ``trainer.clients_per_round`` up; all clients are the greedy choice.
        losses: ``asked`` or ``remembered``.
        weights: how candidates are drawn: by ``samples``, or all as likely (``uniform``); then, with d = m, it is
            `Uniform` bit for bit.

    Raises:
        MisconfigurationException: if a setting is out of its range.
    """

    def __init__(
        self,
        candidates: int,
        losses: Literal["asked", "remembered"] = "asked",
        weights: Literal["samples", "uniform"] = "samples",
    ) -> None:
        super().__init__()
        check_least("trainer.cohort", candidates=(candidates, 1))
        check_choices(
            "trainer.cohort", losses=(losses, ("asked", "remembered")), weights=(weights, ("samples", "uniform"))
        )
        self.candidates, self.losses, self.weights = candidates, losses, weights
        self.asks = frozenset({"received_loss" if losses == "asked" else "loss"})

    def setup(self, sizes: Mapping[int, int]) -> None:
        """Starts without a loss."""
        super().setup(sizes)
        self.state = {"losses": {}}

    def check(self, share: float, size: int, num_clients: int) -> None:
        """Refuses fewer candidates than take part, and more than there are."""
        if not size <= self.candidates <= num_clients:
            raise MisconfigurationException(
                f"trainer.cohort.candidates={self.candidates} must be from {size}, who take part in a round by "
                f"trainer.clients_per_round={share}, to {num_clients}, all clients."
            )

    def choose(self, start: RoundStart) -> list[int]:
        """The cohort of the round."""
        weights = dict.fromkeys(start.clients, 1) if self.weights == "uniform" else self.sizes
        drawn = drawn_by_weight(start.random, start.clients, self.candidates, weights)
        if len(drawn) == start.size:
            return drawn
        known = start.losses(drawn) if self.losses == "asked" else self.state["losses"]
        missing = -math.inf if self.losses == "asked" else math.inf
        losses = {client: known.get(client, missing) for client in drawn}
        return sorted(drawn, key=lambda client: (-losses[client], client))[: start.size]

    def remember(self, told: Told, round: int) -> None:
        """Keeps the losses that those who trained have told."""
        self.state["losses"] |= {client: own["loss"] for client, own in told.items() if "loss" in own}
