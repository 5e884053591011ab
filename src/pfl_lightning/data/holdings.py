"""Who holds what of a pool that has been divided, and how it is asked for."""

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
    """What clients, the server and the central test set hold, once a pool is divided: a `FederatedDataModule`'s half.

    A client's samples are gathered and transformed on request.
    """

    num_clients: int
    """Number of clients M, known without `setup` unless it is left to the data."""
    val_fraction: float
    test_fraction: float
    central_test: float | Literal["original"] | None
    public: Any
    resident: bool = True
    """Whether all samples of a client that trains are in memory at once."""
    at_sites: bool = False
    """Whether clients' samples are where their clients are; of each the number is known here, and nothing else."""
    round: int = 1
    """The round that is run or evaluated, from 1; of all that changes, what clients hold may depend on it alone."""
    drift: Mapping[int, Any] | None = None
    """Partitioners by the round from which on the clients' samples are divided by them."""
    _pool: Pool | None = None
    _divisions: Mapping[int, Division]
    _held: tuple[int, Division] | None = None
    _public: Samples | None = None

    @property
    def task(self) -> Task:
        """What is predicted."""
        raise NotImplementedError

    @property
    def knows_classes(self) -> bool:
        """Whether it is known here of which class each client's samples are."""
        return self.task.has_classes and not self.at_sites

    def transform(self, x: Tree) -> Tree:
        """Make inputs ready for the net."""
        raise NotImplementedError

    def server_samples(self) -> Samples | None:
        """Return the samples that the server holds, as loaded, or None: ``public`` ones, or its ``server_fraction``.

        The labels of public samples are those of their own data set.
        """
        pool = self._ready()
        rows = pool.division.server
        if self._public is not None or not len(rows):
            return self._public
        return pool.samples.take(rows)

    def server_data(self) -> Samples | None:
        """Return the same samples, transformed, or None."""
        samples = self.server_samples()
        source = self if self.public is None else self.public
        return None if samples is None else Samples(source.transform(samples.x), samples.y)

    def central_data(self) -> Samples | None:
        """Return the samples that the server's model is tested on, transformed, or None."""
        rows = self._ready().division.central
        return self._gather(rows) if len(rows) else None

    def part(self, client: int, split: Split) -> Samples:
        """Gather and transform one split of one client.

        Args:
            client: Client id, 0 to num_clients - 1, or one of the `newcomers`.
            split: Which split.
        """
        (samples,) = self.parts([client], split)
        return samples

    def parts(self, clients: Sequence[int], split: Split, device: torch.device | str = "cpu") -> Sequence[Samples]:
        """Gather and transform one split of each of several clients, all at once.

        Whatever looks at clients' samples comes here; override it to change what clients hold.

        Args:
            clients: Client ids, 0 to num_clients - 1.
            split: Which split.
            device: Where the samples are gathered, and stay.
        """
        held = self.division.clients
        rows = [held[client][split] for client in clients]
        if not self.resident:
            return [Streamed(self._ready().samples, each, self.transform, device) for each in rows]
        return Parts(self._gather(torch.cat(rows), device), [each.numel() for each in rows])

    def _gather(self, rows: Tensor, device: torch.device | str = "cpu") -> Samples:
        samples = self._ready().on(torch.device(device)).take(rows)
        return Samples(self.transform(samples.x), samples.y)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Leave the ids of clients as they are; Lightning would look at each for tensors.

        Args:
            batch: Client ids.
            device: Ignored, as engines bring the samples to it.
            dataloader_idx: Ignored.
        """
        return batch

    def teardown(self, stage: str | None = None) -> None:
        """Let go of copies of the pool on devices.

        Args:
            stage: Ignored.
        """
        if self._pool is not None:
            self._pool.copies.clear()

    def client(self, client: int) -> ClientData:
        """One client, its splits gathered and transformed when they are asked for.

        Args:
            client: Client id, 0 to num_clients - 1, or one of the `newcomers`.
        """
        self._ready()
        return ClientData(self, client)

    def size(self, client: int, split: Split) -> int:
        """Number of samples in one split of one client.

        Args:
            client: Client id, 0 to num_clients - 1, or one of the `newcomers`.
            split: Which split.
        """
        return self.division.clients[client][split].numel()

    @property
    def client_names(self) -> list[str]:
        """Names of the clients by id, where the data set has some and they are divided by them; else none."""
        return self._ready().division.names

    @property
    def newcomers(self) -> range:
        """Ids of the clients that take no part and join afterwards, behind those of the federation."""
        return range(self.num_clients, len(self._ready().division.clients))

    @property
    def division(self) -> Division:
        """Who holds which of the samples in this `round`, by their positions in the pool."""
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
        """Return who holds which of the samples in a round, by their positions in the pool.

        Override it for clients whose samples change. The result must depend on the round and on ``seed`` alone, so that
        a resumed run goes on with the same samples, and have the same clients in each round.

        Args:
            round: The round, from 1.
        """
        pool = self._ready()
        starts = [start for start in self._divisions if start <= round]
        return self._divisions[max(starts)] if starts else pool.division

    @property
    def drifts(self) -> bool:
        """Whether the samples that clients hold depend on the round."""
        return bool(self.drift) or type(self).division_at is not Holdings.division_at

    def go_to(self, round: int) -> bool:
        """Take the holdings of another round, and tell whether some client's differ from those before.

        Args:
            round: The round, from 1.
        """
        if not self.drifts:
            self.round = round
            return False
        before, self.round = self.division, round
        if before is self.division:
            return False
        pairs = zip(before.clients, self.division.clients, strict=True)
        return any(not torch.equal(one[split], other[split]) for one, other in pairs for split in one)

    @contextmanager
    def at_round(self, round: int) -> Iterator[None]:
        """Take the holdings of another round for a while.

        Args:
            round: The round, from 1.
        """
        here, self.round = self.round, round
        try:
            yield
        finally:
            self.round = here

    def strata_of(self, client: int, split: Split) -> Tensor:
        """Number of the group, such as the class, of each sample in one split of one client; 0 where there are none.

        Args:
            client: Client id, 0 to num_clients - 1, or one of the `newcomers`.
            split: Which split.
        """
        return self._ready().strata[self.division.clients[client][split]]

    def class_counts(self, split: Split) -> Tensor:
        """Count the samples of each client and class.

        Args:
            split: Which splits to count.

        Returns:
            Counts n_ij, shape [num_clients, num_classes], int64.

        Raises:
            MisconfigurationException: The samples have no class.
        """
        return torch.stack([self.counts_of(client, split) for client in range(self.num_clients)])

    def counts_of(self, client: int, split: Split) -> Tensor:
        """Count the samples of one client by class, [num_classes], int64, without a look at their inputs.

        Args:
            client: Client id, 0 to num_clients - 1, or one of the `newcomers`.
            split: Which split to count.

        Raises:
            MisconfigurationException: The samples have no class.
        """
        return class_counts(self.task, take(self._ready().samples.y, self.division.clients[client][split]))

    @property
    def counts(self) -> Tensor:
        """Class counts of the train splits, shape [num_clients, num_classes], int64."""
        return self.class_counts("train")

    def train_dataloader(self) -> ClientLoader:
        """One batch with the ids of all clients: an epoch is a round."""
        return ClientLoader([range(self.num_clients)])

    def val_dataloader(self) -> ClientLoader:
        """One batch with the ids of all clients; no batch if they have nothing to validate on."""
        return ClientLoader([range(self.num_clients)] if self._holds("val", self.val_fraction) else [])

    def test_dataloader(self) -> ClientLoader:
        """One batch with the ids of all clients; with none if they have nothing to test on, for the central test set.

        Without the two there is no batch.
        """
        if not self._holds("test", self.test_fraction):
            return ClientLoader([] if self.central_test is None else [[]])
        return ClientLoader([range(self.num_clients)])

    def _holds(self, split: Split, share: float) -> bool:
        """Whether clients have samples of a split: all of them have, or none, but for those that `arrange` adds."""
        if self._pool is None:
            return share > 0
        return any(self.size(client, split) for client in range(self.num_clients))

    def arrange(self, names: Sequence[str]) -> None:
        """Give clients the ids that they have in a federation, by their names.

        Clients of other names become newcomers, and names without a client here stand for clients without samples.

        Args:
            names: The names of the federation's clients, by id.
        """
        pool, before = self._ready(), self.client_names
        nothing: dict[Split, Tensor] = {split: torch.empty(0, dtype=torch.int64) for split in ("train", "val", "test")}
        known = set(names)
        others = [name for name in before if name not in known]
        every = [*names, *others]

        def arranged(division: Division) -> Division:
            held = dict(zip(before, division.clients, strict=True))
            clients = [held.get(name, nothing) for name in every]
            return replace(division, clients=clients, names=every, newcomers=len(others))

        pool.division = arranged(pool.division)
        self._divisions = {start: arranged(division) for start, division in self._divisions.items()}
        self._held = None
        self.num_clients = len(names)

    def _ready(self) -> Pool:
        if self._pool is None:
            raise MisconfigurationException(
                f"{type(self).__name__} has no clients yet; call prepare_data() and setup() first, or "
                "pass it to a Trainer"
            )
        return self._pool
