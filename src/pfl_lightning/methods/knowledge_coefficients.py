"""Knowledge coefficients: each client's weights of all clients as teachers, learned from the clients' updates.

Source: Zhang et al., 2021 (https://arxiv.org/abs/2111.02862). Symbols: K clients, p_l client l's update, c [K, K] the
knowledge coefficients.
"""

import math
from collections.abc import Callable
from typing import Literal, TypeAlias

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from pfl_lightning.server import Aggregator, Server

Update: TypeAlias = Literal["project", "softmax5", "raw"]


def project(rows: Tensor) -> Tensor:
    r"""Return the nearest points on the simplex, :math:`\arg\min_{c \ge 0,\, \sum_l c_l = 1} \lVert c - r \rVert_2`.

    >>> project(torch.tensor([[0.5, 0.9], [-3.0, 2.0]]))
    tensor([[0.3000, 0.7000],
            [0.0000, 1.0000]])

    Args:
        rows: r, ``[n, K]``.
    """
    # the usual algorithm: subtract the one number with which the largest entries sum to 1, and cut at 0
    ordered = rows.sort(1, descending=True).values
    excess = (ordered.cumsum(1) - 1) / torch.arange(1, rows.shape[1] + 1, device=rows.device)
    kept = (ordered > excess).sum(1, keepdim=True)
    return (rows - excess.gather(1, kept - 1)).clamp_min(0)


def official_rates(slopes: Tensor) -> Tensor:
    """Return powers of 5, from 1/3125 to 3125, as step sizes: a row's mean step is then between 0.01 and 0.05.

    >>> official_rates(torch.tensor([[0.003, -0.001], [0.2, 0.2]]))
    tensor([[5.0000],
            [0.2000]])

    Args:
        slopes: ``[n, K]``.
    """
    sizes = slopes.abs().mean(1, keepdim=True)
    exponents: Tensor = ((0.01 / sizes).log() / math.log(5)).ceil().clamp(-5, 5)
    return 5**exponents


UPDATES: dict[Update, Callable[[Tensor], Tensor]] = {
    "project": project,
    "softmax5": lambda rows: (5 * rows).softmax(1),
    "raw": lambda rows: rows,
}


class KnowledgeCoefficients(Aggregator):
    r"""Weights of all clients as teachers of each client, updated by one gradient step a round.

    .. math:: J_k = \mathrm{MSE}\Big(p_k, \sum_l c_{kl}\, p_l\Big) + \rho\,\mathrm{MSE}(c_k, 1/K)

    where p are the compared parts of updates. All coefficients begin as 1/K. A round changes the rows of its clients,
    and in these rows the columns of its clients: scaled to a whole row for the step, and then back to their former
    share.

    Args:
        rho: weight of the second term, at least 0. The paper of FedClassAvg takes 0.7 for CIFAR-10 and 0.6 for
            Fashion-MNIST and EMNIST.
        coefficient_lr: learning rate of the coefficients, at least 0; 0 keeps c uniform. The 0.02 of FedClassAvg's code
            moves coefficients by some thousandths in a hundred rounds; None takes the official code's `official_rates`,
            whose steps are large and never shrink.
        c_update: operation after the step: ``project`` onto the simplex; ``softmax5``, the softmax of 5 times the row
            as in the official code, which draws the row to uniform for more than 5 clients and away from it for fewer;
            ``raw``, nothing, as in FedClassAvg's code, with which a row need not stay a mix.

    Raises:
        MisconfigurationException: if a number is negative.
    """

    fixed_clients = True

    def __init__(self, rho: float = 0.7, coefficient_lr: float | None = 0.02, c_update: Update = "project") -> None:
        super().__init__()
        if not rho >= 0:
            raise MisconfigurationException(f"aggregator.rho={rho} must be 0 or more, such as 0.7.")
        if coefficient_lr is not None and not coefficient_lr >= 0:
            raise MisconfigurationException(
                f"aggregator.coefficient_lr={coefficient_lr} must be 0 (equal coefficients) or more, such as 0.02, or "
                "null."
            )
        self.rho = rho
        self.coefficient_lr = coefficient_lr
        self.c_update = c_update

    def setup(self, server: Server) -> None:
        """Start from equal coefficients."""
        super().setup(server)
        self.state["c"] = torch.full((server.num_clients,) * 2, 1 / server.num_clients, dtype=torch.float64)

    def shares(self, client: int, among: list[int]) -> Tensor:
        """Return a client's coefficients of some clients in float64, scaled to the sum of the whole row.

        Args:
            client: the client's id.
            among: ids of the clients.
        """
        row: Tensor = self.state["c"][client]
        kept = row[among]
        # nothing to scale: equal coefficients instead of 0 / 0
        if kept.sum() == 0:
            return torch.full_like(kept, float(row.sum()) / len(among))
        return kept * (row.sum() / kept.sum())

    def learn(self, clients: list[int], products: Tensor) -> dict[str, float]:
        r"""Make one gradient step on the rows of a round's clients.

        Args:
            clients: ids of the round's clients.
            products: :math:`\langle p_k, p_l \rangle` over the length of p ``[n, n]`` in float64; the gradient depends
                on nothing else.

        Returns:
            The mean of the clients' coefficients of themselves, and the largest coefficient, to log.
        """
        n = len(clients)
        c = torch.stack([self.shares(client, clients) for client in clients])
        # gradient of J: the first term by inner products alone, so that p is never mixed here
        slopes = 2 * (c @ products - products) + 2 * self.rho / n * (c - 1 / n)
        rates = official_rates(slopes) if self.coefficient_lr is None else self.coefficient_lr
        c = UPDATES[self.c_update](c - rates * slopes)
        table = self.state["c"].clone()
        for client, row in zip(clients, c, strict=True):
            # back to the share that the round's clients had of the whole row
            table[client, clients] = row * (table[client, clients].sum() / table[client].sum())
        self.state["c"] = table
        return {"own_share": float(c.diagonal().mean()), "largest_share": float(c.max())}
