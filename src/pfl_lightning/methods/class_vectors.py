"""Vectors by class, such as prototypes: a client's own class means, and the server's vectors during a round."""

from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch
from torch import Tensor, nn

from pfl_lightning.data import ClientData
from pfl_lightning.messages import Updates
from pfl_lightning.server.class_means import check_one_width

ClassMessage: TypeAlias = dict[int, Tensor]
"""A vector ``[d]`` by class number, for the classes that a client has; absent classes take no bytes."""


class ClassVectors(nn.Module):
    """Vectors of classes during a round, such as the prototypes from the server.

    Its buffers are no entries of the ``state_dict``: each download brings them anew.

    >>> table = ClassVectors(num_classes=3, size=2)
    >>> table.take({2: torch.tensor([1.0, 5.0])})
    >>> table.vectors[2], table.known
    (tensor([1., 5.]), tensor([False, False,  True]))

    Args:
        num_classes: number of classes C.
        size: width d of a vector.

    Attributes:
        vectors: ``[C, d]``; zero for a class without one.
        known: ``[C]``; whether a class has a vector.
    """

    vectors: Tensor
    known: Tensor

    def __init__(self, num_classes: int, size: int) -> None:
        super().__init__()
        self.register_buffer("vectors", torch.zeros(num_classes, size), persistent=False)
        self.register_buffer("known", torch.zeros(num_classes, dtype=torch.bool), persistent=False)

    @torch.no_grad()
    def take(self, received: Mapping[int, Tensor]) -> None:
        """Replace all vectors.

        Args:
            received: the new vectors, by class number.
        """
        vectors, known = self.vectors, self.known
        absent = next(iter(received.values()), vectors).new_zeros(vectors.shape[1])
        no, yes = known.new_zeros(1), known.new_ones(1)
        # one tensor of all rows: writing single rows by number would launch a copy for each class and client; and zeros
        # with memory of their own, as rows of another stride are joined eight times as slowly
        rows = [received.get(c, absent) for c in range(len(known))]
        vectors.copy_(torch.cat(rows).view_as(vectors))
        known.copy_(torch.cat([yes if c in received else no for c in range(len(known))]))

    @torch.no_grad()
    def put(self, vectors: Tensor, known: Tensor) -> None:
        """Replace all vectors by a table.

        Args:
            vectors: ``[C, d]``.
            known: ``[C]``; whether a class has a vector, without which its row counts as zero.
        """
        self.vectors.copy_(torch.where(known[:, None], vectors, 0))
        self.known.copy_(known)

    def forward(self, target: Tensor, default: Tensor) -> Tensor:
        """Return the vector of each sample's class, or the default where the class has none.

        Args:
            target: class numbers ``[n]``.
            default: ``[n, d]``.

        Returns:
            ``[n, d]``.
        """
        return torch.where(self.known[target][:, None], self.vectors[target], default)


@torch.no_grad()
def class_table(function: Callable[[Tensor], Tensor], data: ClientData, num_classes: int) -> tuple[Tensor, Tensor]:
    r"""Return the mean of a function over a client's training samples of each class, and whether there are any.

    .. math:: \frac{1}{n_c} \sum_{i: y_i = c} f(x_i)

    Args:
        function: maps inputs ``[n, *input_shape]`` to vectors ``[n, d]``, each row from its own input alone, as a net
            in evaluation mode does.
        data: the client's data, on the function's device, with at least one training sample.
        num_classes: number of all classes C.

    Returns:
        Means ``[C, d]``, zero for absent classes, and the presence of classes ``[C]``.
    """
    sums, counts = [], []
    for x, y, own in data.marked_chunks():
        values = function(x)
        wide = values.to(torch.promote_types(values.dtype, torch.float32))
        # a matrix product, because index_add_ on a GPU adds in any order; unlike indexing by a mask, it waits for no
        # count
        members = own[:, None] & (y[:, None] == torch.arange(num_classes, device=y.device))
        sums.append(members.to(wide.dtype).T @ wide)
        counts.append(members.sum(0))
    count = torch.stack(counts).sum(0)
    return (torch.stack(sums).sum(0) / count.clamp_min(1)[:, None]).to(values.dtype), count > 0


def class_means(function: Callable[[Tensor], Tensor], data: ClientData, num_classes: int) -> ClassMessage:
    """Return the means of `class_table` for the client's classes, by class number.

    Args:
        function: as for `class_table`.
        data: likewise.
        num_classes: likewise.
    """
    means, _ = class_table(function, data, num_classes)
    # from the data, because reading the presence of classes would wait for the device
    return {c: means[c] for c in data.classes}


def stacked(updates: Updates, entry: str) -> tuple[Tensor, Tensor]:
    """Return the vectors of all clients and classes as samples ``[n, d]``, with class numbers ``[n]``.

    Args:
        updates: updates by client id, at least one.
        entry: the entry with vectors by class number.

    Raises:
        MisconfigurationException: if vectors have different widths.
    """
    pairs = [(vector, c) for update in updates.values() for c, vector in sorted(update[entry].items())]
    check_one_width([vector for vector, _ in pairs], entry)
    wide = torch.promote_types(pairs[0][0].dtype, torch.float32)
    return torch.stack([vector.to(wide) for vector, _ in pairs]), torch.tensor([c for _, c in pairs])
