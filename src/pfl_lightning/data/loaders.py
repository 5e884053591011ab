"""What the trainer iterates over: ids of clients, not samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


class ClientLoader:
    """Sized iterable of batches, each a list of client ids.

    The samples stay in the data module, from which the engine gathers them. Not a plain list, which
    Lightning takes for a collection of loaders.

    Args:
        groups: The batches.
    """

    def __init__(self, groups: Sequence[Sequence[int]]) -> None:
        self.groups = groups

    def __len__(self) -> int:
        return len(self.groups)

    def __iter__(self) -> Iterator[list[int]]:
        return map(list, self.groups)
