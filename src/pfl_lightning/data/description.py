"""Summaries of a partition for the record of a run."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from pfl_lightning.data.datamodule import FederatedDataModule
from pfl_lightning.messages import digest


def fingerprint(data: FederatedDataModule) -> str:
    """Return a digest of the partition: equal for equal divisions of equal pools.

    Where the clients' samples stay at sites, the digest is of sample counts only.

    Args:
        data: the data module, set up.
    """
    if data.at_sites:
        return digest([amounts(data)])
    # a resumed run stands in a later round, and must have the fingerprint of its beginning
    with data.at_round(1):
        # places in the pool, since other rows may have the same numbers of each class
        divisions = [data.division]
    divisions += [data.division_at(start) for start in sorted(data.drift or {})]
    # all clients of a split in one tensor, which takes a hundredth of the time of a tensor each
    parts: list[Any] = [[list(each.rows.values()), torch.tensor(list(each.sizes.values()))] for each in divisions]
    if data.input_drift:
        # as text, since a digest is of tensors
        parts.append(torch.tensor(list(str(list(data.input_drift)).encode())))
    return digest(parts)


def amounts(data: FederatedDataModule) -> Tensor:
    """Count the training samples of clients by class, ``[clients, classes]``; one column if no class is known.

    Args:
        data: the data module, set up.
    """
    if data.knows_classes:
        return data.counts
    return torch.tensor([[data.size(client, "train")] for client in range(data.num_clients)])


def described(data: FederatedDataModule, clients: Iterable[int]) -> list[dict[str, Any]]:
    """Return the first columns of ``clients.csv``: each client's id, name, training samples and number of classes.

    Names are left out for unnamed clients, numbers of classes where classes are unknown.

    Args:
        data: the data module, set up.
        clients: the clients' ids.
    """
    rows: list[dict[str, Any]] = [{"client": client} for client in clients]
    names = data.client_names
    # of all members at once: a count of each client's own takes some 50 microseconds
    classes = (data.counts > 0).sum(1).tolist() if data.knows_classes and rows else None
    for row in rows:
        client = row["client"]
        if names:
            row["name"] = names[client]
        row["samples"] = data.size(client, "train")
        if classes is not None:
            own = classes[client] if client < len(classes) else int((data.counts_of(client, "train") > 0).sum())
            row["classes"] = own
    return rows
