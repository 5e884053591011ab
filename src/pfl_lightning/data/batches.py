"""The order of a client's samples in an epoch."""

from typing import Literal

import torch
from torch import Tensor

LastBatch = Literal["keep", "drop", "wrap"]
"""Ways to treat samples that do not fill the last batch of an epoch."""


def epoch_order(n: int, batch_size: int, last: LastBatch, generator: torch.Generator) -> Tensor:
    """Draw the sample order of one epoch, whose slices of ``batch_size`` are the batches.

    ``keep`` uses every sample once, so the last batch may be short. ``drop`` leaves out the n mod batch_size samples of
    the short batch (PFLlib's ``drop_last``), except for a client with less than one batch, which keeps all samples:
    PFLlib trains such a client on nothing. ``wrap`` fills the last batch from the beginning of the same order, so that
    all batches have the same size.

    Args:
        n: number of samples of the client, at least 1.
        batch_size: samples per batch, at least 1.
        last: treatment of an incomplete last batch.
        generator: source of the shuffle; the order lies on the generator's device.

    Returns:
        Indices in [0, n), int64. The length is n for ``keep``; for ``drop`` and ``wrap`` a multiple of batch_size
        (``drop`` with n < batch_size: n).
    """
    order = torch.randperm(n, generator=generator, device=generator.device)
    rest = n % batch_size
    if last == "drop" and n >= batch_size:
        return order[: n - rest]
    if last == "wrap" and rest:
        length = n - rest + batch_size
        # repeated as often as needed: the samples of a client with less than half a batch occur several times in the
        # batch
        return order.repeat(-(-length // n))[:length]
    return order
