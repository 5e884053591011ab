"""Checkpoints that are whole or not there."""

import os
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins.io import TorchCheckpointIO


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
            MisconfigurationException: if the file isn't a whole checkpoint.
        """
        try:
            return super().load_checkpoint(path, *args, **kwargs)
        except FileNotFoundError as error:
            raise MisconfigurationException(f"ckpt_path={str(path)!r}: there is no such file.") from error
        except Exception as error:  # torch raises one of many kinds for a damaged file
            # of advice on torch's own settings, which follows in some, only the first sentence is kept
            reason = f"{type(error).__name__}: {str(error).split('. ')[0]}"[:120]
            raise MisconfigurationException(
                f"ckpt_path={str(path)!r} can't be read as a checkpoint ({reason}); take another one."
            ) from error
