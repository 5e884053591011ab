"""Bulyan: what Krum picks in turn, trimmed around the median.

Source: El Mhamdi, Guerraoui and Rouault, 2018 (https://arxiv.org/abs/1802.07927).
"""

from torch import Tensor

from pfl_lightning.aggregators.means.base import Assumed, Mean
from pfl_lightning.aggregators.means.krum import by_score
from pfl_lightning.aggregators.means.vectors import Sum, Vectors, median


class Bulyan(Mean):
    r"""Picks :math:`\theta = n - 2f` uploads by Krum, one after another, and averages what is next to their median.

    Each pick is Krum's among those that are left. Then, coordinate by coordinate, it is the mean of the
    :math:`\beta = \theta - 2f` values nearest to the median of those picked. It bears f bad ones of
    :math:`n \ge 4f + 3`; with f = 0 it is the mean, in which all clients count alike.
    Source: El Mhamdi et al., 2018 (https://arxiv.org/abs/1802.07927).

    Args:
        f: how many uploads are taken for bad, or the share of the round's that they are, rounded down, below 0.25.

    Raises:
        MisconfigurationException: if ``f`` is out of its range.
    """

    def __init__(self, f: int | float = 0.1) -> None:
        self.f = f
        self._bad = Assumed("Bulyan", "f", f, 4, 3)

    def check(self, clients: int) -> None:
        """Refuses an f that no round can bear."""
        self._bad.check(clients)

    def of(self, vectors: Vectors) -> Sum:
        """Picks, and averages around the median."""
        n = len(vectors)
        f = self._bad.among(n)
        picked = picks(vectors.squared_distances, f, n - 2 * f)
        return vectors.by_coordinate(lambda rows: mean_near_median(rows[picked], n - 4 * f))


def picks(squared: Tensor, f: int, count: int) -> list[int]:
    """Positions of the uploads that Krum picks in turn, ascending.

    Args:
        squared: squared distances ``[n, n]``.
        f: how many are taken for bad.
        count: how many are picked.
    """
    left = list(range(len(squared)))
    picked: list[int] = []
    while len(picked) < count:
        picked.append(left.pop(by_score(squared[left][:, left], f)[0]))
    return sorted(picked)


def mean_near_median(rows: Tensor, count: int) -> Tensor:
    """The mean of those values of each column that are nearest to its median.

    >>> import torch
    >>> mean_near_median(torch.tensor([[0.0], [1.0], [2.0], [4.0], [50.0]]), 3)
    tensor([1.])

    Args:
        rows: ``[n, w]``.
        count: of how many values.
    """
    middle = median(rows)
    near = rows - middle
    kept = near.gather(0, near.abs().argsort(dim=0, stable=True)[:count])
    return middle + kept.mean(0)
