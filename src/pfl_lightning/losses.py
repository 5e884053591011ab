"""Terms of local objectives, as pure functions."""

from collections.abc import Iterable

import torch
from torch import Tensor


def proximal(parameters: Iterable[Tensor], anchors: Iterable[Tensor]) -> Tensor:
    r"""Half the squared distance to a reference model, :math:`\frac12 \sum_l \lVert w_l - a_l \rVert_2^2`.

    >>> proximal([torch.tensor([3.0, 0.0])], [torch.tensor([1.0, 1.0])])
    tensor(2.5000)

    Args:
        parameters: tensors of the model under training.
        anchors: the reference's tensors, in the same order and of the same shapes; they receive no gradient.
    """
    squares = [(w - a.detach()).square().sum() for w, a in zip(parameters, anchors, strict=True)]
    return 0.5 * torch.stack(squares).sum()
