"""The order of a client's samples in an epoch."""

from collections.abc import Iterator
from itertools import count
from typing import Any, Literal

import torch
from torch import Tensor

from pfl_lightning.seeds import derive_seed

LastBatch = Literal["keep", "drop", "wrap"]
"""Ways to treat samples that do not fill the last batch of an epoch."""


Limit = int | float
"""Batches of an epoch to use: their number, or their share as a float, where 1.0 is all."""


def epoch_order(n: int, batch_size: int, last: LastBatch, generator: torch.Generator, limit: Limit = 1.0) -> Tensor:
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
        limit: batches to use, the first ones of the order; a share is rounded down to a whole number, at least one.

    Returns:
        Indices in [0, n), int64. Without a limit the length is n for ``keep``; for ``drop`` and ``wrap`` a multiple of
        batch_size (``drop`` with n < batch_size: n).
    """
    order = torch.randperm(n, generator=generator, device=generator.device)
    rest = n % batch_size
    if last == "drop" and n >= batch_size:
        order = order[: n - rest]
    elif last == "wrap" and rest:
        length = n - rest + batch_size
        # repeated as often as needed: the samples of a client with less than half a batch occur several times in the
        # batch
        order = order.repeat(-(-length // n))[:length]
    if isinstance(limit, float):
        # The whole is left alone, as most runs have no limit. A client of few batches keeps one: a share that rounds to
        # nothing would leave it out of the training in silence.
        return order if limit == 1 else order[: max(1, int(-(-len(order) // batch_size) * limit)) * batch_size]
    return order[: limit * batch_size]


def batches_of(length: Any, size: int, smallest: int) -> Any:
    """Return the number of batches of an epoch, without too small batches.

    Args:
        length: samples of the epoch.
        size: samples per batch, except for the last.
        smallest: the smallest usable batch.
    """
    return length // size * (size >= smallest) + (length % size >= smallest)


def continued_orders(
    n: int, batch_size: int, last: LastBatch, smallest: int, seed: int, begun: int, limit: Limit = 1.0
) -> tuple[Iterator[Tensor], int]:
    """Return the sample orders of a client's epochs from the one that it is in, and its batches in that epoch so far.

    The order of an epoch is a function of the seed and the epoch's number alone, so that training can stop within an
    epoch and go on there.

    Args:
        n: number of samples of the client, at least one batch.
        batch_size: samples per batch.
        last: treatment of an incomplete last batch.
        smallest: the smallest usable batch.
        seed: the client's seed, the same in all rounds.
        begun: batches that the client has trained so far, in all rounds.
        limit: batches of an epoch to use, as for `epoch_order`.
    """

    def order(epoch: int) -> Tensor:
        return epoch_order(n, batch_size, last, torch.Generator().manual_seed(derive_seed(seed, epoch)), limit)

    epoch, done = divmod(begun, batches_of(order(0).numel(), batch_size, smallest))
    return map(order, count(epoch)), done
