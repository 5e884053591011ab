"""The median and the trimmed mean, coordinate by coordinate.

Source: Yin et al., 2018 (https://arxiv.org/abs/1803.01498).
"""

from functools import partial

from torch import Tensor

from pfl_lightning.server.means.base import Assumed, Mean
from pfl_lightning.server.means.vectors import Sum, Vectors, median, ordered_columns


class CoordinateMedian(Mean):
    """Take the median of each coordinate; of an even number of uploads, the mean of the middle two.

    Fewer than half of the uploads, whatever they are, leave each coordinate within the range of the others. Where
    clients' data differ, the median also ignores knowledge of few honest clients.
    Source: Yin et al., 2018 (https://arxiv.org/abs/1803.01498).
    """

    def of(self, vectors: Vectors) -> Sum:
        """Return the median of each coordinate."""
        return vectors.by_coordinate(median)


class TrimmedMean(Mean):
    r"""Take the mean of each coordinate without the k lowest and the k highest values.

    .. math:: \frac{1}{n - 2k} \sum_{i=k+1}^{n-k} x_{(i)}

    where :math:`x_{(1)} \le \ldots \le x_{(n)}` are the values of a coordinate. It bears k bad uploads; with k = 0 it
    is the mean, in which all clients count alike. Source: Yin et al., 2018 (https://arxiv.org/abs/1803.01498).

    Args:
        trim: k, from 0 to below half of the uploads; or k as a share of the uploads, rounded down, below 0.5.

    Raises:
        MisconfigurationException: if ``trim`` is out of its range.
    """

    def __init__(self, trim: int | float = 0.2) -> None:
        self.trim = trim
        self._bad = Assumed("TrimmedMean", "trim", trim, 2, 1)

    def check(self, clients: int) -> None:
        """Refuse to trim all values."""
        self._bad.check(clients)

    def of(self, vectors: Vectors) -> Sum:
        """Return the trimmed mean of each coordinate."""
        return vectors.by_coordinate(partial(trimmed_mean, k=self._bad.among(len(vectors))))


def trimmed_mean(rows: Tensor, k: int) -> Tensor:
    """Return the mean of each column without the k lowest and k highest values, in float64.

    Args:
        rows: ``[n, w]``.
        k: below n / 2.
    """
    kept = ordered_columns(rows)[k : len(rows) - k].double()
    # by differences: of equal values that is exact
    return kept[0] + (kept - kept[0]).mean(0)
