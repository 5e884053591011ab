"""A hypernetwork: a net with the weights of another net as outputs."""

from collections.abc import Callable
from itertools import chain

import torch
from torch import Size, Tensor, nn
from torch.optim import LBFGS

from pfl_lightning.messages import StateDict


class ModelMaker(nn.Module):
    """A perceptron with a linear output layer for each tensor of a model.

    Args:
        embedding_size: width e of an embedding.
        hidden: width of the hidden layers.
        layers: number of hidden layers after the first one.
        shapes: shapes of the model's tensors, by name.
    """

    def __init__(self, embedding_size: int, hidden: int, layers: int, shapes: dict[str, Size]) -> None:
        super().__init__()
        deeper = chain.from_iterable((nn.ReLU(), nn.Linear(hidden, hidden)) for _ in range(layers))
        self.body = nn.Sequential(nn.Linear(embedding_size, hidden), *deeper)
        # one output layer a tensor: nearly all of the hypernetwork's weights are here
        self.heads = nn.ModuleList(nn.Linear(hidden, shape.numel()) for shape in shapes.values())
        self.shapes = shapes

    def forward(self, v: Tensor) -> StateDict:
        """Return a model's tensors, by name, for an embedding.

        Args:
            v: embedding ``[e]``.
        """
        h = self.body(v)
        return {n: head(h).view(shape) for head, (n, shape) in zip(self.heads, self.shapes.items(), strict=True)}


def nearest(make: Callable[[Tensor], StateDict], v: Tensor, model: StateDict) -> Tensor:
    """Return the embedding of the model nearest to a given one, in squared distance of the weights.

    Args:
        make: maps an embedding to a model.
        v: the initial embedding.
        model: the given model, with the names of made models.
    """
    v = v.clone().requires_grad_()
    # few unknowns and an exact gradient, for which L-BFGS needs no learning rate
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
