"""A loader of client ids, over which the trainer iterates in place of samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


class ClientLoader:
    """Sized iterable of batches, each a list of client ids.

    Samples stay in the data module, from which the engine gathers them. Lightning would take a plain list for a
    collection of loaders.

    Args:
        groups: client ids of each batch.
    """

    def __init__(self, groups: Sequence[Sequence[int]]) -> None:
        self.groups = groups

    def __len__(self) -> int:
        return len(self.groups)

    def __iter__(self) -> Iterator[list[int]]:
        # new lists each time: a hook that changes its batch in place changes no later round
        return map(list, self.groups)
