"""Checkpoints that are whole or not there."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from zipfile import ZipFile, is_zipfile

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins.io import TorchCheckpointIO

from pfl_lightning.messages import tree_map
from pfl_lightning.runs.whole_files import replacing
from pfl_lightning.stopping import postponed

ENTRIES = {"state_dict", "federation", "pytorch-lightning_version"}
"""What every checkpoint of a federation has."""
HANDED_OVER = ".temp.ckpt"
"""Name of the file in which Lightning's processes hand their weights to the first one, and nothing else."""


class AtomicCheckpointIO(TorchCheckpointIO):
    """Lightning's checkpoint files, put in place in one step: a run killed while it saves keeps the last one.

    Lightning writes through a temporary file too, but in the system's folder for them, and a move from another
    file system is a copy that can be cut short. It also makes the whole file in memory first, which for large clients
    is as much as all of their states again.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Saves beside the path and renames.

        Raises:
            OSError: if the file can't be written; an earlier one stays.
        """
        if "callbacks" in checkpoint:
            # scores are where the models are, and a machine without such a device couldn't read them
            checkpoint = checkpoint | {"callbacks": tree_map(lambda t: t.cpu(), checkpoint["callbacks"])}
        if "://" in str(path) or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with replacing(Path(path)) as partial:
            save(checkpoint, partial)

    def load_checkpoint(
        self,
        path: Any,
        map_location: Callable[..., Any] | None = lambda storage, location: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Loads a checkpoint, after its bytes have been compared with the checksums that are in it.

        Args:
            path: the file, or an address that Lightning reads.
            map_location: as for `torch.load`.
            weights_only: whether tensors and plain values alone may be in it; None is yes, where Lightning's None is no
                for what comes over the network.

        Raises:
            MisconfigurationException: if the file isn't a whole checkpoint of a federation, or not what was saved.
        """
        try:
            if is_zipfile(path):
                compare_checksums(path)
            checkpoint = super().load_checkpoint(path, map_location, weights_only is not False)
        except FileNotFoundError as error:
            raise MisconfigurationException(f"ckpt_path={str(path)!r}: there is no such file.") from error
        except Exception as error:  # torch raises one of many kinds for a damaged file
            raise MisconfigurationException(
                f"ckpt_path={str(path)!r} can't be read as a checkpoint ({flaw(path, error)}); {another(path)}."
            ) from error
        if Path(path).name != HANDED_OVER and not (isinstance(checkpoint, dict) and ENTRIES <= checkpoint.keys()):
            raise MisconfigurationException(
                f"ckpt_path={str(path)!r}: the checkpoint is not of a federation; {another(path)}."
            )
        return checkpoint


def flaw(path: Any, error: Exception) -> str:
    """What is wrong with a file that torch can't load."""
    file = Path(path)
    if file.is_dir():
        return "it is a folder"
    if file.is_file() and not file.stat().st_size:
        return "it is empty"
    # of advice on torch's own settings, which follows in some, only the first sentence is kept
    return f"it is cut short, damaged or of another kind: {type(error).__name__}: {str(error).split('. ')[0]}"[:150]


def another(path: Any) -> str:
    """What to take in a checkpoint's place: one that lies in the folder, or beside the file."""
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    others = sorted(file for file in folder.glob("**/*.ckpt") if file != Path(path) and file.stat().st_size)
    return f"take another one, such as {others[0] if others else 'checkpoints/last.ckpt in a folder of a run'}"


def save(content: Any, path: Path) -> None:
    """`torch.save`, whose files hold a checksum of each of their parts, with the system's errors.

    Args:
        content: what is saved.
        path: the file.

    Raises:
        OSError: if it can't be written; torch itself, at a full disk, complains of an unexpected position.
    """
    try:
        with postponed(), path.open("wb") as file:
            torch.save(content, file)
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def compare_checksums(path: Path | str) -> None:
    """Reads a file of `torch.save` through; torch itself never looks at the checksums that it has written.

    Raises:
        ValueError: if a part of it isn't what was saved.
    """
    with ZipFile(path) as file:
        if damaged := file.testzip():
            raise ValueError(f"the checksum of {damaged} differs")
