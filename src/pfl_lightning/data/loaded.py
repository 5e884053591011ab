"""The samples of a data set before the division, with client, split and time of each."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pfl_lightning.data.trees import Tree, rows_in


# eq=False: a comparison of tensors returns a tensor, so a generated __eq__ would raise
@dataclass(frozen=True, eq=False)
class Loaded:
    """All samples of a data set, with the client, the split and the time of each sample where known.

    Args:
        x: inputs, shape [N, ...], or a tree of arrays. A leaf may be any object with a length that returns rows for
            ``leaf[rows]``, such as a memory map; such a leaf is read one client at a time.
        y: targets in the form of the task, tensors or a tree of tensors.
        client: owner of each sample, N names or numbers.
        split: ``train``, ``val`` or ``test`` for each sample.
        time: time of each sample, N numbers, dates or sortable texts.
    """

    x: Tree
    y: Tree
    client: Sequence[Any] | None = None
    split: Sequence[Any] | None = None
    time: Sequence[Any] | None = None

    def __len__(self) -> int:
        return rows_in(self.y)
