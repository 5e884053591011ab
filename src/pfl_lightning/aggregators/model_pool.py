"""Models of many clients side by side: a server that hands them out, and what compares them."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pfl_lightning.aggregators.base import Aggregator, Server
from pfl_lightning.data import Samples
from pfl_lightning.messages import CPU, Message, Updates, column
from pfl_lightning.tasks import Task

BLOCK = 20_000
"""Columns of the matrices that inner products are summed from: they bound memory and stay in the processor's cache."""
DOZEN = 12
"""Products of rows by the dozen are up to twice as fast as of one more or less."""


class ModelPool(Aggregator):
    """Keeps every client's last upload, averages nothing, and sends each client the models of all others.

    Payloads are references to what is kept: each model is in memory once, however many clients it is sent to.
    """

    needs = frozenset({"weights"})
    sends = frozenset({"models"})

    def setup(self, server: Server) -> None:
        """Starts empty."""
        self.state["models"] = {}

    def aggregate(self, updates: Updates, round: int) -> dict[str, float]:
        """Replaces the models of those who took part."""
        models = self.state["models"] | {client: update["weights"] for client, update in updates.items()}
        self.state["models"] = dict(sorted(models.items()))
        return {}

    def download(self, client: int) -> Message:
        """The models of the others that have taken part, by client id; its own a client has itself."""
        return {"models": {other: model for other, model in self.state["models"].items() if other != client}}


def inner_products(
    models: Sequence[Mapping[str, Tensor]], names: Sequence[str], origin: Mapping[str, Tensor] | None = None
) -> Tensor:
    r"""Inner products of models as long vectors, in float64, taken where the models are.

    >>> inner_products([{"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([0.0, 3.0])}], ["w"])
    tensor([[5., 6.],
            [6., 9.]], dtype=torch.float64)

    Args:
        models: n of them.
        names: the entries that count.
        origin: a model :math:`\theta_g`; given, products are of the differences :math:`\tau_k = \theta_k - \theta_g`,
            and of :math:`\theta_g` itself as the last.

    Returns:
        ``[n, n]``, in the order of the models, on the CPU; ``[n + 1, n + 1]`` with an origin.
    """
    columns = [column(models, name) for name in names]
    if origin is not None:
        for name, tensors in zip(names, columns, strict=True):
            tensors.append(origin[name].to(tensors[0].device))
    size = len(models) + (origin is not None)
    width = min(BLOCK, max((tensors[0].numel() for tensors in columns), default=0))
    device = columns[0][0].device if columns else CPU
    # one buffer for all: where memory is new each time, getting it takes longer than the product
    buffer = torch.zeros(DOZEN * math.ceil(size / DOZEN), width, dtype=torch.float64, device=device)
    products = buffer.new_zeros(len(buffer), len(buffer))
    for tensors in columns:
        for block in blocks(tensors):
            rows = buffer[:, : block.shape[1]]
            rows[:size] = block
            if origin is not None:
                # in float64: differences are small beside models
                rows[: size - 1] -= rows[size - 1]
            products.addmm_(rows, rows.T)
    return products[:size, :size].cpu()


def blocks(tensors: list[Tensor]) -> Iterator[Tensor]:
    """Tensors of one shape as the rows of a matrix, so many columns at a time."""
    if tensors[0].numel() <= BLOCK:
        yield torch.stack(tensors).reshape(len(tensors), tensors[0].numel())
        return
    for parts in zip(*(torch.split(tensor.flatten(), BLOCK) for tensor in tensors), strict=True):
        yield torch.stack(parts)


@torch.no_grad()
def mean_loss(model: Callable[[Any], Tensor], part: Samples, task: Task) -> float:
    """The task's mean loss of a model on samples; infinite where it isn't a number.

    Args:
        model: gives outputs of inputs, such as a net in evaluation mode.
        part: the samples, on the model's device, at least one.
        task: what the loss is of.
    """
    losses = [task.loss(model(x), y, "sum").double() for x, y in part.chunks()]
    loss = float(torch.stack(losses).sum()) / max(int(task.weight(part.y)), 1)
    return math.inf if math.isnan(loss) else loss
