"""What stays with a site's clients between rounds, on the site's own disk."""

import os
import re
import secrets
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.engines import ClientState
from pfl_lightning.flower.template import Refused
from pfl_lightning.runs.checkpoint_io import compare_checksums, flaw, save
from pfl_lightning.runs.whole_files import replacing

TOKEN = re.compile("[0-9a-f]{16}")
LEFT_BEHIND = 3600
"""Seconds after which a file that never took its place is taken for that of a killed process."""


class StateVersions:
    """Versions of clients' states, each in a file of its own that is never changed.

    A version is named by a token, which the server keeps in the place of the state. Each follows the one that its
    client began the round with; what follows the same first version is a line. Lines are kept apart, so that a new run
    drops nothing of an earlier one.

    Args:
        folder: where they are; it is made if need be, and closed to all but its owner.

    Raises:
        MisconfigurationException: if it can't be made or closed.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder).absolute()
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            # one that was there, whatever the umask
            self.folder.chmod(0o700)
        except OSError as error:
            raise MisconfigurationException(
                f"state-dir={str(self.folder)!r} can't hold what stays with clients ({error.strerror}); give a folder "
                "that belongs to who runs the site."
            ) from error

    def keep(
        self, client: int, state: ClientState, after: str | None = None, live: Collection[str] | None = None
    ) -> str:
        """Writes a version, which is on the disk when this returns, and drops those that nobody needs any more.

        Args:
            client: the client's id.
            state: its state.
            after: token of the version that it began the round with, which stays, as the server may ask once more; None
                if it had none.
            live: tokens that the server's checkpoints name: of the same line, all others are dropped. None drops none.

        Returns:
            The new version's token.

        Raises:
            Refused: if there is no version of the token.
            OSError: if it can't be written; nothing is left of it then.
        """
        token = secrets.token_hex(8)
        line = self.of(client) / token if after is None else self._file(client, after).parent
        for folder in (line.parent, line):
            folder.mkdir(mode=0o700, exist_ok=True)
        with written(line / f"{token}.pt") as partial:
            save(vars(state), partial)
        if after is None:
            sync(line.parent)
            sync(self.folder)
        if live is not None:
            drop(line, {token, after, *live})
        return token

    def load(self, client: int, token: str) -> ClientState:
        """A version.

        Args:
            client: the client's id.
            token: its token.

        Raises:
            Refused: if it isn't there, or can't be read.
        """
        path = self._file(client, token)
        try:
            compare_checksums(path)
            return ClientState(**torch.load(path, map_location="cpu", weights_only=True))
        except Exception as error:  # torch raises one of many kinds for a damaged file
            raise Refused(
                f"client {client}: the version {token} of its state is damaged: {flaw(path, error)}."
            ) from error

    def of(self, client: int) -> Path:
        """The folder of a client."""
        return self.folder / str(client)

    def _file(self, client: int, token: str) -> Path:
        # looked at before it becomes part of a path
        if not (isinstance(token, str) and TOKEN.fullmatch(token)):
            raise Refused(f"client {client}: a token is 16 hexadecimal digits, and not {token!r:.40}.")
        found = next(self.of(client).glob(f"*/{token}.pt"), None)
        if found is None:
            raise Refused(f"client {client}: its site has no version {token} of its state.")
        return found


def drop(line: Path, needed: Collection[str | None]) -> None:
    """Removes versions, and what killed processes have left.

    Args:
        line: their folder.
        needed: tokens of those that stay.
    """
    for path in line.iterdir():
        # another process may be faster
        with suppress(FileNotFoundError):
            left_behind = path.suffix != ".pt" and time.time() - path.stat().st_mtime > LEFT_BEHIND
            if left_behind or (path.suffix == ".pt" and path.stem not in needed):
                path.unlink()


@contextmanager
def written(path: Path) -> Iterator[Path]:
    """Gives a path to write to, whose file is then on the disk, for its owner's eyes only, and takes another's place.

    Args:
        path: the file.
    """
    with replacing(path) as partial:
        # made here, as others make files that everyone may read
        partial.unlink(missing_ok=True)
        os.close(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        yield partial
        sync(partial)
    sync(path.parent)


def sync(path: Path) -> None:
    """Waits until a file, or a folder's list of files, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
