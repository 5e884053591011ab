"""Who holds which samples of a pool: the clients, the server, and the central test set."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, cast

import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from pfl_lightning.data.checks import ClientTest, check_partition
from pfl_lightning.data.client_splits import Cut, check_parts
from pfl_lightning.data.partitioners.base import rows_of
from pfl_lightning.data.partitioners.natural import Natural
from pfl_lightning.data.samples import Split
from pfl_lightning.data.splits import draw_alike, hold_out
from pfl_lightning.seeds import derive_seed


@dataclass(frozen=True)
class Division:
    """Positions in a pool, int64.

    Args:
        clients: Those of each client, by split.
        central: Those of the central test set.
        server: Those of the server's samples.
        names: Names of the clients, where the data set has some.
        newcomers: How many clients, the last ones, take no part and join afterwards.
    """

    clients: list[dict[Split, Tensor]]
    central: Tensor
    server: Tensor
    names: list[str]
    newcomers: int = 0


def divide(
    y: Tensor,
    is_test: Tensor,
    partitioner: Callable[..., list[Tensor]],
    *,
    cut: Cut,
    owners: tuple[list[str], Tensor] | None,
    num_clients: int | None,
    num_classes: int,
    is_given: bool,
    test_fraction: float,
    val_fraction: float,
    client_test: ClientTest,
    central_test: float | Literal["original"] | None,
    server_fraction: float,
    seed: int,
) -> Division:
    """Set the central test set and the server's samples aside, and divide the others among the clients.

    Args:
        y: Labels of the pool, shape [N], in [0, num_classes).
        is_test: Which samples are of the original test half, shape [N].
        partitioner: Divides what is left among the clients.
        cut: Splits a client's samples.
        owners: Names of the clients that there are, and the number of each sample's; None divides by labels.
        num_clients: Number of clients M; None takes all owners.
        num_classes: Number of classes K.
        is_given: Whether the data set says of what split each sample is.
        test_fraction: As for `FederatedDataModule`, like all that follow.
        val_fraction: The same.
        client_test: The same.
        central_test: The same.
        server_fraction: The same.
        seed: The same.

    Raises:
        MisconfigurationException: The pool cannot be divided so.
    """
    central = server = torch.empty(0, dtype=torch.int64)
    if central_test is not None:
        central, server = hold_out(y, is_test, central_test, server_fraction, num_classes, seed)
    is_free = torch.ones(len(y), dtype=torch.bool)
    is_free[central] = is_free[server] = False
    if client_test == "original":
        is_free &= ~is_test
    own_fraction = test_fraction if client_test == "own" else 0.0
    free = is_free.nonzero().flatten()
    labels, groups = (y[free], num_classes) if owners is None else (owners[1][free], len(owners[0]))
    if num_clients is None:
        num_clients = len(cast(Natural, partitioner).owners(rows_of(labels.numpy(), groups)))
    shares = partitioner(labels, num_clients, groups, seed)
    least = 1 if is_given else 1 + (own_fraction > 0) + (val_fraction > 0)
    check_partition(shares, partitioner, num_clients, len(free), least)
    names = [] if owners is None else [owners[0][int(labels[rows[0]])] for rows in shares]
    clients = [cut(free[rows], client) for client, rows in enumerate(shares)]
    if is_given:
        check_parts(clients, names, val_fraction)
    if client_test == "original" and test_fraction > 0:
        can_test = is_test.index_fill(0, server, False)
        classes = [((y == k) & can_test).nonzero().flatten() for k in range(num_classes)]
        for client, rows in enumerate(shares):
            size = int(np.ceil(test_fraction * len(rows)))
            clients[client]["test"] = draw_alike(y[free[rows]], classes, size, client, seed)
    return Division(clients, central, server, names)


def redivided(
    division: Division, y: Tensor, partitioner: Callable[..., list[Tensor]], num_classes: int, start: int, seed: int
) -> Division:
    """Divide the clients' training samples anew, from a round on, and let their val and test samples follow.

    A sample that was tested on is never trained on: val and test samples are drawn of those that some client had in
    the same split, with the class mix of the client's new training samples, so that clients may share them. New clients
    keep what they have.

    Args:
        division: Who holds what in the first round.
        y: Labels of the pool, shape [N], in [0, num_classes).
        partitioner: Divides the training samples.
        num_classes: Number of classes K.
        start: The round.
        seed: Seed of the first division, of which that of this one is made.

    Raises:
        MisconfigurationException: The samples cannot be divided so.
    """
    count = len(division.clients) - division.newcomers
    held: dict[Split, Tensor] = {
        split: torch.cat([parts[split] for parts in division.clients[:count]]) for split in ("train", "val", "test")
    }
    rows = held["train"].sort().values
    shares = partitioner(y[rows], count, num_classes, derive_seed(seed, "drift", start) % 2**32)
    check_partition(shares, partitioner, count, len(rows), least=1)
    clients: list[dict[Split, Tensor]] = [{"train": rows[share]} for share in shares]
    for split in ("val", "test"):
        theirs = torch.unique(held[split])
        classes = [theirs[y[theirs] == k] for k in range(num_classes)]
        known = torch.tensor([len(each) > 0 for each in classes])
        own_seed = derive_seed(seed, "drift", start, split)
        for client, parts in enumerate(clients):
            labels = y[parts["train"]]
            labels = labels[known[labels]]
            if len(theirs) and not len(labels):
                raise MisconfigurationException(
                    f"data.drift: from round {start} on client {client} trains on classes of which nobody has a "
                    f"{split} sample; take a larger data.{split}_fraction, or more samples"
                )
            size = max(1, round(len(parts["train"]) * len(held[split]) / len(rows))) if len(theirs) else 0
            # once each, where a client's classes have fewer than its share
            parts[split] = torch.unique(draw_alike(labels, classes, size, client, own_seed)) if size else theirs
    return replace(division, clients=[*clients, *division.clients[count:]])
