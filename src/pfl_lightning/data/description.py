"""Summaries of a partition for the record of a run."""

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
        parts: list[Any] = [list(held.values()) for held in data.division.clients]
    for start in sorted(data.drift or {}):
        parts += [list(held.values()) for held in data.division_at(start).clients]
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


def described(data: FederatedDataModule, client: int) -> dict[str, Any]:
    """Return the first columns of a client's row in ``clients.csv``: id, name, training samples, number of classes.

    The name is left out for unnamed clients, the number of classes where classes are unknown.

    Args:
        data: the data module, set up.
        client: the client's id.
    """
    row: dict[str, Any] = {"client": client}
    if data.client_names:
        row["name"] = data.client_names[client]
    row["samples"] = data.size(client, "train")
    if data.knows_classes:
        row["classes"] = int((data.counts_of(client, "train") > 0).sum())
    return row
