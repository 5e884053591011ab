"""Versions of clients' states, such as personal parameters, on a site's own disk between rounds."""

import math
import os
import re
import secrets
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.data.files import check_whole, flaw
from pfl_lightning.engines import ClientState
from pfl_lightning.flower.template import Refused
from pfl_lightning.runs.checkpoint_io import save
from pfl_lightning.runs.folder import NO_ROOM
from pfl_lightning.runs.whole_files import replacing

# 64 random bits, so that runs and processes need no common counter
TOKEN = re.compile("[0-9a-f]{16}")
SECRET = "secret"
"""The file with the secret of a site."""
LEFT_BEHIND = 3600
"""Age in seconds from which an unfinished file counts as left by a killed process."""


class StateVersions:
    """Versions of clients' states on disk, one file per version, never changed after writing.

    A token names a version, and the server keeps the token in place of the state. Each version follows the version
    with which the client began the round. All versions after one first version form a line, in a folder of the line's
    own, so that a new run drops no version of an earlier run.

    Args:
        folder: the folder of all states; made if missing, and closed to all users but the owner.

    Raises:
        MisconfigurationException: if the folder can't be made or closed.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder).absolute()
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            # mkdir leaves an existing folder's mode as it is, which may let others read personal models
            self.folder.chmod(0o700)
        except OSError as error:
            raise MisconfigurationException(
                f"state-dir={str(self.folder)!r} can't hold what stays with clients ({error.strerror}); give a folder "
                "that belongs to who runs the site."
            ) from error

    def keep(
        self, client: int, state: ClientState, after: str | None = None, live: Collection[str] | None = None
    ) -> str:
        """Write a new version to the disk, and drop versions of no further use.

        Args:
            client: the client's id.
            state: the client's state.
            after: the token of the version before training, which is kept, since the server may repeat the round; None
                for a first version.
            live: the tokens in use by the server and the server's checkpoints. Other versions of the same line are
                dropped; None drops none.

        Returns:
            The new version's token.

        Raises:
            Refused: if no version has the token ``after``.
            OSError: if the version can't be written; no file is left then.
        """
        token = secrets.token_hex(8)
        line = self.of(client) / token if after is None else self._file(client, after).parent
        for folder in (line.parent, line):
            folder.mkdir(mode=0o700, exist_ok=True)
        with written(line / f"{token}.pt") as partial:
            save(vars(state), partial)
        # new folders are entries of their parents, which a power cut could lose with all that is in them
        if after is None:
            sync(line.parent)
            sync(self.folder)
        if live is not None:
            # newer ones may answer the same question, asked twice: the server may take any of the answers
            since = math.inf if after is None else self._file(client, after).stat().st_mtime
            drop(line, {token, after, *live}, since)
        return token

    def load(self, client: int, token: str) -> ClientState:
        """Return a version of a client's state, on the CPU.

        Args:
            client: the client's id.
            token: the version's token.

        Raises:
            Refused: if the version is missing or damaged.
        """
        path = self._file(client, token)
        try:
            check_whole(path)
            return ClientState(**torch.load(path, map_location="cpu", weights_only=True))
        except Exception as error:  # torch raises one of many kinds for a damaged file
            raise Refused(
                f"client {client}: the version {token} of its state is damaged: {flaw(path, error)}."
            ) from error

    def secret(self) -> str:
        """Return the folder's secret, by which a server knows a site that has restarted; made at the first call."""
        path = self.folder / SECRET
        if not path.is_file():
            with written(path) as partial:
                partial.write_text(secrets.token_hex(16), encoding="utf-8")
        return path.read_text(encoding="utf-8")

    def of(self, client: int) -> Path:
        """Return the folder of a client's versions."""
        return self.folder / str(client)

    def _file(self, client: int, token: str) -> Path:
        # the token comes from the server, and ".." or "*" in a path would reach other files
        if not (isinstance(token, str) and TOKEN.fullmatch(token)):
            raise Refused(f"client {client}: a token is 16 hexadecimal digits, and not {token!r:.40}.")
        found = next(self.of(client).glob(f"*/{token}.pt"), None)
        if found is None:
            raise Refused(f"client {client}: its site has no version {token} of its state.")
        return found


def drop(line: Path, needed: Collection[str | None], since: float = math.inf) -> None:
    """Remove versions of no further use, and files left by killed processes.

    Args:
        line: the folder of a line of versions.
        needed: tokens of the versions to keep.
        since: time of the system's clock from which on versions are kept.
    """
    for path in line.iterdir():
        # Flower runs messages in processes of their own, so that another one may have removed the file already
        with suppress(FileNotFoundError):
            # a young unfinished file may be one that another process is writing now
            left_behind = path.suffix != ".pt" and time.time() - path.stat().st_mtime > LEFT_BEHIND
            is_old = path.suffix == ".pt" and path.stem not in needed and path.stat().st_mtime < since
            if left_behind or is_old:
                path.unlink()


@contextmanager
def written(path: Path) -> Iterator[Path]:
    """Yield a temporary path, and move the written file to ``path``, readable for the owner alone and safe on the disk.

    Args:
        path: the final file; an older file is replaced.

    Raises:
        MisconfigurationException: if the disk is full.
    """
    with with_room(path), replacing(path) as partial:
        # made before writing, since torch.save would make a file with the umask's mode, readable for others
        partial.unlink(missing_ok=True)
        os.close(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        yield partial
        # before the move: after a power cut the new name would else stand for an empty file
        sync(partial)
    sync(path.parent)


@contextmanager
def with_room(path: Path) -> Iterator[None]:
    """Explain a full disk inside this context in a sentence for the site's operator, whom the server's may call."""
    try:
        yield
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        raise MisconfigurationException(
            f"{path.parent}: {error.strerror} at the site; make room there, and it takes part again from the next "
            "round on."
        ) from error


def sync(path: Path) -> None:
    """Wait until a file's bytes, or a folder's list of files, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
