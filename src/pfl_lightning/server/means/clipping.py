"""Means of bounded changes: every client counts, and no client moves the model far.

Sources: Karimireddy, He and Jaggi, 2021 (https://arxiv.org/abs/2012.10333); Sun et al., 2019
(https://arxiv.org/abs/1911.07963).
"""

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from pfl_lightning.server.means.base import Mean
from pfl_lightning.server.means.vectors import Sum, Vectors


class CentredClipping(Mean):
    r"""Move a centre, at first the last model, by steps of bounded length towards all uploads.

    .. math:: v \leftarrow v + \frac1n \sum_k (x_k - v) \min\Bigl(1, \frac{\tau}{\lVert x_k - v \rVert}\Bigr)

    The paper takes one pass, from its last mean of momenta; here the clients' models are averaged, and a further pass
    starts nearer to them. A bad upload moves v by :math:`\tau / n` a pass at most.
    Source: Karimireddy et al., 2021 (https://arxiv.org/abs/2012.10333).

    Args:
        radius: :math:`\tau`, above 0; None takes the median of the distances to v, anew in each pass.
        passes: number of passes, at least 1.

    Raises:
        MisconfigurationException: if a value is out of its range.
    """

    def __init__(self, radius: float | None = None, passes: int = 3) -> None:
        check_bound("CentredClipping", "radius", radius)
        if passes < 1:
            raise MisconfigurationException(f"aggregator.mean=CentredClipping: passes={passes} must be 1 or more.")
        self.radius, self.passes = radius, passes

    def of(self, vectors: Vectors) -> Sum:
        """Return the centre after the last pass."""
        shares = torch.zeros(len(vectors), dtype=torch.float64)
        for _ in range(self.passes):
            shares = clipped_step(vectors.products, shares, self.radius)
        return vectors.combined(shares)


class NormBound(Mean):
    r"""Move the last model by the mean of the clients' changes, each cut to a bounded length.

    .. math:: x + \frac1n \sum_k \Delta_k \min\Bigl(1, \frac{C}{\lVert \Delta_k \rVert}\Bigr), \qquad
        \Delta_k = x_k - x

    Source: Sun et al., 2019 (https://arxiv.org/abs/1911.07963).

    Args:
        bound: C, above 0; None takes the median of the changes' norms.

    Raises:
        MisconfigurationException: if ``bound`` isn't above 0.
    """

    def __init__(self, bound: float | None = None) -> None:
        check_bound("NormBound", "bound", bound)
        self.bound = bound

    def of(self, vectors: Vectors) -> Sum:
        """Return the moved model."""
        # one step of centred clipping from the last model, which is the vectors' origin
        return vectors.combined(clipped_step(vectors.products, torch.zeros(len(vectors)).double(), self.bound))


def clipped_step(products: Tensor, shares: Tensor, radius: float | None) -> Tensor:
    r"""Return the shares of a centre :math:`x + \sum_k a_k (x_k - x)` after steps of bounded length to each upload.

    Args:
        products: inner products of the changes :math:`x_k - x` ``[n, n]``.
        shares: :math:`a_k` before the step ``[n]``.
        radius: above 0; None takes the median of the distances to the centre.
    """
    # inner products of n by n stand for the vectors: a pass costs nothing beside one product of all uploads
    along = products @ shares
    distances = (products.diagonal() - 2 * along + shares @ along).clamp_min(0).sqrt()
    bound = float(distances.quantile(0.5)) if radius is None else radius
    factors = torch.where(distances > bound, bound / distances, 1.0)
    return shares * (1 - factors.mean()) + factors / len(factors)


def check_bound(rule: str, setting: str, value: float | None) -> None:
    """Refuse a bound of 0 or less.

    Args:
        rule: the rule's name.
        setting: the setting's name.
        value: the bound; None is no bound to check.

    Raises:
        MisconfigurationException: if the bound isn't above 0.
    """
    if value is not None and not value > 0:
        raise MisconfigurationException(
            f"aggregator.mean={rule}: {setting}={value} must be above 0; leave it out to take the median of a round."
        )
