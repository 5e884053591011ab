"""Read files from outside, each kind in one way: arrays and tensors, and checkpoints.

A file is read whole or refused in one sentence, and no reader runs code from it. Tables are read by
`data.sources.columns`, and YAML by `cli.yaml_text`.
"""

import errno
import pickle
import sys
import warnings
from collections.abc import Callable, Collection
from functools import lru_cache
from pathlib import Path
from typing import Any
from zipfile import ZipFile, is_zipfile

import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.data.record_columns import in_rows

ARRAYS = (".npy", ".pt", ".pth")
"""Endings of files with arrays and tensors."""
ENTRIES = ("state_dict", "federation", "pytorch-lightning_version")
"""Entries of every checkpoint of a federation."""
PLAIN = ("state_dict", "pytorch-lightning_version")
"""Entries of every checkpoint of Lightning."""
MAPPED_CAN_GO = sys.platform != "win32"
"""Whether a memory-mapped file can be replaced or removed; where it can't, files are read whole."""


def read_array(path: Path, owner: str) -> Any:
    """Return the array of a ``.npy`` file, or the tensors of a ``.pt`` file, memory-mapped.

    Args:
        path: the file.
        owner: beginning of the error message, such as ``data.x='x.npy'``.

    Raises:
        MisconfigurationException: if the file is of another kind, or has no array or tensor.
    """
    if path.suffix not in ARRAYS:
        raise MisconfigurationException(f"{owner} must be a .npy or .pt file")
    try:
        # mapped, as a pool may be larger than memory; an array of objects is refused by NumPy itself
        if path.suffix == ".npy":
            return np.lib.format.open_memmap(path, mode="r")
        return saved_by_torch(path, "cpu", mapped=True)
    except Exception as error:  # NumPy and torch raise many types
        raise MisconfigurationException(
            f"{owner} cannot be read ({flaw(path, error)}); give a file with an array or a tensor"
        ) from None


def read_checkpoint(
    path: Path | str,
    owner: str = "",
    needed: Collection[str] = ENTRIES,
    instead: str = "",
    map_location: str | torch.device | Callable[..., Any] | None = "cpu",
    mapped: bool = True,
) -> dict[str, Any]:
    """Return a checkpoint of tensors and plain values, after comparing its bytes with the checksums inside.

    Args:
        path: the file.
        owner: beginning of the error message; empty for ``ckpt_path='PATH'``.
        needed: entries that the checkpoint must have.
        instead: end of the error message; empty advises another checkpoint.
        map_location: device of the tensors, as for `torch.load`.
        mapped: whether tensors are read on first use.

    Raises:
        MisconfigurationException: if the file is missing, damaged or of another kind.
    """
    owner = owner or f"ckpt_path={str(path)!r}"
    try:
        check_whole(path)
        content = saved_by_torch(path, map_location, mapped)
        if isinstance(content, dict) and "federation" in content:
            content["federation"] = in_rows(content["federation"])
    except FileNotFoundError as error:
        raise MisconfigurationException(f"{owner}: there is no such file{instead and f'; {instead}'}.") from error
    except Exception as error:  # torch raises one of many kinds for a damaged file
        # no cause: torch's own text advises to load without its safeguard
        raise MisconfigurationException(
            f"{owner} can't be read as a checkpoint ({flaw(path, error)}); {instead or another(path)}."
        ) from None
    if not (isinstance(content, dict) and all(name in content for name in needed)):
        kind = "of a federation" if "federation" in needed else "of Lightning"
        raise MisconfigurationException(f"{owner}: the checkpoint is not {kind}; {instead or another(path)}.")
    return content


def saved_by_torch(path: Path | str, map_location: Any, mapped: bool) -> Any:
    """Return the tensors and plain values of a `torch.save` file; a mapped file's tensors are read on first use."""
    with warnings.catch_warnings():
        # torch tells of an unusual pickle before it refuses it
        warnings.filterwarnings("ignore", message="Detected pickle protocol")
        # only files of torch's present format can be mapped
        return torch.load(path, map_location, weights_only=True, mmap=mapped and MAPPED_CAN_GO and is_zipfile(path))


def check_whole(path: Path | str) -> None:
    """Compare the parts of a `torch.save` file with their checksums, which torch writes but never reads.

    A file without checksums passes. A large file is read once, however often it is checked.

    Args:
        path: the file.

    Raises:
        OSError: if the file is missing or unreadable.
        ValueError: if a part differs.
    """
    now = Path(path).stat()
    if is_zipfile(path):
        compare_checksums(str(path), now.st_ino, now.st_size, now.st_mtime_ns)


# an error isn't kept, so that each reading of a damaged file is refused
@lru_cache(maxsize=64)
def compare_checksums(path: str, *version: int) -> None:
    """Compare the parts of a zip file with their checksums.

    Args:
        path: the file.
        *version: numbers that change with the file.

    Raises:
        ValueError: if a part differs.
    """
    with ZipFile(path) as file:
        if damaged := file.testzip():
            raise ValueError(f"the checksum of {damaged} differs")


def flaw(path: Path | str, error: Exception) -> str:
    """Return the reason why a file can't be read."""
    file = Path(path)
    if file.is_dir():
        return "it is a folder"
    if file.is_file() and not file.stat().st_size:
        return "it is empty"
    if isinstance(error, OSError) and error.errno in (errno.ENOENT, errno.EACCES, errno.EPERM, errno.EIO):
        return error.strerror or ""
    # torch's text for these advises to load the file without the safeguard against code
    if isinstance(error, pickle.UnpicklingError):
        return "it is damaged, or has Python objects, which might run code"
    # only the first sentence: NumPy and torch go on with advice on their own settings, which would mislead here
    said = " ".join(str(error).split()).split(". ")[0]
    return f"it is cut short, damaged or of another kind: {type(error).__name__}: {said}"[:150]


def another(path: Path | str) -> str:
    """Return advice to take another checkpoint: an existing file of the same folder, or else a typical path."""
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    others = sorted(file for file in folder.glob("**/*.ckpt") if file != Path(path) and file.stat().st_size)
    return f"take another one, such as {others[0] if others else 'checkpoints/last.ckpt in a folder of a run'}"
