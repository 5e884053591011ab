"""Power-of-Choice: select the candidates with the largest losses."""

import math
from collections.abc import Mapping
from typing import Literal

from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.selection.base import Reports, RoundStart, Selection, drawn_by_weight
from pfl_lightning.settings import check_choices, check_least


class PowerOfChoice(Selection):
    r"""Draw :math:`d` candidates, and select the :math:`m` with the largest losses :math:`F_k(x)`.

    Candidates are drawn without replacement by their training samples, :math:`p_k \propto n_k`. With :math:`d = m`, all
    candidates take part, and none is asked for a loss. Equal losses are ordered by id, and a candidate without an
    answer (a client that is gone, or holds no sample) comes last.

    With ``losses="asked"``, every candidate receives its payload, computes the loss on all of its training samples in
    evaluation mode, and answers with one number. Both directions are counted, and selected clients are sent their
    payload once more to train from. With ``losses="remembered"`` (the paper's rpow-d), the loss is the mean of a
    client's last local training, reported only by clients that trained; clients that never trained come first.

    The paper's server counts all clients alike, since the draw already favours clients with many samples: take
    ``aggregator.weighting=uniform`` if the aggregator has this setting, or draw candidates by ``weights="uniform"``.

    Source: Cho, Wang and Joshi, 2020 (https://arxiv.org/abs/2010.01243); the numbers of candidates in its experiments
    could not be verified.

    Args:
        candidates: d, from ``trainer.clients_per_round`` up; d = all clients is the greedy choice.
        losses: ``asked`` or ``remembered``.
        weights: probabilities of candidates: by ``samples``, or all equal (``uniform``); ``uniform`` with d = m equals
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
        """Start without losses.

        Args:
            sizes: training samples of all clients, by id.
        """
        super().setup(sizes)
        self.state = {"losses": {}}

    def check(self, share: float, size: int, num_clients: int) -> None:
        """Refuse fewer candidates than take part, and more than there are clients.

        Args:
            share: ``trainer.clients_per_round`` as given.
            size: ``trainer.clients_per_round`` as a number of clients.
            num_clients: number of clients.
        """
        if not size <= self.candidates <= num_clients:
            raise MisconfigurationException(
                f"trainer.cohort.candidates={self.candidates} must be from {size} "
                f"(trainer.clients_per_round={share}) to {num_clients} (all clients)."
            )

    def choose(self, start: RoundStart) -> list[int]:
        """Return the cohort of the round.

        Args:
            start: the beginning round.
        """
        weights = dict.fromkeys(start.clients, 1) if self.weights == "uniform" else self.sizes
        drawn = drawn_by_weight(start.random, start.clients, self.candidates, weights)
        # asking would cost a payload per candidate and change nothing
        if len(drawn) == start.size:
            return drawn
        known = start.losses(drawn) if self.losses == "asked" else self.state["losses"]
        # no answer: the client can't train now. No memory: the client has never trained, and is explored first.
        missing = -math.inf if self.losses == "asked" else math.inf
        losses = {client: known.get(client, missing) for client in drawn}
        return sorted(drawn, key=lambda client: (-losses[client], client))[: start.size]

    def remember(self, reports: Reports, round: int) -> None:
        """Keep the reported losses of the trained clients.

        Args:
            reports: losses of each client whose update counts.
            round: number of the round, from 0.
        """
        self.state["losses"] |= {client: own["loss"] for client, own in reports.items() if "loss" in own}
