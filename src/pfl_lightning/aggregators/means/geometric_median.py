"""The geometric median, by smoothed Weiszfeld steps.

Source: Pillutla, Kakade and Harchaoui, 2019, RFA (https://arxiv.org/abs/1912.13445).
"""

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from pfl_lightning.aggregators.means.base import Mean
from pfl_lightning.aggregators.means.vectors import Sum, Vectors


class GeometricMedian(Mean):
    r"""The point whose sum of distances to all uploads is least: RFA.

    .. math:: \arg\min_z \sum_k p_k \lVert z - x_k \rVert

    by Weiszfeld's steps :math:`z \leftarrow \sum_k b_k x_k / \sum_k b_k` with
    :math:`b_k = p_k / \max(\nu, \lVert z - x_k \rVert)`, from the mean on. It bears bad uploads that hold less than
    half of all :math:`p_k`. Source: Pillutla et al., 2019 (https://arxiv.org/abs/1912.13445).

    Args:
        weighted: whether :math:`p_k` is client k's share of the training samples, as in the paper. Then who claims to
            have many counts for much: take it where numbers of samples are known. Else all count alike.
        smoothing: :math:`\nu`, above 0: distances below it count as it.
        passes: steps at most, at least 1; it ends where no weight changes by more than 1e-9 of it.

    Raises:
        MisconfigurationException: if a value is out of its range.
    """

    def __init__(self, weighted: bool = False, smoothing: float = 1e-6, passes: int = 1000) -> None:
        if not smoothing > 0 or passes < 1:
            raise MisconfigurationException(
                f"aggregator.mean=GeometricMedian: smoothing={smoothing} must be above 0, such as 1e-6, and "
                f"passes={passes} at least 1, such as 1000."
            )
        self.weighted, self.smoothing, self.passes = weighted, smoothing, passes

    def of(self, vectors: Vectors) -> Sum:
        """Makes steps until they are small."""
        return vectors.combined(weiszfeld(vectors.products, vectors.weights, self.smoothing, self.passes))


def weiszfeld(products: Tensor, p: Tensor, smoothing: float, passes: int) -> Tensor:
    """The weights of the geometric median in its uploads ``[n]``, summing to 1.

    Args:
        products: inner products of the uploads ``[n, n]``, from any origin.
        p: by how much each counts ``[n]``.
        smoothing: distances below it count as it.
        passes: steps at most.
    """
    weights = p / p.sum()
    for _ in range(passes):
        old = weights
        # of each upload to the sum of all by weights
        along = products @ old
        squared = products.diagonal() - 2 * along + old @ along
        pulls = p / squared.clamp_min(0).sqrt().clamp_min(smoothing)
        weights = pulls / pulls.sum()
        # each in proportion to itself: one of 1e-20 counts where its upload is as far away as that is small
        if bool(((weights - old).abs() <= 1e-9 * old).all()):
            break
    return weights
