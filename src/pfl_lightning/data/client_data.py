"""The samples of one client, gathered on first access."""

from collections.abc import Collection, Iterator, Sequence
from functools import cached_property
from typing import Any, Protocol, cast, get_args
from weakref import WeakSet

import torch
from torch import Tensor

from pfl_lightning.data.samples import Parts, Samples, Split
from pfl_lightning.data.streamed import Streamed
from pfl_lightning.data.target_scale import TargetScale, source_scale
from pfl_lightning.data.trees import Tree, rows_in
from pfl_lightning.seeds import derive_seed
from pfl_lightning.tasks import Classification, Task
from pfl_lightning.tasks.base import number_of_classes


class Source(Protocol):
    """The origin of clients' samples: a `FederatedDataModule`."""

    @property
    def task(self) -> Task:
        """The prediction task."""

    def parts(self, clients: Sequence[int], split: Split, device: torch.device | str = ...) -> Sequence[Samples]:
        """Return one split of each client."""

    def size(self, client: int, split: Split) -> int:
        """Return the number of samples in one split of one client."""


IGNORED = -100
"""The class number that torch's cross-entropy leaves out, by default."""


def drawn_numbers(size: int, percent: float, seed: int) -> Tensor:
    """Return the numbers of a random share of samples, at least one, in random order.

    Args:
        size: number of samples, at least one.
        percent: the share in percent, above 0 and up to 100.
        seed: of the draw.
    """
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(size, generator=generator)[: max(1, int(size * percent / 100))]


def class_counts(task: Task, target: Tree) -> Tensor:
    """Count the samples of each class, shape [num_classes], int64.

    Args:
        task: the prediction task.
        target: targets of the samples.

    Raises:
        MisconfigurationException: if the task has no classes.
    """
    classes = number_of_classes(task, "a count of classes")
    return torch.bincount(cast(Tensor, task.classes(target)), minlength=classes)


class ClientData:
    """The three disjoint splits of one client, each gathered on first access.

    Args:
        source: origin of the splits, a `FederatedDataModule`.
        client: client id.
        device: device of the splits.
        dtype: floating type of the inputs; None keeps the type.
    """

    def __init__(
        self, source: Source, client: int, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
    ) -> None:
        self.source = source
        self.client = client
        self._where = (device, dtype)
        self._together: Collection[ClientData] = ()
        self._gathered: dict[Split, tuple[Sequence[Samples], int]] = {}

    def __repr__(self) -> str:
        label = getattr(self.source, "client_label", str)(self.client)
        sizes = ", ".join(f"{split}={self.size(split)}" for split in get_args(Split))
        return f"ClientData(client {label}, {sizes})"

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
        if split not in self._gathered:
            find(list(self._together) or [self], split)
        parts, place = self._gathered[split]
        return parts[place]

    def part(self, split: Split) -> Samples:
        """Return one split by its name, gathered anew.

        Args:
            split: the split's name.
        """
        (samples,) = self.source.parts([self.client], split, self._where[0])
        return samples.to(*self._where)

    def size(self, split: Split) -> int:
        """Return the number of samples in a split, without gathering the split."""
        return self.source.size(self.client, split)

    def marked_chunks(self, size: int | None = None, ignored: bool = False) -> Iterator[tuple[Tree, Tree, Tensor]]:
        """Yield inputs and targets of the training samples in their order, and which are the client's ``[n]``.

        Alone, all samples are the client's. For many clients at once, smaller clients are filled up by samples of their
        own, behind which no further samples are the client's, and those without samples by other clients' samples.

        Args:
            size: samples per chunk; None takes some.
            ignored: whether filling has a class number that torch's cross-entropy leaves out of its mean.
        """
        for x, y in self.train.chunks() if size is None else self.train.chunks(size):
            yield x, y, torch.ones(rows_in(y), dtype=torch.bool, device=self._where[0])

    def drawn(self, percent: float, name: str) -> tuple[Samples, Tensor]:
        """Return a random share of the training samples, at least one, in random order, and which are the client's.

        The draw is by a generator with the seed ``derive_seed(torch.initial_seed(), name)``. Alone, all samples are the
        client's. For many clients at once, those of smaller clients are filled up, by a class number that torch's
        cross-entropy leaves out of its mean.

        Args:
            percent: the share in percent, above 0 and up to 100.
            name: of the draw.
        """
        rows = drawn_numbers(self.size("train"), percent, derive_seed(torch.initial_seed(), name))
        return self.train.take(rows), torch.ones(len(rows), dtype=torch.bool, device=self._where[0])

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> "ClientData":
        """Return the same client on another device, or ``self`` if device and type are the same.

        Args:
            device: device of the splits.
            dtype: floating type of the inputs; None keeps the type.
        """
        return self if (device, dtype) == self._where else ClientData(self.source, self.client, device, dtype)

    @property
    def is_absent(self) -> bool:
        """True if a model is made without the client's samples, as from a checkpoint alone."""
        return getattr(self.source, "is_absent", False)

    @property
    def task(self) -> Task:
        """The prediction task; classification where the source names only ``num_classes``."""
        return task_of(self.source)

    @property
    def target_scale(self) -> TargetScale | None:
        """Mean and deviation by which the targets were standardised; None where they are as loaded."""
        return source_scale(self.source, self.client)

    @property
    def class_counts(self) -> Tensor:
        """Number of training samples of each class, n_ij, shape [num_classes], int64.

        Raises:
            MisconfigurationException: if the samples have no class.
        """
        return self._counted[0].clone()

    @property
    def classes(self) -> list[int]:
        """Classes with at least one training sample, ascending.

        Raises:
            MisconfigurationException: if the samples have no class.
        """
        return self._counted[1]

    @cached_property
    def _counted(self) -> tuple[Tensor, list[int]]:
        # Counted for all clients side by side: one operation and one copy from the device serve a whole round.
        clients = list(self._together) or [self]
        counts = counted(clients) if len(clients) > 1 else class_counts(self.task, self.train.y)[None]
        for client, own, there in zip(clients, counts, (counts > 0).cpu(), strict=True):
            vars(client)["_counted"] = own, there.nonzero().flatten().tolist()
        own_counts: tuple[Tensor, list[int]] = vars(self)["_counted"]
        return own_counts


class Together:
    """A source whose clients all have the training samples of all clients, and their own other samples.

    Args:
        source: the origin of the samples.
        clients: ids of the clients whose training samples count.
    """

    def __init__(self, source: Source, clients: Sequence[int]) -> None:
        self.source, self.clients = source, clients

    @property
    def task(self) -> Task:
        """The prediction task."""
        return task_of(self.source)

    def target_scale(self, client: int) -> TargetScale | None:
        """Return the scale of a client's targets, as its data module does."""
        return source_scale(self.source, client)

    def parts(self, clients: Sequence[int], split: Split, device: torch.device | str = "cpu") -> Sequence[Samples]:
        """Return one split of each client."""
        if split != "train":
            return self.source.parts(clients, split, device)
        parts = self.source.parts(self.clients, split, device)
        first = parts[0]
        if isinstance(first, Streamed):
            # left in the pool, as one client's would be
            rows = torch.cat([cast(Streamed, part).rows for part in parts])
            whole: Samples = Streamed(first.pool, rows, first.transform, first.device, first.dtype, first.reconstructs)
        else:
            whole = parts.whole if isinstance(parts, Parts) else Samples.joined(parts)
        return [whole for _ in clients]

    def size(self, client: int, split: Split) -> int:
        """Return the number of samples in one split of one client."""
        if split != "train":
            return self.source.size(client, split)
        return sum(self.source.size(other, split) for other in self.clients)


def find(clients: Sequence[ClientData], split: Split) -> None:
    """Gather the same split of several clients, in one call for all clients of one source.

    Args:
        clients: the clients, all on one device; a client that has gathered the split keeps it.
        split: the split's name.
    """
    groups: dict[Any, list[ClientData]] = {}
    for client in clients:
        if split not in client._gathered:
            groups.setdefault((id(client.source), *client._where), []).append(client)
    for (_, device, dtype), group in groups.items():
        # Parts stay one stack while they move, which is one transfer for all clients.
        found = group[0].source.parts([client.client for client in group], split, device)
        parts = found.to(device, dtype) if isinstance(found, Parts) else [part.to(device, dtype) for part in found]
        for client, place in zip(group, range(len(parts)), strict=True):
            client._gathered[split] = parts, place


def gather(clients: Sequence[ClientData], split: Split) -> list[Samples]:
    """Return the same split of several clients, as if read from each client by itself.

    Args:
        clients: the clients, all on one device.
        split: the split's name.
    """
    find(clients, split)
    return [getattr(client, split) for client in clients]


def whole_of(clients: Sequence[ClientData], split: Split) -> Samples:
    """Return the same split of several clients as one stack, without a copy after gathering in the same order.

    Args:
        clients: the clients, all on one device.
        split: the split's name.
    """
    find(clients, split)
    parts = clients[0]._gathered[split][0]
    in_order = [client._gathered[split] == (parts, place) for place, client in enumerate(clients)]
    if isinstance(parts, Parts) and all(in_order) and len(in_order) == len(parts):
        return parts.whole
    return Samples.joined(gather(clients, split))


def counted(clients: list[ClientData]) -> Tensor:
    """Count the training samples of several clients by class, [clients, num_classes], in one operation.

    Args:
        clients: the clients, all on one device and of one task; the list is sorted into the order of gathering.

    Raises:
        MisconfigurationException: if the samples have no class.
    """
    task = clients[0].task
    find(clients, "train")
    clients.sort(key=lambda client: client._gathered["train"][1])
    numbers = cast(Tensor, task.classes(whole_of(clients, "train").y))
    counts = numbers.new_zeros(len(clients), number_of_classes(task, "a count of classes"))
    sizes = torch.tensor([client.size("train") for client in clients])
    rows = torch.arange(len(clients)).repeat_interleave(sizes).to(numbers.device)
    # An indexed add refuses class numbers out of range; one `bincount` over all clients would count them for the next
    # client.
    return counts.index_put_((rows, numbers), numbers.new_ones(()), accumulate=True)


def counts_of(clients: Sequence[ClientData]) -> Tensor:
    """Return the clients' `ClientData.class_counts` side by side, [clients, num_classes].

    Args:
        clients: the clients, all on one device and of one task.

    Raises:
        MisconfigurationException: if the samples have no class.
    """
    # without the copy that a client gets
    return torch.stack([client._counted[0] for client in clients])


def put_together(clients: Sequence[ClientData]) -> None:
    """Make clients gather their splits together: the first access to one client's split gathers the split of all.

    Args:
        clients: the clients, all on one device.
    """
    # Weak references: in a circle of strong ones, samples would stay in memory until the garbage collector runs.
    together = WeakSet(clients)
    for client in clients:
        client._together = together


def task_of(source: Any) -> Task:
    """Return the task of a source of samples; classification if the source names only ``num_classes``."""
    task: Task | None = getattr(source, "task", None)
    return Classification(source.num_classes) if task is None else task
