"""Partitions of Hugging Face data sets, such as those of Flower Datasets."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.data.datamodule import DataSettings
from pfl_lightning.data.samples import Loaded
from pfl_lightning.data.sources.columns import package
from pfl_lightning.data.sources.hf_data import HFData
from pfl_lightning.settings import Unpack
from pfl_lightning.tasks import Task

SPLITS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}
"""Names of splits by those of Hugging Face."""


class FlowerDatasets(HFData):
    """Clients that hold partitions of Hugging Face data sets, such as ``flwr_datasets`` makes; needs the extra ``hf``.

    .. code-block:: python

        federated = flwr_datasets.FederatedDataset(dataset="mnist", partitioners={"train": 10})
        data = FlowerDatasets(federated, "label", Classification(num_classes=10))

    The partitions are read when the data module is made, which lets ``flwr_datasets`` fetch its files; nothing else is
    fetched. With partitioners for train and test, each client has its own test samples; with one for train alone, its
    samples are split by ``test_fraction`` and ``val_fraction``.

    Args:
        partitions: an object with ``load_partition`` and ``partitioners``, as ``flwr_datasets.FederatedDataset`` has;
            or one of its partitioners, with ``load_partition`` and ``num_partitions``; or a list of
            ``datasets.Dataset``, or a mapping from clients' names to them. A partition may be a ``DatasetDict``, or a
            dict of data sets by the names of splits.
        target: column of the target.
        task: the prediction task.
        features: columns of the inputs, as in `HFData`; None takes all other columns.
        **kwargs: settings of `FederatedDataModule`; ``root`` and ``download`` have no effect.

    Raises:
        MisconfigurationException: if there are no partitions, they differ in their columns, or a split has another
            name.
    """

    def __init__(
        self,
        partitions: Any,
        target: str,
        task: Task,
        features: list[str] | None = None,
        **kwargs: Unpack[DataSettings],
    ) -> None:
        datasets = package("datasets", "hf", "FlowerDatasets")
        parts = [
            (name, split, part) for name, held in partitions_of(partitions) for split, part in by_split(name, held)
        ]
        # an empty data set may have lost the types of its columns
        parts = [(name, split, part) for name, split, part in parts if len(part)]
        if not parts:
            raise MisconfigurationException("data.partitions has no samples; give partitions with some")
        try:
            whole = datasets.concatenate_datasets([part.with_format(None) for *_, part in parts])
        except ValueError as error:
            reason = " ".join(str(error).split())[:120]
            raise MisconfigurationException(
                f"data.partitions differ in their columns ({reason}); cast them to the same features"
            ) from None
        super().__init__(whole, target, task, features, **kwargs)
        self._owners = [name for name, _, part in parts for _ in range(len(part))]
        splits = [split for _, split, part in parts for _ in range(len(part))]
        # partitions of train alone are split here
        self._splits = splits if len(set(splits)) > 1 else None

    def load(self) -> Loaded:
        """Read targets, and small inputs."""
        return replace(super().load(), client=self._owners, split=self._splits)


def partitions_of(partitions: Any) -> Iterator[tuple[Any, Any]]:
    """Yield name, or number from 0, and partition of each client.

    Args:
        partitions: the argument of `FlowerDatasets`.

    Raises:
        MisconfigurationException: if the argument has no partitions.
    """
    if isinstance(partitions, Mapping):
        yield from partitions.items()
    elif isinstance(partitions, Sequence) and not isinstance(partitions, str):
        yield from enumerate(partitions)
    elif hasattr(partitions, "partitioners") and hasattr(partitions, "load_partition"):
        made = dict(partitions.partitioners)
        # a partitioner knows its number of partitions once it has a data set, which the first partition gives it
        first = {split: partitions.load_partition(0, split) for split in made}
        counts = {split: partitioner.num_partitions for split, partitioner in made.items()}
        if len(set(counts.values())) != 1:
            raise MisconfigurationException(
                f"data.partitions has {counts} partitions by split; let each split have one for each client"
            )
        names = names_of(next(iter(made.values())), next(iter(counts.values())))
        for number, name in enumerate(names):
            yield name, {split: partitions.load_partition(number, split) if number else first[split] for split in made}
    elif hasattr(partitions, "load_partition"):
        first = partitions.load_partition(0)
        for number, name in enumerate(names_of(partitions, partitions.num_partitions)):
            yield name, partitions.load_partition(number) if number else first
    else:
        raise MisconfigurationException(
            f"data.partitions={type(partitions).__name__} must be a FederatedDataset, a list of data sets, or a "
            "mapping from names to them"
        )


def names_of(partitioner: Any, count: int) -> list[Any]:
    """Return the names that a partitioner by a column gives its partitions, else their numbers.

    Args:
        partitioner: a partitioner of ``flwr_datasets``.
        count: number of partitions.
    """
    named = getattr(partitioner, "partition_id_to_natural_id", None) or {}
    return [named[number] for number in range(count)] if set(named) == set(range(count)) else list(range(count))


def by_split(name: Any, held: Any) -> Iterator[tuple[str, Any]]:
    """Yield split and data set of each part of a client's partition.

    Args:
        name: the client's name.
        held: a data set, or data sets by the names of splits.

    Raises:
        MisconfigurationException: if a split has another name, or a part is no data set.
    """
    parts = held if isinstance(held, Mapping) else {"train": held}
    for split, part in parts.items():
        if split not in SPLITS:
            raise MisconfigurationException(
                f"data.partitions: client {name!r} has a split {split!r}; name splits {', '.join(SPLITS)}"
            )
        if not isinstance(part, package("datasets", "hf", "FlowerDatasets").Dataset):
            raise MisconfigurationException(
                f"data.partitions: {split} of client {name!r} is a {type(part).__name__}; give a datasets.Dataset"
            )
        yield SPLITS[split], part
