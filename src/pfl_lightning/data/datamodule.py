"""The base class of all data sets: load a pool of samples and divide the pool among clients."""

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
    """Divide a pool of samples among clients, and each client's samples into train, val and test.

    Subclasses set ``input_shape`` and ``num_classes`` (or a ``task`` of another kind instead of ``num_classes``), and
    implement `load`. The pool is kept once, as loaded. A second copy lies on the GPU that trains clients if a quarter
    of the free GPU memory holds the pool. A client's samples are gathered and transformed on request. The division
    depends on ``seed`` alone, so runs that differ in the training seed have the same partition.

    Args:
        root: folder of the data set's files.
        num_clients: number of clients M, at least 1; under partitioner `Natural`, None takes all clients of the data
            set.
        partitioner: how the pool is divided among the clients.
        batch_size: samples per training batch, at least 1.
        last_batch: what happens to an incomplete last batch, see `epoch_order`.
        test_fraction: share of a client's samples to test on, in [0, 1).
        val_fraction: share of a client's other samples to validate on, in [0, 1).
        max_samples: use only this many samples of the pool, class proportions kept; None uses all.
        client_split: how a client's samples are split. ``random`` shuffles; ``stratified`` shuffles and gives each
            split the client's label mix; ``time`` trains on the oldest and tests on the newest samples; ``given`` takes
            the splits that `load` names, and draws val from train if `load` names no val samples. None means ``given``
            if `load` names splits, else ``random``.
        client_test: samples to test a client on: the client's ``own``, or the ``original`` test half of the data set.
            Under ``original``, clients hold samples of the other half only, and train and validate on all of them. The
            number of test samples is ``test_fraction`` times the client's samples, drawn from the test half with the
            client's class mix; two clients may test on the same sample.
        central_test: test samples of the server's model, held by no client: the ``original`` test half of the data set,
            or a share of the pool in (0, 1), class proportions kept; None for none.
        server_fraction: share of the central test set, in [0, 1), that the server learns from instead, class
            proportions kept.
        public: another data set with inputs of the same shape, whose samples the server holds, such as CIFAR100 where
            clients hold CIFAR10. The settings by which that data set would be divided and split have no effect.
        public_samples: number of samples of ``public``, taken outside its original test half, class proportions kept.
        new_clients: clients that take no part in training and join afterwards: their number, or their share of all
            clients in (0, 1). The partitioner divides the pool among old and new clients alike; ``seed`` draws which
            clients are new. New clients have ids from num_clients up.
        seed: seed of the subset, the partition, the splits and the draw of new clients, 0 to 2**32 - 1.
        download: fetch missing files, where the data set supports it.
        drift: partitioners by the round, from 2 on, in which each begins to divide the training samples of all clients
            anew, such as ``{20: Dirichlet(alpha=1.0)}``. The val and test samples follow the new class mix, and no
            tested sample is ever trained on. Each round's division depends on ``seed`` alone.
        resident: keep all samples of a client in memory while the client trains. False reads one batch at a time, for
            clients larger than memory: slower, with the same bits, and not under the engine ``vectorised``.

    Raises:
        MisconfigurationException: a value is out of range.
    """

    num_classes: int
    """Number of classes K of a classification, known without `setup`."""
    input_shape: tuple[int, ...]
    """Shape of one transformed input, for images [C, H, W], known without `setup`."""
    original_test: Tensor = torch.empty(0, dtype=torch.int64)
    """Pool positions of the original test half, int64 [n]; `load` sets this where the data set has such a half."""

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
        # Checkpoints hold plain values only. logger=False: since Lightning 2.4, loggers fail to merge the
        # hyper-parameters of a module and a data module made by the command line; loggers get these settings from the
        # record callback.
        self.save_hyperparameters(ignore=["partitioner", "public", "drift", *unsaved_arguments()], logger=False)
        self.root = root
        # Known after `setup`; 0 until then if the number is left to the data.
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
        """How raw values became inputs and targets, known after `setup`: plain values, which checkpoints hold."""
        check_settings({**vars(self), "num_clients": num_clients})

    @property
    def task(self) -> Task:
        """The prediction task, known without `setup`; by default ``Classification(num_classes)``."""
        if not hasattr(self, "num_classes"):
            raise MisconfigurationException(
                f"{type(self).__name__} says neither num_classes nor task; set one, such as task = Regression()"
            )
        return Classification(self.num_classes)

    @abstractmethod
    def load(self) -> Loaded | tuple[Tree, Tree]:
        """Read the whole pool, original train and test samples together; set ``original_test`` to tell them apart.

        Returns:
            Inputs [N, ...], images as uint8 [N, C, H, W], and targets in the form of the ``task``, such as class
            numbers [N]. Each may be a dict, tuple or list of tensors. Or a `Loaded` with inputs, targets, and the
            client, the split and the time of each sample.
        """

    def strata(self, y: Tree) -> Tensor | None:
        """Return the group of each sample, int64 ``[N]`` from 0; None without groups.

        Partitioners tell samples apart by group, and ``max_samples`` and ``central_test`` keep the proportions of
        groups. By default the group is the class. Override this for other groups, such as the quantile of a quantity,
        or a text's topic.

        Args:
            y: targets of the pool.
        """
        return self.task.classes(y)

    def transform(self, x: Tree) -> Tree:
        """Make inputs ready for the net, each by itself: uint8 images become (x / 255 - 0.5) / 0.5, others stay.

        Clients train and are tested on the same result, so an override must not be random.

        Args:
            x: some inputs of the pool, shape [n, ...], of one client or of several, on the CPU or on a GPU.
        """
        return tree_map(net_inputs, x)

    def preprocess(self, samples: Samples, division: Division) -> Samples:
        """Fit preprocessing on training rows and apply the result to all rows; by default, change nothing.

        `setup` calls this once, after the division. An override keeps the fitted values in ``preprocessing``.

        Args:
            samples: the pool, as loaded.
            division: the pool positions of each client's rows.
        """
        return samples

    @property
    def fitted_on(self) -> FittedOn:
        """Return the rows that decide how raw values become inputs and targets."""
        return "nothing"

    @property
    def needs_all_clients(self) -> str:
        """Return why a site with only its own rows would compute other inputs, and the remedy; else an empty text.

        Known after `setup`.
        """
        return ""

    @property
    def head_lines(self) -> list[tuple[str, str]]:
        """Return lines about preprocessing for the head of a run, each a name and a text."""
        return []

    def state_dict(self) -> dict[str, Any]:
        """Return the data module's entry in checkpoints: ``preprocessing``, unless empty."""
        return {"preprocessing": self.preprocessing} if self.preprocessing else {}

    def setup(self, stage: str | None = None) -> None:
        """Load, cut to ``max_samples``, partition, split and preprocess; later calls do nothing.

        Args:
            stage: ignored: all of Lightning's stages use the same pool.

        Raises:
            MisconfigurationException: the data are missing, or cannot be divided as asked.
        """
        if self._pool is not None:
            return
        if not isinstance(self.task, Task):
            raise MisconfigurationException(
                f"{type(self).__name__}.task={self.task!r} must be a task of pfl_lightning.tasks, such as Regression()"
            )
        pool = prepared(self, as_loaded(self.load()))
        # After the division, so that statistics come from training rows only and no test row leaks into inputs.
        pool.samples = self.preprocess(pool.samples, pool.division)
        self._check_transform(pool)
        if self.public is not None:
            name = type(self).__name__
            self._public = public_samples(self.public, self.public_samples, self.seed, name, self.input_shape)
        groups = self.task.outputs if self.task.has_classes else int(pool.strata.max()) + 1
        self._divisions = {}
        # Each drift divides the first division's training samples, not those of the drift before: else every drift
        # would lose the samples that its predecessor left to no client.
        for start, partitioner in (self.drift or {}).items():
            if getattr(partitioner, "by_class", True):
                check_strata(self.strata(pool.samples.y), len(pool.strata), self.task, partitioner)
            self._divisions[start] = redivided(pool.division, pool.strata, partitioner, groups, start, self.seed)
        self._pool = pool
        self.num_clients = len(pool.division.clients) - pool.division.newcomers

    def _check_transform(self, pool: Pool) -> None:
        """Refuse a user's `transform` that is random."""
        # our own transforms draw nothing: the check is for users' ones
        if type(self).transform.__module__.startswith("pfl_lightning."):
            return
        few = pool.samples.take(slice(SAMPLES)).x
        if differs(lambda: self.transform(tree_map(torch.clone, few))):
            name = type(self).__name__
            raise MisconfigurationException(f"{name}.transform gives other inputs at each call; {NO_RANDOM}")
