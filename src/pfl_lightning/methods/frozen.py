"""Frozen copies: of tensors, and of a module that can still be run."""

import copy
from collections.abc import Iterable, Iterator
from itertools import chain

import torch
from torch import Tensor, nn
from torch.func import functional_call

from pfl_lightning.messages import StateDict


class Frozen(nn.Module):
    """Copies of named tensors that nothing trains, such as of a received model's parameters.

    They are buffers: no optimizer and no gradient sees them. Names of buffers have no dots, and have slashes instead.

    >>> anchors = Frozen([("0.weight", torch.zeros(2))])
    >>> anchors.take([("0.weight", torch.ones(2)), ("1.weight", torch.ones(3))])
    >>> anchors.tensors(), list(dict(anchors.named_buffers()))
    ({'0.weight': tensor([1., 1.])}, ['0/weight'])

    Args:
        named: names and tensors, such as a module's ``named_parameters()``.
        persistent: whether the copies are entries of the ``state_dict``; what every download brings anew is none.
    """

    def __init__(self, named: Iterable[tuple[str, Tensor]], persistent: bool = False) -> None:
        super().__init__()
        for name, tensor in named:
            self.register_buffer(name.replace(".", "/"), tensor.detach().clone(), persistent=persistent)

    def tensors(self) -> StateDict:
        """The copies by the names of their originals, in the order given."""
        return {name.replace("/", "."): tensor for name, tensor in self.named_buffers()}

    @torch.no_grad()
    def take(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Copies tensors anew.

        Args:
            named: names and tensors, among them all that there is a copy of.
        """
        given = dict(named)
        for name, tensor in self.tensors().items():
            tensor.copy_(given[name])


class FrozenModule(Frozen):
    """A frozen copy of a module that can be run, and stays in evaluation mode whatever its owner's mode is.

    Args:
        module: the module, whose parameters and buffers are copied.
        persistent: whether the copies are entries of the ``state_dict``.
        common: parameters of the module that never change, of which no copies are made.
    """

    def __init__(self, module: nn.Module, persistent: bool = False, common: Iterable[nn.Parameter] = ()) -> None:
        kept = {id(parameter): parameter for parameter in common}
        named = [(name, t) for name, t in tensors_of(module) if id(t) not in kept]
        super().__init__(named, persistent)
        # "meta" tensors have shapes and no memory
        empty = {id(t): like(t, t.detach().to("meta")) for _, t in named}
        # in a tuple it is no submodule, so that nobody sets its mode
        self._architecture = (copy.deepcopy(module, kept | empty).eval(),)

    def take_from(self, module: nn.Module) -> None:
        """Copies the tensors of a module like the first one."""
        self.take(tensors_of(module))

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        """The module's output, without gradient."""
        output: Tensor = functional_call(self._architecture[0], self.tensors(), (x,))
        return output


def tensors_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers of a module, with their names."""
    return chain(module.named_parameters(), module.named_buffers())


def like(tensor: Tensor, other: Tensor) -> Tensor:
    """A tensor as a parameter where another one is."""
    return nn.Parameter(other, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else other
