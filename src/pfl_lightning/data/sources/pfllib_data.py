"""Data in the folders that PFLlib's scripts write."""

import json
import pickle
import zipfile
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from numpy.typing import NDArray

from pfl_lightning.data.datamodule import DivisionSettings
from pfl_lightning.data.samples import Loaded
from pfl_lightning.data.sources.base import OwnedData, single, targets_of
from pfl_lightning.data.sources.columns import check_finite_column
from pfl_lightning.settings import Unpack
from pfl_lightning.tasks import Classification, Task

SPLITS = ("train", "test")

# Functions by which NumPy pickles arrays, taken from arrays, as their modules differ between NumPy 1 and 2.
NUMPY: dict[str, Any] = {
    "ndarray": np.ndarray,
    "dtype": np.dtype,
    "_reconstruct": np.zeros(1).__reduce__()[0],
    "scalar": np.float64(0).__reduce__()[0],
    "_frombuffer": np.zeros(1).__reduce_ex__(5)[0],
}
"""What a pickle may name: the parts of an array."""
MODULES = {"numpy", *(f"numpy.{core}.{part}" for core in ("core", "_core") for part in ("multiarray", "numeric"))}


class PFLlibData(OwnedData):
    """The clients of a folder that a script of PFLlib wrote: ``train/N.npz``, ``test/N.npz`` and ``config.json``.

    Each file holds ``data``, a dict of arrays ``x`` and ``y``, as ``numpy.savez_compressed(file, data=...)`` writes it.
    Clients are numbered as the files, and keep PFLlib's split into train and test; PFLlib validates nobody, so without
    ``val_fraction`` there is no validation. All files are read into memory. PFLlib's training loaders drop the last
    batch, which is ``last_batch="drop"``.

    The dict is a pickle, and an ordinary reading of a pickle runs whatever its writer named. Here a pickle may name
    the parts of arrays alone; any other name is refused unread.

    Args:
        root: the folder, such as ``dataset/MNIST``.
        task: the prediction task; None is the classification of as many classes as ``config.json`` says.
        val_fraction: share of a client's training samples to validate on, in [0, 1).
        **kwargs: settings of `FederatedDataModule`; ``test_fraction`` and ``download`` have no effect.

    Raises:
        MisconfigurationException: if there are no such files, or a file holds something else.

    Source: Zhang et al., PFLlib: A Beginner-Friendly and Comprehensive Personalized Federated Learning Library and
        Benchmark, JMLR 26, 2025 (https://github.com/TsingZ0/PFLlib).
    """

    # named although it is among the keyword arguments, for its default here, which the command line takes from here
    def __init__(  # type: ignore[misc]
        self, root: str, task: Task | None = None, val_fraction: float = 0.0, **kwargs: Unpack[DivisionSettings]
    ) -> None:
        config = config_of(Path(root))
        # before the task: a wrong folder has no configuration either
        clients = clients_in(Path(root), config.get("num_clients"))
        if task is None:
            count = config.get("num_classes")
            if not isinstance(count, int) or count < 2:
                raise MisconfigurationException(
                    f"data.task=null: {Path(root, 'config.json')} names no num_classes; give a task, such as "
                    "Classification(num_classes=10)"
                )
            task = Classification(count)
        super().__init__(task, root=root, val_fraction=val_fraction, **kwargs)
        self._clients = clients
        x, _ = samples_in(Path(root, "train", f"{self._clients[0]}.npz"))
        self.input_shape = tuple(x.shape[1:])

    def load(self) -> Loaded:
        """Read all files."""
        x, y, owners, splits = [], [], [], []
        for client in self._clients:
            for split in SPLITS:
                path = Path(self.root, split, f"{client}.npz")
                # a client without test samples may lack a file
                if split == "test" and not path.is_file():
                    continue
                inputs, targets = samples_in(path)
                if tuple(inputs.shape[1:]) != self.input_shape and len(inputs):
                    raise MisconfigurationException(
                        f"{path} has inputs of shape {list(inputs.shape[1:])}, the first client "
                        f"{list(self.input_shape)}; correct the files"
                    )
                if len(inputs):
                    x.append(single(torch.from_numpy(inputs)))
                    y.append(targets_of(torch.from_numpy(targets)))
                    check_finite_column(x[-1], f"x of {path}")
                owners += [client] * len(inputs)
                splits += [split] * len(inputs)
        return Loaded(torch.cat(x), torch.cat(y), owners, splits)


def config_of(root: Path) -> dict[str, Any]:
    """Return the content of ``config.json``; empty without that file.

    Args:
        root: the folder.

    Raises:
        MisconfigurationException: if the file is no JSON object.
    """
    path = root / "config.json"
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise MisconfigurationException(f"{path} is no JSON ({error}); write it again by PFLlib's script") from None
    if not isinstance(content, dict):
        raise MisconfigurationException(f"{path} is no JSON object; write it again by PFLlib's script")
    return content


def clients_in(root: Path, count: Any) -> list[int]:
    """Return the numbers of the clients.

    Args:
        root: the folder.
        count: the number of clients by ``config.json``: files beyond are left from an earlier run of PFLlib's script,
            and PFLlib doesn't read them either; None takes all files.

    Raises:
        MisconfigurationException: if there are no files, or a client has none.
    """
    there = sorted(int(path.stem) for path in (root / "train").glob("*.npz") if path.stem.isdecimal())
    wanted = list(range(count)) if isinstance(count, int) else there
    if not wanted or not there:
        raise MisconfigurationException(
            f"data.root={str(root)!r} has no train/0.npz; give the folder that a script of PFLlib wrote, such as "
            "dataset/MNIST"
        )
    if lacking := sorted(set(wanted) - set(there)):
        raise MisconfigurationException(
            f"{root / 'config.json'} says num_clients={count}, and there is no train/{lacking[0]}.npz; run PFLlib's "
            "script again"
        )
    return wanted


def samples_in(path: Path) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the inputs and targets of a file.

    Args:
        path: the file.

    Raises:
        MisconfigurationException: if the file holds something else.
    """
    try:
        held = unpickled(path)
        content = held.item() if isinstance(held, np.ndarray) and held.shape == () else held
        x, y = (np.asarray(content[name]) for name in ("x", "y"))
    except (OSError, ValueError, KeyError, TypeError, IndexError, EOFError, zipfile.BadZipFile) as error:
        raise no_samples(path, error) from None
    except pickle.UnpicklingError as error:
        raise no_samples(path, error) from None
    for name, values in (("x", x), ("y", y)):
        if values.dtype.kind not in "biuf":
            raise MisconfigurationException(f"{path}: {name} are no numbers of one shape; give them by TensorData")
    if len(x) != len(y):
        raise MisconfigurationException(f"{path} has {len(x)} x and {len(y)} y; write it again by PFLlib's script")
    # an array made by a pickle may lie on memory that can't be written, which torch doesn't take
    return np.array(x), np.array(y)


def no_samples(path: Path, error: Exception) -> MisconfigurationException:
    """Return the error for a file with another content.

    Args:
        path: the file.
        error: what its reading raised.
    """
    reason = " ".join(str(error).split())[:120]
    return MisconfigurationException(
        f"{path} is no file of PFLlib ({type(error).__name__}: {reason}); it has data, a dict of arrays x and y"
    )


def unpickled(path: Path) -> Any:
    """Return the entry ``data`` of an npz file, whose pickle may name arrays alone.

    Args:
        path: the file.

    Raises:
        UnpicklingError: if the pickle names something else.
    """
    with zipfile.ZipFile(path) as archive:
        content = BytesIO(archive.read("data.npy"))
    version = np.lib.format.read_magic(content)
    headers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    if version not in headers:
        raise ValueError(f"version {version} of NumPy's format")
    _, _, dtype = headers[version](content)
    if not dtype.hasobject:
        raise TypeError("data is an array and no dict")
    return ArraysAlone(content).load()


class ArraysAlone(pickle.Unpickler):
    """Unpickle numbers, texts, lists, dicts and NumPy's arrays, and refuse all other names, which would run code."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the part of an array with a name.

        Args:
            module: the module that the pickle names.
            name: the name within.

        Raises:
            UnpicklingError: for any other name.
        """
        if module not in MODULES or name not in NUMPY:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which isn't read as it could run code")
        return NUMPY[name]
