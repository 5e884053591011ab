"""The samples of a client larger than memory, gathered one batch at a time."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from pfl_lightning.data.samples import CHUNK, Samples, ready
from pfl_lightning.data.trees import Tree, take


class Streamed(Samples):
    """Samples that stay in the pool, gathered and transformed one batch at a time.

    Args:
        pool: all samples, whose inputs may be in files.
        rows: positions of these samples, shape [n]; a position may occur several times.
        transform: makes inputs ready for the net.
        device: device of the batches.
        dtype: floating type of the inputs; None keeps the type.
        reconstructs: whether inputs are the targets, as for `Task.reconstructs`.
    """

    def __init__(
        self,
        pool: Samples,
        rows: Tensor,
        transform: Callable[[Tree], Tree],
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        reconstructs: bool = False,
    ) -> None:
        # past the frozen dataclass, whose __setattr__ refuses and whose two fields are properties here
        vars(self).update(
            pool=pool, rows=rows, transform=transform, device=device, dtype=dtype, reconstructs=reconstructs
        )

    pool: Samples
    rows: Tensor
    transform: Callable[[Tree], Tree]
    device: torch.device | str
    dtype: torch.dtype | None
    reconstructs: bool

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def x(self) -> Tree:
        """All inputs at once, gathered on each access."""
        return self._ready(self.pool.take(self.rows)).x

    @property
    def y(self) -> Tree:
        """All targets, which are in memory anyway unless they are the inputs."""
        if self.reconstructs:
            return self.x
        return Samples((), take(self.pool.y, self.rows)).to(self.device).y

    def take(self, rows: Tensor | slice) -> "Streamed":
        """Return the samples at some positions; the samples stay in the pool.

        Args:
            rows: positions of the samples.
        """
        # the pool is indexed on the CPU, while callers draw orders on their device
        kept = self.rows[rows.cpu() if isinstance(rows, Tensor) else rows]
        return Streamed(self.pool, kept, self.transform, self.device, self.dtype, self.reconstructs)

    def chunks(self, size: int = CHUNK) -> Iterator[tuple[Tree, Tree]]:
        """Yield inputs and targets in order, ``size`` samples at a time, and gather each chunk only in its turn.

        Args:
            size: samples per chunk; the last chunk may have fewer.
        """
        for samples in self.pool.batches(torch.split(self.rows, min(size, self.pool.largest_chunk or size))):
            batch = self._ready(samples)
            yield batch.x, batch.y

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> "Streamed":
        """Return the same samples, with batches on another device.

        Args:
            device: device of the batches.
            dtype: floating type of the inputs; None, and integer inputs, keep the type.
        """
        return Streamed(self.pool, self.rows, self.transform, device, dtype or self.dtype, self.reconstructs)

    def _ready(self, samples: Samples) -> Samples:
        return ready(samples, self.transform, self.reconstructs).to(self.device, self.dtype)
