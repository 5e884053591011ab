"""PyTorch Datasets of clients, one or several for each client."""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from multiprocessing import current_process
from typing import Any, cast, get_args

import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningDataModule
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, TensorDataset, default_collate

from pfl_lightning.data.checks import READ, SAMPLES, check_integers, differs, seeded
from pfl_lightning.data.client_names import distinct
from pfl_lightning.data.datamodule import DataSettings
from pfl_lightning.data.division import Division
from pfl_lightning.data.identity import mixed, warn_of_shared_rows
from pfl_lightning.data.samples import Loaded, Samples, Split
from pfl_lightning.data.sources.base import OwnedData, targets_of
from pfl_lightning.data.sources.client_modules import read_modules
from pfl_lightning.data.sources.tensor_data import shape_of
from pfl_lightning.data.sources.vision_data import pixels, random_transform
from pfl_lightning.data.trees import Tree, as_tensor, first_not_finite, joined, leaves_of, like
from pfl_lightning.messages import num_bytes
from pfl_lightning.nets.item_lists import are_items, packed
from pfl_lightning.settings import Unpack
from pfl_lightning.tasks import OwnLoss, Task

SMALL = 2**28
"""Bytes of inputs up to which Datasets without random transforms are read once and kept in memory."""
AT_ONCE = 1024
"""Items that are read at once where all are read."""
LOOKED_AT, TOGETHER = 32, 4
"""Items that are looked at to detect randomness, unless there are many Datasets, and of these as many as are read at
once."""
PARTS: tuple[Split, ...] = get_args(Split)
"""Names of a client's Datasets."""


class ClientDatasets(OwnedData):
    """Clients that hold PyTorch Datasets: a training set each, and test and validation sets where there are some.

    Each Dataset is map-style, ``dataset[i]`` an input and a target, and reads and transforms its own items. Training
    sets may transform at random, and then give other inputs in each epoch. Random and large Datasets are read a batch
    at a time, under the engines ``sequential`` and ``processes``; small Datasets without randomness are read once and
    kept in memory, under every engine. The head of a run tells which.

    A random transform may draw from torch, NumPy or Python's ``random``. The draws depend on the seed, the round and
    the client alone, whatever the number of workers. Randomness is found by TorchVision's names, and by 256 readings
    of up to 32 items, or of items of 16 Datasets: an item that is another one in a share p of its readings passes
    unseen with the probability :math:`(1 - p)^{256}`, which is 0.6 % for p = 0.02.

    All Datasets have one type of inputs, or types that become one without a loss, such as whole numbers beside floats.
    Bytes, which `transform` takes for pixels, are refused beside any other type.

    .. code-block:: python

        data = ClientDatasets({"Bremen": (train, test), "Erfurt": (train2, test2)}, Classification(num_classes=10))

    Args:
        clients: a mapping from each client's name to a Dataset, to a pair (train, test), to a triple (train, val, test)
            with None for a missing one, or to a dict of Datasets by these names; or a list of such values, whose
            clients are numbered from 0; or, with ``read``, a list of names. A Dataset alone is split by
            ``test_fraction`` and ``val_fraction``. A dict of arrays ``x`` and ``y`` may stand for a Dataset.
        task: the prediction task; by default that of a LightningModule with its own loss, whose batches may have any
            form: items that are no pairs of input and target, such as dicts, are then given to it as they are, and
            lists of items of different shapes as ``collate_fn`` makes them, such as images beside their boxes.
        read: a function from a client's name to such a value, called once for each name.
        collate_fn: makes a batch (inputs, targets) of a list of items; None takes torch's ``default_collate``.
        num_workers: processes that read batches ahead, 0 or more, as in torch's ``DataLoader``; the engine
            ``processes`` reads in its own.
        **kwargs: settings of `FederatedDataModule`; ``root`` and ``download`` have no effect. Without ``resident``,
            size and randomness decide whether items are kept in memory. If no client has a validation set,
            ``val_fraction`` of the training samples are drawn, or none from random training sets.

    Raises:
        MisconfigurationException: a client has no training samples, a Dataset isn't map-style, an item can't be read,
            is no pair of input and target or has an input that isn't finite, types of inputs don't go together, or
            samples to validate or test on differ from one reading to the next.
    """

    def __init__(
        self,
        clients: Mapping[str, Any] | Sequence[Any],
        task: Task = OwnLoss(),  # noqa: B008 - immutable
        read: Callable[[str], Any] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        **kwargs: Unpack[DataSettings],
    ) -> None:
        check_integers("data.", num_workers=num_workers)
        if num_workers < 0:
            raise MisconfigurationException(f"data.num_workers={num_workers} must be 0 or more")
        held = {name: datasets_of(name, given) for name, given in given_by(clients, read)}
        parts = [(name, split, dataset) for name, given in held.items() for split, dataset in given.items()]
        given = {split for _, split, _ in parts}
        names = [f"{split} of client {name!r}" for name, split, _ in parts]
        takes_any = isinstance(task, OwnLoss)
        reader = Reader(
            [dataset for *_, dataset in parts], names, collate_fn or default_collate, num_workers, takes_any
        )
        # only training sets beside other test sets may be random: a metric must be of the same inputs in each round
        for split in given - {"train"} if len(given) > 1 else given:
            if changing := reader.changing(index for index, part in enumerate(parts) if part[1] == split):
                raise MisconfigurationException(
                    f"data.clients: {changing}, and clients are tested on these samples; give pairs of Datasets "
                    "(train, test), of which train alone has random transforms"
                )
        changing = reader.changing(index for index, part in enumerate(parts) if part[1] == "train")
        resident = kwargs.get("resident")
        if reader.has_lists:
            if resident:
                raise MisconfigurationException(
                    "data.resident=true stacks all items, and data.collate_fn makes lists of items, whose shapes may "
                    "differ; leave it out"
                )
            resident = False
        if changing and resident:
            raise MisconfigurationException(f"data.resident=true reads each item once, but {changing}; leave it out")
        if changing and "val" not in given:
            if kwargs.get("val_fraction"):
                raise MisconfigurationException(
                    f"data.val_fraction={kwargs['val_fraction']} draws validation samples from train, but {changing}; "
                    "give triples of Datasets (train, val, test), or leave it out"
                )
            kwargs["val_fraction"] = 0.0
        reader.is_random = bool(changing)
        x, _ = reader.read(np.zeros(1, dtype=np.int64))
        if resident is None:
            resident = not changing and num_bytes(x) * len(reader) <= SMALL
        kwargs["resident"] = resident
        super().__init__(task, **kwargs)
        self.to_predict: dict[Any, Any] = {}
        """Datasets to predict for by client, of LightningDataModules with a ``predict_dataloader``."""
        self.input_shape = shape_of(x)
        self._reader = reader
        sizes = [len(dataset) for *_, dataset in parts]
        # as numbers in their order, in which client 2 comes before client 10
        is_numbered = read is None and not isinstance(clients, Mapping)
        self._names: Any = np.repeat(np.array([int(name) if is_numbered else name for name, *_ in parts]), sizes)
        self._splits: Any = np.repeat(np.array([split for _, split, _ in parts]), sizes) if len(given) > 1 else None

    @classmethod
    def of_modules(
        cls,
        modules: Mapping[Any, LightningDataModule] | Sequence[LightningDataModule],
        task: Task = OwnLoss(),  # noqa: B008 - immutable
        **kwargs: Any,
    ) -> "ClientDatasets":
        """Return the data of clients with a LightningDataModule each: their loaders' Datasets.

        ``prepare_data`` and ``setup`` of each are called here. Batch size, ``drop_last``, ``collate_fn`` and workers
        are those of the loaders, which all clients share; the largest ``num_workers`` counts. `to_predict` has the
        Datasets of ``predict_dataloader``.

        Args:
            modules: a LightningDataModule by the client's name, or a list of them.
            task: as for `ClientDatasets`.
            **kwargs: further settings of `ClientDatasets`, in place of those of the loaders.

        Raises:
            MisconfigurationException: if loaders of two clients differ in a setting, or if one has something that
                clients' training can't carry on, such as a sampler of its own.
        """
        datasets, predict, settings = read_modules(modules)
        clients: Any = datasets if isinstance(modules, Mapping) else list(datasets.values())
        made = cls(clients, task, **{**settings, **kwargs})
        made.to_predict = predict
        return made

    def load(self) -> Loaded:
        """Read all items if they are kept in memory, else the targets alone."""
        if not self.resident:
            return Loaded(self._reader, self._reader.targets(), self._names, self._splits)
        rows = torch.split(torch.arange(len(self._reader)), AT_ONCE)
        firsts = [int(each[0]) for each in rows]
        x, y = self._reader.stacked(list(self._reader.batches(rows)), firsts)
        return Loaded(x, y, self._names, self._splits)

    def preprocess(self, samples: Samples, division: Division) -> Samples:
        """Let batches have inputs and targets of one reading, if they aren't in memory.

        Args:
            samples: the pool, as loaded.
            division: who holds which rows of the pool.
        """
        if self.resident:
            return samples
        # `max_samples` leaves some positions of the reader
        rows = getattr(samples.x, "rows", np.arange(len(self._reader)))
        # items aren't read to compare them, so that only one and the same item is found
        origins = np.concatenate([origin_of(dataset) for dataset in self._reader.datasets])[rows]
        warn_of_shared_rows(mixed(origins), division, lambda: False, type(self).__name__)
        # lists of images are large, and a model may hold features of all at once
        most = self.batch_size if self._reader.has_lists else None
        return Items(samples.x, samples.y, self._reader, torch.from_numpy(rows), most)

    @property
    def head_lines(self) -> list[tuple[str, str]]:
        """Return the way in which items are read, for the head of a run."""
        if self.resident:
            return [("items", "read once, kept in memory")]
        drawn = ", transformed at random" if self._reader.is_random else ""
        workers = f", by {self._reader.num_workers} workers" if self._reader.num_workers else ""
        return [("items", f"read a batch at a time{drawn}{workers}")]


def given_by(clients: Any, read: Callable[[str], Any] | None) -> Iterator[tuple[str, Any]]:
    """Yield the name and the Datasets of each client.

    Args:
        clients: the argument of `ClientDatasets`.
        read: the argument of `ClientDatasets`.

    Raises:
        MisconfigurationException: there are no clients, two names are spellings of one, or ``read`` fails.
    """
    if isinstance(clients, str) or not isinstance(clients, (Mapping, Sequence)) or not len(clients):
        raise MisconfigurationException(
            f"data.clients={type(clients).__name__} must be a mapping from names to Datasets, such as "
            '{"Bremen": (train, test)}, or a list of Datasets, with at least one client'
        )
    if read is None:
        pairs = dict(clients) if isinstance(clients, Mapping) else dict(enumerate(clients))
        yield from zip(distinct(pairs, "data.clients"), pairs.values(), strict=True)
        return
    # compared before anything is read, and `read` gets each name as given
    names = list(clients)
    for spelled, name in zip(distinct(names, "data.clients"), names, strict=True):
        try:
            given = read(name)
        except Exception as error:
            raise MisconfigurationException(
                f"data.read: client {spelled!r} can't be read ({said(error)}); correct the function or this client's "
                "files, or leave the client out"
            ) from error
        yield spelled, given


def said(error: Exception) -> str:
    """Return an error of a user's code for a sentence.

    >>> said(KeyError("label"))
    "KeyError: 'label'"

    Args:
        error: the error.
    """
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}".removesuffix(": ")


def datasets_of(name: str, given: Any) -> dict[Split, Any]:
    """Return a client's Datasets by split, without empty ones.

    >>> sets = TensorDataset(torch.zeros(3), torch.zeros(3)), TensorDataset(torch.ones(1), torch.ones(1))
    >>> {split: len(dataset) for split, dataset in datasets_of("Bremen", sets).items()}
    {'train': 3, 'test': 1}

    Args:
        name: the client's name.
        given: a Dataset, a pair, a triple, or a dict.

    Raises:
        MisconfigurationException: the value is none of these, or there is nothing to train on.
    """
    if isinstance(given, Mapping) and not {"x", "y"} <= set(given):
        by_split = dict(given)
    elif isinstance(given, (tuple, list)) and len(given) in (2, 3):
        by_split = dict(zip(("train", "test") if len(given) == 2 else ("train", "val", "test"), given, strict=True))
    else:
        by_split = {"train": given}
    if unknown := set(by_split) - set(PARTS):
        raise MisconfigurationException(
            f"data.clients: client {name!r} has {min(map(str, unknown))!r}; name Datasets train, val and test"
        )
    datasets: dict[Split, Any] = {
        split: checked(by_split[split], f"{split} of client {name!r}") for split in PARTS if split in by_split
    }
    datasets = {split: dataset for split, dataset in datasets.items() if dataset is not None and len(dataset)}
    if "train" not in datasets:
        raise MisconfigurationException(
            f"data.clients: client {name!r} has nothing to train on; give it a training set, or leave it out"
        )
    return datasets


def checked(dataset: Any, name: str) -> Any:
    """Return a map-style Dataset; of arrays ``x`` and ``y`` by name a Dataset of their rows; None unchanged.

    Args:
        dataset: the given value.
        name: the value's name in messages.

    Raises:
        MisconfigurationException: the value has no items by position, or no number of them, or arrays don't fit.
    """
    if isinstance(dataset, Mapping) and {"x", "y"} <= set(dataset):
        return rows_of(dataset, name)
    advice = "give a map-style Dataset, with __len__ and __getitem__"
    if isinstance(dataset, IterableDataset):
        advice = "clients' samples are shuffled and resumed by position, which a stream doesn't have; " + advice
    elif isinstance(dataset, DataLoader):
        advice = "give its dataset, as batches are drawn for each client and round by data.batch_size"
    elif isinstance(dataset, (Tensor, np.ndarray)):
        advice = 'give inputs and targets together, as {"x": ..., "y": ...}'
    elif dataset is None:
        return None
    elif hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__") and not isinstance(dataset, str):
        try:
            len(dataset)
        except Exception as error:
            raise MisconfigurationException(
                f"data.clients: {name}, a {type(dataset).__name__}, has no number of items ({said(error)}); let its "
                "__len__ return one"
            ) from error
        return dataset
    raise MisconfigurationException(f"data.clients: {name} is a {type(dataset).__name__}; {advice}")


def rows_of(arrays: Mapping[str, Any], name: str) -> TensorDataset:
    """Return a Dataset of the rows of arrays ``x`` and ``y``.

    Args:
        arrays: the arrays by these names.
        name: the Dataset's name in messages.

    Raises:
        MisconfigurationException: the arrays don't hold numbers, or as many rows as each other.
    """
    x, y = (as_tensor(arrays[key], f"data.clients: {key} of {name}") for key in ("x", "y"))
    counts = [f"{len(part)} rows" if part.dim() else "a single number" for part in (x, y)]
    if not x.dim() or not y.dim() or len(x) != len(y):
        raise MisconfigurationException(
            f"data.clients: {name} has x of {counts[0]} and y of {counts[1]}; give a row of each for every sample"
        )
    return TensorDataset(x, y)


def is_pair(item: Any) -> bool:
    """Return whether an item or a batch has two parts, input and target.

    Args:
        item: the item.
    """
    return isinstance(item, (tuple, list)) and len(item) == 2


class Reader:
    """Items of several Datasets, numbered consecutively, read and collated on access.

    Args:
        datasets: the Datasets, none empty.
        names: a name for each Dataset in messages.
        collate_fn: makes a batch (inputs, targets) of a list of items.
        num_workers: processes that read batches ahead.
        takes_any: whether items may be other things than pairs of input and target, such as a dict; they are inputs,
            beside targets of no numbers ``[n, 0]``.
    """

    def __init__(
        self,
        datasets: list[Any],
        names: list[str],
        collate_fn: Callable[[list[Any]], Any],
        num_workers: int,
        takes_any: bool = False,
    ) -> None:
        self.datasets = datasets
        self.names = names
        self.collate_fn = collate_fn
        self.num_workers = num_workers
        self.takes_any = takes_any
        self.is_random = False
        self._starts = list(accumulate(map(len, datasets), initial=0))
        self._types: dict[str, torch.dtype] = {}
        # which parts of a batch, or whether the whole, are lists of samples
        self._lists: tuple[bool, ...] = seeded(self._list_parts, 0)
        self._types = seeded(self._common_types, 0)

    @property
    def has_lists(self) -> bool:
        """Whether batches are lists of items, as for detection models."""
        return any(self._lists)

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, rows: NDArray[np.int64]) -> Tree:
        return self.read(rows)[0]

    def _list_parts(self) -> tuple[bool, ...]:
        """Return whether inputs and targets of a batch are lists of samples each; one value for a whole that is."""
        if not self.takes_any or self.collate_fn is default_collate:
            return (False, False)
        item = self._item(0, 0)
        # an error of collate_fn is named where a batch is read
        try:
            one, two = self.collate_fn([item]), self.collate_fn([item, item])
        except Exception:
            return (False, False)
        if are_items(one, two):
            return (True,)
        if not (is_pair(one) and is_pair(two)):
            return (False, False)
        return tuple(are_items(*parts) for parts in zip(one, two, strict=True))

    def _common_types(self) -> dict[str, torch.dtype]:
        """Return the type of each part of inputs and targets to which the first items of all Datasets go without loss.

        Raises:
            MisconfigurationException: if Datasets have bytes beside another type, or other parts.
        """
        common: dict[str, torch.dtype] = {}
        whose: dict[str, str] = {}
        for start, name in zip(self._starts, self.names, strict=False):
            types = types_of(self.read(np.array([start])))
            if common and types.keys() != common.keys():
                raise MisconfigurationException(
                    f"data.clients: items of {self.names[0]} have {', '.join(common)}, and those of {name} "
                    f"{', '.join(types)}; give all Datasets the same parts"
                )
            for part, dtype in types.items():
                before = common.setdefault(part, dtype)
                if dtype != before and torch.uint8 in (dtype, before):
                    raise MisconfigurationException(two_types(part, (whose[part], before), (name, dtype)))
                common[part] = torch.promote_types(before, dtype)
                whose.setdefault(part, name)
        return common

    def read(self, rows: NDArray[np.int64]) -> tuple[Tree, Tree]:
        """Read and collate some items; those of each Dataset by themselves, unless ``collate_fn`` is the user's.

        Args:
            rows: positions of the items.

        Raises:
            MisconfigurationException: an item can't be read, is no pair of input and target or isn't finite, or items
                can't be stacked.
        """
        places = [(bisect_right(self._starts, int(row)) - 1, int(row)) for row in rows]
        if self.collate_fn is not default_collate:
            return self._batch(places)
        groups = [list(group) for _, group in groupby(places, key=lambda place: place[0])]
        batches = [self._batch(group) for group in groups]
        return self.stacked(batches, [group[0][1] for group in groups])

    def _batch(self, places: list[tuple[int, int]]) -> tuple[Tree, Tree]:
        """Read some items and collate them at once.

        Args:
            places: the number of its Dataset and the position of each item.
        """
        items = [self._item(*place) for place in places]
        name = self.names[places[-1][0]]
        try:
            batch = self.collate_fn(items)
        except Exception as error:
            raise MisconfigurationException(
                f"data.clients: {len(items)} items, the last of {name}, make no batch ({said(error)}); bring inputs to "
                "one shape by a transform, or give data.collate_fn"
            ) from error
        if self.has_lists:
            # lists are packed together with the other part, as their targets have no form that a task knows
            whole = len(self._lists) == 1
            batch = (
                packed(batch)
                if whole
                else tuple(packed(part) if is_list else part for part, is_list in zip(batch, self._lists, strict=True))
            )
            batch = batch, torch.zeros(len(items), 0)
        if self.takes_any and not is_pair(batch):
            batch = batch, torch.zeros(len(items), 0)
        if not is_pair(batch):
            raise MisconfigurationException(
                f"data.collate_fn returned a {type(batch).__name__}; return a pair (inputs, targets)"
            )
        batch = batch[0], targets_of(batch[1])
        for part, leaf in named_leaves("inputs", batch[0]):
            if isinstance(leaf, Tensor) and (place := first_not_finite(leaf)) is not None:
                raise MisconfigurationException(
                    f"data.clients: {self._named(*places[place[0]])} has {leaf[place].item()} in its {part} at "
                    f"{list(place[1:])}, which no net can take; correct this item, or leave it out"
                )
        return self._in_common_types(batch, name) if self._types else batch

    def _item(self, index: int, row: int) -> Any:
        """Read an item.

        Args:
            index: number of its Dataset.
            row: position of the item.
        """
        name = self.names[index]
        try:
            item = self.datasets[index][row - self._starts[index]]
        except Exception as error:
            raise MisconfigurationException(
                f"data.clients: {self._named(index, row)} can't be read ({said(error)}), while the length is "
                f"{self._starts[index + 1] - self._starts[index]}; correct __getitem__ or __len__ of this Dataset"
            ) from error
        if self.collate_fn is not default_collate or (self.takes_any and not is_pair(item)):
            return item
        if not is_pair(item):
            raise MisconfigurationException(
                f"data.clients: an item of {name} is a {type(item).__name__}"
                + (f" of {len(item)}" if isinstance(item, (tuple, list)) else "")
                + "; let a Dataset give pairs (input, target), or give data.collate_fn"
            )
        # torch's collate_fn doesn't know Pillow's images
        item = pixels(item[0]) if hasattr(item[0], "getbands") else item[0], item[1]
        # torch's collate_fn would make floats of bytes beside floats
        for part, leaf in named_leaves("inputs", item[0]):
            common, dtype = self._types.get(part), getattr(leaf, "dtype", None)
            if common is not None and (dtype in (torch.uint8, np.uint8)) != (common == torch.uint8):
                raise MisconfigurationException(
                    two_types(part, ("the first items", common), (self._named(index, row), dtype))
                )
        return item

    def _named(self, index: int, row: int) -> str:
        """Return the words for an item, by the number of its Dataset and its position."""
        return f"item {row - self._starts[index]} of {self.names[index]}"

    def _in_common_types(self, batch: tuple[Tree, Tree], name: str) -> tuple[Tree, Tree]:
        """Return a batch in the types of all Datasets.

        Args:
            batch: inputs and targets.
            name: name of the last item's Dataset.

        Raises:
            MisconfigurationException: if a type holds more than the common one, such as floats beside whole numbers.
        """
        types = types_of(batch)
        if types == self._types:
            return batch
        for part, dtype in types.items():
            common = self._types.get(part)
            both_floats = common is not None and common.is_floating_point and dtype.is_floating_point
            if common is None or not (both_floats or torch.promote_types(common, dtype) == common):
                raise MisconfigurationException(two_types(part, ("the first items", common), (name, dtype)))
        leaves = [leaf for leaf in leaves_of(batch) if isinstance(leaf, Tensor)]
        return cast(
            tuple[Tree, Tree],
            like(batch, [leaf.to(self._types[part]) for leaf, part in zip(leaves, types, strict=True)]),
        )

    def stacked(self, batches: list[tuple[Tree, Tree]], firsts: list[int]) -> tuple[Tree, Tree]:
        """Return several batches as one.

        Args:
            batches: inputs and targets, at least one.
            firsts: position of the first item of each batch.

        Raises:
            MisconfigurationException: if their shapes differ.
        """
        if len(batches) == 1:
            return batches[0]
        try:
            return cast(tuple[Tree, Tree], joined(batches))
        except (RuntimeError, LookupError, ValueError, AttributeError) as error:
            shapes = [
                [list(leaf.shape[1:]) for leaf in leaves_of(batch) if isinstance(leaf, Tensor)] for batch in batches
            ]
            other = next((number for number, each in enumerate(shapes) if each != shapes[0]), 1)
            one, two = (self.names[bisect_right(self._starts, firsts[number]) - 1] for number in (0, other))
            raise MisconfigurationException(
                f"data.clients: items of {one} have inputs and targets of shapes {shapes[0]}, and of {two} "
                f"{shapes[other]}, and can't be stacked; bring them to one shape by a transform or data.collate_fn, or "
                "leave inputs unstacked by data.resident=false"
            ) from error

    def seeded(self, rows: NDArray[np.int64], seed: int) -> tuple[Tree, Tree]:
        """Read some items with random generators of their own.

        Args:
            rows: positions of the items.
            seed: seed of torch's, NumPy's and Python's generators, 0 to 2**32 - 1.
        """
        return seeded(lambda: self.read(rows), seed)

    def batches(self, rows: Iterable[Tensor]) -> Iterator[tuple[Tree, Tree]]:
        """Yield several batches, read one after another, or ahead by workers.

        Args:
            rows: positions of each batch's items.
        """
        wanted = [each.cpu().numpy() for each in rows]
        # a worker of an engine may not start processes; items are the same without
        workers = 0 if current_process().daemon else self.num_workers
        if not self.is_random and not workers:
            yield from map(self.read, wanted)
            return
        # all before the first batch, so that workers, who read ahead, find the same seeds: an engine has seeded torch
        # for this client and round
        seeds = torch.randint(2**32, (len(wanted),)).tolist() if self.is_random else [0] * len(wanted)
        if not workers:
            yield from map(self.seeded, wanted, seeds)
            return
        batches = list(zip(wanted, seeds, strict=True))
        # the sampler gives whole batches: torch's own seeds would depend on the number of workers
        for batch in DataLoader(
            Batches(self),
            sampler=batches,
            batch_size=None,
            num_workers=self.num_workers,
            collate_fn=lambda batch: batch,
        ):
            if isinstance(batch, MisconfigurationException):
                raise batch
            yield batch

    def targets(self) -> Tree:
        """Return the targets of all items, from the Datasets' own lists where they have some, else from all items."""
        lists = [targets if (targets := targets_in(dataset)) is not None else None for dataset in self.datasets]
        parts = []
        for start, end, targets in zip(self._starts, self._starts[1:], lists, strict=False):
            if targets is None or not self._has(start, end, targets):
                rows = np.arange(start, end)
                pieces = np.array_split(rows, -(-len(rows) // AT_ONCE))
                read = [((), self.read(piece)[1]) for piece in pieces]
                _, targets = self.stacked(read, [int(piece[0]) for piece in pieces])
            parts.append(((), targets))
        return self.stacked(parts, self._starts[:-1])[1]

    def _has(self, start: int, end: int, targets: Tensor) -> bool:
        """Return whether items have the targets of the list, which a target transform may change."""
        looked_at = np.unique(np.linspace(start, end - 1, min(SAMPLES, end - start)).astype(np.int64))
        _, y = self.read(looked_at)
        if len(targets) != end - start or not isinstance(y, Tensor):
            return False
        if torch.promote_types(y.dtype, targets.dtype) != y.dtype:
            return False
        return torch.equal(targets[looked_at - start].to(y.dtype), y)

    def changing(self, indices: Iterable[int]) -> str:
        """Return the words for Datasets that give other items at each reading; an empty text if none does.

        Args:
            indices: numbers of the Datasets.
        """
        chosen = list(indices)
        for index in chosen:
            if transform := random_transform(self.datasets[index]):
                return f"{self.names[index]} has the random transform {transform}"
        # spread over Datasets and items, as one Dataset may be sorted by class
        places = sorted({round(place) for place in np.linspace(0, len(chosen) - 1, SAMPLES)}) if chosen else []
        each, looked_at = max(2, -(-LOOKED_AT // max(1, len(places)))), []
        for index in (chosen[place] for place in places):
            start, end = self._starts[index], self._starts[index + 1]
            rows = np.unique(np.linspace(start, end - 1, each).astype(np.int64))
            # few at once, as items may be large
            looked_at += [(index, rows[first : first + TOGETHER]) for first in range(0, len(rows), TOGETHER)]
        readings = -(-READ // max(1, sum(len(rows) for _, rows in looked_at)))
        for place, (index, rows) in enumerate(looked_at):
            if differs(lambda rows=rows: self.read(rows), readings, place):  # type: ignore[misc]
                return f"{self.names[index]} gives other items at each reading"
        return ""


class Batches(Dataset[tuple[Tree, Tree] | MisconfigurationException]):
    """Batches by their positions and seeds, for the workers of a ``DataLoader``.

    Args:
        reader: the reader of items.
    """

    def __init__(self, reader: Reader) -> None:
        self.reader = reader

    def __getitem__(self, wanted: tuple[NDArray[np.int64], int]) -> tuple[Tree, Tree] | MisconfigurationException:
        # returned, as torch would raise a worker's error with the text of its whole traceback
        try:
            return self.reader.seeded(*wanted)
        except MisconfigurationException as error:
            return error


@dataclass(frozen=True, eq=False)
class Items(Samples):
    """Samples whose batches are read when they are asked for, inputs and targets of one reading.

    Args:
        x: the reader, or some of its positions.
        y: targets of all items.
        reader: the reader of items.
        rows: positions of these items, shape [n].
        most: the largest number of items of a chunk; None for any number.
    """

    reader: Reader
    rows: Tensor
    most: int | None = None

    @property
    def largest_chunk(self) -> int | None:
        """Return the largest number of items of a chunk; None for any number."""
        return self.most

    def take(self, rows: Tensor | slice) -> Samples:
        """Read the items at some positions.

        Args:
            rows: positions of the items.
        """
        (batch,) = self.batches([rows if isinstance(rows, Tensor) else torch.arange(len(self))[rows]])
        return batch

    def batches(self, rows: Iterable[Tensor]) -> Iterator[Samples]:
        """Yield the samples at several sets of positions, read ahead where there are workers.

        Args:
            rows: positions of each batch's samples.
        """
        return (Samples(*batch) for batch in self.reader.batches(self.rows[each.cpu()] for each in rows))


def origin_of(dataset: Any) -> NDArray[np.uint64]:
    """Return a number for each item, equal for the same item of the same Dataset.

    Args:
        dataset: a Dataset; subsets and concatenations are looked into.
    """
    if type(dataset) is Subset:
        return origin_of(dataset.dataset)[np.asarray(dataset.indices, dtype=np.int64)]
    if type(dataset) is ConcatDataset:
        return np.concatenate([origin_of(part) for part in dataset.datasets])
    items: NDArray[np.uint64] = np.arange(len(dataset)).astype(np.uint64)
    return items + mixed(np.full(1, id(dataset), dtype=np.uint64))


def targets_in(dataset: Any) -> Tensor | None:
    """Return the targets that a Dataset keeps apart from its items; None without such a list.

    Args:
        dataset: a Dataset; subsets and concatenations are looked into.
    """
    if isinstance(dataset, Subset):
        whole = targets_in(dataset.dataset)
        return None if whole is None else whole[torch.as_tensor(list(dataset.indices), dtype=torch.int64)]
    if isinstance(dataset, ConcatDataset):
        parts = [targets_in(part) for part in dataset.datasets]
        return None if any(part is None for part in parts) else torch.cat(parts)  # type: ignore[arg-type]
    if type(dataset) is TensorDataset and len(dataset.tensors) == 2:
        return cast(Tensor, targets_of(dataset.tensors[1]))
    for name in ("targets", "labels"):
        known = getattr(dataset, name, None)
        try:
            if known is not None and len(known) == len(dataset):
                return cast(Tensor, targets_of(as_tensor(known)))
        # no list of numbers
        except (TypeError, ValueError, RuntimeError, MisconfigurationException):
            continue
    return None


def named_leaves(name: str, tree: Tree) -> Iterator[tuple[str, Any]]:
    """Yield each leaf of a tree with its name, in the tree's order.

    >>> [name for name, _ in named_leaves("inputs", {"a": 1, "b": (2, 3)})]
    ["inputs['a']", "inputs['b'][0]", "inputs['b'][1]"]

    Args:
        name: the tree's name.
        tree: a tree of any leaves.
    """
    if isinstance(tree, Mapping):
        for key, part in tree.items():
            yield from named_leaves(f"{name}[{key!r}]", part)
    elif type(tree) in (list, tuple):
        for number, part in enumerate(tree):
            yield from named_leaves(f"{name}[{number}]", part)
    else:
        yield name, tree


def types_of(batch: tuple[Tree, Tree]) -> dict[str, torch.dtype]:
    """Return the type of each tensor of inputs and targets, by name.

    Args:
        batch: inputs and targets.
    """
    named = [*named_leaves("inputs", batch[0]), *named_leaves("targets", batch[1])]
    return {name: leaf.dtype for name, leaf in named if isinstance(leaf, Tensor)}


def two_types(part: str, one: tuple[str, Any], other: tuple[str, Any]) -> str:
    """Return the sentence about two types that don't go together.

    Args:
        part: the part of inputs or targets.
        one: whose items have the first type, and this type.
        other: the same of the second type.
    """
    bytes_too = " (pixels, which are scaled to [-1, 1])"
    said_types = [f"{dtype}{bytes_too if dtype == torch.uint8 else ''} in {whose}" for whose, dtype in (one, other)]
    return f"data.clients: {part} are {' and '.join(said_types)}; give all Datasets one type, such as float32"
