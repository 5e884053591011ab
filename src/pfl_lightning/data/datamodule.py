"""The data module that all data sets share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Literal

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from pfl_lightning.data.batches import LastBatch
from pfl_lightning.data.checks import NO_RANDOM, SAMPLES, ClientSplit, ClientTest, check_settings, check_strata, differs
from pfl_lightning.data.division import Division, redivided
from pfl_lightning.data.holdings import Holdings
from pfl_lightning.data.hyper_parameters import unsaved_arguments
from pfl_lightning.data.inputs import net_inputs
from pfl_lightning.data.loaded import Loaded
from pfl_lightning.data.partitioners import Dirichlet, Partitioner
from pfl_lightning.data.pool import Pool
from pfl_lightning.data.preparation import as_loaded, prepared
from pfl_lightning.data.preprocessing import FittedOn
from pfl_lightning.data.public import public_samples
from pfl_lightning.data.samples import Samples
from pfl_lightning.data.trees import Tree
from pfl_lightning.messages import tree_map
from pfl_lightning.tasks import Classification, Task


class FederatedDataModule(Holdings, ABC):
    """A pool of samples, divided among clients and, at each client, into train, val and test.

    Subclasses set ``input_shape`` and ``num_classes``, or a ``task`` of another kind in the place of the latter, and
    implement `load`. The pool is kept once, as loaded, and once more on a GPU that clients train on, if a quarter
    of its free memory holds it; a client's samples are gathered and transformed on request. Who holds which sample
    depends on ``seed`` alone, so runs that differ in the training seed share their partition.

    Args:
        root: Folder of the data set's files.
        num_clients: Number of clients M, at least 1; under partitioner `Natural`, None takes all that there are.
        partitioner: How the pool is divided among the clients.
        batch_size: Samples a training batch, at least 1.
        last_batch: What to do with an incomplete last batch, see `epoch_order`.
        test_fraction: Share of a client's samples to test on, in [0, 1).
        val_fraction: Share of a client's other samples to validate on, in [0, 1).
        max_samples: Use only so many samples of the pool, class proportions kept; all if None.
        client_split: What becomes of a client's samples: ``random`` splits; ``stratified``, random splits with its own
            label mix in each; ``time`` trains on the oldest and tests on the newest; ``given``, as `load` says, with
            val drawn from train where it names none. None is given where `load` says, else random.
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
        drift: Partitioners by the round, from 2 on, from which on they divide the training samples of all clients, such
            as ``{20: Dirichlet(alpha=1.0)}``; val and test samples follow with the new class mix, and no sample that
            was tested on is ever trained on. Each round's division depends on ``seed`` alone.
        resident: Whether all samples of a client that trains are in memory at once. False reads them a batch at a time,
            for clients that are larger than memory: slower, the same bits, and none of the engine ``vectorised``.

    Raises:
        MisconfigurationException: A value is out of range.
    """

    num_classes: int
    """Number of classes K of a classification, known without `setup`."""
    input_shape: tuple[int, ...]
    """Shape of one transformed input, for images [C, H, W], known without `setup`."""
    original_test: Tensor = torch.empty(0, dtype=torch.int64)
    """Pool positions of the original test half, set by `load` where the data set has one."""

    def __init__(
        self,
        root: str = "data",
        num_clients: int | None = 20,
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
        client_split: ClientSplit | None = None,
        resident: bool = True,
        drift: dict[int, Partitioner] | None = None,
    ) -> None:
        super().__init__()
        if not (public is None or isinstance(public, FederatedDataModule)):
            raise MisconfigurationException(
                f"data.public={public!r} must be a data module, such as CIFAR100(), or null"
            )
        # checkpoints hold plain values only; loggers get them from the record, since Lightning 2.4 fails to
        # merge a module's and a data module's that the command line made
        self.save_hyperparameters(ignore=["partitioner", "public", "drift", *unsaved_arguments()], logger=False)
        self.root = root
        # the number after `setup`; 0 until then where the data have to tell it
        self.num_clients = num_clients or 0
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
        self.client_split: ClientSplit | None = client_split
        self.resident = resident
        self.drift = drift
        self.preprocessing: dict[str, Any] = {}
        """How raw values become inputs and targets, known after `setup`: plain values, which checkpoints hold."""
        check_settings({**vars(self), "num_clients": num_clients})

    @property
    def task(self) -> Task:
        """What is predicted, known without `setup`; by default ``Classification(num_classes)``."""
        if not hasattr(self, "num_classes"):
            raise MisconfigurationException(
                f"{type(self).__name__} says neither num_classes nor task; set one, such as task = Regression()"
            )
        return Classification(self.num_classes)

    @abstractmethod
    def load(self) -> Loaded | tuple[Tree, Tree]:
        """Read the whole pool, original train and test samples together; say which are which in ``original_test``.

        Returns:
            Inputs [N, ...], images as uint8 [N, C, H, W], and targets as the ``task`` has them, such as class numbers
            [N]. Each may be a dict, tuple or list of tensors. Or `Loaded` with them, and who holds each sample, its
            split, and its time.
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

        Clients train and are tested on the same result, which must not be random.

        Args:
            x: Some inputs of the pool, shape [n, ...], of one client or of several, on the CPU or on a GPU.
        """
        return tree_map(net_inputs, x)

    def preprocess(self, samples: Samples, division: Division) -> Samples:
        """Fit on training rows what depends on the data, and apply it to all rows; by default nothing changes.

        `setup` calls it once, after the division. An override keeps what it has fitted in ``preprocessing``.

        Args:
            samples: The pool, as loaded.
            division: Who holds which rows of it.
        """
        return samples

    @property
    def fitted_on(self) -> FittedOn:
        """Return the rows that decide how raw values become inputs and targets."""
        return "nothing"

    @property
    def needs_all_clients(self) -> str:
        """Return why a site with its own rows alone would make other inputs, and the remedy; else an empty text.

        Known after `setup`.
        """
        return ""

    @property
    def head_lines(self) -> list[tuple[str, str]]:
        """Return lines on preprocessing for the head of a run, each a name and a text."""
        return []

    def state_dict(self) -> dict[str, Any]:
        """Return the data module's entry in checkpoints: ``preprocessing``, where there is some."""
        return {"preprocessing": self.preprocessing} if self.preprocessing else {}

    def setup(self, stage: str | None = None) -> None:
        """Load, cut to ``max_samples``, partition, split and preprocess; only the first call does something.

        Args:
            stage: Ignored: all of Lightning's stages use the same pool.

        Raises:
            MisconfigurationException: The data are missing, or cannot be divided as asked.
        """
        if self._pool is not None:
            return
        if not isinstance(self.task, Task):
            raise MisconfigurationException(
                f"{type(self).__name__}.task={self.task!r} must be a task of pfl_lightning.tasks, such as Regression()"
            )
        pool = prepared(self, as_loaded(self.load()))
        pool.samples = self.preprocess(pool.samples, pool.division)
        self._check_transform(pool)
        if self.public is not None:
            name = type(self).__name__
            self._public = public_samples(self.public, self.public_samples, self.seed, name, self.input_shape)
        groups = self.task.outputs if self.task.has_classes else int(pool.strata.max()) + 1
        self._divisions = {}
        # each of the first one, so that no sample is lost to all later rounds
        for start, partitioner in (self.drift or {}).items():
            if getattr(partitioner, "by_class", True):
                check_strata(self.strata(pool.samples.y), len(pool.strata), self.task, partitioner)
            self._divisions[start] = redivided(pool.division, pool.strata, partitioner, groups, start, self.seed)
        self._pool = pool
        self.num_clients = len(pool.division.clients) - pool.division.newcomers

    def _check_transform(self, pool: Pool) -> None:
        """Refuse a `transform` of a user's that is random."""
        if type(self).transform.__module__.startswith("pfl_lightning."):
            return
        few = pool.samples.take(slice(SAMPLES)).x
        if differs(lambda: self.transform(tree_map(torch.clone, few))):
            name = type(self).__name__
            raise MisconfigurationException(f"{name}.transform gives other inputs at each call; {NO_RANDOM}")
