"""Attribute a network's prediction to the units of a layer."""

from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from pfl_lightning.nets.modes import kept_modes


def layer_conductance(
    model: nn.Module,
    layer: nn.Module,
    x: Tensor,
    target: Tensor,
    steps: int = 50,
    baseline: Tensor | None = None,
) -> Tensor:
    r"""Return the conductance of a layer's units for a class's logit, on the straight path from baseline to input.

    .. math::

        \mathrm{cond}_j = \int_0^1 \frac{\partial F}{\partial h_j} \frac{\partial h_j}{\partial \alpha}\, d\alpha
        \approx \sum_{s=1}^{S} \frac12 \Big(\frac{\partial F}{\partial h_j}(x_{s-1})
        + \frac{\partial F}{\partial h_j}(x_s)\Big)\, \big(h_j(x_s) - h_j(x_{s-1})\big),
        \qquad x_s = x_0 + \frac sS (x - x_0)

    F is the logit and h the layer's output. If F depends on x through h alone, the sum over units is :math:`F(x) -
    F(x_0)`: exactly for F linear or quadratic in h, otherwise up to an error that shrinks with the number of steps. The
    model runs in evaluation mode, with the S + 1 points of one sample as a batch. Source: Dhamdhere et al., 2019
    (https://arxiv.org/abs/1805.12233).

    >>> net = nn.Sequential(nn.Identity(), nn.Linear(2, 1, bias=False))
    >>> _ = net[1].weight.data.copy_(torch.tensor([[3.0, -1.0]]))
    >>> layer_conductance(net, net[0], torch.tensor([[2.0, 5.0]]), torch.tensor([0]))
    tensor([[ 6., -5.]])

    Args:
        model: maps inputs ``[n, *input_shape]`` to logits ``[n, num_classes]``, such as a net or a client module.
        layer: the module within the model whose outputs are the units, such as ``net.features``; used once per pass.
        x: inputs ``[n, *input_shape]``.
        target: class of the logit to explain, for each input ``[n]``.
        steps: S, at least 1.
        baseline: :math:`x_0`, shaped like ``x`` or like one input; None takes zeros.

    Returns:
        ``[n, d]``, the layer's output flattened; in float32 or wider.

    Raises:
        MisconfigurationException: if inputs are integers, such as word ids, or ``steps`` is less than 1.
    """
    if steps < 1:
        raise MisconfigurationException(f"steps={steps} must be 1 or more, such as 50.")
    if not x.is_floating_point():
        raise MisconfigurationException(f"inputs of type {x.dtype} have no path between; give floating-point inputs.")
    start = torch.zeros_like(x) if baseline is None else baseline.to(x).expand_as(x)
    shares = torch.linspace(0, 1, steps + 1, dtype=x.dtype, device=x.device).view(-1, *[1] * (x.dim() - 1))
    with kept_modes(model):
        model.eval()
        rows = [
            _along_path(model, layer, torch.lerp(first, last, shares), int(label))
            for first, last, label in zip(start, x, target, strict=True)
        ]
    return torch.stack(rows)


def _along_path(model: nn.Module, layer: nn.Module, path: Tensor, label: int) -> Tensor:
    """Return the conductance ``[d]`` along the points of a path ``[S + 1, *input_shape]``."""
    outputs: list[Tensor] = []

    def begin(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        # the graph begins at h: layers before need none, which saves their memory; leaving no_grad ends it
        torch.set_grad_enabled(True)
        outputs.append(output.requires_grad_())
        return output

    handle = layer.register_forward_hook(begin)
    try:
        with torch.no_grad():
            score = model(path)[:, label].sum()
    finally:
        handle.remove()
    h = outputs[-1]
    (slopes,) = torch.autograd.grad(score, h)
    # in bf16 the sum of S small differences would be lost in rounding
    wide = torch.promote_types(h.dtype, torch.float32)
    h, slopes = h.detach().flatten(1).to(wide), slopes.flatten(1).to(wide)
    return ((slopes[1:] + slopes[:-1]) / 2 * h.diff(dim=0)).sum(0)
