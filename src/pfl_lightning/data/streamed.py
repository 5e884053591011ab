"""Samples of a client that is larger than memory: gathered a batch at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from pfl_lightning.data.samples import CHUNK, Samples
from pfl_lightning.data.trees import Tree, take


class Streamed(Samples):
    """Samples that stay in the pool until they go through the net: batches of them are gathered and transformed.

    Args:
        pool: All samples, whose inputs may be in files.
        rows: Positions of these, shape [n]; a sample may be there several times.
        transform: Makes inputs ready for the net.
        device: Where batches shall be.
        dtype: Floating type of their inputs; None keeps it.
    """

    def __init__(
        self,
        pool: Samples,
        rows: Tensor,
        transform: Callable[[Tree], Tree],
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
    ) -> None:
        # a frozen dataclass, whose two fields are properties here
        vars(self).update(pool=pool, rows=rows, transform=transform, device=device, dtype=dtype)

    pool: Samples
    rows: Tensor
    transform: Callable[[Tree], Tree]
    device: torch.device | str
    dtype: torch.dtype | None

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def x(self) -> Tree:
        """All inputs at once, for who asks for them."""
        return self._gathered(self.rows).x

    @property
    def y(self) -> Tree:
        """All targets, which are in memory."""
        return Samples((), take(self.pool.y, self.rows)).to(self.device).y

    def take(self, rows: Tensor | slice) -> Streamed:
        """Some of the samples, which stay where they are.

        Args:
            rows: their positions.
        """
        kept = self.rows[rows.cpu() if isinstance(rows, Tensor) else rows]
        return Streamed(self.pool, kept, self.transform, self.device, self.dtype)

    def chunks(self, size: int = CHUNK) -> Iterator[tuple[Tree, Tree]]:
        """Inputs and targets of so many samples at a time, in their order, gathered one after another.

        Args:
            size: samples per chunk; the last one may have fewer.
        """
        for rows in torch.split(self.rows, size):
            batch = self._gathered(rows)
            yield batch.x, batch.y

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> Streamed:
        """The same samples, whose batches will be on another device.

        Args:
            device: Where.
            dtype: Floating type of the inputs; None, and inputs that are integers, keep theirs.
        """
        return Streamed(self.pool, self.rows, self.transform, device, dtype or self.dtype)

    def _gathered(self, rows: Tensor) -> Samples:
        samples = self.pool.take(rows)
        return Samples(self.transform(samples.x), samples.y).to(self.device, self.dtype)
