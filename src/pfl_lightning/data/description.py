"""What records say of who holds what."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pfl_lightning.data.datamodule import FederatedDataModule
from pfl_lightning.messages import digest


def fingerprint(data: FederatedDataModule) -> str:
    """Fingerprint of a partition: the same for the same division of the same pool, as far as it is known.

    Args:
        data: set up.
    """
    if data.at_sites:
        return digest([amounts(data)])
    with data.at_round(1):
        if data.task.has_classes:
            parts: list[Any] = [data.class_counts(split) for split in ("train", "val", "test")]
        else:
            parts = [list(held.values()) for held in data.division.clients]
    for start in sorted(data.drift or {}):
        parts += [list(held.values()) for held in data.division_at(start).clients]
    return digest(parts)


def amounts(data: FederatedDataModule) -> Tensor:
    """Training samples of clients by class, ``[clients, classes]``; all in one column where no class is known.

    Args:
        data: set up.
    """
    if data.knows_classes:
        return data.counts
    return torch.tensor([[data.size(client, "train")] for client in range(data.num_clients)])


def described(data: FederatedDataModule, client: int) -> dict[str, Any]:
    """What a client's row in ``clients.csv`` begins with: its id, its name, its training samples, and its classes.

    The name and the classes only where some are known.

    Args:
        data: set up.
        client: its id.
    """
    row: dict[str, Any] = {"client": client}
    if data.client_names:
        row["name"] = data.client_names[client]
    row["samples"] = data.size(client, "train")
    if data.knows_classes:
        row["classes"] = int((data.counts_of(client, "train") > 0).sum())
    return row
