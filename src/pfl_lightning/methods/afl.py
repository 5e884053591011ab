r"""AFL: the model for the worst mixture of clients, whose weights rise with the clients' losses.

Source: Mohri, Sivek and Suresh, 2019 (https://arxiv.org/abs/1902.00146), with federated averaging as by Ro et al., 2021
(https://arxiv.org/abs/2104.02748). Symbols: x is the server's model, :math:`F_k` client k's mean loss at x,
:math:`w_k` its model after training, :math:`\lambda_k` its weight, and S the clients of the round.
"""

import math
from collections.abc import Mapping
from typing import Literal, TypeAlias

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from pfl_lightning.messages import Updates
from pfl_lightning.methods.q_fedavg import LossReport
from pfl_lightning.server import Aggregator, Server, WeightedAverage
from pfl_lightning.settings import check_choices

Ascent: TypeAlias = Literal["exponential", "projected"]
"""How weights rise: by factors (``exponential``), or by sums that are projected back to the simplex (``projected``)."""


class AFL(LossReport):
    """Trains as `FedAvg`, and reports the received model's loss on all training samples.

    The server side is `AgnosticAverage`. Takes the arguments of `FedAvg`.
    Source: Mohri, Sivek and Suresh, 2019 (https://arxiv.org/abs/1902.00146).
    """

    def configure_aggregator(self) -> Aggregator:
        """Return AFL's server."""
        return AgnosticAverage()


class AgnosticAverage(WeightedAverage):
    r"""Averages by weights that climb the loss of their mixture, while clients descend.

    .. math::

        x \leftarrow \frac{\sum_{k \in S} \lambda_k w_k}{\sum_{k \in S} \lambda_k}, \qquad
        \lambda_k \leftarrow \lambda_k e^{\gamma F_k} \cdot c
        \quad\text{or}\quad \lambda \leftarrow \Pi(\lambda + \gamma F)

    from :math:`\lambda_k = 1/K`, which is a game between a model and a mixture: :math:`\min_w \max_\lambda \sum_k
    \lambda_k F_k(w)`. The model counts by the weights of before. c keeps the sum, and :math:`\Pi` goes to the nearest
    weights of the same sum that are at least 0. A weight that is 0 stays so by factors, which never make it 0, and can
    rise again by sums. Losses that aren't finite change nothing.

    The papers' domains are groups of samples; here each client is one. Weights of clients that are away stay as they
    are, and those of the round keep their sum. FedJAX takes a loss of 0 for domains that are away, so that these fall,
    and divides weights by numbers of samples in recent rounds, so that a domain's weight is that of one of its samples:
    where all clients come it is the same rule. easyFL averages the models of all rounds for its tests, as the theory
    has it; here the last one counts.
    Source: Mohri, Sivek and Suresh, 2019, Algorithm 1 (https://arxiv.org/abs/1902.00146), ``projected``; Ro et al.,
    2021 (https://arxiv.org/abs/2104.02748), ``exponential``; google/fedjax@c57ee19, WwZzz/easyFL@ea07f1d.

    Args:
        step: :math:`\gamma`, at least 0; 0 is `WeightedAverage` with ``weighting=uniform``, bit for bit.
        ascent: how weights rise, ``exponential`` or ``projected``.

    Raises:
        MisconfigurationException: if ``step`` is negative, or ``ascent`` is none of its choices.
    """

    fixed_clients = True
    needs = frozenset({"weights", "received_loss"})

    def __init__(self, step: float = 0.1, ascent: Ascent = "exponential") -> None:
        super().__init__(weighting="uniform")
        check_choices("aggregator", ascent=(ascent, ("exponential", "projected")))
        if not 0 <= step < math.inf:
            raise MisconfigurationException(f"aggregator.step={step} must be 0 (the plain mean) or more, such as 0.1.")
        self.step, self.ascent = step, ascent

    def setup(self, server: Server) -> None:
        """Start from the common initial model, with equal weights."""
        super().setup(server)
        self.state["lambda"] = dict.fromkeys(range(server.num_clients), 1 / server.num_clients)

    def aggregate(self, updates: Updates, round: int) -> dict[str, float]:
        """Average the models, and move the weights; log the largest share, ``largest``, and the mixture's ``loss``."""
        if not updates:
            return {}
        own = {client: self.state["lambda"][client] for client in updates}
        total = math.fsum(own.values())
        # by sums, the weights of all of the round's clients may be 0; equal ones are the plain mean to the last bit
        alike = total == 0 or len(set(own.values())) == 1
        shares = {client: 1 / len(own) if alike else weight / total for client, weight in own.items()}
        self.average(updates, shares)
        losses = {client: float(update["received_loss"]) for client, update in updates.items()}
        finite = {client: loss for client, loss in losses.items() if math.isfinite(loss)}
        if self.step and finite:
            self.state["lambda"] = self.state["lambda"] | self.climbed(own, finite)
        return {
            "largest": max(shares.values()),
            "loss": math.fsum(shares[client] * loss for client, loss in losses.items()),
        }

    def climbed(self, weights: Mapping[int, float], losses: Mapping[int, float]) -> dict[int, float]:
        """Return weights after a step, with the same sum.

        Args:
            weights: weights by client id.
            losses: losses of some of the clients, at least one.
        """
        old = torch.tensor([weights[client] for client in losses], dtype=torch.float64)
        rise = self.step * torch.tensor([*losses.values()], dtype=torch.float64)
        # From the largest loss down, which neither rule sees: the exponential of a large loss is infinite, and a large
        # sum has no digits left for weights.
        rise = rise - rise.max()
        if self.ascent == "exponential":
            grown = old * rise.exp()
            new = grown * (old.sum() / grown.sum()) if float(grown.sum()) else old
        else:
            new = onto_simplex(old + rise, float(old.sum()))
        return dict(zip(losses, new.tolist(), strict=True))


def onto_simplex(point: Tensor, total: float) -> Tensor:
    r"""Return the nearest point with entries of at least 0 and a given sum.

    >>> onto_simplex(torch.tensor([0.9, 0.5, -0.2]), 1.0)
    tensor([0.7000, 0.3000, 0.0000])

    Source: Duchi et al., 2008, "Efficient projections onto the l1-ball for learning in high dimensions".

    Args:
        point: ``[n]``, at least one entry.
        total: the sum, at least 0.
    """
    ranked = point.sort(descending=True).values
    # what all kept entries lose, if the first 1, 2, ... of the ranks are kept
    losses = (ranked.cumsum(0) - total) / torch.arange(1, len(point) + 1, dtype=point.dtype)
    kept = max(int((ranked > losses).sum()), 1)
    return (point - losses[kept - 1]).clamp_min(0)
