r"""FedAsync: the server mixes each update into its model as it arrives, the less the staler it is.

Symbols: x is the server's model, :math:`w_k` the model of client k after training, and :math:`\tau_k` the number of the
server's steps since the client's start.
"""

from typing import Literal

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.messages import StateDict, Updates
from pfl_lightning.methods.fedbuff import staleness
from pfl_lightning.server import WeightedAverage
from pfl_lightning.settings import check_choices, check_least


class FedAsync(WeightedAverage):
    r"""Mixes each client's model into the server's.

    .. math:: x \leftarrow (1 - \alpha_k)\, x + \alpha_k w_k, \qquad \alpha_k = \alpha\, s(\tau_k)

    with s one of ``constant``, 1; ``polynomial``, :math:`(1 + \tau)^{-a}`; and ``hinge``, 1 up to :math:`\tau = b` and
    :math:`1 / (a (\tau - b) + 1)` above. Clients train with a proximal term, as `FedProx`. With
    ``--trainer.schedule Asynchronous --trainer.schedule.buffer 1`` each update is a step of the server. Updates of the
    same round, as of a larger buffer or without a clock, are mixed in one after another, by their times of arrival and
    then by id, each with its staleness at the beginning of the round. Running statistics are mixed as weights, and
    counters take the maximum. For the same number of updates it ends below `FedAvg` where clients are unlike, as with
    few classes each: the model leans to the last clients, and to fast ones.

    Mix and rules are those of the official code, which calls ``polynomial`` ``power``, and can lower :math:`\alpha`
    after given rounds; its README takes 0.8. The defaults here are a choice of this package.
    Source: Xie, Koyejo and Gupta, 2019 (https://arxiv.org/abs/1903.03934); xcgoner/async_fl@912ecf3.

    Args:
        alpha: :math:`\alpha`, above 0 and at most 1; with 1 and the constant rule, the model is the last update.
        rule: s: ``polynomial``, ``constant`` or ``hinge``.
        a: the exponent of ``polynomial``, or the slope of ``hinge``, at least 0; 0 gives no discount.
        b: staleness up to which ``hinge`` gives no discount, at least 0.

    Raises:
        MisconfigurationException: if an argument is out of its range.
    """

    reads_arrivals = True
    example_level = True
    needs = frozenset({"weights"})

    def __init__(
        self,
        alpha: float = 0.6,
        rule: Literal["polynomial", "constant", "hinge"] = "polynomial",
        a: float = 0.5,
        b: int = 4,
    ) -> None:
        super().__init__(weighting="uniform")
        check_choices("aggregator", rule=(rule, ("polynomial", "constant", "hinge")))
        if not 0 < alpha <= 1:
            raise MisconfigurationException(f"aggregator.alpha={alpha} must be above 0 and at most 1, such as 0.6.")
        check_least("aggregator", a=(a, 0), b=(b, 0))
        self.alpha, self.rule, self.a, self.b = alpha, rule, a, b

    def share(self, stale: int) -> float:
        r"""Return :math:`\alpha_k` of an update.

        Args:
            stale: the number of the server's steps since the client's start.
        """
        if self.rule == "polynomial":
            return float(self.alpha * (1 + stale) ** -self.a)
        if self.rule == "hinge" and stale > self.b:
            return self.alpha / (self.a * (stale - self.b) + 1)
        return self.alpha

    def aggregate(self, updates: Updates, round: int) -> dict[str, float]:
        r"""Mix the updates in, in the order of arrival.

        Returns:
            ``alpha``, the mean of :math:`\alpha_k`; empty without updates.
        """
        if not updates:
            return {}
        shares = {client: self.share(staleness(update)) for client, update in updates.items()}
        places = {client: int(u["arrival"]["place"]) if "arrival" in u else 0 for client, u in updates.items()}
        for client in sorted(updates, key=lambda client: (places[client], client)):
            self.mix(updates[client]["weights"], shares[client])
        self.state["shares"] = shares
        return {"alpha": sum(shares.values()) / len(shares)}

    def mix(self, weights: StateDict, share: float) -> None:
        r"""Move the model towards a client's by a share of the way.

        Args:
            weights: the client's weights.
            share: :math:`\alpha_k`.
        """
        x = self.state["weights"]
        mixed: StateDict = {}
        for name, own in weights.items():
            if own.is_floating_point():
                # uploads may be in half precision
                wide = torch.promote_types(own.dtype, torch.float32)
                mixed[name] = torch.lerp(x[name].to(wide), own.to(wide), share).to(own.dtype)
            else:
                # a counter between two counts would be none
                mixed[name] = torch.maximum(x[name].to(own), own)
        self.state["weights"] = x | mixed
