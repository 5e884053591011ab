"""A pool of all clients' models, and comparisons of models: inner products and losses."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pfl_lightning.data import Samples
from pfl_lightning.internals.of_torch import copy_each
from pfl_lightning.messages import CPU, Message, Others, Updates, block_width, column
from pfl_lightning.nets.lightning_net import Deferred
from pfl_lightning.server.base import Aggregator, Server
from pfl_lightning.tasks import Task

DOZEN = 12
"""`inner_products` rounds the number of rows up to a multiple of this: measured up to twice as fast as one row more."""
STRIP = 6 * DOZEN
"""Rows of a product in `add_products`: smaller products take longer than they save."""


class ModelPool(Aggregator):
    """Keeps every client's last upload, averages nothing, and sends each client all other clients' models.

    Payloads are references: each model is in memory once, however many clients receive it.
    """

    needs = frozenset({"weights"})
    sends = frozenset({"models"})

    def setup(self, server: Server) -> None:
        """Start empty."""
        self.state["models"] = {}

    def aggregate(self, updates: Updates, round: int) -> dict[str, float]:
        """Replace the models of the round's clients."""
        models = self.state["models"] | {client: update["weights"] for client, update in updates.items()}
        # by id, so that results don't depend on the rounds in which clients first took part
        self.state["models"] = dict(sorted(models.items()))
        return {}

    def download(self, client: int) -> Message:
        """Return the last uploads of all other clients, by client id."""
        return {"models": {other: model for other, model in self.state["models"].items() if other != client}}


def rows_of_others(models: Mapping[int, Mapping[str, Tensor]], name: str, count: int, like: Tensor) -> Tensor:
    """Return one entry of other clients' models, a row for each client ``[M, ...]``.

    The row of a client without a model has any finite values: clients with a common pool get one and the same tensor.

    Args:
        models: the models by client id.
        name: the entry's name.
        count: number of all clients M.
        like: a client's tensor, of the rows' shape, type and device.
    """
    if isinstance(models, Others) and len(models.pool.models) == count:
        return models.pool.stack(name, like)
    rows = like.new_zeros(count, *like.shape)
    for client, model in models.items():
        rows[client] = model[name]
    return rows


def inner_products(
    models: Sequence[Mapping[str, Tensor]],
    names: Sequence[str],
    origin: Mapping[str, Tensor] | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    r"""Return the inner products of models as long vectors, in float64, computed on the models' device.

    >>> inner_products([{"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([0.0, 3.0])}], ["w"])
    tensor([[5., 6.],
            [6., 9.]], dtype=torch.float64)

    Args:
        models: n models.
        names: the entries that count.
        origin: a model :math:`\theta_g`; if given, products are of the differences :math:`\tau_k = \theta_k -
            \theta_g`, followed by :math:`\theta_g` itself.
        dtype: type of the differences, and of sums within a block; blocks are summed in float64. float32 takes half the
            time of float64, and is for callers whom an error of 1e-6 of the largest product doesn't disturb.

    Returns:
        ``[n, n]``, symmetric, in the order of the models, on the CPU; ``[n + 1, n + 1]`` with an origin.
    """
    columns = [column(models, name) for name in names]
    if origin is not None:
        for name, tensors in zip(names, columns, strict=True):
            tensors.append(origin[name].to(tensors[0].device))
    size = len(models) + (origin is not None)
    # as many bytes in either type: wider rows are copied faster
    width = block_width(size) * 8 // dtype.itemsize
    width = min(width, max((tensors[0].numel() for tensors in columns), default=0))
    device = columns[0][0].device if columns else CPU
    # one buffer for all blocks: to get new memory each time takes longer than the product
    buffer = torch.zeros(DOZEN * math.ceil(size / DOZEN), width, dtype=dtype, device=device)
    products = buffer.new_zeros(len(buffer), len(buffer), dtype=torch.float64)
    sums = products if dtype == torch.float64 else torch.zeros_like(products, dtype=dtype)
    for tensors in columns:
        flat = [tensor.reshape(-1) for tensor in tensors]
        for start in range(0, len(flat[0]), max(width, 1)):
            rows = buffer[:, : len(flat[0]) - start]
            parts = [tensor[start : start + width] for tensor in flat]
            # in one launch on a GPU, and row by row on a CPU: a stack would be one more pass over all models
            copy_each([*rows[:size]], parts)
            if origin is not None:
                # subtracted first, since differences are small beside the models
                rows[: size - 1] -= rows[size - 1]
            add_products(sums, rows)
            if sums is not products:
                products += sums
                sums.zero_()
    products = products.tril()
    return (products + products.tril(-1).T)[:size, :size].cpu()


def add_products(products: Tensor, rows: Tensor) -> None:
    """Add the inner products of rows to the lower triangle of a matrix, in little more than half the time of all.

    Args:
        products: ``[n, n]`` of the rows' type, changed in place; the rest above the diagonal is undefined.
        rows: ``[n, w]``.
    """
    for start in range(0, len(rows), STRIP):
        end = start + STRIP
        products[start:end, :end].addmm_(rows[start:end], rows[:end].T)


@torch.no_grad()
def mean_loss(model: Callable[[Any], Tensor], part: Samples, task: Task) -> float:
    """Return a model's mean loss on samples, by the task's definition; infinite in place of NaN.

    Args:
        model: maps inputs to outputs, such as a net in evaluation mode; a LightningModule's own loss counts.
        part: the samples, on the model's device, at least one.
        task: the task.
    """

    def loss_of(outputs: Any, target: Any) -> Tensor:
        if isinstance(outputs, Deferred):
            return outputs.loss(target)[0] * task.weight(target)
        return task.loss(outputs, target, "sum")

    losses = [loss_of(model(x), y).double() for x, y in part.chunks()]
    # the number of targets, not of samples: a text has several, and targets to be ignored don't count
    loss = float(torch.stack(losses).sum()) / max(int(task.weight(part.y)), 1)
    return math.inf if math.isnan(loss) else loss
