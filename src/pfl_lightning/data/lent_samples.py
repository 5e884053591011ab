"""Samples that clients lend to a server that has none."""

import torch

from pfl_lightning.data.client_data import Samples
from pfl_lightning.data.datamodule import FederatedDataModule


def lent_samples(data: FederatedDataModule, fraction: float, generator: torch.Generator) -> Samples:
    """Training samples of all clients, as many of each class, drawn without replacement.

    A class that has fewer gives all that it has. One client's samples are gathered at a time.

    Args:
        data: the data module, set up.
        fraction: share of all training samples, in (0, 1]; the number a class is rounded, and at least 1.
        generator: source of the draws.
    """
    counts = data.counts
    per_class = max(1, round(fraction * int(counts.sum()) / data.num_classes))
    # how many of its samples of each class a client lends; so no labels need be gathered to draw
    lent = torch.zeros_like(counts)
    for j in range(data.num_classes):
        holders = torch.arange(len(counts)).repeat_interleave(counts[:, j])
        lot = torch.randperm(len(holders), generator=generator)[:per_class]
        lent[:, j] = torch.bincount(holders[lot], minlength=len(counts))
    x, y = [], []
    for client in lent.any(1).nonzero().flatten().tolist():
        part = data.part(client, "train")
        order = torch.randperm(len(part), generator=generator)
        rows = torch.cat([order[part.y[order] == j][: lent[client, j]] for j in range(data.num_classes)])
        x.append(part.x[rows])
        y.append(part.y[rows])
    return Samples(torch.cat(x), torch.cat(y))
