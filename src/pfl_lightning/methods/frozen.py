"""Frozen copies of tensors, and of a module to be run."""

import copy
from collections.abc import Iterable, Iterator
from itertools import chain

import torch
from torch import Tensor, nn
from torch.func import functional_call

from pfl_lightning.messages import StateDict


class Frozen(nn.Module):
    """Copies of named tensors which nothing trains, such as a received model's parameters.

    They are buffers, so that no optimizer and no gradient sees them. Names of buffers can't have dots, and have slashes
    instead.

    >>> anchors = Frozen([("0.weight", torch.zeros(2))])
    >>> anchors.take([("0.weight", torch.ones(2)), ("1.weight", torch.ones(3))])
    >>> anchors.tensors(), list(dict(anchors.named_buffers()))
    ({'0.weight': tensor([1., 1.])}, ['0/weight'])

    Args:
        named: names and tensors, such as a module's ``named_parameters()``.
        persistent: whether the copies are entries of the ``state_dict``; unnecessary for what every download brings
            anew.
    """

    def __init__(self, named: Iterable[tuple[str, Tensor]], persistent: bool = False) -> None:
        super().__init__()
        for name, tensor in named:
            self.register_buffer(name.replace(".", "/"), tensor.detach().clone(), persistent=persistent)

    def tensors(self) -> StateDict:
        """Return the copies by name of the original, in the order given."""
        return {name.replace("/", "."): tensor for name, tensor in self.named_buffers()}

    @torch.no_grad()
    def take(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Copy the tensors anew.

        Args:
            named: names and tensors, at least those of all copies.
        """
        given = dict(named)
        for name, tensor in self.tensors().items():
            tensor.copy_(given[name])


class FrozenModule(Frozen):
    """A frozen copy of a module, run in evaluation mode always.

    Args:
        module: the module, whose parameters and buffers are copied.
        persistent: whether the copies are entries of the ``state_dict``.
        common: parameters of the module that never change, and aren't copied.
    """

    def __init__(self, module: nn.Module, persistent: bool = False, common: Iterable[nn.Parameter] = ()) -> None:
        kept = {id(parameter): parameter for parameter in common}
        named = [(name, t) for name, t in tensors_of(module) if id(t) not in kept]
        super().__init__(named, persistent)
        # the architecture alone, on "meta" tensors, which have shapes and no memory: `forward` runs it with the copies
        empty = {id(t): like(t, t.detach().to("meta")) for _, t in named}
        # in a tuple, so that it isn't a submodule, whose mode and device the owner would set
        self._architecture = (copy.deepcopy(module, kept | empty).eval(),)

    def take_from(self, module: nn.Module) -> None:
        """Copy the tensors of a module with the same architecture.

        Args:
            module: the module.
        """
        self.take(tensors_of(module))

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        """Return the module's output, without gradient.

        Args:
            x: the input.
        """
        output: Tensor = functional_call(self._architecture[0], self.tensors(), (x,))
        return output


def tensors_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield names and tensors of a module's parameters and buffers.

    Args:
        module: the module.
    """
    return chain(module.named_parameters(), module.named_buffers())


def like(tensor: Tensor, other: Tensor) -> Tensor:
    """Return a tensor as a parameter if another tensor is one.

    Args:
        tensor: the tensor to take after.
        other: the tensor to return.
    """
    return nn.Parameter(other, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else other
