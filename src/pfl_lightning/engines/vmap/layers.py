"""Faster layers of stacked clients, and correct types under autocast, where ``vmap`` has neither."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from pfl_lightning.engines.vmap.recurrent import CELLS, recurrent
from pfl_lightning.internals.of_torch import is_wrapped, level_of, outside_vmap, row_dimension, row_of, unwrapped
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
"""The keyword arguments of ``torch.nn.functional.cross_entropy`` with default settings."""
LOSSES = {
    *(F.cross_entropy, F.nll_loss, F.binary_cross_entropy, F.binary_cross_entropy_with_logits),
    *(F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.kl_div, F.gaussian_nll_loss, F.poisson_nll_loss),
}
"""Losses of samples that torch averages."""


class Layers(TorchFunctionMode):
    """Replace linear layers, convolutions and cross-entropy under ``vmap``, and means over padded batches."""

    classes: Tensor | None = None
    """The batch's class numbers, checked beforehand to be in range. torch's own cross-entropy looks for ignored samples
    at every call, and this batch has none."""
    weights: Tensor | None = None
    """Weights of a padded batch's samples in means over samples, ``[n]`` with sum 1, 0 beyond the client's own; None
    for batches without padding."""
    clients = 0
    """Number of clients whose samples are one batch, outside of ``vmap`` (`Merged`); 0 under ``vmap``."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call this file's version of a layer."""
        if func is F.linear:
            if self.clients:
                return linear_of_batch(self.clients, *args, **(kwargs or {}))
            return linear(*args, **(kwargs or {}))
        if func is F.cross_entropy and args[1] is self.classes and kwargs == MEAN:
            logits, target = args
            return cross_entropy(logits, target, self.weights)
        if self.weights is not None and func in MEANS:
            return MEANS[func](self.weights, kl_div if func is F.kl_div else func, args, kwargs or {})
        if func is F.kl_div:
            return kl_div(*args, **(kwargs or {}))
        if func in CONVOLUTIONS:
            return convolution(func, *args, **(kwargs or {}))
        if func in CELLS and not self.clients:
            return recurrent(func, linear, self.between, *args)
        return func(*args, **(kwargs or {}))

    def between(self, input: Tensor, p: float) -> Tensor:
        """Compute the dropout between recurrent layers; evaluation has none.

        Args:
            input: outputs of a layer.
            p: probability of dropout.
        """
        raise RuntimeError("dropout between recurrent layers")


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``torch.nn.functional.linear`` under ``vmap``.

    ``vmap`` alone adds multiplications by 1, and returns gradients with another memory layout than the parameters'.
    """
    # The most frequent case; the plain form below also works for more dimensions and under autocast.
    if input.dim() == 2 and not torch.is_autocast_enabled(input.device.type):
        tensors = [input, weight] if bias is None else [input, weight, bias]
        if (stacks := stacks_of(tensors)) is not None:
            return applied(StackLinear, stacks, input)
    product = torch.matmul(input, weight.t())
    return product if bias is None else product + bias.to(product.dtype)


def linear_of_batch(clients: int, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``torch.nn.functional.linear`` of a batch with all clients' samples, one client after another.

    Args:
        clients: number of clients.
        input: inputs ``[clients * n, ..., in]``.
        weight: ``[out, in]``, of one client or common.
        bias: ``[out]`` likewise.
    """
    if not is_wrapped(weight):
        return F.linear(input, weight, bias)
    own = [unwrapped(entry).movedim(row_dimension(entry), 0) for entry in (weight, bias) if entry is not None]
    rows = input.reshape(clients, -1, input.shape[-1])
    if torch.is_autocast_enabled(input.device.type):
        product = torch.matmul(rows, own[0].mT)
        output = product if bias is None else product + own[1][:, None].to(product.dtype)
    else:
        output = cast(Tensor, StackLinear.apply(rows, *own))
    return output.view(*input.shape[:-1], -1)


def cross_entropy(input: Tensor, target: Tensor, weights: Tensor | None = None) -> Tensor:
    """Compute ``torch.nn.functional.cross_entropy`` for class numbers known to be in range.

    Args:
        input: logits ``[n, classes]``.
        target: class numbers ``[n]``.
        weights: the samples' weights ``[n]``; None for the plain mean.
    """
    if torch.is_autocast_enabled(input.device.type):
        # autocast computes cross-entropy in float32.
        input = input.float()
    tensors = [input, target] if weights is None else [input, target, weights]
    if input.dim() == 2 and (stacks := stacks_of(tensors)) is not None:
        return applied(StackCrossEntropy, stacks, input)
    # Targets shared by all clients have no stack; this plain form works under vmap as it is.
    log_p = input.log_softmax(1).gather(1, target[:, None])
    return log_p.sum() / -len(target) if weights is None else weighted_sum(weights, -log_p.flatten(1).mean(1))


def kl_div(
    input: Tensor, target: Tensor, reduction: str = "mean", log_target: bool = False, **retired: bool | None
) -> Tensor:
    """Compute ``torch.nn.functional.kl_div``, for which ``vmap`` has no rule but a loop over clients.

    Args:
        input: logarithms of probabilities ``[n, ...]``.
        target: probabilities of the same shape.
        reduction: ``mean``, ``batchmean``, ``sum`` or ``none``.
        log_target: whether the target has logarithms too.
        **retired: torch's older arguments for the reduction.
    """
    if any(value is not None for value in retired.values()):
        return F.kl_div(input, target, reduction=reduction, log_target=log_target, **retired)
    # 0 log 0 is 0
    errors = target.exp() * (target - input) if log_target else torch.xlogy(target, target) - target * input
    if reduction == "none":
        return errors
    if reduction == "mean":
        return errors.mean()
    return errors.sum() / input.shape[0] if reduction == "batchmean" else errors.sum()


def weighted_loss(weights: Tensor, function: Callable[..., Tensor], args: Any, kwargs: Mapping[str, Any]) -> Tensor:
    """Return a loss of a padded batch with each sample at its weight.

    Args:
        weights: the samples' weights ``[n]``.
        function: the loss of ``torch.nn.functional``.
        args: its arguments.
        kwargs: its further arguments, by which it may ask for another reduction than the mean.
    """
    reduction = kwargs.get("reduction", "mean")
    if reduction not in ("mean", "batchmean"):
        return function(*args, **kwargs)
    errors = function(*args, **{**kwargs, "reduction": "none"})
    # A loss of other things than samples, such as distances of weights.
    if errors.shape[:1] != weights.shape:
        return function(*args, **kwargs)
    of_samples = errors.flatten(1) if errors.dim() > 1 else errors[:, None]
    return weighted_sum(weights, of_samples.sum(1) if reduction == "batchmean" else of_samples.mean(1))


def weighted_mean(weights: Tensor, function: Callable[..., Tensor], args: Any, kwargs: Mapping[str, Any]) -> Tensor:
    """Return ``torch.mean`` of a padded batch's tensor, with each sample at its weight if it is a mean over samples.

    Args:
        weights: the samples' weights ``[n]``.
        function: ``torch.mean``, or the method.
        args: its arguments.
        kwargs: its further arguments.
    """
    given = dict(zip(("input", "dim", "keepdim"), args, strict=False)) | dict(kwargs)
    input, dim, keepdim = given.pop("input"), given.pop("dim", None), given.pop("keepdim", False)
    dims = range(input.dim()) if dim is None else [d % input.dim() for d in ([dim] if isinstance(dim, int) else dim)]
    if given or 0 not in dims or input.shape[:1] != weights.shape:
        return function(*args, **kwargs)
    others = [d for d in dims if d]
    of_samples = input.mean(others, keepdim=True) if others else input
    mean = weighted_sum(weights, of_samples)[None]
    if keepdim:
        return mean
    # from the last, as each removal moves those behind it
    for d in sorted(dims, reverse=True):
        mean = mean.squeeze(d)
    return mean


def weighted_sum(weights: Tensor, of_samples: Tensor) -> Tensor:
    r"""Return :math:`\sum_i w_i t_i` for tensors of samples ``[n, ...]``."""
    return (of_samples * weights.view(-1, *[1] * (of_samples.dim() - 1))).sum(0)


MEANS = {**dict.fromkeys(LOSSES, weighted_loss), **dict.fromkeys((torch.mean, torch.Tensor.mean), weighted_mean)}
"""What takes the place of a mean over the samples of a padded batch."""


def convolution(function: Callable[..., Tensor], input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Compute a convolution, with the type of autocast under autocast.

    ``vmap`` replaces a convolution by an operation that autocast doesn't know on a CPU; on a GPU the bias is added
    apart, in float32, and all later layers would run in float32.

    Args:
        function: the convolution of ``torch.nn.functional``.
        input: the input.
        *args: further arguments.
        **kwargs: further keyword arguments.
    """
    kind = input.device.type
    if not torch.is_autocast_enabled(kind):
        return function(input, *args, **kwargs)
    narrow = torch.get_autocast_dtype(kind)

    def cast(tensor: Tensor) -> Tensor:
        # autocast leaves integers and float64 unchanged.
        return tensor.to(narrow) if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor

    return function(cast(input), *tree_map(cast, args), **tree_map(cast, kwargs))


def stacks_of(tensors: Sequence[Tensor]) -> list[Tensor] | None:
    """Return the stacks ``[clients, ...]`` behind tensors under ``vmap``; None if the tensors aren't plain rows.

    Args:
        tensors: tensors inside a step under ``vmap``.
    """
    if any(row_dimension(tensor) != 0 for tensor in tensors):
        return None
    stacks = [unwrapped(tensor) for tensor in tensors]
    return None if any(map(is_wrapped, stacks)) else stacks


def applied(function: type[torch.autograd.Function], stacks: list[Tensor], like: Tensor) -> Tensor:
    """Apply a function to stacks, and return the result as a tensor under ``vmap``.

    Args:
        function: maps stacks to a stack.
        stacks: tensors ``[clients, ...]``.
        like: any tensor under ``vmap``, for the level.
    """
    # Outside of vmap's levels autograd uses the function's own backward, instead of a rule for each level.
    with outside_vmap():
        stack = function.apply(*stacks)
    rows: Tensor = row_of(stack, 0, level_of(like))
    return rows


class StackLinear(torch.autograd.Function):
    r"""Linear layers side by side, :math:`x_k W_k^\top + b_k`."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute outputs of inputs ``[clients, n, in]``, weights ``[clients, out, in]``, biases ``[clients, out]``."""
        ctx.save_for_backward(input, weight)
        return linear_of_stacks(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return gradients with the memory layout of their inputs."""
        (gradient,) = gradients
        input, weight = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        of_input = torch.bmm(gradient, weight) if wanted[0] else None
        of_weight = torch.bmm(gradient.mT, input) if wanted[1] else None
        return of_input, of_weight, *(gradient.sum(1) if asked else None for asked in wanted[2:])


class StackCrossEntropy(torch.autograd.Function):
    r"""Cross-entropies side by side, :math:`-\sum_i w_i \log p_{i y_i}` with the softmax p, by default the mean."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return losses ``[clients]`` of logits ``[clients, n, classes]``, classes and weights ``[clients, n]``."""
        log_p, target = log_softmax(logits), target[:, :, None]
        ctx.save_for_backward(log_p, target, weights)
        of_samples = log_p.gather(2, target)
        if weights is None:
            return of_samples.sum((1, 2)) / -logits.shape[1]
        return -(of_samples.squeeze(2) * weights).sum(1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the softmax minus the one-hot targets; a second derivative is refused."""
        if torch.is_grad_enabled():
            raise RuntimeError("gradients of the gradients of cross-entropy, of many clients at once")
        log_p, target, weights = ctx.saved_tensors
        difference = softmax_minus_one_hot(log_p, target)
        factors = gradients[0][:, None] * weights if weights is not None else (gradients[0] / target.shape[1])[:, None]
        return difference.mul_(factors[:, :, None]), None, None


def linear_of_stacks(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return outputs ``[clients, n, out]`` of linear layers side by side.

    Args:
        input: ``[clients, n, in]``.
        weight: ``[clients, out, in]``.
        bias: ``[clients, out]``; None without one.
    """
    return torch.bmm(input, weight.mT) if bias is None else torch.baddbmm(bias[:, None], input, weight.mT)


def softmax_minus_one_hot(log_p: Tensor, target: Tensor) -> Tensor:
    """Return the gradients of cross-entropies by their logits.

    Args:
        log_p: logarithms of the softmax ``[clients, n, classes]``.
        target: class numbers ``[clients, n, 1]``.
    """
    # In place on the softmax, which saves a one-hot tensor of the same size.
    return log_p.exp().scatter_(2, target, -1, reduce="add")


def log_softmax(logits: Tensor) -> Tensor:
    """Compute ``torch.log_softmax`` over the last dimension; torch's own is slow on a CPU for few classes."""
    return logits.log_softmax(-1) if logits.is_cuda else logits - logits.logsumexp(-1, keepdim=True)
