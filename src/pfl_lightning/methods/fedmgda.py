r"""FedMGDA+: the step that is of use for all clients of the round, from changes of equal length.

Source: Hu et al., 2022 (https://arxiv.org/abs/2006.11489). Symbols: x is the server's model, :math:`w_k` client k's
model after training, :math:`g_k` the direction of its change, :math:`\lambda_k` its weight, and S the round's clients.
"""

import math

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from pfl_lightning.messages import Updates
from pfl_lightning.server import Server, WeightedAverage, Weighting, client_weights, mean_model, moved_model
from pfl_lightning.server.model_pool import inner_products


class FedMGDA(WeightedAverage):
    r"""Moves the model along the shortest mixture of the clients' directions, near the usual weights.

    .. math::

        g_k = \frac{x - w_k}{\lVert x - w_k \rVert}, \qquad
        \lambda^* = \arg\min_\lambda \Bigl\lVert \sum_{k \in S} \lambda_k g_k \Bigr\rVert^2, \qquad
        \lambda \ge 0,\ \ \sum_k \lambda_k = 1,\ \ |\lambda_k - \lambda_k^0| \le \epsilon

    .. math:: x \leftarrow x - \eta \sum_{k \in S} \lambda_k^* g_k

    With :math:`\epsilon = 1` the step, if it isn't 0, has a positive inner product with each client's direction: a
    small enough one lowers the losses of all. Changes of equal length keep a client with a long one from having its
    way. With :math:`\epsilon = 0` the weights are :math:`\lambda^0`. A client that hasn't moved counts as 0, and by its
    :math:`\lambda_k^0`: the shortest mixture would be of it as far as bounds allow, and the model would stay. Norms are
    over all learnable parameters together; running statistics are averaged by :math:`\lambda^*`.

    The length of a step is :math:`\eta` times that of the mixture, which is at most 1, whatever clients' learning rates
    are: :math:`\eta` has to be small, or to fall by ``decay``, for the model to settle.
    Source: Hu et al., 2022, Algorithm 1 (https://arxiv.org/abs/2006.11489). No code of the authors was found; the rule
    is also that of WwZzz/easyFL@ea07f1d, whose defaults are :math:`\epsilon = 0.1` and :math:`\eta = 1`; it leaves no
    client out.

    Args:
        server_lr: :math:`\eta` of the first round, above 0.
        epsilon: :math:`\epsilon`, in [0, 1].
        decay: factor of :math:`\eta` from round to round, above 0 and at most 1.
        weighting: :math:`\lambda^0`: by training ``samples``, or all alike (``uniform``).

    Raises:
        MisconfigurationException: if an argument is out of its range.
    """

    example_level = True

    def __init__(
        self, server_lr: float = 1.0, epsilon: float = 0.1, decay: float = 1.0, weighting: Weighting = "samples"
    ) -> None:
        super().__init__(server_lr, weighting)
        if not 0 <= epsilon <= 1:
            raise MisconfigurationException(f"aggregator.epsilon={epsilon} must be between 0 and 1, such as 0.1.")
        if not 0 < decay <= 1:
            raise MisconfigurationException(f"aggregator.decay={decay} must be above 0 and at most 1, such as 0.99.")
        self.epsilon, self.decay = epsilon, decay

    def setup(self, server: Server) -> None:
        """Start from the common initial model."""
        super().setup(server)
        # a tied parameter counts once in norms, and moves under each of its names
        self.once, self.learnable = server.parameter_names(), server.parameter_names(remove_duplicate=False)
        self.state["eta"] = self.server_lr

    def aggregate(self, updates: Updates, round: int) -> dict[str, float]:
        """Make the step; log the ``largest`` weight, and the ``length`` of the mixture, which is 0 where no step helps.

        Returns:
            Both, or nothing without updates.
        """
        if not updates:
            return {}
        x, models = self.state["weights"], [update["weights"] for update in updates.values()]
        changes = inner_products(models, self.once, origin=x)[:-1, :-1]
        lengths = changes.diagonal().clamp_min(0).sqrt()
        inverse = torch.where(lengths > 0, 1 / lengths.clamp_min(torch.finfo(lengths.dtype).tiny), 0)
        gram = inverse[:, None] * changes * inverse
        usual = client_weights(updates, self.weighting)
        start = torch.tensor([*usual.values()], dtype=torch.float64)
        room = self.epsilon * (lengths > 0).to(start)
        found = shortest(gram, start, (start - room).clamp_min(0), (start + room).clamp_max(1))
        shares = dict(zip(updates, found.tolist(), strict=True))
        scales = dict(zip(updates, (self.state["eta"] * found * inverse).tolist(), strict=True))
        self.state["weights"] = x | mean_model(updates, shares) | moved_model(updates, scales, x, self.learnable)
        self.state |= {"shares": shares, "eta": self.state["eta"] * self.decay}
        return {"largest": max(shares.values()), "length": math.sqrt(max(float(found @ gram @ found), 0.0))}


def shortest(gram: Tensor, start: Tensor, low: Tensor, high: Tensor) -> Tensor:
    r"""Return the weights between bounds, with the sum of the given ones, of the least :math:`\lambda^T G \lambda`.

    Solved by an active set: weights at a bound stand still, those between go to the least of their own, or as far
    towards it as the nearest bound; at the least, the weight whose multiplier has the wrong sign most is let go.

    >>> shortest(torch.eye(2).double(), torch.tensor([0.9, 0.1]).double(), torch.zeros(2), torch.ones(2))
    tensor([0.5000, 0.5000], dtype=torch.float64)

    Args:
        gram: G ``[n, n]`` in float64, symmetric and positive semidefinite up to rounding.
        start: ``[n]`` in float64, within the bounds.
        low: lower bounds ``[n]``.
        high: upper bounds ``[n]``.
    """
    n = len(start)
    weights, low, high = start.clone(), low.to(start), high.to(start)
    # a ridge far below the entries makes equal directions share their weight, and the system regular
    matrix = gram + 1e-12 * torch.eye(n, dtype=gram.dtype)
    free = (weights > low) & (weights < high)
    # each set of free weights comes up once in theory, and a few times n in practice
    for _ in range(20 * n + 20):
        if free.any():
            inner = free.nonzero().squeeze(1)
            border = torch.zeros(len(inner) + 1, len(inner) + 1, dtype=gram.dtype)
            border[:-1, :-1], border[:-1, -1], border[-1, :-1] = matrix[inner][:, inner], 1, 1
            right = torch.zeros(len(inner) + 1, dtype=gram.dtype)
            # the gradient of the weights as they are, so that the solution is the way to go, whose sum is 0
            right[:-1] = -(matrix @ weights)[inner]
            way = torch.linalg.solve(border, right)[:-1]
            bound = torch.where(way > 0, high[inner], low[inner])
            far = torch.where(way.abs() > 1e-14, (bound - weights[inner]) / way, math.inf)
            step = float(far.min().clamp(max=1))
            weights[inner] = (weights[inner] + step * way).clamp(low[inner], high[inner])
            if step < 1:
                hit = far.argmin()
                # to the last bit, as the bound at which a weight stands is known by its value
                weights[inner[hit]], free[inner[hit]] = bound[hit], False
                continue
        gradient = matrix @ weights
        # what one more unit costs; of the free weights it is the same
        price = gradient[free].mean() if free.any() else None
        at_low, at_high = ~free & (weights <= low) & (low < high), ~free & (weights > low) & (low < high)
        if price is None:
            cheap = gradient.masked_fill(~at_low, math.inf)
            dear = gradient.masked_fill(~at_high, -math.inf)
            if float(dear.max() - cheap.min()) <= 1e-13:
                break
            free[cheap.argmin()] = free[dear.argmax()] = True
            continue
        wrong = torch.where(at_low, price - gradient, torch.where(at_high, gradient - price, -math.inf))
        if float(wrong.max()) <= 1e-13:
            break
        free[wrong.argmax()] = True
    return weights
