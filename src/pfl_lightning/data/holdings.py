"""The samples of each client, of the server and of the central test set, after the division of a pool."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningDataModule
from torch import Tensor

from pfl_lightning.data.client_data import ClientData, class_counts
from pfl_lightning.data.division import Division
from pfl_lightning.data.loaders import ClientLoader
from pfl_lightning.data.pool import Pool
from pfl_lightning.data.samples import Parts, Samples, Split
from pfl_lightning.data.streamed import Streamed
from pfl_lightning.data.trees import Tree, take
from pfl_lightning.tasks import Task


class Holdings(LightningDataModule):
    """Give access to the samples of clients, server and central test set: one half of `FederatedDataModule`.

    A client's samples are gathered and transformed on request.
    """

    num_clients: int
    """Number of clients M, known without `setup` unless it is left to the data."""
    val_fraction: float
    test_fraction: float
    central_test: float | Literal["original"] | None
    public: Any
    resident: bool = True
    """True if all samples of a client are in memory while the client trains."""
    at_sites: bool = False
    """True if the samples stay at the clients' sites; then only the number of each client's samples is known here."""
    round: int = 1
    """The current round, from 1, trained or evaluated; no other changing value may decide the clients' samples."""
    drift: Mapping[int, Any] | None = None
    """Partitioners by the round from which on each one's division holds."""
    _pool: Pool | None = None
    _divisions: Mapping[int, Division]
    _held: tuple[int, Division] | None = None
    _public: Samples | None = None

    @property
    def task(self) -> Task:
        """The prediction task."""
        raise NotImplementedError

    @property
    def knows_classes(self) -> bool:
        """True if the classes of each client's samples are known here."""
        return self.task.has_classes and not self.at_sites

    def transform(self, x: Tree) -> Tree:
        """Make inputs ready for the net."""
        raise NotImplementedError

    def server_samples(self) -> Samples | None:
        """Return the samples of the server as loaded, or None: the ``public`` ones, or the ``server_fraction``.

        Public samples have the labels of their own data set.
        """
        pool = self._ready()
        rows = pool.division.server
        if self._public is not None or not len(rows):
            return self._public
        return pool.samples.take(rows)

    def server_data(self) -> Samples | None:
        """Return the samples of the server, transformed, or None."""
        samples = self.server_samples()
        # public samples need the transform of the data set from which they come
        source = self if self.public is None else self.public
        return None if samples is None else Samples(source.transform(samples.x), samples.y)

    def central_data(self) -> Samples | None:
        """Return the test samples of the server's model, transformed, or None."""
        rows = self._ready().division.central
        return self._gather(rows) if len(rows) else None

    def part(self, client: int, split: Split) -> Samples:
        """Gather and transform one split of one client.

        Args:
            client: client id, 0 to num_clients - 1, or one of the `newcomers`.
            split: the split's name.
        """
        (samples,) = self.parts([client], split)
        return samples

    def parts(self, clients: Sequence[int], split: Split, device: torch.device | str = "cpu") -> Sequence[Samples]:
        """Gather and transform one split of each of several clients, all at once.

        All access to clients' samples goes through this method; override it to change the samples of clients.

        Args:
            clients: client ids, 0 to num_clients - 1, or `newcomers`.
            split: the split's name.
            device: the device on which the samples are gathered, and stay.
        """
        held = self.division.clients
        rows = [held[client][split] for client in clients]
        # the positions alone: a client larger than memory must never be gathered as a whole
        if not self.resident:
            return [Streamed(self._ready().samples, each, self.transform, device) for each in rows]
        # one gather and one transform for all clients, in place of two calls for each client
        return Parts(self._gather(torch.cat(rows), device), [each.numel() for each in rows])

    def _gather(self, rows: Tensor, device: torch.device | str = "cpu") -> Samples:
        samples = self._ready().on(torch.device(device)).take(rows)
        return Samples(self.transform(samples.x), samples.y)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Return the client ids unchanged; Lightning would search each id for tensors.

        Args:
            batch: client ids.
            device: ignored, since engines move the samples themselves.
            dataloader_idx: ignored.
        """
        return batch

    def teardown(self, stage: str | None = None) -> None:
        """Free the copies of the pool on devices.

        Args:
            stage: ignored.
        """
        if self._pool is not None:
            self._pool.copies.clear()

    def client(self, client: int) -> ClientData:
        """Return one client's data, whose splits are gathered and transformed on first access.

        Args:
            client: client id, 0 to num_clients - 1, or one of the `newcomers`.
        """
        self._ready()
        return ClientData(self, client)

    def size(self, client: int, split: Split) -> int:
        """Return the number of samples in one split of one client.

        Args:
            client: client id, 0 to num_clients - 1, or one of the `newcomers`.
            split: the split's name.
        """
        return self.division.clients[client][split].numel()

    @property
    def client_names(self) -> list[str]:
        """Names of the clients by id; empty unless the pool is divided by named clients."""
        return self._ready().division.names

    @property
    def newcomers(self) -> range:
        """Ids of the clients that take no part in training and join afterwards, above the federation's ids."""
        return range(self.num_clients, len(self._ready().division.clients))

    @property
    def division(self) -> Division:
        """Pool positions of all clients' samples in the current `round`."""
        # Asked for many times in a round: one result is kept, since an overridden `division_at` may be slow.
        if self._held is None or self._held[0] != self.round:
            found, count = self.division_at(self.round), len(self._ready().division.clients)
            if not isinstance(found, Division) or len(found.clients) != count:
                what = f"{len(found.clients)} clients" if isinstance(found, Division) else f"a {type(found).__name__}"
                raise MisconfigurationException(
                    f"{type(self).__name__}.division_at({self.round}) returned {what}; return a Division of the same "
                    f"{count} clients as in the first round"
                )
            self._held = self.round, found
        return self._held[1]

    def division_at(self, round: int) -> Division:
        """Return the pool positions of all clients' samples in a round.

        Override this for clients whose samples change. The result must depend on the round and on ``seed`` alone, so
        that a resumed run goes on with the same samples, and must have the same clients in each round.

        Args:
            round: the round, from 1.
        """
        pool = self._ready()
        starts = [start for start in self._divisions if start <= round]
        return self._divisions[max(starts)] if starts else pool.division

    @property
    def drifts(self) -> bool:
        """True if the samples of clients depend on the round."""
        return bool(self.drift) or type(self).division_at is not Holdings.division_at

    def go_to(self, round: int) -> bool:
        """Go to another round, and return whether the samples of any client changed.

        Args:
            round: the round, from 1.
        """
        if not self.drifts:
            self.round = round
            return False
        before, self.round = self.division, round
        # the same object for all rounds between two drifts, which spares the comparison of all positions below
        if before is self.division:
            return False
        pairs = zip(before.clients, self.division.clients, strict=True)
        return any(not torch.equal(one[split], other[split]) for one, other in pairs for split in one)

    @contextmanager
    def at_round(self, round: int) -> Iterator[None]:
        """Go to another round inside a ``with`` block, and back to the former round after the block.

        Args:
            round: the round, from 1.
        """
        here, self.round = self.round, round
        try:
            yield
        finally:
            self.round = here

    def strata_of(self, client: int, split: Split) -> Tensor:
        """Return the group, such as the class, of each sample in one split of one client; zeros without groups.

        Args:
            client: client id, 0 to num_clients - 1, or one of the `newcomers`.
            split: the split's name.
        """
        return self._ready().strata[self.division.clients[client][split]]

    def class_counts(self, split: Split) -> Tensor:
        """Count the samples of each client and class.

        Args:
            split: the split to count.

        Returns:
            Counts n_ij, shape [num_clients, num_classes], int64.

        Raises:
            MisconfigurationException: the samples have no class.
        """
        return torch.stack([self.counts_of(client, split) for client in range(self.num_clients)])

    def counts_of(self, client: int, split: Split) -> Tensor:
        """Count the samples of one client by class, [num_classes], int64, without reading inputs.

        Args:
            client: client id, 0 to num_clients - 1, or one of the `newcomers`.
            split: the split to count.

        Raises:
            MisconfigurationException: the samples have no class.
        """
        return class_counts(self.task, take(self._ready().samples.y, self.division.clients[client][split]))

    @property
    def counts(self) -> Tensor:
        """Class counts of the train splits, shape [num_clients, num_classes], int64."""
        return self.class_counts("train")

    def train_dataloader(self) -> ClientLoader:
        """Return a loader of one batch, the ids of all clients: an epoch is a round."""
        return ClientLoader([range(self.num_clients)])

    def val_dataloader(self) -> ClientLoader:
        """Return a loader of one batch, the ids of all clients; of no batch without val samples."""
        return ClientLoader([range(self.num_clients)] if self._holds("val", self.val_fraction) else [])

    def test_dataloader(self) -> ClientLoader:
        """Return a loader of one batch, the ids of all clients.

        Without test samples of clients, the batch is empty if there is a central test set; else there is no batch.
        """
        # with given splits, test_fraction may be above 0 and no client have test samples: samples decide, not shares
        if not self._holds("test", self.test_fraction):
            # an empty batch makes Lightning run the test loop, in which the server's model is tested
            return ClientLoader([] if self.central_test is None else [[]])
        return ClientLoader([range(self.num_clients)])

    def _holds(self, split: Split, share: float) -> bool:
        """Return whether any client of the federation has samples of a split.

        Before `setup` the share decides. After `setup`, all clients have samples of a split or none has, apart from
        clients without samples that `arrange` adds.
        """
        if self._pool is None:
            return share > 0
        return any(self.size(client, split) for client in range(self.num_clients))

    def arrange(self, names: Sequence[str]) -> None:
        """Give clients the ids of a federation, matched by name.

        Clients of other names become newcomers. A name without a client here becomes a client without samples.

        Args:
            names: names of the federation's clients, by id.
        """
        pool, before = self._ready(), self.client_names
        nothing: dict[Split, Tensor] = {split: torch.empty(0, dtype=torch.int64) for split in ("train", "val", "test")}
        known = set(names)
        # clients that the federation doesn't know stay usable, as newcomers
        others = [name for name in before if name not in known]
        every = [*names, *others]

        def arranged(division: Division) -> Division:
            held = dict(zip(before, division.clients, strict=True))
            clients = [held.get(name, nothing) for name in every]
            return replace(division, clients=clients, names=every, newcomers=len(others))

        pool.division = arranged(pool.division)
        self._divisions = {start: arranged(division) for start, division in self._divisions.items()}
        # the kept division has the ids from before
        self._held = None
        self.num_clients = len(names)

    def _ready(self) -> Pool:
        if self._pool is None:
            raise MisconfigurationException(
                f"{type(self).__name__} has no clients yet; call prepare_data() and setup() first, or "
                "pass it to a Trainer"
            )
        return self._pool
