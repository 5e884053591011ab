"""Bulyan: uploads picked by Krum in turn, then trimmed around the median.

Source: El Mhamdi, Guerraoui and Rouault, 2018 (https://arxiv.org/abs/1802.07927).
"""

import math

import torch
from torch import Tensor

from pfl_lightning.server.means.base import Assumed, Mean
from pfl_lightning.server.means.vectors import Sum, Vectors, middle_of, ordered_columns


class Bulyan(Mean):
    r"""Pick :math:`\theta = n - 2f` uploads by Krum, one after another, and average around the median of the picks.

    Each pick is Krum's among the uploads left. Then, coordinate by coordinate, the result is the mean of the
    :math:`\beta = \theta - 2f` picked values nearest to the median of all picked values. The rule bears f bad uploads
    of :math:`n \ge 4f + 3`; with f = 0 it is the mean, in which all clients count alike.
    Source: El Mhamdi et al., 2018 (https://arxiv.org/abs/1802.07927).

    Args:
        f: the number of uploads taken for bad, or the share of the round's uploads, rounded down, below 0.25.

    Raises:
        MisconfigurationException: if ``f`` is out of its range.
    """

    def __init__(self, f: int | float = 0.1) -> None:
        self.f = f
        self._bad = Assumed("Bulyan", "f", f, 4, 3)

    def check(self, clients: int) -> None:
        """Refuse an f too large for any round."""
        self._bad.check(clients)

    def of(self, vectors: Vectors) -> Sum:
        """Return the mean of the picked values near the median."""
        n = len(vectors)
        f = self._bad.among(n)
        # whole uploads first, then coordinates: an upload near by Krum may still be far off in one coordinate
        picked = picks(vectors.squared_distances, f, n - 2 * f)
        return vectors.by_coordinate(lambda rows: mean_near_median(rows[picked], n - 4 * f))


def picks(squared: Tensor, f: int, count: int) -> list[int]:
    """Return the positions of the uploads picked by Krum in turn, ascending.

    Args:
        squared: squared distances ``[n, n]``.
        f: number of uploads taken for bad.
        count: number of picks.
    """
    n = len(squared)
    # sorted once: 1,000 uploads sorted anew for each pick take minutes
    near, whose = (squared + torch.diag(torch.full((n,), math.inf, dtype=squared.dtype))).sort(1)
    left, picked = torch.arange(n), list[int]()
    # scores change with each pick, as the picked upload is nobody's neighbour any more
    while len(picked) < count:
        neighbours = max(len(left) - f - 2, 1)
        scores = near[:, :neighbours].sum(1).tolist()
        least = min(scores)
        # as `by_score` does, the distances beyond the neighbours decide between equal scores
        equal = [row for row, score in enumerate(scores) if not score > least]
        row = min(equal, key=lambda row: near[row, neighbours:].tolist())
        others = torch.arange(len(left)) != row
        picked.append(int(left[row]))
        kept = (whose != left[row]) & others[:, None]
        # every row loses one distance, and stays sorted
        near, whose = (values[kept].view(len(left) - 1, len(left) - 1) for values in (near, whose))
        left = left[others]
    return sorted(picked)


def mean_near_median(rows: Tensor, count: int) -> Tensor:
    """Return, column by column, the mean of the values nearest to the median, in float64.

    Of two values equally far on both sides, the value of the lower row is nearer.

    >>> import torch
    >>> mean_near_median(torch.tensor([[0.0], [1.0], [2.0], [4.0], [50.0]]), 3)
    tensor([1.], dtype=torch.float64)

    Args:
        rows: ``[n, w]``.
        count: number of values in the mean, at most n.
    """
    ordered = ordered_columns(rows)
    middle, left_out = middle_of(ordered), len(rows) - count
    # in order, the nearest values are neighbours: they begin where the first value is no further than the next after
    # the last one
    below, above = middle - ordered[:left_out].double(), ordered[count:].double() - middle
    start = (below > above).sum(0)
    near = ordered.gather(0, start + torch.arange(count, device=rows.device)[:, None]).double()
    # by differences to the median: equal values then are their own mean to the last bit
    result = middle + (near - middle).mean(0)
    tied = ((below == above) & (below != 0)).any(0)
    if bool(tied.any()):
        off = rows[:, tied].double() - middle[tied]
        result[tied] = middle[tied] + off.gather(0, off.abs().argsort(dim=0, stable=True)[:count]).mean(0)
    return result
