"""The order in which a client goes through its samples."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

LastBatch = Literal["keep", "drop", "wrap"]
"""What to do with the samples that do not fill the last batch of an epoch."""


def epoch_order(n: int, batch_size: int, last: LastBatch, generator: torch.Generator) -> Tensor:
    """Draw the sample order of one epoch; slices of ``batch_size`` of it are the batches.

    ``keep`` uses every sample once, so the last batch may be short. ``drop`` leaves the n mod batch_size
    samples of the short batch out (PFLlib's ``drop_last``), except that a client with less than one batch
    keeps it: PFLlib trains such a client on nothing. ``wrap`` fills the last batch from the beginning
    of the same order, so that all batches have the same size.

    Args:
        n: Number of samples of the client, at least 1.
        batch_size: Samples a batch, at least 1.
        last: What to do with an incomplete last batch.
        generator: Source of the shuffle; the order lies on its device.

    Returns:
        Indices in [0, n), int64. The length is n for ``keep``; for ``drop`` and ``wrap`` it is a multiple of
        batch_size (``drop`` with n < batch_size: n).
    """
    order = torch.randperm(n, generator=generator, device=generator.device)
    rest = n % batch_size
    if last == "drop" and n >= batch_size:
        return order[: n - rest]
    if last == "wrap" and rest:
        length = n - rest + batch_size
        return order.repeat(-(-length // n))[:length]
    return order
