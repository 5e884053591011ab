"""A sample of the clients' training data, lent to a server without data."""

import torch

from pfl_lightning.data.datamodule import FederatedDataModule
from pfl_lightning.data.samples import Samples


def sample_proxy(data: FederatedDataModule, fraction: float, generator: torch.Generator) -> Samples:
    """Draw training samples from all clients, equally many per class or other group, without replacement.

    A class with fewer samples gives all of them; without groups, all samples form one. One client's samples are
    gathered at a time.

    Args:
        data: the data module, set up.
        fraction: share of all training samples, in (0, 1]; the number per class is rounded, and at least 1.
        generator: source of the draws.
    """
    strata = [data.strata_of(client, "train") for client in range(data.num_clients)]
    groups = data.task.outputs if data.task.has_classes else int(torch.cat(strata).max()) + 1
    counts = torch.stack([torch.bincount(of_one, minlength=groups) for of_one in strata])
    per_class = max(1, round(fraction * int(counts.sum()) / groups))
    # number of samples per client and class: drawn from counts alone, so that no labels need be gathered
    lent = torch.zeros_like(counts)
    for j in range(groups):
        holders = torch.arange(len(counts)).repeat_interleave(counts[:, j])
        lot = torch.randperm(len(holders), generator=generator)[:per_class]
        lent[:, j] = torch.bincount(holders[lot], minlength=len(counts))
    parts = []
    for client in lent.any(1).nonzero().flatten().tolist():
        part = data.part(client, "train")
        order = torch.randperm(len(part), generator=generator)
        # an override of `parts` may change a client's labels, so the gathered ones count and not the pool's
        classes = data.task.classes(part.y)
        of_part = (strata[client] if classes is None else classes)[order]
        rows = torch.cat([order[of_part == j][: lent[client, j]] for j in range(groups)])
        parts.append(part.take(rows))
    return Samples.joined(parts)
