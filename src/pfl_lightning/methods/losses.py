"""Terms of local objectives, as pure functions."""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import functional as F


def proximal(parameters: Iterable[Tensor], anchors: Iterable[Tensor]) -> Tensor:
    r"""Return half the squared distance to a reference model, :math:`\frac12 \sum_l \lVert w_l - a_l \rVert_2^2`.

    >>> proximal([torch.tensor([3.0, 0.0])], [torch.tensor([1.0, 1.0])])
    tensor(2.5000)

    Args:
        parameters: tensors of the model in training.
        anchors: the reference's tensors, in the same order and shapes; they receive no gradient.
    """
    # one operation a tensor in each direction: a difference, a square and a sum take three, and their gradients more
    squares = [F.mse_loss(w, a.detach(), reduction="sum") for w, a in zip(parameters, anchors, strict=True)]
    return 0.5 * torch.stack(squares).sum()


def divergence(teacher: Tensor, student: Tensor) -> Tensor:
    r"""Return the mean of :math:`\mathrm{KL}(p_t \Vert p_s)` over samples; only the student receives a gradient.

    Args:
        teacher: logits ``[n, C]``.
        student: logits ``[n, C]``.
    """
    # logarithms on both sides: a softmax that rounds to 0 would give NaN
    known = teacher.detach().log_softmax(1)
    return F.kl_div(student.log_softmax(1), known, reduction="batchmean", log_target=True)


def supervised_contrastive(
    features: Tensor, target: Tensor, tau: float = 0.07, base_tau: float = 0.07, normalize: bool = True
) -> Tensor:
    r"""Return the supervised contrastive loss: features of one class attract, and all features repel each other.

    .. math::

        -\frac{\tau}{\tau_b} \, \mathrm{mean}_i \frac{1}{|P(i)|} \sum_{p \in P(i)}
        \log \frac{e^{\langle f_i, f_p\rangle / \tau}}{\sum_{a \ne i} e^{\langle f_i, f_a\rangle / \tau}}, \qquad
        P(i) = \{p \ne i : y_p = y_i\}

    A feature with no other of its class adds 0 to the mean; with two views of each sample this can't occur.
    Source: Khosla et al., 2020, equation 2 (https://arxiv.org/abs/2004.11362), whose official code has the factor and
    the defaults: 0.07 for both temperatures, and unit vectors.

    >>> views = torch.tensor([[3.0, 0.0], [0.0, 2.0], [3.0, 0.0], [0.0, 2.0]])
    >>> supervised_contrastive(views, torch.tensor([0, 1, 0, 1]), tau=1.0, base_tau=1.0, normalize=False)
    tensor(0.0181)

    Args:
        features: ``[n, d]``; several views of one sample are rows of their own.
        target: class numbers ``[n]``.
        tau: temperature :math:`\tau`, above 0.
        base_tau: :math:`\tau_b`, which scales the loss, above 0.
        normalize: whether to take :math:`f / \lVert f \rVert_2` instead of f.
    """
    # inner products of unbounded features leave the range of half precision
    with torch.autocast(features.device.type, enabled=False):
        wide = features.to(torch.promote_types(features.dtype, torch.float32))
        wide = F.normalize(wide, dim=1) if normalize else wide
        itself = torch.eye(len(target), dtype=torch.bool, device=target.device)
        similarity = (wide @ wide.T / tau).masked_fill(itself, -torch.inf)
        positive = (target[:, None] == target) & ~itself
        log_share = similarity - similarity.logsumexp(1, keepdim=True)
        sums = torch.where(positive, log_share, 0).sum(1)
        # clamped: a feature without a positive has the sum 0, and 0 / 1 is 0
        return -tau / base_tau * (sums / positive.sum(1).clamp_min(1)).mean()
