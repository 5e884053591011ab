r"""FedExP: the server goes further than the mean where clients' changes point different ways.

Source: Jhunjhunwala, Wang and Joshi, 2023 (https://arxiv.org/abs/2301.09604). Symbols: x is the server's model,
:math:`\Delta_k` client k's change of it, :math:`p_k` its weight, and :math:`\bar\Delta` the weighted mean change.
"""

import math
from collections.abc import Mapping

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.messages import StateDict, Updates, column
from pfl_lightning.server import Server, WeightedAverage, Weighting


class FedExP(WeightedAverage):
    r"""Steps along the mean change at a rate that grows with the spread of the clients' changes.

    .. math::

        x \leftarrow x + \eta \bar\Delta, \qquad
        \eta = \max\Bigl(1, \frac{\sum_k p_k \lVert\Delta_k\rVert^2}{2 (\lVert\bar\Delta\rVert^2 + \epsilon)}\Bigr)

    Norms are over all learnable parameters together; running statistics are averaged. Equal changes, and a single
    client, give :math:`\eta = 1`, which is `WeightedAverage` bit for bit. Orthogonal changes of M clients of equal
    weight give up to M / 2. As :math:`\eta` can make iterates swing, the deployed model is the mean of the last two: it
    is the record's global model, and takes the place of x after the last of the planned rounds, so that a longer run
    begins again from it. Until then clients train and are evaluated by x; the official code evaluates the mean in each
    round. Secure aggregation can't serve it here, as :math:`\lVert\Delta_k\rVert^2` is computed by the server.

    The official code multiplies :math:`\epsilon` by the number of the round's clients, and by 0.998 squared in each
    round, as its clients' learning rate falls by 0.998.
    Source: Jhunjhunwala, Wang and Joshi, 2023 (https://arxiv.org/abs/2301.09604); Divyansh03/FedExP@34b05a2, whose
    client weights, by samples, are the default.

    Args:
        epsilon: :math:`\epsilon`, at least 0: with a larger one :math:`\eta` is 1 more often; with 0, where clients'
            changes cancel, the step is as long as their mean length allows.
        average_last: whether the deployed model is the mean of the last two iterates, and not the last one.
        weighting: client weights: by training ``samples``, or all alike (``uniform``).

    Raises:
        MisconfigurationException: if ``epsilon`` is negative.
    """

    example_level = True

    def __init__(self, epsilon: float = 1e-3, average_last: bool = True, weighting: Weighting = "samples") -> None:
        super().__init__(weighting=weighting)
        if not 0 <= epsilon < math.inf:
            raise MisconfigurationException(f"aggregator.epsilon={epsilon} must be 0 or more, such as 0.001.")
        self.epsilon, self.average_last = epsilon, average_last

    def setup(self, server: Server) -> None:
        """Start from the common initial model."""
        super().setup(server)
        # a tied parameter counts once in norms, and moves under each of its names
        self.once, self.learnable = server.parameter_names(), server.parameter_names(remove_duplicate=False)
        self.rounds = server.rounds
        self.state["deployed"] = server.weights

    def aggregate(self, updates: Updates, round: int) -> dict[str, float]:
        r"""Make the step, and log :math:`\eta` as ``rate``."""
        if not updates:
            return {}
        before: StateDict = self.state["weights"]
        super().aggregate(updates, round)
        after: StateDict = self.state["weights"]
        if self.average_last:
            # running statistics are those of the last round, as nothing extrapolates them
            middle = {name: torch.lerp(before[name].to(after[name]), after[name], 0.5) for name in self.learnable}
            self.state["deployed"] = after | middle
            if round + 1 == self.rounds:
                self.state["weights"] = self.state["deployed"]
        else:
            self.state["deployed"] = after
        return {"rate": self.state["rate"]}

    def average(self, updates: Updates, weights: Mapping[int, float]) -> None:
        """Make the step; see `WeightedAverage.average` for the arguments."""
        x, target = self.state["weights"], self.mean_of(updates, weights)
        uploads = {name: column([update["weights"] for update in updates.values()], name) for name in self.once}
        # in float64, since squares of many small entries are summed
        spread = sum(
            weights[client] * float((y[row].double() - x[name].to(y[row].device).double()).square().sum())
            for name, y in uploads.items()
            for row, client in enumerate(updates)
        )
        common = sum(
            float((target[name].double() - x[name].to(target[name].device).double()).square().sum())
            for name in self.once
        )
        below = 2 * (common + self.epsilon)
        # 0 where no client moved, or, without epsilon, where all changes cancel to the last bit
        self.state["rate"] = rate = max(1.0, spread / below) if below else 1.0
        if rate > 1:
            for name in filter(target.__contains__, self.learnable):
                target[name] = torch.lerp(x[name].to(target[name]), target[name], rate)
        self.state["weights"] = x | target

    def global_model(self) -> StateDict:
        """Return the deployed model."""
        deployed: StateDict = self.state["deployed"]
        return deployed
