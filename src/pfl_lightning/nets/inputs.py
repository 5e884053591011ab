"""Inputs of networks: the shape of one, examples of several tensors, and the ways to hand these to a module."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from pfl_lightning.messages import tensors, tree_map


class InputShape(tuple[int, ...]):
    """The shape of one input, of the first tensor where an input has several, with an example of such inputs.

    Attributes:
        example: two inputs, a tree of tensors ``[2, ...]``; None where the shape says all.
    """

    example: Any = None

    @classmethod
    def of(cls, given: Any) -> "InputShape":
        """Return the input shape of a setting.

        >>> shape = InputShape.of({"shape": [5], "inputs": {"ids": {"shape": [5], "dtype": "int64"}}})
        >>> shape, shape.example["ids"].dtype
        ((5,), torch.int64)

        Args:
            given: numbers, an `InputShape`, or the result of `plain`.
        """
        if isinstance(given, InputShape):
            return given
        if not isinstance(given, Mapping):
            return cls(given)
        made = cls(given["shape"])
        made.example = example_of(given["inputs"])
        return made

    @classmethod
    def like(cls, example: Any) -> "InputShape":
        """Return the input shape of inputs.

        Args:
            example: two inputs, a tree of tensors ``[2, ...]``.
        """
        made = cls(next(tensors(example)).shape[1:])
        # the shape of a single tensor says all, as a net that looks up numbers refuses floats
        made.example = None if isinstance(example, Tensor) else example
        return made

    def plain(self) -> Any:
        """Return plain values for a checkpoint: a tuple, or with an example a dict."""
        return tuple(self) if self.example is None else {"shape": list(self), "inputs": plain_inputs(self.example)}


def plain_inputs(tree: Any) -> Any:
    """Return the shapes and types of a tree of tensors as plain values.

    Args:
        tree: the tree.
    """
    if isinstance(tree, Tensor):
        return {"shape": list(tree.shape[1:]), "dtype": str(tree.dtype).removeprefix("torch.")}
    if isinstance(tree, Mapping):
        return {"names": {name: plain_inputs(part) for name, part in tree.items()}}
    return {"places": [plain_inputs(part) for part in tree], "tuple": isinstance(tree, tuple)}


def example_of(plain: Mapping[str, Any]) -> Any:
    """Return two inputs of the shapes and types of `plain_inputs`, of ones.

    Args:
        plain: the plain values; a tensor's in short, as in ``{"ids": {"shape": [5], "dtype": "int64"}}``, too.
    """
    if "dtype" in plain:
        # ones: a mask of zeros would leave no position
        return torch.ones(2, *plain["shape"], dtype=getattr(torch, plain["dtype"]))
    if "places" in plain:
        parts = [example_of(part) for part in plain["places"]]
        return tuple(parts) if plain["tuple"] else parts
    return {name: example_of(part) for name, part in plain.get("names", plain).items()}


class Spread(nn.Module):
    """A module whose ``forward`` takes several tensors, called with a dict or tuple of these.

    An output with ``logits``, as models of transformers give, stands for these.

    Args:
        module: the module.
        way: ``names`` of a dict, ``places`` of a tuple, or ``one`` argument as it is.
    """

    def __init__(self, module: nn.Module, way: str) -> None:
        super().__init__()
        self.module = module
        self.way = way

    def forward(self, x: Any) -> Any:
        """Return the module's output."""
        return logits_of(called(self.module, x, self.way))


def called(module: nn.Module, x: Any, way: str) -> Any:
    """Return the output of a module for inputs; see `Spread`.

    Args:
        module: the module.
        x: the inputs.
        way: the way to hand them over.
    """
    return module(**x) if way == "names" else module(*x) if way == "places" else module(x)


def logits_of(outputs: Any) -> Any:
    """Return the logits of a module's output, or an output without ``logits`` as it is."""
    return outputs.logits if hasattr(outputs, "logits") else outputs


def way_of(module: nn.Module, x: Any) -> str:
    """Return the way to hand inputs to a module, by the arguments of its ``forward``.

    Args:
        module: the module.
        x: the inputs.
    """
    signature = inspect.signature(module.forward)
    try:
        if isinstance(x, Mapping):
            signature.bind(**x)
            return "names"
        if isinstance(x, (tuple, list)):
            signature.bind(*x)
            return "places"
    # a forward of one argument takes the whole
    except TypeError:
        pass
    return "one"


def candidates(input_shape: tuple[int, ...]) -> list[Any]:
    """Return inputs to try a module on: the example, or numbers and then indices of the shape.

    Args:
        input_shape: shape of one input, perhaps with an example.
    """
    shape = InputShape.of(input_shape)
    if shape.example is not None:
        return [tree_map(torch.clone, shape.example)]
    # no random numbers: the weights of further layers mustn't depend on this call
    numbers = torch.linspace(-1, 1, 2 * torch.Size(shape).numel()).view(2, *shape)
    return [numbers, torch.zeros_like(numbers, dtype=torch.int64)]


def refusal(module: nn.Module, x: Any, input_shape: tuple[int, ...], problem: Exception) -> MisconfigurationException:
    """Return the error about a module that can't be called with inputs, with the module's own error.

    Args:
        module: the module.
        x: the inputs.
        input_shape: the setting.
        problem: the module's error.
    """
    reason = f"{type(problem).__name__}: {' '.join(str(problem).split())}"
    if isinstance(x, Tensor):
        return MisconfigurationException(
            f"model.net={type(module).__name__} can't be called with inputs of shape {list(x.shape)}, two samples of "
            f"model.input_shape={tuple(input_shape)} ({reason}); give input_shape=data.input_shape, and a net for "
            "this shape"
        )
    given = tree_map(lambda t: f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}", x)
    return MisconfigurationException(
        f"model.net={type(module).__name__} can't be called with two samples of the data, {given} ({reason}); let its "
        "forward take them, by the names of a dict, by the places of a tuple, or as one argument"
    )
