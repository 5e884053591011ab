"""Losses and gradients of a net at given weights."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, grad_and_value

from pfl_lightning.client import Batch, ClientModule
from pfl_lightning.client.common import trained_parameters
from pfl_lightning.data import Samples
from pfl_lightning.internals.of_torch import is_wrapped
from pfl_lightning.messages import StateDict
from pfl_lightning.nets import Net


def loss_at(client: ClientModule, net: Net, entries: StateDict, batch: Batch) -> Tensor:
    """Return a client's loss on a batch, by a net with some entries replaced.

    Args:
        client: the client module, for its `ClientModule.loss`.
        net: the net, the client's own or another one.
        entries: parameters and buffers that replace the net's. BatchNorm updates the running statistics among them, or
            the net's own if they have none.
        batch: inputs and targets.
    """
    x, target = batch
    features = called(net, "features", entries, x)
    return client.loss(features, called(net, "classifier", entries, features), target)


def called(net: nn.Module, part: str, entries: StateDict, x: Any) -> Any:
    """Return the output of a part of a net, with some of the net's entries replaced.

    A parameter with several names is replaced under all of them, by the entry of its first name.

    Args:
        net: the net.
        part: the part's name, or an empty one for all of the net.
        entries: parameters and buffers, by their first names in the net.
        x: the part's input.
    """
    module, prefix = net.get_submodule(part), f"{part}." if part else ""
    own = within(prefix, entries)
    first = {id(parameter): name for name, parameter in net.named_parameters()}
    names = [name for name, _ in net.named_parameters(remove_duplicate=False)]
    if len(first) < len(names):
        others = {name: entry for name, entry in own.items() if prefix + name not in names}
        # Each module once: of two changes at one place, as of a layer that a net has twice, functional_call puts the
        # first back in place of the parameter, and its own tie_weights makes both.
        places = [
            (f"{path}.{name}".removeprefix("."), first[id(parameter)])
            for path, each in module.named_modules()
            for name, parameter in each.named_parameters(recurse=False, remove_duplicate=False)
        ]
        own = others | {place: entries[name] for place, name in places if name in entries}
    return functional_call(module, own, (x,), tie_weights=False)


def gradient_at(client: ClientModule, weights: StateDict, batch: Batch) -> StateDict:
    """Return the gradient of a client's loss at given weights, as a constant; running statistics stand still.

    Args:
        client: the client module.
        weights: the weights, by name, at which to take the gradient.
        batch: inputs and targets.
    """

    def objective(constants: StateDict, buffers: StateDict) -> Tensor:
        return loss_at(client, client.net, constants | buffers, batch)

    # detached, and buffers cloned: neither a graph nor a running statistic of the caller's may change
    constants = {name: weight.detach() for name, weight in weights.items()}
    buffers = {name: buffer.clone() for name, buffer in client.net.named_buffers()}
    return value_and_gradient(objective, constants, buffers)[1]


def value_and_gradient(objective: Callable[..., Tensor], weights: StateDict, *args: Any) -> tuple[Tensor, StateDict]:
    """Return an objective's value and its gradient by weights, as constants, also where gradients are switched off.

    Args:
        objective: returns a scalar for weights and further arguments.
        weights: the weights, by name.
        *args: the further arguments.
    """
    # autograd alone takes half the time, but can't differentiate under vmap, and no compiler follows it
    if torch.compiler.is_compiling() or any(map(is_wrapped, weights.values())):
        slope, value = grad_and_value(objective)(weights, *args)
        return value, slope
    leaves = {name: weight.detach().requires_grad_() for name, weight in weights.items()}
    with torch.enable_grad():
        value = objective(leaves, *args)
    slopes = torch.autograd.grad(value, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return value.detach(), dict(zip(leaves, slopes, strict=True))


def mean_gradient(client: ClientModule, part: Samples) -> StateDict:
    """Return the gradient of the mean task loss of some samples at the net's weights, by the parameter's name in it.

    Args:
        client: the client module, in evaluation mode.
        part: the samples, on the module's device; without any, the gradient is 0.
    """

    def objective(weights: StateDict, x: Any, y: Any) -> Tensor:
        return client.task_loss(called(client.net, "", weights, x), y, "sum") / total

    total = client.task.weight(part.y)
    weights = {name: parameter.detach() for name, parameter in trained_parameters(client, "net").items()}
    if not len(part):
        return {name: torch.zeros_like(weight) for name, weight in weights.items()}
    # chunk by chunk: the loss is a sum over chunks, divided by the number of all targets
    gradients = [grad(objective)(weights, x, y) for x, y in part.chunks()]
    return {name: torch.stack([each[name] for each in gradients]).sum(0) for name in weights}


def trainable(net: nn.Module) -> StateDict:
    """Return the net's parameters in training now, by name.

    Args:
        net: the net.
    """
    return {name: parameter for name, parameter in net.named_parameters() if parameter.requires_grad}


def within(part: str, entries: StateDict) -> StateDict:
    """Return the entries of a part of a net, by name within the part.

    Args:
        part: the part's prefix, such as ``features.``.
        entries: entries of the net, by name.
    """
    return {name.removeprefix(part): entry for name, entry in entries.items() if name.startswith(part)}


def exact_squares(h: Tensor, vectors: Tensor) -> Tensor:
    """Return squared distances ``[n, m]`` of features.

    Args:
        h: ``[n, d]``.
        vectors: ``[m, d]``.
    """
    # the faster mode by a matrix product loses small distances between long vectors to rounding
    return torch.cdist(h, vectors, compute_mode="donot_use_mm_for_euclid_dist").square()


def quick_squares(h: Tensor, vectors: Tensor) -> Tensor:
    r"""Return squared distances ``[n, m]`` by a matrix product, which all export formats have.

    .. math:: \lVert h - v \rVert^2 = \lVert h \rVert^2 - 2\, h^\top v + \lVert v \rVert^2

    >>> quick_squares(torch.tensor([[1000.0, 0.0]]), torch.tensor([[1000.0, 0.125]]))
    tensor([[0.0156]])

    Args:
        h: ``[n, d]``.
        vectors: ``[m, d]``.
    """
    # in double precision, as the difference of large squares would lose small distances to rounding
    wide, own = h.double(), vectors.double()
    squares = wide.square().sum(1, keepdim=True) - 2 * wide @ own.T + own.square().sum(1)
    return squares.clamp_min(0).to(h.dtype)
