"""Layers of stacked clients in the fewest operations, and as autocast has them, where vmap's own way is neither."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import (
    _add_batch_dim,
    get_unwrapped,
    is_functorch_wrapped_tensor,
    maybe_get_bdim,
    maybe_get_level,
)
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from pfl_lightning.messages import tree_map

CONVOLUTIONS = {
    *(F.conv1d, F.conv2d, F.conv3d),
    *(F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d),
}
MEAN = {
    **dict.fromkeys(("weight", "size_average", "reduce")),
    "ignore_index": -100,
    "reduction": "mean",
    "label_smoothing": 0.0,
}
"""How ``torch.nn.functional.cross_entropy`` says that it was given no settings."""


class Layers(TorchFunctionMode):
    """While it is entered, linear layers, convolutions and cross-entropy under vmap are those of this file."""

    classes: Tensor | None = None
    """A batch's class numbers, checked before: torch's own cross-entropy looks for samples that are to be ignored, of
    which these have none."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Takes the place of layers."""
        if func is F.linear:
            return linear(*args, **(kwargs or {}))
        if func is F.cross_entropy and args[1] is self.classes and kwargs == MEAN:
            return cross_entropy(*args)
        if func in CONVOLUTIONS:
            return convolution(func, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As ``torch.nn.functional.linear``.

    vmap's own way multiplies by 1 in between, and gives gradients whose memory isn't in their parameters' order.
    """
    if input.dim() == 2 and not torch.is_autocast_enabled(input.device.type):
        tensors = [input, weight] if bias is None else [input, weight, bias]
        if (stacks := stacks_of(tensors)) is not None:
            return applied(StackLinear, stacks, input)
    product = torch.matmul(input, weight.t())
    return product if bias is None else product + bias.to(product.dtype)


def cross_entropy(input: Tensor, target: Tensor) -> Tensor:
    """As ``torch.nn.functional.cross_entropy`` of class numbers that are all in range."""
    if torch.is_autocast_enabled(input.device.type):
        input = input.float()
    if input.dim() == 2 and (stacks := stacks_of([input, target])) is not None:
        return applied(StackCrossEntropy, stacks, input)
    return input.log_softmax(1).gather(1, target[:, None]).sum() / -len(target)


def convolution(function: Callable[..., Tensor], input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """A convolution of any kind, under autocast in its type.

    vmap computes it by an operation that autocast doesn't know on a CPU, and on a GPU adds the bias by itself, in
    float32, which all that follows would then be in.

    Args:
        function: of ``torch.nn.functional``.
        input: its input.
        *args: what else it takes.
        **kwargs: the same by name.
    """
    kind = input.device.type
    if not torch.is_autocast_enabled(kind):
        return function(input, *args, **kwargs)
    narrow = torch.get_autocast_dtype(kind)

    def cast(tensor: Tensor) -> Tensor:
        # as autocast has it
        return tensor.to(narrow) if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor

    return function(cast(input), *tree_map(cast, args), **tree_map(cast, kwargs))


def stacks_of(tensors: Sequence[Tensor]) -> list[Tensor] | None:
    """The stacks whose rows tensors under vmap are, ``[clients, ...]``; None where they aren't, or are more than that.

    Args:
        tensors: as a step under vmap sees them.
    """
    if any(maybe_get_bdim(tensor) != 0 for tensor in tensors):
        return None
    stacks = [get_unwrapped(tensor) for tensor in tensors]
    return None if any(map(is_functorch_wrapped_tensor, stacks)) else stacks


def applied(function: type[torch.autograd.Function], stacks: list[Tensor], like: Tensor) -> Tensor:
    """What a function makes of stacks, as a step under vmap sees it.

    Args:
        function: from stacks to a stack.
        stacks: ``[clients, ...]``.
        like: a tensor under vmap.
    """
    # outside of vmap's levels a function has its own backward, and no rule for each level
    with temporarily_clear_interpreter_stack():
        stack = function.apply(*stacks)
    rows: Tensor = _add_batch_dim(stack, 0, maybe_get_level(like))
    return rows


class StackLinear(torch.autograd.Function):
    r"""Linear layers side by side, :math:`x_k W_k^\top + b_k`."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Of inputs ``[clients, n, in]``, weights ``[clients, out, in]`` and biases ``[clients, out]``."""
        ctx.save_for_backward(input, weight)
        if bias is None:
            return torch.bmm(input, weight.mT)
        return torch.baddbmm(bias[:, None], input, weight.mT)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients whose memory is in the order of what they are of."""
        (gradient,) = gradients
        input, weight = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        of_input = torch.bmm(gradient, weight) if wanted[0] else None
        of_weight = torch.bmm(gradient.mT, input) if wanted[1] else None
        return of_input, of_weight, *(gradient.sum(1) if asked else None for asked in wanted[2:])


class StackCrossEntropy(torch.autograd.Function):
    r"""Mean cross-entropies side by side, :math:`-\frac{1}{n} \sum_i \log p_{i y_i}` where p is the softmax."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor) -> Tensor:
        """Of logits ``[clients, n, classes]`` and class numbers ``[clients, n]``."""
        log_p, target = log_softmax(logits), target[:, :, None]
        ctx.save_for_backward(log_p, target)
        return log_p.gather(2, target).sum((1, 2)) / -logits.shape[1]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """The difference of what is predicted and what is; refused where it should be differentiated once more."""
        if torch.is_grad_enabled():
            raise RuntimeError("gradients of the gradients of cross-entropy, of many clients at once")
        log_p, target = ctx.saved_tensors
        difference = log_p.exp().scatter_(2, target, -1, reduce="add")
        return difference.mul_((gradients[0] / target.shape[1])[:, None, None]), None


def log_softmax(logits: Tensor) -> Tensor:
    """As ``torch.log_softmax`` over the last dimension, which on a CPU is slow for few classes."""
    return logits.log_softmax(-1) if logits.is_cuda else logits - logits.logsumexp(-1, keepdim=True)
