"""Vectors that stand for classes: a client's means of features or outputs, and their means at a server."""

from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn import functional as F

from pfl_lightning.aggregators.base import Aggregator, Server
from pfl_lightning.data import Samples
from pfl_lightning.engines.evaluation import CHUNK
from pfl_lightning.messages import Message, Updates

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
        self.vectors.zero_()
        self.known.zero_()
        if received:
            classes = list(received)
            self.vectors[classes] = torch.stack(list(received.values())).to(self.vectors)
            self.known[classes] = True

    def forward(self, target: Tensor, default: Tensor) -> Tensor:
        """The vector of each sample's class; the default where it has none.

        Args:
            target: class numbers ``[n]``.
            default: ``[n, d]``.
        """
        return torch.where(self.known[target][:, None], self.vectors[target], default)


@torch.no_grad()
def class_means(function: Callable[[Tensor], Tensor], part: Samples, num_classes: int) -> ClassMessage:
    r"""Mean of a function over the samples of each class, :math:`\frac{1}{n_c} \sum_{i: y_i = c} f(x_i)`.

    >>> part = Samples(torch.tensor([[1.0], [3.0], [4.0]]), torch.tensor([0, 0, 2]))
    >>> class_means(lambda x: 10 * x, part, num_classes=3)
    {0: tensor([20.]), 2: tensor([40.])}

    Args:
        function: gives vectors ``[n, d]`` of inputs ``[n, *input_shape]``, each sample's of its own alone: a net in
            evaluation mode.
        part: the samples, on the function's device, at least one.
        num_classes: number of classes.

    Returns:
        By class number, the classes of the part alone.
    """
    sums = []
    for x, y in zip(torch.split(part.x, CHUNK), torch.split(part.y, CHUNK), strict=True):
        values = function(x)
        wide = values.to(torch.promote_types(values.dtype, torch.float32))
        # a product, because index_add_ takes its addends in any order on a GPU
        sums.append(F.one_hot(y, num_classes).to(wide.dtype).T @ wide)
    counts = torch.bincount(part.y, minlength=num_classes)
    means = (torch.stack(sums).sum(0) / counts.clamp_min(1)[:, None]).to(values.dtype)
    return {c: means[c] for c in torch.nonzero(counts).flatten().tolist()}


class ClassMeans(Aggregator):
    r"""Averages class by class what clients send for each class, such as prototypes.

    .. math:: G_c = \sum_{k \in S_c} m_{kc} F_{kc} \Big/ \sum_{k \in S_c} m_{kc}

    over the clients :math:`S_c` of the round that have the class, where :math:`m_{kc}` is their number of samples
    :math:`n_{kc}` of it, or 1. A class that nobody fed in a round keeps its last mean.

    Args:
        entry: the entry of updates and payloads: a vector by class number, of the classes that there are.
        weighted: whether clients count by their samples of the class, which they then send.
        exclude_self: whether a client's own part is taken out of what it receives; a class that only it fed is then
            left out. The server keeps a vector for each client and class to do so.
    """

    def __init__(self, entry: str = "prototypes", weighted: bool = True, exclude_self: bool = False) -> None:
        super().__init__()
        self.entry, self.weighted, self.exclude_self = entry, weighted, exclude_self
        self.sends = frozenset({entry})
        self.needs = self.sends | ({"class_counts"} if weighted else set())

    def setup(self, server: Server) -> None:
        """Starts with no class known."""
        self.state |= {"means": {}, "others": {}}

    def aggregate(self, updates: Updates, round: int) -> dict[str, float]:
        """Takes the means of the classes that were fed, and logs how many these are.

        Raises:
            MisconfigurationException: if clients with different networks send vectors of different widths.
        """
        if not updates:
            return {}
        widths = sorted({len(vector) for update in updates.values() for vector in update[self.entry].values()})
        if len(widths) > 1:
            raise MisconfigurationException(
                f"model.net: clients sent {self.entry} of widths {', '.join(map(str, widths))}, which have no mean; "
                "give networks whose features have one width."
            )
        fed = sorted({c for update in updates.values() for c in update[self.entry]})
        for c in fed:
            self._average(c, {client: update for client, update in updates.items() if c in update[self.entry]})
        return {f"{self.entry}_fed": float(len(fed))}

    def _average(self, c: int, updates: Updates) -> None:
        """The mean of a class over clients that have it, and for each of them the mean of the others."""
        masses = {client: float(u["class_counts"][c]) if self.weighted else 1.0 for client, u in updates.items()}
        parts = {client: masses[client] * update[self.entry][c].double() for client, update in updates.items()}
        mass, total = sum(masses.values()), torch.stack(list(parts.values())).sum(0)
        dtype = next(iter(updates.values()))[self.entry][c].dtype
        self.state["means"][c] = (total / mass).to(dtype)
        if self.exclude_self:
            self.state["others"][c] = {
                client: ((total - part) / (mass - masses[client])).to(dtype) if len(parts) > 1 else None
                for client, part in parts.items()
            }

    def download(self, client: int) -> Message:
        """The mean of each class that is known."""
        others = self.state["others"]
        means = {c: others.get(c, {}).get(client, mean) for c, mean in self.state["means"].items()}
        return {self.entry: {c: mean for c, mean in means.items() if mean is not None}}
