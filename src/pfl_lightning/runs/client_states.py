"""Clients' states on the disk, for federations whose clients together are larger than the memory."""

import os
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from itertools import count
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO

from pfl_lightning.engines import ClientState
from pfl_lightning.runs.checkpoint_io import AtomicCheckpointIO, save
from pfl_lightning.runs.folder import remove_states, states_folder


class DiskStates(MutableMapping[int, ClientState]):
    """States by client id, each in a file; a state that is looked up is mapped, and read as far as it is used.

    Tensors that were looked up stay what they were when their client gets another state: no file is written twice, and
    one that is unlinked lives on until nobody maps it. Writing into them changes nothing on the disk.

    Args:
        folder: where they are kept, in a folder of their own, which goes when this object or the process does; it is
            made if need be. None takes the system's folder for temporary files.
        states: states to begin with.
    """

    def __init__(self, folder: Path | None, states: Mapping[int, ClientState]) -> None:
        self._folder = states_folder(folder)
        weakref.finalize(self, remove_states, self._folder)
        self._files: dict[int, str] = {}
        self._numbers = count()
        self.update(states)

    def __getitem__(self, client: int) -> ClientState:
        return ClientState(**torch.load(self._files[client], mmap=True, weights_only=True))

    def __setitem__(self, client: int, state: ClientState) -> None:
        path = os.path.join(self._folder, f"{client}-{next(self._numbers)}.pt")
        save(vars(state), Path(path))
        # the earlier state counts until the new one is whole
        earlier, self._files[client] = self._files.get(client), path
        if earlier is not None:
            os.unlink(earlier)

    def __delitem__(self, client: int) -> None:
        os.unlink(self._files.pop(client))

    def __iter__(self) -> Iterator[int]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


class _Mapped(TorchCheckpointIO):
    def load_checkpoint(
        self,
        path: Any,
        map_location: Callable[..., Any] | None = lambda storage, location: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        if "://" in str(path):
            return super().load_checkpoint(path, map_location, weights_only)
        loaded: dict[str, Any] = torch.load(path, map_location, weights_only=weights_only, mmap=True)
        return loaded


class MappedCheckpointIO(AtomicCheckpointIO, _Mapped):
    """The same checkpoints, whose local files are mapped: their tensors are read when they are used."""
