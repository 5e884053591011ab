"""A pool of samples, and its division: positions of each client, of the server and of the central test set."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal, cast, get_args

import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from pfl_lightning.data.checks import ClientTest, check_partition
from pfl_lightning.data.memory import free_memory
from pfl_lightning.data.partitioners.base import rows_of
from pfl_lightning.data.partitioners.natural import Natural
from pfl_lightning.data.samples import Samples, Split
from pfl_lightning.data.splits import Cut, check_parts, draw_alike, hold_out
from pfl_lightning.data.trees import leaves_of
from pfl_lightning.messages import num_bytes
from pfl_lightning.seeds import derive_seed


@dataclass(frozen=True)
class Division:
    """Pool positions of all holders of samples, int64.

    Args:
        clients: positions of each client, by split.
        central: positions of the central test set.
        server: positions of the server's samples.
        names: names of the clients, or an empty list.
        newcomers: number of clients, the last ones, that take no part in training and join afterwards.
        named: splits of which the data name the rows, so that they are the same at every seed.
    """

    clients: list[dict[Split, Tensor]]
    central: Tensor
    server: Tensor
    names: list[str]
    newcomers: int = 0
    named: frozenset[Split] = frozenset()

    @cached_property
    def sizes(self) -> dict[Split, list[int]]:
        """Each client's number of samples, by split."""
        return {split: [held[split].numel() for held in self.clients] for split in get_args(Split)}

    @cached_property
    def rows(self) -> dict[Split, Tensor]:
        """Positions of all clients in one tensor, client after client, by split."""
        # once: a look at each of 100,000 clients' tensors takes longer than what is done with them
        return {split: torch.cat([held[split] for held in self.clients]) for split in get_args(Split)}

    @cached_property
    def starts(self) -> dict[Split, list[int]]:
        """Each client's place in `rows`, by split."""
        return {split: list(accumulate(sizes, initial=0)) for split, sizes in self.sizes.items()}

    def held_by(self, clients: Sequence[int], split: Split) -> tuple[Tensor, list[int]]:
        """Return positions of some clients in one tensor, client after client, and each client's number.

        >>> one, two, three = ({"train": torch.tensor(rows)} for rows in ([4], [0, 2], [1]))
        >>> empty = {"val": torch.tensor([]), "test": torch.tensor([])}
        >>> division = Division([one | empty, two | empty, three | empty], torch.tensor([]), torch.tensor([]), [])
        >>> division.held_by([1, 2], "train")
        (tensor([0, 2, 1]), [2, 1])
        >>> division.held_by([2, 0], "train")
        (tensor([1, 4]), [1, 1])

        Args:
            clients: ids of the clients.
            split: the split.
        """
        # several clients of neighbouring ids, such as all of them, have one slice
        if len(clients) > 1 and list(clients) == list(range(first := clients[0], stop := first + len(clients))):
            starts = self.starts[split]
            return self.rows[split][starts[first] : starts[stop]], self.sizes[split][first:stop]
        rows = [self.clients[client][split] for client in clients]
        return torch.cat(rows), [each.numel() for each in rows]


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
    """Set the central test set and the server's samples aside, and divide the rest among the clients.

    Args:
        y: labels of the pool, shape [N], in [0, num_classes).
        is_test: whether each sample belongs to the original test half, bool [N].
        partitioner: divides the rest among the clients.
        cut: splits all clients' samples.
        owners: names of all owners, and the owner's number for each sample; None divides by labels.
        num_clients: number of clients M; None takes all owners.
        num_classes: number of classes K.
        is_given: whether the data set names the split of each sample.
        test_fraction: as for `FederatedDataModule`, like all settings below.
        val_fraction: see `FederatedDataModule`.
        client_test: see `FederatedDataModule`.
        central_test: see `FederatedDataModule`.
        server_fraction: see `FederatedDataModule`.
        seed: see `FederatedDataModule`.

    Raises:
        MisconfigurationException: if the pool cannot be divided so.
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
    # one sample for train, and one for each split with a share; given splits are checked by `check_parts`
    least = 1 if is_given else 1 + (own_fraction > 0) + (val_fraction > 0)
    check_partition(shares, partitioner, num_clients, len(free), least)
    names = [] if owners is None else [owners[0][int(labels[rows[0]])] for rows in shares]
    held = torch.split(free[torch.cat([*shares])], [rows.shape[0] for rows in shares])
    clients = cut(held)
    if is_given:
        check_parts(clients, names, val_fraction)
    if client_test == "original" and test_fraction > 0:
        # the server may learn from a part of the test half; no client is tested on that part
        can_test = is_test.index_fill(0, server, False)
        classes = [((y == k) & can_test).nonzero().flatten() for k in range(num_classes)]
        for client, rows in enumerate(shares):
            # rounded up as in `part_sizes`, so that both kinds of test have the same size
            size = int(np.ceil(test_fraction * len(rows)))
            clients[client]["test"] = draw_alike(y[free[rows]], classes, size, client, seed)
    return Division(clients, central, server, names)


def redivided(
    division: Division, y: Tensor, partitioner: Callable[..., list[Tensor]], num_classes: int, start: int, seed: int
) -> Division:
    """Divide the clients' training samples anew from a round on; val and test samples follow the new class mix.

    A tested sample is never trained on: val and test samples are drawn from the samples that any client had in the same
    split, with the class mix of the client's new training samples, so two clients may share one. New clients keep their
    samples.

    Args:
        division: the division of the first round.
        y: labels of the pool, shape [N], in [0, num_classes).
        partitioner: divides the training samples.
        num_classes: number of classes K.
        start: the round, from 2.
        seed: seed of the first division; the seed of this division is derived from it and ``start``.

    Raises:
        MisconfigurationException: if the samples cannot be divided so.
    """
    count = len(division.clients) - division.newcomers
    held: dict[Split, Tensor] = {
        split: torch.cat([parts[split] for parts in division.clients[:count]]) for split in ("train", "val", "test")
    }
    # sorted, so that the result doesn't depend on the order of clients in the first division
    rows = held["train"].sort().values
    shares = partitioner(y[rows], count, num_classes, derive_seed(seed, "drift", start) % 2**32)
    check_partition(shares, partitioner, count, len(rows), least=1)
    clients: list[dict[Split, Tensor]] = [{"train": rows[share]} for share in shares]
    for split in ("val", "test"):
        theirs = torch.unique(held[split])
        classes = [theirs[y[theirs] == k] for k in range(num_classes)]
        testable = torch.tensor([len(each) > 0 for each in classes])
        own_seed = derive_seed(seed, "drift", start, split)
        for client, parts in enumerate(clients):
            labels = y[parts["train"]]
            # classes that no client can test on are left out of the mix; the refusal below is for a client of such
            # classes only
            labels = labels[testable[labels]]
            if len(theirs) and not len(labels):
                raise MisconfigurationException(
                    f"data.drift: from round {start} on client {client} trains on classes without a {split} "
                    f"sample at any client; take a larger data.{split}_fraction, or more samples"
                )
            size = max(1, round(len(parts["train"]) * len(held[split]) / len(rows))) if len(theirs) else 0
            # `draw_alike` repeats samples of a class with fewer than the client's share; each counts once in a test
            parts[split] = torch.unique(draw_alike(labels, classes, size, client, own_seed)) if size else theirs
    return replace(division, clients=[*clients, *division.clients[count:]])


class Pool:
    """All samples as loaded, and one copy on each GPU with room for them.

    With a copy on the GPU, clients' samples need not be gathered and transformed on the CPU and sent to the GPU in
    every round.

    Args:
        samples: all samples, on the CPU.
        division: the pool positions of each client's samples.
        strata: group of each sample, int64 [N]; zeros without groups.
        keys: keys by which samples are known again.
    """

    def __init__(self, samples: Samples, division: Division, strata: Tensor, keys: Any) -> None:
        self.samples = samples
        self.strata = strata
        self.division = division
        self.keys = keys
        self.copies: dict[torch.device, Samples] = {}
        # memory maps and readers are read one client at a time; a copy on a GPU would read them as a whole
        self._in_memory = all(isinstance(leaf, Tensor) for leaf in leaves_of(samples.x))

    def on(self, device: torch.device) -> Samples:
        """Return the samples, on the device if all are in memory and fit into a quarter of the device's free memory.

        Args:
            device: the device of the clients' training.
        """
        if device.type == "cpu" or not self._in_memory:
            return self.samples
        if device not in self.copies:
            # a quarter, since gathered samples, nets, gradients and optimizer states of the clients need the rest
            fits = 4 * num_bytes((self.samples.x, self.samples.y)) <= free_memory(device)
            self.copies[device] = self.samples.to(device) if fits else self.samples
        return self.copies[device]
