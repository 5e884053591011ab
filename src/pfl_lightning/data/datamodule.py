"""The base class of all data sets: load a pool of samples and divide the pool among clients."""

import inspect
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, NoReturn, TypedDict, cast

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities.parsing import collect_init_args
from torch import Tensor

from pfl_lightning.data import client_names
from pfl_lightning.data.batches import LastBatch
from pfl_lightning.data.checks import (
    NO_RANDOM,
    READ,
    SAMPLES,
    ClientSplit,
    ClientTest,
    check_settings,
    check_strata,
    checked_rows,
    differs,
)
from pfl_lightning.data.client_data import ClientData, Together, class_counts
from pfl_lightning.data.division import Division, Pool, redivided
from pfl_lightning.data.identity import digests
from pfl_lightning.data.input_drift import InputDrift, changed
from pfl_lightning.data.partitioners import Dirichlet, Partitioner
from pfl_lightning.data.preparation import as_loaded, prepared, public_samples
from pfl_lightning.data.preprocessing import FittedOn
from pfl_lightning.data.samples import Loaded, Parts, Samples, Split, ready
from pfl_lightning.data.streamed import Streamed
from pfl_lightning.data.target_scale import TargetScale
from pfl_lightning.data.trees import Tree, take
from pfl_lightning.messages import tree_map
from pfl_lightning.settings import as_call
from pfl_lightning.tasks import Classification, Task
from pfl_lightning.tasks.base import number_of_classes
from pfl_lightning.tasks.plain import plain

LONG = 100
"""A list of this many entries or more is data and not a setting."""


class ClientLoader:
    """Sized iterable of batches, each a list of client ids.

    Samples stay in the data module, from which the engine gathers them. Lightning would take a plain list for a
    collection of loaders.

    Args:
        groups: client ids of each batch.
    """

    def __init__(self, groups: Sequence[Sequence[int]]) -> None:
        self.groups = groups

    def __len__(self) -> int:
        return len(self.groups)

    def __iter__(self) -> Iterator[list[int]]:
        # new lists each time: a hook that changes its batch in place changes no later round
        return map(list, self.groups)


class SplitSettings(TypedDict, total=False):
    """Settings of `FederatedDataModule` but for those that subclasses give other defaults."""

    batch_size: int
    last_batch: LastBatch
    test_fraction: float
    val_fraction: float
    max_samples: int | None
    client_test: ClientTest
    central_test: float | Literal["original"] | None
    server_fraction: float
    public: "FederatedDataModule | None"
    public_samples: int
    seed: int
    download: bool
    new_clients: int | float | list[str]
    client_split: ClientSplit | None
    resident: bool | None
    drift: dict[int, Partitioner] | None
    input_drift: list[InputDrift] | None
    val_fold: int | None


class DivisionSettings(SplitSettings, total=False):
    """Settings of `FederatedDataModule` but for ``root``, for the ``**kwargs`` of subclasses."""

    num_clients: int | None
    partitioner: Partitioner


class DataSettings(DivisionSettings, total=False):
    """Settings of `FederatedDataModule`, for the ``**kwargs`` of subclasses."""

    root: str


class FederatedDataModule(LightningDataModule, ABC):
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
            clients in (0, 1), of which ``seed`` draws who is new, or a list of their names. The partitioner divides the
            pool among old and new clients alike. New clients have ids from num_clients up.
        seed: seed of the subset, the partition, the splits and the draw of new clients, 0 to 2**32 - 1.
        download: fetch missing files, where the data set supports it.
        drift: partitioners by the round, from 2 on, in which each begins to divide the training samples of all clients
            anew, such as ``{20: Dirichlet(alpha=1.0)}``. The val and test samples follow the new class mix, and no
            tested sample is ever trained on. Each round's division depends on ``seed`` alone.
        resident: keep all samples of a client in memory while the client trains, as None does where the data module
            doesn't decide by itself. False reads one batch at a time, for clients larger than memory: slower, with the
            same bits, and not under the engine ``vectorised``.
        input_drift: changes of clients' inputs from a round on, such as ``[InputDrift(start=20, shift=0.5)]``, one
            after the other where a client has several.
        val_fold: number of the fold that validates, from 0 below 1 / ``val_fraction`` (rounded). Each client's samples
            outside test are dealt to so many folds, so that each of them validates in one fold and trains in the
            others; test samples are the same in all. None takes the first ``val_fraction`` of a client's samples.

    Raises:
        MisconfigurationException: if a value is out of range.
    """

    num_classes: int
    """Number of classes K of a classification, known without `setup`."""
    input_shape: tuple[int, ...]
    """Shape of one transformed input, for images [C, H, W], known without `setup`."""
    original_test: Tensor = torch.empty(0, dtype=torch.int64)
    """Pool positions of the original test half, int64 [n]; `load` sets this where the data set has such a half."""
    _classification: Classification | None = None
    num_clients: int
    """Number of clients M, known without `setup` unless it is left to the data."""
    val_fraction: float
    val_fold: int | None
    test_fraction: float
    central_test: float | Literal["original"] | None
    public: "FederatedDataModule | None"
    resident: bool = True
    """True if all samples of a client are in memory while the client trains."""
    at_sites: bool = False
    """True if the samples stay at the clients' sites; then only the number of each client's samples is known here."""
    most_clients: int = 0
    """Largest number of clients of a server with sites, where further ones may join during the run."""
    round: int = 1
    """The current round, from 1, trained or evaluated; no other changing value may decide the clients' samples."""
    adopted: Mapping[str, Any] = MappingProxyType({})
    """The ``preprocessing`` of the federation that these data are tested by or join; see `adopt`."""
    adopted_names: Sequence[str] = ()
    """Names of that federation's clients, in the order of lists in ``adopted``."""
    drift: Mapping[int, Any] | None = None
    """Partitioners by the round from which on each one's division holds."""
    input_drift: Sequence[InputDrift] | None = None
    """Changes of clients' inputs."""
    _drifting: Sequence[frozenset[int]] = ()
    """Ids of the clients of each `InputDrift`, known after `setup`."""
    _pool: Pool | None = None
    _asked_clients: int = 0
    _divisions: Mapping[int, Division]
    _held: tuple[int, Division] | None = None
    _public: Samples | None = None
    _saved: Mapping[str, Any] = MappingProxyType({})
    """Entry of the checkpoint that `load_state_dict` took, without a pool."""

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
        public: "FederatedDataModule | None" = None,
        public_samples: int = 3000,
        seed: int = 1,
        download: bool = True,
        new_clients: int | float | list[str] = 0,
        client_split: ClientSplit | None = None,
        resident: bool | None = None,
        drift: dict[int, Partitioner] | None = None,
        input_drift: list[InputDrift] | None = None,
        val_fold: int | None = None,
    ) -> None:
        super().__init__()
        if not (public is None or isinstance(public, FederatedDataModule)):
            raise MisconfigurationException(
                f"data.public={public!r} must be a data module, such as CIFAR100(), or null"
            )
        # Checkpoints hold plain values only. logger=False: since Lightning 2.4, loggers fail to merge the
        # hyper-parameters of a module and a data module made by the command line; loggers get these settings from the
        # record callback.
        objects = ["partitioner", "public", "drift", "input_drift"]
        self.save_hyperparameters(ignore=[*objects, *unsaved_arguments()], logger=False)
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
        self.resident = resident is not False
        self.drift = drift
        self.input_drift = input_drift
        self.val_fold = val_fold
        self.preprocessing: dict[str, Any] = {}
        """How raw values became inputs and targets, known after `setup`: plain values, which checkpoints hold."""
        self.adopted, self.adopted_names = {}, []
        check_settings({**vars(self), "num_clients": num_clients})

    def __repr__(self) -> str:
        return as_call(self, ("num_clients", "partitioner"))

    # Lightning's own text asks each loader for a length in samples, and these loaders count clients
    __str__ = __repr__

    @classmethod
    def from_datasets(cls, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse Lightning's Datasets of one holder, which say nothing about clients.

        Raises:
            MisconfigurationException: always.
        """
        raise MisconfigurationException(
            f"{cls.__name__}.from_datasets knows no clients; take "
            'ClientDatasets({"Bremen": (train, test), ...}, task), with Datasets of each client.'
        )

    @property
    def task(self) -> Task:
        """The prediction task, known without `setup`; by default ``Classification(num_classes)``."""
        if not hasattr(self, "num_classes"):
            raise MisconfigurationException(
                f"{type(self).__name__} says neither num_classes nor task; set one, such as task = Regression()"
            )
        # asked for with each client's samples, and its settings are checked when it is made
        if self._classification is None or self._classification.num_classes != self.num_classes:
            self._classification = Classification(self.num_classes)
        return self._classification

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

    def row_contents(self, loaded: Loaded) -> Tree:
        """Return what tells rows apart, a tree of tensors ``[N, ...]``; by default the loaded inputs and targets.

        Of these are the digests of clients' splits, by which a checkpoint knows its rows again, and the warning of rows
        that are held twice.

        Args:
            loaded: the pool, as loaded.
        """
        return loaded.x, loaded.y

    def transform(self, x: Tree) -> Tree:
        """Make inputs ready for the net, each by itself: uint8 images become (x / 255 - 0.5) / 0.5, others stay.

        Clients train and are tested on the same result, so an override must not be random.

        Args:
            x: some inputs of the pool, shape [n, ...], of one client or of several, on the CPU or on a GPU.
        """
        return tree_map(net_inputs, x)

    def preprocess(self, samples: Samples, division: Division) -> Samples:
        """Fit preprocessing on training rows and apply the result to all rows; by default, change nothing.

        `setup` calls this once, after the division. An override keeps the fitted values in ``preprocessing``, and takes
        values from ``adopted`` in place of fitting them, unless ``adopted`` is empty.

        Args:
            samples: the pool, as loaded.
            division: the pool positions of each client's rows.
        """
        return samples

    def target_scale(self, client: int | str | None) -> TargetScale | None:
        """Return the mean and deviation by which a client's targets were standardised; None where they are as loaded.

        Evaluations and predictions undo the scale. An override belongs to a `preprocess` that standardises targets.

        Args:
            client: the client's id or name, or ``new``, as for `inputs`; None asks for the scale that all clients
                share, which a model of nobody has.
        """
        return None

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
    def agreed(self) -> dict[str, Any]:
        """Return what decides how raw rows become inputs and class numbers, as plain values by the setting's name.

        All sites of a deployment must have the same, so values fitted on each client's own rows are left out. Known
        after `setup`.
        """
        return {"classes": self.class_names}

    @property
    def head_lines(self) -> list[tuple[str, str]]:
        """Return lines about preprocessing for the head of a run, each a name and a text."""
        return []

    def state_dict(self) -> dict[str, Any]:
        """Return the data module's entry in checkpoints, from which `inputs` works without the samples.

        The entry has ``clients``, the names of the federation's clients by id; ``num_clients``; ``task`` as in
        configurations; ``input_shape``; ``classes``, their names; ``like``, a tree of empty tensors with the shape and
        type of loaded inputs; and ``preprocessing``, unless empty. An override adds plain values and tensors.
        """
        if self._pool is None:
            # samples at sites, or a data module made by `from_state`
            state = dict(self._saved)
        else:
            state = {
                "clients": self.client_names[: self.num_clients],
                "num_clients": self.num_clients,
                "task": plain(self.task),
                "input_shape": list(self.input_shape),
                "like": self._like(),
                "classes": self.class_names,
            }
        return state | ({"preprocessing": self.preprocessing} if self.preprocessing else {})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the entry of a checkpoint; after `setup`, change nothing, as the samples decide.

        Args:
            state_dict: the result of `state_dict`.
        """
        if self._pool is None:
            self._saved = dict(state_dict)
            self.preprocessing = dict(state_dict.get("preprocessing", {}))
            self.input_shape = tuple(state_dict.get("input_shape", getattr(self, "input_shape", ())))
            self.num_clients = state_dict.get("num_clients", self.num_clients)

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "FederatedDataModule":
        """Return a data module without samples, only for `inputs`, from the entry of a checkpoint.

        Neither ``__init__`` nor `setup` runs, since files of the run may be missing.

        Args:
            state: the result of `state_dict`.
        """
        data = cls.__new__(cls)
        LightningDataModule.__init__(data)
        data.num_clients, data.preprocessing = 0, {}
        data.load_state_dict(dict(state))
        return data

    @property
    def class_names(self) -> list[str]:
        """Names of the classes by number; empty if classes have numbers alone."""
        # folders of images have their names in an attribute
        return [str(name) for name in getattr(self, "classes", None) or self._saved.get("classes", ())]

    def inputs(self, rows: Any, client: int | str) -> Tree:
        """Return raw rows as inputs of a net, as clients' samples become inputs.

        An override may take other rows, such as data frames. It needs `setup` or `load_state_dict`.

        Args:
            rows: inputs as `load` returns them, ``[n, ...]``: a tensor, an array, or a tree of these; or a map-style
                Dataset, whose items are such inputs without targets, or pairs that begin with them.
            client: name or id of the client whose rows they are, or ``new`` for one unknown to the federation.

        Raises:
            MisconfigurationException: if the rows have another shape or type than the inputs in training, or numbers
                that aren't finite.
        """
        name = type(self).__name__
        if self.fitted_on != "nothing":
            raise MisconfigurationException(
                f"data={name} fits its preprocessing on samples of {self.fitted_on}, and has no method inputs(rows, "
                "client) that applies it to raw rows; write one"
            )
        like = self._saved.get("like") if self._pool is None else self._like()
        if like is None:
            raise MisconfigurationException(
                f"data={name} knows no shape of inputs yet; call prepare_data() and setup() first, or load_state_dict()"
            )
        return self.transform(checked_rows(rows, like))

    def prediction_labels(self, rows: Any, client: int | str) -> dict[str, list[Any]]:
        """Return further columns of a table of predictions by name, a value per prediction; by default none.

        ``row``, if there, is the position of each prediction's row among the raw rows, where only some have a
        prediction.

        Args:
            rows: raw rows as `inputs` takes them; None is for the client's test split.
            client: name or id of the client.
        """
        return {}

    def _like(self) -> Tree:
        """Return a tree of empty tensors with the shape and type of the pool's inputs."""
        # of the samples and not of their inputs, as items read on access may be trees
        first = self._ready().samples.take(slice(0, 1)).x
        return tree_map(lambda leaf: torch.empty((0, *leaf.shape[1:]), dtype=leaf.dtype), first)

    def setup(self, stage: str | None = None) -> None:
        """Load, cut to ``max_samples``, partition, split and preprocess; later calls do nothing.

        Args:
            stage: ignored: all of Lightning's stages use the same pool.

        Raises:
            MisconfigurationException: if the data are missing, or cannot be divided as asked.
        """
        if self._pool is not None:
            return
        self._asked_clients = self.num_clients
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
        if self.input_drift:
            few, count = self.transform(pool.samples.take(slice(1)).x), len(pool.division.clients)
            for drift in self.input_drift:
                drift.check(few)
            self._drifting = [drift.chosen(count, self.seed, self.client_id) for drift in self.input_drift]

    def adopt(self, preprocessing: Mapping[str, Any], names: Sequence[str]) -> None:
        """Set up, if necessary anew, with values that a federation's preprocessing fitted in place of own ones.

        A model understands the rows of a client that comes later only if these rows become inputs as the rows did that
        trained the model.

        Args:
            preprocessing: the federation's ``preprocessing``; an empty one goes back to own values.
            names: names of the federation's clients by id, for values fitted on each client's own rows.
        """
        if preprocessing == (self.preprocessing if preprocessing else self.adopted):
            return
        self.adopted, self.adopted_names = dict(preprocessing), list(names)
        if self._pool is not None:
            self._pool = self._held = None
            # `setup` has counted the clients where their number was left to the data
            self.num_clients = self._asked_clients
            self.setup()

    def _check_transform(self, pool: Pool) -> None:
        """Refuse a user's `transform` that is random."""
        # our own transforms draw nothing: the check is for users' ones
        if type(self).transform.__module__.startswith("pfl_lightning."):
            return
        few = pool.samples.take(slice(SAMPLES)).x
        # all samples may be changed by one draw, so that only calls count
        if differs(lambda: self.transform(tree_map(torch.clone, few)), READ // 4):
            name = type(self).__name__
            raise MisconfigurationException(f"{name}.transform gives other inputs at each call; {NO_RANDOM}")

    @property
    def knows_classes(self) -> bool:
        """True if the classes of each client's samples are known here."""
        return self.task.has_classes and not self.at_sites

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
        return None if samples is None else ready(samples, source.transform, self.task.reconstructs)

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
        # the positions alone: a client larger than memory must never be gathered as a whole
        if not self.resident:
            held, streamed = self.division.clients, partial(Streamed, self._ready().samples)
            return [
                streamed(held[client][split], self._transform_of(client), device, None, self.task.reconstructs)
                for client in clients
            ]
        # one gather and one transform for all clients, in place of two calls for each client
        rows, sizes = self.division.held_by(clients, split)
        parts = Parts(self._gather(rows, device), sizes)
        if not self.input_drift:
            return parts
        changes = [self._changes_of(client) for client in clients]
        if not any(changes):
            return parts
        own = [
            ready(part, partial(changed, changes=each), self.task.reconstructs)
            for part, each in zip(parts, changes, strict=True)
        ]
        return Parts(Samples.joined(own), parts.sizes)

    def _changes_of(self, client: int) -> list[tuple[InputDrift, float]]:
        """Return the changes of a client's inputs in the current round, each with its strength above 0."""
        pairs = zip(self.input_drift or (), self._drifting, strict=True)
        strengths = [(drift, drift.strength(self.round)) for drift, clients in pairs if client in clients]
        return [(drift, strength) for drift, strength in strengths if strength]

    def _transform_of(self, client: int) -> Callable[[Tree], Tree]:
        """Return the function that makes a client's inputs of the current round from inputs of the pool."""
        changes = self._changes_of(client)
        return (lambda x: changed(self.transform(x), changes)) if changes else self.transform

    def _gather(self, rows: Tensor, device: torch.device | str = "cpu") -> Samples:
        samples = self._ready().on(torch.device(device)).take(rows)
        return ready(samples, self.transform, self.task.reconstructs)

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

    def pooled(self, client: int) -> ClientData:
        """Return one client's data, with the training samples of all clients in place of its own.

        Args:
            client: client id, 0 to num_clients - 1.
        """
        return ClientData(Together(self, range(self.num_clients)), client)

    def size(self, client: int, split: Split) -> int:
        """Return the number of samples in one split of one client.

        Args:
            client: client id, 0 to num_clients - 1, or one of the `newcomers`.
            split: the split's name.
        """
        return self.division.sizes[split][client]

    def sizes(self, clients: Iterable[int], split: Split) -> dict[int, int]:
        """Return the number of samples in one split of each client, by id.

        Args:
            clients: client ids, as for `size`.
            split: the split's name.
        """
        # a subclass may know sizes alone, and not who holds which samples
        if type(self).size is not FederatedDataModule.size:
            return {client: self.size(client, split) for client in clients}
        clients = list(clients)
        return dict(zip(clients, map(self.division.sizes[split].__getitem__, clients), strict=True))

    @property
    def client_names(self) -> list[str]:
        """Names of the clients by id; empty unless the pool is divided by named clients."""
        if self._pool is None and self._saved:
            return list(self._saved["clients"])
        return self._ready().division.names

    def client_id(self, client: int | str) -> int:
        """Return the id of a client given by id or by name.

        Args:
            client: the name, or the id, from 0 to num_clients - 1 or of one of the `newcomers`.

        Raises:
            MisconfigurationException: if there is no such client, or an integer is the id of one client and the name of
                another.
        """
        return client_names.client_id(client, self.client_names, self.num_clients + len(self.newcomers))

    def client_name(self, client: int) -> int | str:
        """Return a client's name, or the id where clients have no names.

        Args:
            client: client id, 0 to num_clients - 1, or one of the `newcomers`.
        """
        names = self.client_names
        return names[client] if names else client

    def client_label(self, client: int) -> str:
        """Return a client's id for messages, followed by the client's name unless the name is the id: ``3 (Bremen)``.

        Args:
            client: client id, 0 to num_clients - 1, or one of the `newcomers`.
        """
        return client_names.client_label(client, self.client_names)

    def split_digests(self) -> Tensor | None:
        """Return digests of each client's splits, int64 ``[num_clients, 3, 3]``; None where samples are at sites.

        The splits are train, val and test. The digests are of the contents of a split's rows in any order; of the
        contents in their order; and of targets and places in the data, in the rows' order. The first two are 0 where
        inputs stay in files.
        """
        if self.at_sites or self._pool is None:
            return None
        return digests(self._pool.keys, self.division, self.num_clients)

    @property
    def newcomers(self) -> range:
        """Ids of the clients that take no part in training and join afterwards, above the federation's ids."""
        if self._pool is None and self._saved:
            return range(self.num_clients, self.num_clients)
        return range(self.num_clients, len(self._ready().division.clients))

    @property
    def division(self) -> Division:
        """Pool positions of all clients' samples in the current `round`."""
        # Asked for many times in a round: one result is kept, since an overridden `division_at` may be slow.
        if self._held is None or self._held[0] != self.round:
            division, count = self.division_at(self.round), len(self._ready().division.clients)
            if not isinstance(division, Division) or len(division.clients) != count:
                what = (
                    f"{len(division.clients)} clients"
                    if isinstance(division, Division)
                    else f"a {type(division).__name__}"
                )
                raise MisconfigurationException(
                    f"{type(self).__name__}.division_at({self.round}) returned {what}; return a Division of the same "
                    f"{count} clients as in the first round"
                )
            self._held = self.round, division
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
    def redivides(self) -> bool:
        """True if samples move between clients or splits from one round to another."""
        return bool(self.drift) or type(self).division_at is not FederatedDataModule.division_at

    @property
    def drifts(self) -> bool:
        """True if the samples of clients, or their inputs, depend on the round."""
        return self.redivides or bool(self.input_drift)

    @property
    def drifting(self) -> dict[int, frozenset[int]]:
        """Ids of the clients whose samples change in a round, by the rounds in which a change begins or ends.

        A gradual change is listed by its first round. Changes by a `division_at` or `parts` of one's own aren't known.
        """
        everyone = frozenset(range(self.num_clients))
        by_round: dict[int, frozenset[int]] = dict.fromkeys(self.drift or (), everyone)
        for drift, clients in zip(self.input_drift or (), self._drifting, strict=True):
            for round in (drift.start, drift.end):
                if round is not None and round > 1:
                    by_round[round] = by_round.get(round, frozenset()) | (clients & everyone)
        return dict(sorted(by_round.items()))

    def go_to(self, round: int) -> bool:
        """Go to another round, and return whether the samples of any client changed.

        Args:
            round: the round, from 1.
        """
        if not self.drifts:
            self.round = round
            return False
        moves = any(drift.strength(self.round) != drift.strength(round) for drift in self.input_drift or ())
        before, self.round = self.division, round
        if moves:
            return True
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
            MisconfigurationException: if the samples have no class.
        """
        if type(self).counts_of is FederatedDataModule.counts_of:
            rows, sizes = self.division.held_by(range(self.num_clients), split)
            classes = number_of_classes(self.task, "a count of classes")
            labels = cast(Tensor, self.task.classes(take(self._ready().samples.y, rows)))
            if len(labels) == len(rows):
                # all clients at once: a count of their own takes 10 microseconds each
                owners = torch.repeat_interleave(torch.tensor(sizes))
                counts = torch.bincount(owners * classes + labels, minlength=len(sizes) * classes)
                return counts.view(len(sizes), classes)
        return torch.stack([self.counts_of(client, split) for client in range(self.num_clients)])

    def counts_of(self, client: int, split: Split) -> Tensor:
        """Count the samples of one client by class, [num_classes], int64, without reading inputs.

        Args:
            client: client id, 0 to num_clients - 1, or one of the `newcomers`.
            split: the split to count.

        Raises:
            MisconfigurationException: if the samples have no class.
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
        ids = {name: client for client, name in enumerate(every)}
        self._drifting = [frozenset(ids[before[client]] for client in clients) for clients in self._drifting]
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


def net_inputs(x: Tensor) -> Tensor:
    """Scale images to [-1, 1]: uint8 becomes (x / 255 - 0.5) / 0.5, other types stay unchanged.

    >>> net_inputs(torch.tensor([0, 255], dtype=torch.uint8))
    tensor([-1.,  1.])

    Args:
        x: some inputs, shape [n, ...].
    """
    # in place on the fresh copy: one pass of memory fewer for each batch
    return x.float().div_(127.5).sub_(1.0) if x.dtype == torch.uint8 else x


def unsaved_arguments() -> list[str]:
    """Return the names of arguments that are no plain settings, of the running ``__init__`` and its subclasses' ones.

    Checkpoints hold plain values only. Lightning copies saved arguments, so arrays would be read from disk as a whole.
    """
    caller = inspect.currentframe()
    if caller is None or caller.f_back is None:
        return []
    # Lightning's own walk over the frames of nested __init__ calls, so that both see the same arguments
    collected = collect_init_args(caller.f_back, [], classes=(LightningDataModule,))
    return [name for arguments in collected for name, value in arguments.items() if not is_plain(value)]


def is_plain(value: Any) -> bool:
    """Return whether a value is a number, a text, a path, or a short list or dict of plain values.

    >>> is_plain([1, "a", None]), is_plain([0] * 1000), is_plain(object())
    (True, False, False)
    """
    if isinstance(value, Mapping):
        value = [*value, *value.values()]
    # exact types: a named tuple or a subclass may not survive the safe loading of checkpoints
    if type(value) in (list, tuple):
        return len(value) < LONG and all(map(is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str, os.PathLike))
