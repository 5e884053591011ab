"""Samples with targets: of one client, or of several clients in one stack."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal, overload

import torch
from torch import Tensor

from pfl_lightning.data.trees import Tree, joined, rows_in, split, take
from pfl_lightning.messages import tensors, tree_map

Split = Literal["train", "val", "test"]
"""Name of one split of a client's samples."""

CHUNK = 1024
"""Samples per pass through a net without training."""


# eq=False: comparing tensors gives a tensor, so a generated __eq__ would raise
@dataclass(frozen=True, eq=False)
class Samples:
    """Samples with targets, such as one split of one client.

    Args:
        x: inputs as the net takes them, shape [n, ...], usually float and normalised; or a tree of such tensors.
        y: targets in the form of the task, such as class numbers [n], int64; or a tree of tensors.
    """

    x: Tree
    y: Tree

    def __len__(self) -> int:
        return rows_in(self.y)

    @property
    def largest_chunk(self) -> int | None:
        """Return the largest number of samples of a chunk, whatever is asked for; None for any number."""
        return None

    def take(self, rows: Tensor | slice) -> "Samples":
        """Return the samples at some positions.

        Args:
            rows: positions of the samples.
        """
        if isinstance(rows, Tensor) and (first := next(tensors(self.y), None)) is not None:
            # moved once here: `take` would move the positions for each tensor of the tree
            rows = rows.to(first.device)
        return Samples(take(self.x, rows), take(self.y, rows))

    def batches(self, rows: Iterable[Tensor]) -> "Iterator[Samples]":
        """Return the samples at several sets of positions, one set after another.

        Args:
            rows: positions of each batch's samples.
        """
        return map(self.take, rows)

    @classmethod
    def joined(cls, parts: "Sequence[Samples]") -> "Samples":
        """Join several samples into one object, one after another.

        Args:
            parts: the samples to join, all of one structure and on one device.
        """
        return cls(*joined([(part.x, part.y) for part in parts]))

    def chunks(self, size: int = CHUNK) -> Iterator[tuple[Tree, Tree]]:
        """Yield inputs and targets in their order, ``size`` samples at a time.

        >>> samples = Samples(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([0, 1, 2]))
        >>> [y.tolist() for x, y in samples.chunks(2)]
        [[0, 1], [2]]

        Args:
            size: samples per chunk; the last chunk may have fewer.
        """
        return split((self.x, self.y), size)

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> "Samples":
        """Return the same samples on another device, without a copy of tensors already on the device.

        Args:
            device: device of the result.
            dtype: floating type of the inputs; None, and integer inputs, keep the type.
        """
        x = tree_map(lambda t: t.to(device, dtype if t.is_floating_point() else None), self.x)
        y = tree_map(lambda t: t.to(device), self.y)
        # itself where nothing moves, as in most rounds
        return self if x is self.x and y is self.y else Samples(x, y)


def ready(samples: Samples, transform: Callable[[Tree], Tree], reconstructs: bool = False) -> Samples:
    """Return samples with transformed inputs, which may be the targets too.

    Args:
        samples: samples of the pool.
        transform: makes inputs ready for the net.
        reconstructs: whether inputs are the targets, as for `Task.reconstructs`.
    """
    x = transform(samples.x)
    return Samples(x, x if reconstructs else samples.y)


class Parts(Sequence[Samples]):
    """The samples of several clients in one stack; each client's samples are views, made on access.

    Args:
        whole: all samples, client after client.
        sizes: number of samples of each client.
    """

    def __init__(self, whole: Samples, sizes: Sequence[int]) -> None:
        self.whole = whole
        self.sizes = sizes

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(self.sizes, initial=0))

    def __len__(self) -> int:
        return len(self.sizes)

    @overload
    def __getitem__(self, index: int) -> Samples: ...

    @overload
    def __getitem__(self, index: slice) -> list[Samples]: ...

    def __getitem__(self, index: int | slice) -> Samples | list[Samples]:
        places = range(len(self))[index]
        if isinstance(places, range):
            return [self[place] for place in places]
        return self.whole.take(slice(self._ends[places], self._ends[places + 1]))

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> "Parts":
        """Return the same samples on another device, as `Samples.to` does."""
        return Parts(self.whole.to(device, dtype), self.sizes)


# eq=False: a comparison of tensors returns a tensor, so a generated __eq__ would raise
@dataclass(frozen=True, eq=False)
class Loaded:
    """All samples of a data set, with the client, the split, the time and the group of each sample where known.

    Args:
        x: inputs, shape [N, ...], or a tree of arrays. A leaf may be any object with a length that returns rows for
            ``leaf[rows]``, such as a memory map; such a leaf is read one client at a time.
        y: targets in the form of the task, tensors or a tree of tensors.
        client: owner of each sample, N names or numbers.
        split: ``train``, ``val`` or ``test`` for each sample.
        time: time of each sample, N numbers, dates or sortable texts.
        group: group of each sample, such as its patient, N names or numbers; a group's samples at a client stay on one
            side of the client's splits.
    """

    x: Tree
    y: Tree
    client: Sequence[Any] | None = None
    split: Sequence[Any] | None = None
    time: Sequence[Any] | None = None
    group: Sequence[Any] | None = None

    def __len__(self) -> int:
        return rows_in(self.y)
