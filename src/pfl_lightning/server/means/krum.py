"""Krum and multi-Krum: the uploads with the nearest neighbours.

Source: Blanchard et al., 2017 (https://arxiv.org/abs/1703.02757).
"""

import math

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from pfl_lightning.server.means.base import Assumed, Mean
from pfl_lightning.server.means.vectors import Sum, Vectors


class MultiKrum(Mean):
    r"""Average the c uploads with the least scores, each a sum of squared distances to nearest neighbours.

    .. math:: s_i = \sum_{j \in N_i} \lVert x_i - x_j \rVert^2

    where :math:`N_i` are the n - f - 2 nearest of the others. Of equal scores (two uploads that are each other's only
    neighbour have one), the upload with the nearer next neighbour comes first, then the one with the lower id. The rule
    bears f bad uploads of :math:`n \ge 2f + 3`; the paper leaves c open. With c = n it is the mean, in which all
    clients count alike.
    Source: Blanchard et al., 2017 (https://arxiv.org/abs/1703.02757).

    Args:
        f: the number of uploads taken for bad, or the share of the round's uploads, rounded down, below 0.5.
        keep: c, at least 1; above n it counts as n; None is n - f.

    Raises:
        MisconfigurationException: if a value is out of its range.
    """

    def __init__(self, f: int | float = 0.2, keep: int | None = None) -> None:
        self.f, self.keep = f, keep
        self._bad = Assumed(self.name, "f", f, 2, 3)
        if keep is not None and keep < 1:
            raise MisconfigurationException(f"aggregator.mean=MultiKrum: keep={keep} must be 1 or more.")

    def check(self, clients: int) -> None:
        """Refuse an f too large for any round."""
        self._bad.check(clients)

    def of(self, vectors: Vectors) -> Sum:
        """Return the mean of the uploads with the least scores."""
        n = len(vectors)
        f = self._bad.among(n)
        kept = torch.tensor(by_score(vectors.squared_distances, f)[: self.keep or n - f])
        return vectors.combined(torch.zeros(n, dtype=torch.float64).index_fill(0, kept, 1 / len(kept)))


class Krum(MultiKrum):
    """Take the upload with the least score: `MultiKrum` with ``keep`` 1.

    Source: Blanchard et al., 2017 (https://arxiv.org/abs/1703.02757).

    Args:
        f: the number of uploads taken for bad, or the share of the round's uploads, rounded down, below 0.5.

    Raises:
        MisconfigurationException: if ``f`` is out of its range.
    """

    def __init__(self, f: int | float = 0.2) -> None:
        super().__init__(f, keep=1)


def by_score(squared: Tensor, f: int) -> list[int]:
    """Return the positions of the uploads, the least score first.

    Args:
        squared: squared distances ``[n, n]``.
        f: number of uploads taken for bad; at least one neighbour counts, unless n is 1.
    """
    n = len(squared)
    # nobody is a neighbour of itself
    near = squared + torch.diag(torch.full((n,), math.inf, dtype=squared.dtype))
    near, count = near.sort(1).values, max(n - f - 2, 1)
    # the distances beyond the neighbours decide between equal scores, whatever the order of uploads
    scores, further = near[:, :count].sum(1).tolist(), near[:, count:].tolist()
    return sorted(range(n), key=lambda i: (scores[i], further[i]))
