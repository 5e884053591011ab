"""The geometric median of uploads, by smoothed Weiszfeld steps.

Source: Pillutla, Kakade and Harchaoui, 2019, RFA (https://arxiv.org/abs/1912.13445).
"""

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from pfl_lightning.server.means.base import Mean
from pfl_lightning.server.means.vectors import Sum, Vectors


class GeometricMedian(Mean):
    r"""Take the point with the least sum of distances to all uploads: RFA.

    .. math:: \arg\min_z \sum_k p_k \lVert z - x_k \rVert

    by Weiszfeld's steps :math:`z \leftarrow \sum_k b_k x_k / \sum_k b_k` with
    :math:`b_k = p_k / \max(\nu, \lVert z - x_k \rVert)`, from the mean on. It bears bad uploads that hold less than
    half of all :math:`p_k`. Source: Pillutla et al., 2019 (https://arxiv.org/abs/1912.13445).

    Args:
        weighted: whether :math:`p_k` is in proportion to client k's number of training samples, as in the paper; else
            all clients count alike.
        cap: the largest number of samples that counts where ``weighted``, in multiples of the round's median (of an
            even number of clients the lower middle one), at least 1; larger claims count as that. Where honest clients
            are alike, f of n clients are borne for f below n / (cap + 1), whatever they claim. The paper has no cap,
            which is ``inf``: one client who claims enough then is the median.
        smoothing: :math:`\nu`, above 0: distances below it count as it.
        passes: steps at most, at least 1; it ends where no weight changes by more than 1e-9 of it.

    Raises:
        MisconfigurationException: if a value is out of its range.
    """

    def __init__(self, weighted: bool = False, smoothing: float = 1e-6, passes: int = 1000, cap: float = 3.0) -> None:
        if not smoothing > 0 or passes < 1 or not cap >= 1:
            raise MisconfigurationException(
                f"aggregator.mean=GeometricMedian: smoothing={smoothing} must be above 0, such as 1e-6, "
                f"passes={passes} at least 1, such as 1000, and cap={cap} at least 1, such as 3."
            )
        self.weighted, self.smoothing, self.passes, self.cap = weighted, smoothing, passes, cap

    def of(self, vectors: Vectors) -> Sum:
        """Return the uploads' geometric median."""
        # the lower middle claim, as claims are bad by being large; without weights all are equal
        p = vectors.weights.clamp(max=self.cap * vectors.weights.median())
        return vectors.combined(weiszfeld(vectors.products, p, self.smoothing, self.passes))


def weiszfeld(products: Tensor, p: Tensor, smoothing: float, passes: int) -> Tensor:
    """Return the share of each upload in the geometric median ``[n]``, summing to 1.

    Args:
        products: inner products of the uploads ``[n, n]``, from any origin.
        p: by how much each counts ``[n]``.
        smoothing: distances below it count as it.
        passes: steps at most.
    """
    weights = p / p.sum()
    for _ in range(passes):
        old = weights
        # inner products with the current point; a matrix of n by n is all that a step needs, whatever the net's size
        along = products @ old
        squared = products.diagonal() - 2 * along + old @ along
        pulls = p / squared.clamp_min(0).sqrt().clamp_min(smoothing)
        weights = pulls / pulls.sum()
        # relative, as a weight of 1e-20 still moves the point if that upload is 1e20 away
        if bool(((weights - old).abs() <= 1e-9 * old).all()):
            break
    return weights
