"""What a data set says of its samples, before they are divided."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pfl_lightning.data.trees import Tree, rows_in


@dataclass(frozen=True, eq=False)
class Loaded:
    """All samples of a data set, with what it knows of each: who holds it, its split, its time.

    Args:
        x: Inputs, shape [N, ...], or a tree of such; a leaf may be anything that has a length and gives some of its
            rows for ``leaf[rows]``, such as a memory map, and is then read a client at a time.
        y: Targets as the task has them, tensors.
        client: Who holds each sample, N names or numbers.
        split: ``train``, ``val`` or ``test`` for each sample.
        time: When each sample came, N numbers, dates or texts that sort.
    """

    x: Tree
    y: Tree
    client: Sequence[Any] | None = None
    split: Sequence[Any] | None = None
    time: Sequence[Any] | None = None

    def __len__(self) -> int:
        return rows_in(self.y)
