"""A net that makes the weights of another one, and which of its models is nearest to a given one."""

from collections.abc import Callable
from itertools import chain

import torch
from torch import Size, Tensor, nn
from torch.optim import LBFGS

from pfl_lightning.messages import StateDict


class ModelMaker(nn.Module):
    """A perceptron, and a linear layer for each tensor of a model.

    Args:
        embedding_size: width e of an embedding.
        hidden: width of the hidden layers.
        layers: hidden layers after the first one.
        shapes: of the model's tensors, by name.
    """

    def __init__(self, embedding_size: int, hidden: int, layers: int, shapes: dict[str, Size]) -> None:
        super().__init__()
        deeper = chain.from_iterable((nn.ReLU(), nn.Linear(hidden, hidden)) for _ in range(layers))
        self.body = nn.Sequential(nn.Linear(embedding_size, hidden), *deeper)
        self.heads = nn.ModuleList(nn.Linear(hidden, shape.numel()) for shape in shapes.values())
        self.shapes = shapes

    def forward(self, v: Tensor) -> StateDict:
        """A model, by name, of an embedding ``[e]``."""
        h = self.body(v)
        return {n: head(h).view(shape) for head, (n, shape) in zip(self.heads, self.shapes.items(), strict=True)}


def nearest(make: Callable[[Tensor], StateDict], v: Tensor, model: StateDict) -> Tensor:
    """The embedding whose model is nearest to a given one.

    Args:
        make: gives the model of an embedding.
        v: the embedding to begin with.
        model: the given one, with the names of those that are made.
    """
    v = v.clone().requires_grad_()
    optimizer = LBFGS([v], max_iter=100, line_search_fn="strong_wolfe")

    def distance() -> float:
        optimizer.zero_grad()
        squares = torch.stack([(tensor - model[name]).square().sum() for name, tensor in make(v).items()]).sum()
        torch.autograd.backward(squares)
        return squares.item()

    with torch.enable_grad():
        optimizer.step(distance)  # type: ignore[no-untyped-call]
    found: Tensor = v.detach()
    return found
