"""The data that one federated client holds."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal, Protocol, cast, overload
from weakref import WeakSet

import torch
from torch import Tensor

from pfl_lightning.data.trees import Tree, joined, rows_in, split, take
from pfl_lightning.messages import tensors, tree_map
from pfl_lightning.tasks import Classification, Task
from pfl_lightning.tasks.base import number_of_classes

Split = Literal["train", "val", "test"]
"""Which of a client's samples are meant."""

CHUNK = 1024
"""Samples that go through a net at once where it doesn't learn from them."""


# eq=False: comparing tensors gives a tensor, so a generated __eq__ would raise
@dataclass(frozen=True, eq=False)
class Samples:
    """Samples with their targets, such as one split of one client's.

    Args:
        x: Inputs as the net takes them, shape [n, ...], usually float and normalised; or a tree of such tensors.
        y: Targets as the task has them, such as class numbers [n], int64; or a tree of tensors.
    """

    x: Tree
    y: Tree

    def __len__(self) -> int:
        return rows_in(self.y)

    def take(self, rows: Tensor | slice) -> Samples:
        """Some of the samples.

        Args:
            rows: their positions.
        """
        if isinstance(rows, Tensor) and (first := next(tensors(self.y), None)) is not None:
            # once, and not for each tensor
            rows = rows.to(first.device)
        return Samples(take(self.x, rows), take(self.y, rows))

    @classmethod
    def joined(cls, parts: Sequence[Samples]) -> Samples:
        """The samples of several, one after another."""
        return cls(*joined([(part.x, part.y) for part in parts]))

    def chunks(self, size: int = CHUNK) -> Iterator[tuple[Tree, Tree]]:
        """Inputs and targets of so many samples at a time, in their order.

        >>> samples = Samples(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([0, 1, 2]))
        >>> [y.tolist() for x, y in samples.chunks(2)]
        [[0, 1], [2]]

        Args:
            size: samples per chunk; the last one may have fewer.
        """
        return split((self.x, self.y), size)

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> Samples:
        """Return the same samples on another device; nothing is copied if they are there already.

        Args:
            device: Where to put the tensors.
            dtype: Floating type of the inputs; None, and inputs that are integers, keep theirs.
        """
        x = tree_map(lambda t: t.to(device, dtype if t.is_floating_point() else None), self.x)
        y = tree_map(lambda t: t.to(device), self.y)
        return self if x is self.x and y is self.y else Samples(x, y)


class Parts(Sequence[Samples]):
    """Samples of several clients, one after another: each client's are views, made when they are asked for.

    Args:
        whole: All of them.
        sizes: How many each client has.
    """

    def __init__(self, whole: Samples, sizes: Sequence[int]) -> None:
        self.whole = whole
        self.sizes = sizes
        self._ends = list(accumulate(sizes, initial=0))

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, index: int) -> Samples: ...

    @overload
    def __getitem__(self, index: slice) -> list[Samples]: ...

    def __getitem__(self, index: int | slice) -> Samples | list[Samples]:
        places = range(len(self))[index]
        if isinstance(places, range):
            return [self[place] for place in places]
        return self.whole.take(slice(self._ends[places], self._ends[places + 1]))

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> Parts:
        """Return the same samples on another device, as `Samples.to` does."""
        return Parts(self.whole.to(device, dtype), self.sizes)


class Source(Protocol):
    """Where clients' samples come from: a `FederatedDataModule`."""

    @property
    def task(self) -> Task:
        """What is predicted."""

    def parts(self, clients: Sequence[int], split: Split, device: torch.device | str = ...) -> Sequence[Samples]:
        """One split of each client."""

    def size(self, client: int, split: Split) -> int:
        """Number of samples in one split of one client."""


def class_counts(task: Task, target: Tree) -> Tensor:
    """Number of samples of each class, shape [num_classes], int64.

    Args:
        task: What is predicted.
        target: Targets of the samples.

    Raises:
        MisconfigurationException: They have no class.
    """
    classes = number_of_classes(task, "who asks for class counts")
    return torch.bincount(cast(Tensor, task.classes(target)), minlength=classes)


class ClientData:
    """The three disjoint splits of one client, each made when it is first asked for.

    Args:
        source: gives the splits of clients.
        client: Client id.
        device: Where the splits shall be.
        dtype: Floating type of their inputs; None keeps it.
    """

    def __init__(
        self, source: Source, client: int, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
    ) -> None:
        self.source = source
        self.client = client
        self._where = (device, dtype)
        self._together: Collection[ClientData] = ()
        self._found: dict[Split, tuple[Sequence[Samples], int]] = {}

    @cached_property
    def train(self) -> Samples:
        """Samples to train on, never empty."""
        return self._held("train")

    @cached_property
    def val(self) -> Samples:
        """Samples to select on; empty when the data module's ``val_fraction`` is 0."""
        return self._held("val")

    @cached_property
    def test(self) -> Samples:
        """Samples to report on; empty when the data module's ``test_fraction`` is 0."""
        return self._held("test")

    def _held(self, split: Split) -> Samples:
        find(list(self._together) or [self], split)
        parts, place = self._found[split]
        return parts[place].to(*self._where)

    def part(self, split: Split) -> Samples:
        """One split by its name, gathered anew.

        Args:
            split: Which split.
        """
        (samples,) = self.source.parts([self.client], split, self._where[0])
        return samples.to(*self._where)

    def size(self, split: Split) -> int:
        """Number of samples in a split, which needn't be gathered for it."""
        return self.source.size(self.client, split)

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> ClientData:
        """Return the same client on another device, or itself if it is there already.

        Args:
            device: Where its splits shall be.
            dtype: Floating type of their inputs; None keeps it.
        """
        return self if (device, dtype) == self._where else ClientData(self.source, self.client, device, dtype)

    @property
    def task(self) -> Task:
        """What is predicted; classification where the source names but ``num_classes``."""
        return task_of(self.source)

    @property
    def class_counts(self) -> Tensor:
        """Number of training samples of each class, n_ij, shape [num_classes], int64.

        Raises:
            MisconfigurationException: The samples have no class.
        """
        return self._counted[0].clone()

    @property
    def classes(self) -> list[int]:
        """Numbers of the classes that it has training samples of, ascending.

        Raises:
            MisconfigurationException: The samples have no class.
        """
        return self._counted[1]

    @cached_property
    def _counted(self) -> tuple[Tensor, list[int]]:
        # of all that were put together, for which they are counted, and come from a device, at once
        clients = list(self._together) or [self]
        counts = counted(clients) if len(clients) > 1 else class_counts(self.task, self.train.y)[None]
        for client, own, there in zip(clients, counts, (counts > 0).cpu(), strict=True):
            vars(client)["_counted"] = own, there.nonzero().flatten().tolist()
        own_counts: tuple[Tensor, list[int]] = vars(self)["_counted"]
        return own_counts


def find(clients: Sequence[ClientData], split: Split) -> None:
    """Gather the same split of several clients, at once where all of them come from one source.

    Args:
        clients: The clients, all on one device; those that have theirs already keep it.
        split: Which split.
    """
    groups: dict[Any, list[ClientData]] = {}
    for client in clients:
        if split not in client._found:
            groups.setdefault((id(client.source), *client._where), []).append(client)
    for (_, device, dtype), group in groups.items():
        parts: Sequence[Samples] = group[0].source.parts([client.client for client in group], split, device)
        if isinstance(parts, Parts):
            parts = parts.to(device, dtype)
        for client, place in zip(group, range(len(parts)), strict=True):
            client._found[split] = parts, place


def gather(clients: Sequence[ClientData], split: Split) -> list[Samples]:
    """Return the same split of several clients, which keep it, as if each had been asked for it.

    Args:
        clients: The clients, all on one device.
        split: Which split.
    """
    find(clients, split)
    return [getattr(client, split) for client in clients]


def whole_of(clients: Sequence[ClientData], split: Split) -> Samples:
    """Return the same split of several clients, one after another; without a copy if they were gathered so.

    Args:
        clients: The clients, all on one device.
        split: Which split.
    """
    find(clients, split)
    parts = clients[0]._found[split][0]
    in_order = [client._found[split] == (parts, place) for place, client in enumerate(clients)]
    if isinstance(parts, Parts) and all(in_order) and len(in_order) == len(parts):
        return parts.whole
    return Samples.joined(gather(clients, split))


def counted(clients: list[ClientData]) -> Tensor:
    """Number of training samples of each class of several clients, [clients, num_classes], in one operation.

    Args:
        clients: The clients, all on one device and of one task; sorted as they were gathered.

    Raises:
        MisconfigurationException: The samples have no class.
    """
    task = clients[0].task
    find(clients, "train")
    clients.sort(key=lambda client: client._found["train"][1])
    numbers = cast(Tensor, task.classes(whole_of(clients, "train").y))
    counts = numbers.new_zeros(len(clients), number_of_classes(task, "who asks for class counts"))
    sizes = torch.tensor([client.size("train") for client in clients])
    rows = torch.arange(len(clients)).repeat_interleave(sizes).to(numbers.device)
    # refuses numbers out of range, where a count of all of them side by side would take them for the next client's
    return counts.index_put_((rows, numbers), numbers.new_ones(()), accumulate=True)


def put_together(clients: Sequence[ClientData]) -> None:
    """Has the splits of clients that are at work side by side gathered at once, when that of one is asked for.

    Args:
        clients: The clients, all on one device.
    """
    # weakly: in a circle their samples would stay until the collector comes by
    together = WeakSet(clients)
    for client in clients:
        client._together = together


def task_of(source: Any) -> Task:
    """The task of a source of samples; classification where it names but ``num_classes``."""
    task: Task | None = getattr(source, "task", None)
    return Classification(source.num_classes) if task is None else task
