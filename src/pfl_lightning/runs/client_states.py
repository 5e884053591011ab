"""Client states on disk, for federations larger than memory."""

import os
import weakref
from collections.abc import Iterator, Mapping, MutableMapping
from itertools import count
from pathlib import Path

import torch

from pfl_lightning.data.files import MAPPED_CAN_GO
from pfl_lightning.engines import ClientState
from pfl_lightning.runs.checkpoint_io import save
from pfl_lightning.runs.folder import remove_states, states_folder


class DiskStates(MutableMapping[int, ClientState]):
    """Client states by id, one file per state; a looked-up state is memory-mapped and read as far as used.

    Looked-up tensors keep their values when their client gets another state: no file is written twice, and an unlinked
    file lives on as long as it is mapped. Windows unlinks no mapped file, so a state is read whole there. Writing into
    the tensors changes nothing on disk.

    Args:
        folder: parent of the states' own folder, made if missing; the states' folder is removed with this object or
            process. None takes the system's temporary folder.
        states: initial states.
    """

    def __init__(self, folder: Path | None, states: Mapping[int, ClientState]) -> None:
        self._folder = states_folder(folder)
        weakref.finalize(self, remove_states, self._folder)
        self._files: dict[int, str] = {}
        # a new name for each state: overwriting a mapped file would change tensors in use
        self._numbers = count()
        self.update(states)

    def __getitem__(self, client: int) -> ClientState:
        return ClientState(**torch.load(self._files[client], mmap=MAPPED_CAN_GO, weights_only=True))

    def __setitem__(self, client: int, state: ClientState) -> None:
        path = os.path.join(self._folder, f"{client}-{next(self._numbers)}.pt")
        save(vars(state), Path(path))
        # only now, when the new file is complete: until here the earlier state counts
        earlier, self._files[client] = self._files.get(client), path
        if earlier is not None:
            os.unlink(earlier)

    def __delitem__(self, client: int) -> None:
        os.unlink(self._files.pop(client))

    def __iter__(self) -> Iterator[int]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)
