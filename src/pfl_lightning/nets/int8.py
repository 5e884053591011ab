"""Linear layers whose frozen weights are held in 8 bits."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Int8Linear(nn.Linear):
    r"""A frozen linear layer that holds a byte a weight, and computes in the type of its inputs.

    .. math:: y = s \odot (Q x) + b, \qquad s_o = \max_i |W_{oi}| / 127.5, \qquad
        Q_{oi} = \operatorname{round}(W_{oi} / s_o)

    Q is one of the integers from -128 to 127, and s has a number an output. Numbers are those of torchao's
    ``Int8WeightOnlyConfig``; its own tensors have no views, which engines need. The product's weights in floating
    numbers exist while a layer computes, forward or backward, and are not kept between the two.

    Args:
        layer: the layer in floating numbers.
    """

    def __init__(self, layer: nn.Linear) -> None:
        # on `meta`, as the weights come from the layer
        super().__init__(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
        self.training = layer.training
        # a row of zeros would be divided by 0
        wide = layer.weight.detach().float()
        scale = (wide.abs().amax(1) / 127.5).clamp(min=torch.finfo(torch.float32).eps)
        # times the inverse, as torchao has it: the largest of a row is then no tie between two integers
        rounded = (wide * (1 / scale)[:, None]).round().clamp(-128, 127).to(torch.int8)
        self.weight = nn.Parameter(rounded, requires_grad=False)
        self.scale = nn.Parameter(scale.to(layer.weight.dtype), requires_grad=False)
        if layer.bias is not None:
            self.bias = nn.Parameter(layer.bias.detach(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs ``[..., o]``.

        Args:
            x: inputs ``[..., i]``.
        """
        output: Tensor = ScaledProduct.apply(x, self.weight, self.scale)
        return output if self.bias is None else output + self.bias


class ScaledProduct(torch.autograd.Function):
    """The product with integers, times a number an output; for the backward pass it keeps the integers alone."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        """Return the outputs.

        Args:
            x: inputs ``[..., i]``.
            weight: integers ``[o, i]``.
            scale: ``[o]``.
        """
        return F.linear(x, weight.to(x.dtype)) * scale

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """Keep what the backward pass needs."""
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of the inputs; weights have none."""
        [gradient], (weight, scale) = gradients, ctx.saved_tensors
        scaled = gradient * scale
        return scaled @ weight.to(scaled.dtype), None, None


def hold_in_int8(model: nn.Module) -> int:
    """Hold all linear layers of a module in 8 bits, and return their number.

    Args:
        model: the module, which is changed.
    """
    found = [(path, layer) for path, layer in model.named_modules() if type(layer) is nn.Linear]
    for path, layer in found:
        model.set_submodule(path, Int8Linear(layer))
    return len(found)
