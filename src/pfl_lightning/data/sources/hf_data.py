"""Data sets of Hugging Face ``datasets``, from local files."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from numpy.typing import NDArray
from torch import Tensor

from pfl_lightning.data.datamodule import DataSettings
from pfl_lightning.data.samples import Loaded
from pfl_lightning.data.sources.base import OwnedData, resident, targets_of
from pfl_lightning.data.sources.columns import check_finite_column, chosen_columns, client_files, package
from pfl_lightning.settings import Unpack
from pfl_lightning.tasks import Task

SAVED = ("dataset_info.json", "dataset_dict.json", "state.json")
"""Files in the folder of a saved ``datasets.Dataset``, one of them at least."""


class HFData(OwnedData):
    """A data set of Hugging Face ``datasets``, or of local files in one of their formats; needs the extra ``hf``.

    The network is never used: names on the hub are refused. Up to 1 GiB is read into memory; larger inputs stay in
    Arrow's files and are read one client at a time.

    Args:
        dataset: a ``datasets.Dataset``, the folder of a saved one, or a ``.parquet``, ``.arrow``, ``.csv``, ``.json``
            or ``.jsonl`` file; or a folder with a ``CLIENT.jsonl``, ``CLIENT.csv`` or ``CLIENT.parquet`` for each
            client, whose clients are named by files.
        target: column of the target.
        task: the prediction task.
        features: columns of the inputs: one column of sequences of one length or of images, or several columns of
            numbers, which become single precision unless all are integers; None takes all other columns.
        client: column of each row's client; None under another partitioner than `Natural`, and for a folder with a
            file for each client.
        time: column of each row's time.
        split_column: column of ``train``, ``val`` or ``test``.
        **kwargs: settings of `FederatedDataModule`; ``root`` and ``download`` have no effect.

    Raises:
        MisconfigurationException: if there is no such file or column, or numbers are missing or not finite.
    """

    def __init__(
        self,
        dataset: Any,
        target: str,
        task: Task,
        features: list[str] | None = None,
        client: str | None = None,
        time: str | None = None,
        split_column: str | None = None,
        **kwargs: Unpack[DataSettings],
    ) -> None:
        super().__init__(task, **kwargs)
        self._dataset, self._owners = with_owners(dataset)
        if self._owners is not None and client is not None:
            raise MisconfigurationException(
                f"data.client={client!r}: each file of the folder data.dataset={str(dataset)!r} is a client's, by its "
                "name; leave the column out"
            )
        there = self._dataset.column_names
        named = {"client": client, "split_column": split_column, "time": time}
        self._columns, (self._target, *_) = chosen_columns(there, features, target, **named)
        self._others = {"client": client, "split": split_column, "time": time}
        self._leaf = ArrowRows(self._dataset, self._columns)
        # from one row read in the end, since Arrow's own types don't tell the shape of images
        self.input_shape = tuple(self._leaf[np.arange(1)].shape[1:])

    def load(self) -> Loaded:
        """Read targets and other columns, and small inputs."""
        y = np.asarray(self._dataset.with_format("numpy", columns=[self._target])[:][self._target])
        if y.dtype.kind not in "biuf":
            raise MisconfigurationException(
                f"data.target: column {self._target!r} doesn't hold numbers of one shape; map it to numbers, or "
                "turn texts that are classes into numbers by the data set's class_encode_column"
            )
        check_finite_column(torch.as_tensor(y), f"data.target: column {self._target!r}")
        columns = {
            # as Python values: NumPy's format would turn integers with gaps into floats
            name: None if column is None else list(self._dataset.with_format(None)[column])
            for name, column in self._others.items()
        }
        if self._owners is not None:
            columns["client"] = self._owners
        return Loaded(resident(self._leaf, len(self._leaf) * self._leaf[np.arange(1)].nbytes), targets_of(y), **columns)


class ArrowRows:
    """Columns of a data set, whose rows are read on access.

    Args:
        dataset: a ``datasets.Dataset``.
        columns: one column, or several columns of numbers.
    """

    def __init__(self, dataset: Any, columns: list[str]) -> None:
        self.columns = columns
        self.dataset = dataset.with_format("numpy", columns=columns)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, positions: NDArray[np.int64]) -> Tensor:
        found = self.dataset[positions.tolist()]
        arrays = [np.asarray(found[column]) for column in self.columns]
        if any(array.dtype.kind not in "biuf" for array in arrays):
            wrong = next(
                column for column, array in zip(self.columns, arrays, strict=True) if array.dtype.kind not in "biuf"
            )
            raise MisconfigurationException(
                f"data.features: column {wrong!r} doesn't hold numbers of one shape; map it to numbers, or leave it out"
            )
        tensors = [torch.from_numpy(array) for array in arrays]
        # checked on each access, as the rows may be too many to look through on loading
        for column, tensor in zip(self.columns, tensors, strict=True):
            check_finite_column(tensor, f"data.features: column {column!r}", positions)
        if len(tensors) == 1:
            # Pillow images come with the channels last; grey images have three dimensions and stay
            is_image = tensors[0].dtype == torch.uint8 and tensors[0].dim() == 4
            return tensors[0].permute(0, 3, 1, 2) if is_image else tensors[0]
        # integers may be codes, such as tokens of texts, which a net looks up
        if any(tensor.is_floating_point() for tensor in tensors):
            return torch.stack([tensor.float() for tensor in tensors], dim=1)
        return torch.from_numpy(np.stack(arrays, axis=1))


def with_owners(dataset: Any) -> tuple[Any, list[str] | None]:
    """Return a data set, and the client of each row if it is given as a folder with a file for each client.

    Args:
        dataset: a ``datasets.Dataset``, or a path.

    Raises:
        MisconfigurationException: if a file can't be read or has no rows, or files differ in their columns.
    """
    path = Path(str(dataset))
    datasets = package("datasets", "hf", "HFData")
    is_folder = not isinstance(dataset, datasets.Dataset) and path.is_dir()
    if not is_folder or any((path / name).is_file() for name in SAVED):
        return local_dataset(dataset), None
    files = client_files(path, "data.dataset", (".jsonl", ".csv", ".parquet"))
    parts = {name: local_dataset(file) for name, file in files.items()}
    first = next(iter(parts))
    for name, part in parts.items():
        if not len(part):
            raise MisconfigurationException(
                f"data.dataset={str(path)!r}: {files[name].name} has no rows; give at least one, or remove the file"
            )
        if odd := sorted({*part.column_names} ^ {*parts[first].column_names}):
            lacking = name if odd[0] in parts[first].column_names else first
            raise MisconfigurationException(
                f"data.dataset={str(path)!r}: {files[lacking].name} has no column {odd[0]!r}, and another file has; "
                "give all files the same columns"
            )
    try:
        whole = datasets.concatenate_datasets([*parts.values()])
    # a column of texts in one file and of numbers in another, for which pyarrow raises many types
    except Exception as error:
        reason = " ".join(str(error).split())[:100]
        raise MisconfigurationException(
            f"data.dataset={str(path)!r} has files with columns of different types ({reason}); give all the same types"
        ) from None
    return whole, [name for name, part in parts.items() for _ in range(len(part))]


def local_dataset(dataset: Any, setting: str = "data.dataset", owner: str = "HFData") -> Any:
    """Return a data set, read from local files if given by a path.

    Args:
        dataset: a ``datasets.Dataset``, or a path.
        setting: the setting that gives it, for messages.
        owner: the class of the setting, for messages.

    Raises:
        MisconfigurationException: if there is no such file, or the package is missing.
    """
    datasets = package("datasets", "hf", owner)
    if isinstance(dataset, datasets.Dataset):
        return dataset
    path = Path(str(dataset))
    readers = {
        ".parquet": datasets.Dataset.from_parquet,
        ".arrow": datasets.Dataset.from_file,
        ".csv": datasets.Dataset.from_csv,
        ".json": datasets.Dataset.from_json,
        ".jsonl": datasets.Dataset.from_json,
    }
    if path.is_dir() and not any((path / name).is_file() for name in SAVED):
        raise MisconfigurationException(
            f"{setting}={str(dataset)!r} is a folder, and no saved data set; for a CLIENT.csv or CLIENT.parquet of "
            "each client take TableData, for CLIENT.jsonl with conversations ChatData, or save the set by save_to_disk"
        )
    reader = datasets.load_from_disk if path.is_dir() else readers.get(path.suffix)
    if reader is None or not path.exists():
        raise MisconfigurationException(
            f"{setting}={str(dataset)!r} is no local folder of a saved data set, nor a {', '.join(readers)} file; "
            "download it first, as nothing is fetched here"
        )
    try:
        table = reader(str(path))
    # the readers raise many types, their own ones and pyarrow's
    except Exception as error:
        reason = " ".join(str(error).split())[:100]
        raise MisconfigurationException(f"{setting}={str(path)!r} cannot be read ({reason})") from None
    if isinstance(table, datasets.DatasetDict):
        raise MisconfigurationException(
            f"{setting}={str(path)!r} has several data sets; give the folder of one, such as {str(path / min(table))!r}"
        )
    return table
