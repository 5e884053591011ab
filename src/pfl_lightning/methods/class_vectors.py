"""Vectors that stand for classes: the means of a client's features or outputs, and what it receives of them."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pfl_lightning.aggregators.class_means import check_one_width
from pfl_lightning.data import Samples
from pfl_lightning.messages import Updates

ClassMessage: TypeAlias = dict[int, Tensor]
"""A vector ``[d]`` for each class that there is one of, by class number: absent classes take no bytes."""


class ClassVectors(nn.Module):
    """The vectors of classes that a client holds during a round, such as the prototypes that it received.

    Its buffers are no entries of the ``state_dict``: each download brings them anew.

    >>> table = ClassVectors(num_classes=3, size=2)
    >>> table.take({2: torch.tensor([1.0, 5.0])})
    >>> table.vectors[2], table.known
    (tensor([1., 5.]), tensor([False, False,  True]))

    Args:
        num_classes: number of classes C.
        size: width d of a vector.

    Attributes:
        vectors: ``[C, d]``, zero where a class has none.
        known: ``[C]``, whether a class has one.
    """

    vectors: Tensor
    known: Tensor

    def __init__(self, num_classes: int, size: int) -> None:
        super().__init__()
        self.register_buffer("vectors", torch.zeros(num_classes, size), persistent=False)
        self.register_buffer("known", torch.zeros(num_classes, dtype=torch.bool), persistent=False)

    @torch.no_grad()
    def take(self, received: Mapping[int, Tensor]) -> None:
        """Replaces all vectors.

        Args:
            received: the new ones, by class number.
        """
        classes = range(len(self.known))
        # stacks of what is there, where rows that are chosen by number would be a copy for each client
        absent, no, yes = self.vectors.new_zeros(()), self.known.new_zeros(()), self.known.new_ones(())
        absent = absent.expand(self.vectors.shape[1])
        self.vectors.copy_(torch.stack([received.get(c, absent).to(self.vectors) for c in classes]))
        self.known.copy_(torch.stack([yes if c in received else no for c in classes]))

    def forward(self, target: Tensor, default: Tensor) -> Tensor:
        """The vector of each sample's class; the default where it has none.

        Args:
            target: class numbers ``[n]``.
            default: ``[n, d]``.
        """
        return torch.where(self.known[target][:, None], self.vectors[target], default)


@torch.no_grad()
def class_means(
    function: Callable[[Tensor], Tensor], part: Samples, classes: Sequence[int], num_classes: int
) -> ClassMessage:
    r"""Mean of a function over the samples of each class, :math:`\frac{1}{n_c} \sum_{i: y_i = c} f(x_i)`.

    >>> part = Samples(torch.tensor([[1.0], [3.0], [4.0]]), torch.tensor([0, 0, 2]))
    >>> class_means(lambda x: 10 * x, part, classes=[0, 2], num_classes=3)
    {0: tensor([20.]), 2: tensor([40.])}

    Args:
        function: gives vectors ``[n, d]`` of inputs ``[n, *input_shape]``, each sample's of its own alone: a net in
            evaluation mode.
        part: the samples, on the function's device, at least one.
        classes: those that it has, which its labels would have to come from a device to tell.
        num_classes: number of all classes.

    Returns:
        By class number, the classes of the part alone.
    """
    sums, counts = [], []
    for x, y in part.chunks():
        values = function(x)
        wide = values.to(torch.promote_types(values.dtype, torch.float32))
        # a product, because index_add_ takes its addends in any order on a GPU; and it waits for no count
        members = F.one_hot(y, num_classes)
        sums.append(members.to(wide.dtype).T @ wide)
        counts.append(members.sum(0))
    count = torch.stack(counts).sum(0)
    means = (torch.stack(sums).sum(0) / count.clamp_min(1)[:, None]).to(values.dtype)
    return {c: means[c] for c in classes}


def stacked(updates: Updates, entry: str) -> tuple[Tensor, Tensor]:
    """What all clients sent for their classes, as samples: vectors ``[n, d]`` and their classes ``[n]``.

    Args:
        updates: by client id, at least one.
        entry: the entry with vectors by class number.

    Raises:
        MisconfigurationException: if they have different widths.
    """
    pairs = [(vector, c) for update in updates.values() for c, vector in sorted(update[entry].items())]
    check_one_width([vector for vector, _ in pairs], entry)
    wide = torch.promote_types(pairs[0][0].dtype, torch.float32)
    return torch.stack([vector.to(wide) for vector, _ in pairs]), torch.tensor([c for _, c in pairs])
