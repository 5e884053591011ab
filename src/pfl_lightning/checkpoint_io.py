"""Checkpoints that are whole or not there."""

import os
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins.io import TorchCheckpointIO

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
        """Saves beside the path and renames."""
        if "://" in str(path) or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        partial = Path(f"{path}.partial")
        partial.parent.mkdir(parents=True, exist_ok=True)
        torch.save(checkpoint, partial)
        os.replace(partial, path)

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Loads a checkpoint.

        Raises:
            MisconfigurationException: if the file isn't a whole checkpoint of a federation.
        """
        try:
            checkpoint = super().load_checkpoint(path, *args, **kwargs)
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
