"""Bound the change of one client, and let the bound follow the clients' norms."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def clipped(change: Tensor, clip: float, sizes: Sequence[int] | None = None) -> Tensor:
    r"""Return a change within a norm, :math:`\Delta \min(1, C / \|\Delta\|)`, and zero for one with NaN or infinity.

    >>> clipped(torch.tensor([3.0, 4.0], dtype=torch.float64), 1.0)
    tensor([0.6000, 0.8000], dtype=torch.float64)

    Args:
        change: :math:`\Delta` ``[d]``, in float64.
        clip: C, above 0; infinite bounds nothing.
        sizes: lengths of L entries that follow one another in it, each of which then has the bound
            :math:`C / \sqrt{L}`, so that all together have C; None bounds it as a whole.
    """
    if sizes is not None:
        # squares add up to C squared
        bound = clip / math.sqrt(len(sizes))
        return torch.cat([clipped(part, bound) for part in torch.split(change, list(sizes))])
    norm = float(torch.linalg.vector_norm(change))
    # zero is within any bound, and NaN times zero is NaN
    if not math.isfinite(norm):
        return torch.zeros_like(change)
    return change * (clip / norm) if norm > clip else change


def noise_beside_counts(noise_multiplier: float, count_noise: float) -> float:
    r"""Return the noise multiplier of the sum, where sum and count of clients share one.

    .. math::

        z_\Delta = \left( z^{-2} - (2 \sigma_b)^{-2} \right)^{-1/2}

    Source: Andrew et al., 2021, Theorem 1 (https://arxiv.org/abs/1905.03871).

    Args:
        noise_multiplier: z, that both together shall have, at least 0 and below :math:`2 \sigma_b`.
        count_noise: :math:`\sigma_b`, standard deviation of the count's noise; a client moves it by ½.
    """
    if noise_multiplier == 0:
        return 0.0
    return 1 / math.sqrt(noise_multiplier**-2 - (2 * count_noise) ** -2)


def next_clip(clip: float, share: float, quantile: float, rate: float) -> float:
    r"""The bound of the next round: :math:`C e^{-\eta (\tilde b - \gamma)}`.

    It falls where more than a quantile of the norms are within it, and grows where fewer are. Source: Andrew et al.,
    2021 (https://arxiv.org/abs/1905.03871).

    Args:
        clip: C.
        share: :math:`\tilde b`, of clients whose norms are within it, with noise.
        quantile: :math:`\gamma`, the share that shall be.
        rate: :math:`\eta`.
    """
    return clip * math.exp(-rate * (share - quantile))
