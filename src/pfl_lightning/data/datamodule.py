"""The data module that all data sets share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningDataModule
from torch import Tensor

from pfl_lightning.data.batches import LastBatch
from pfl_lightning.data.checks import (
    ClientTest,
    check_enough,
    check_halves,
    check_pool,
    check_settings,
    is_plain,
    strata_of,
    warn_of_one_class,
)
from pfl_lightning.data.client_data import ClientData, Samples, Split, class_counts
from pfl_lightning.data.division import Division, divide
from pfl_lightning.data.inputs import net_inputs
from pfl_lightning.data.loaders import ClientLoader
from pfl_lightning.data.newcomers import how_many, newcomers_last
from pfl_lightning.data.partitioners import Dirichlet, Partitioner
from pfl_lightning.data.pool import Pool
from pfl_lightning.data.public import public_samples
from pfl_lightning.data.splits import stratified_rows
from pfl_lightning.data.trees import Tree, take
from pfl_lightning.data.trees import split as cut
from pfl_lightning.messages import tree_map
from pfl_lightning.tasks import Classification, Task


class FederatedDataModule(LightningDataModule, ABC):
    """A pool of samples, divided among clients and, at each client, into train, val and test.

    Subclasses set ``input_shape`` and ``num_classes``, or a ``task`` of another kind in the place of the latter, and
    implement :meth:`load`. The pool is kept once, as loaded, and once more on a GPU that clients train on, if a quarter
    of its free memory holds it; a client's samples are gathered and transformed on request. Who holds which sample
    depends on ``seed`` alone, so runs that differ in the training seed share their partition.

    Args:
        root: Folder of the data set's files.
        num_clients: Number of clients M, at least 1.
        partitioner: How the pool is divided among the clients.
        batch_size: Samples a training batch, at least 1.
        last_batch: What to do with an incomplete last batch, see :func:`epoch_order`.
        test_fraction: Share of a client's samples to test on, in [0, 1).
        val_fraction: Share of a client's other samples to validate on, in [0, 1).
        max_samples: Use only so many samples of the pool, class proportions kept; all if None.
        client_test: What a client is tested on: its ``own`` samples, or the ``original`` test half of the data set.
            Then clients hold the other half alone and train and validate on all that they hold; each is tested on
            ``test_fraction`` as many samples of the test half, drawn with its own class mix, which clients may share.
        central_test: Samples that no client holds and on which the server's model is tested: the ``original`` test
            half of the data set, or a share of the pool in (0, 1), class proportions kept; none if None.
        server_fraction: Share of the central test set, in [0, 1), that the server holds to learn from instead,
            class proportions kept.
        public: Another data set with inputs of the same shape, of which the server holds samples, such as CIFAR100
            where clients hold CIFAR10; how it is divided, split and cut has no effect.
        public_samples: How many of its samples, of those outside its original test half, class proportions kept.
        new_clients: Clients beside these that no round and no server sees, so that they can join afterwards: their
            number, or their share of all clients in (0, 1). The partitioner divides among all; a draw by ``seed`` says
            who is new, and these have ids from num_clients up.
        seed: Seed of the subset, the partition, the splits and the draw of new clients, 0 to 2**32 - 1.
        download: Try to fetch missing files, where the data set supports it.

    Raises:
        MisconfigurationException: A value is out of range.
    """

    num_classes: int
    """Number of classes K of a classification, known without :meth:`setup`."""
    input_shape: tuple[int, ...]
    """Shape of one transformed input, for images [C, H, W], known without :meth:`setup`."""
    original_test: Tensor = torch.empty(0, dtype=torch.int64)
    """Pool positions of the original test half, set by :meth:`load` where the data set has one."""

    def __init__(
        self,
        root: str = "data",
        num_clients: int = 20,
        partitioner: Partitioner = Dirichlet(alpha=0.1),  # noqa: B008 - immutable, and a literal for --print_config
        batch_size: int = 10,
        last_batch: LastBatch = "keep",
        test_fraction: float = 0.25,
        val_fraction: float = 0.1,
        max_samples: int | None = None,
        client_test: ClientTest = "own",
        central_test: float | Literal["original"] | None = None,
        server_fraction: float = 0.0,
        public: FederatedDataModule | None = None,
        public_samples: int = 3000,
        seed: int = 1,
        download: bool = True,
        new_clients: int | float = 0,
    ) -> None:
        super().__init__()
        if not (public is None or isinstance(public, FederatedDataModule)):
            raise MisconfigurationException(
                f"data.public={public!r} must be a data module, such as CIFAR100(), or null"
            )
        # checkpoints hold plain values only; loggers get them from the record, since Lightning 2.4 fails to
        # merge a module's and a data module's that the command line made
        self.save_hyperparameters(ignore=["partitioner", "public"], logger=False)
        for name in [name for name, value in self.hparams.items() if not is_plain(value)]:
            del self.hparams[name]
        self.root = root
        self.num_clients = num_clients
        self.partitioner = partitioner
        self.batch_size = batch_size
        self.last_batch: LastBatch = last_batch
        self.test_fraction = test_fraction
        self.val_fraction = val_fraction
        self.max_samples = max_samples
        self.client_test = client_test
        self.central_test = central_test
        self.server_fraction = server_fraction
        self.public = public
        self.public_samples = public_samples
        self.seed = seed
        self.download = download
        self.new_clients = new_clients
        check_settings(vars(self))
        self._pool: Pool | None = None
        self._public: Samples | None = None

    @property
    def task(self) -> Task:
        """What is predicted, known without :meth:`setup`; by default ``Classification(num_classes)``."""
        return Classification(self.num_classes)

    @abstractmethod
    def load(self) -> tuple[Tree, Tree]:
        """Read the whole pool, original train and test samples together; say which are which in ``original_test``.

        Returns:
            Inputs [N, ...], images as uint8 [N, C, H, W], and targets as the ``task`` has them, such as class numbers
            [N]. Each may be a dict, tuple or list of tensors.
        """

    def strata(self, y: Tree) -> Tensor | None:
        """Number of the group of each sample ``[N]``, from 0; None where there are none.

        Partitioners tell samples apart by it, and ``max_samples`` and ``central_test`` keep its proportions. By default
        it is the class; override it for others, such as a quantile of a quantity, or a text's topic.

        Args:
            y: Targets of the pool.
        """
        return self.task.classes(y)

    def transform(self, x: Tree) -> Tree:
        """Make inputs ready for the net, each by itself: uint8 images become (x / 255 - 0.5) / 0.5, others stay.

        Args:
            x: Some inputs of the pool, shape [n, ...], of one client or of several, on the CPU or on a GPU.
        """
        return tree_map(net_inputs, x)

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

    def setup(self, stage: str | None = None) -> None:
        """Load, cut to ``max_samples``, partition and split; only the first call does something.

        Args:
            stage: Ignored: all of Lightning's stages use the same pool.

        Raises:
            MisconfigurationException: The data are missing, or cannot be divided as asked.
        """
        if self._pool is not None:
            return
        x, y = self.load()
        check_pool(x, y, self.task)
        samples = Samples(x, y)
        strata, count = strata_of(self.strata(y), len(samples), self.task, self.partitioner)
        is_test = torch.zeros(len(samples), dtype=torch.bool).index_fill(0, self.original_test, True)
        if self.max_samples is not None:
            check_enough(self.max_samples, count)
            kept = stratified_rows(strata, self.max_samples, count, self.seed)
            samples, strata, is_test = samples.take(kept), strata[kept], is_test[kept]
        if self.task.has_classes:
            warn_of_one_class(type(self).__name__, samples.y)
        check_halves(type(self).__name__, bool(is_test.any()), self.client_test, self.central_test)
        division = divide(
            strata,
            is_test,
            self.partitioner,
            num_clients=self.num_clients + len(self.newcomers),
            num_classes=count,
            test_fraction=self.test_fraction,
            val_fraction=self.val_fraction,
            client_test=self.client_test,
            central_test=self.central_test,
            server_fraction=self.server_fraction,
            seed=self.seed,
        )
        if self.public is not None:
            name = type(self).__name__
            self._public = public_samples(self.public, self.public_samples, self.seed, name, self.input_shape)
        self._pool = Pool(samples, newcomers_last(division, len(self.newcomers), self.seed))

    def part(self, client: int, split: Split) -> Samples:
        """Gather and transform one split of one client.

        Args:
            client: Client id, 0 to num_clients - 1, or one of the `newcomers`.
            split: Which split.
        """
        (samples,) = self.parts([client], split)
        return samples

    def parts(self, clients: Sequence[int], split: Split, device: torch.device | str = "cpu") -> list[Samples]:
        """Gather and transform one split of each of several clients, all at once.

        Whatever looks at clients' samples comes here; override it to change what clients hold.

        Args:
            clients: Client ids, 0 to num_clients - 1.
            split: Which split.
            device: Where the samples are gathered, and stay.
        """
        held = self._ready().division.clients
        rows = [held[client][split] for client in clients]
        whole = self._gather(torch.cat(rows), device)
        sizes = [len(r) for r in rows]
        return [Samples(x, y) for x, y in cut((whole.x, whole.y), sizes)]

    def _gather(self, rows: Tensor, device: torch.device | str = "cpu") -> Samples:
        samples = self._ready().on(torch.device(device)).take(rows)
        return Samples(self.transform(samples.x), samples.y)

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
        return len(self._ready().division.clients[client][split])

    @property
    def newcomers(self) -> range:
        """Ids of the new clients."""
        return range(self.num_clients, self.num_clients + how_many(self.new_clients, self.num_clients))

    @property
    def division(self) -> Division:
        """Who holds which of the samples, by their positions in the pool."""
        return self._ready().division

    def class_counts(self, split: Split) -> Tensor:
        """Count the samples of each client and class.

        Args:
            split: Which splits to count.

        Returns:
            Counts n_ij, shape [num_clients, num_classes], int64.

        Raises:
            MisconfigurationException: The samples have no class.
        """
        pool = self._ready()
        clients = pool.division.clients[: self.num_clients]
        return torch.stack([class_counts(self.task, take(pool.samples.y, rows[split])) for rows in clients])

    @property
    def counts(self) -> Tensor:
        """Class counts of the train splits, shape [num_clients, num_classes], int64."""
        return self.class_counts("train")

    def train_dataloader(self) -> ClientLoader:
        """One batch with the ids of all clients: an epoch is a round."""
        return ClientLoader([range(self.num_clients)])

    def val_dataloader(self) -> ClientLoader:
        """One batch with the ids of all clients; no batch if ``val_fraction`` is 0."""
        return ClientLoader([range(self.num_clients)] if self.val_fraction > 0 else [])

    def test_dataloader(self) -> ClientLoader:
        """One batch with the ids of all clients; with none if ``test_fraction`` is 0, for the central test set alone.

        Without the two there is no batch.
        """
        if self.test_fraction == 0:
            return ClientLoader([] if self.central_test is None else [[]])
        return ClientLoader([range(self.num_clients)])

    def _ready(self) -> Pool:
        if self._pool is None:
            raise MisconfigurationException(
                f"{type(self).__name__} has no clients yet; call prepare_data() and setup() first, or "
                "pass it to a Trainer"
            )
        return self._pool
