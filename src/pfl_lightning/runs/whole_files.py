"""Files written in one step, either complete or absent."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile

from lightning.fabric.utilities.exceptions import MisconfigurationException

PARTIAL = ".partial"
"""Suffix of the name of a file being written."""


def check_place(path: Path, owner: str) -> None:
    """Check that a file can be written, before the work whose result it holds.

    Args:
        path: the file.
        owner: beginning of the error message, such as ``predict: --out a.csv``.

    Raises:
        MisconfigurationException: if the path is a folder, or its folder can't be written to.
    """
    if path.is_dir():
        raise MisconfigurationException(f"{owner} is a folder; give a file, such as {path / 'predictions.csv'}.")
    if path.exists() and not path.is_file():
        return
    # the folders that are still missing are made only when the file is written
    folder = next(each for each in path.absolute().parents if os.path.lexists(each))
    try:
        # tried, as folders such as those of /proc have all rights and take no file
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise MisconfigurationException(
            f"{owner} can't be written ({folder}: {error.strerror}); give a file in another folder."
        ) from error


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path to write to, and move the written file into place in one step.

    If writing fails, the partial file is removed, and readers keep the old file. A device or a pipe is written to as it
    is.

    Args:
        path: the file; readers see either the old or the new one.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        yield path
        return
    # a link stays one, and the file behind it is replaced
    path = path.resolve() if path.is_symlink() else path
    # in the same folder, since a rename is atomic only within one file system
    partial = path.with_name(f"{path.name}{PARTIAL}")
    try:
        yield partial
        os.replace(partial, path)
    # also on KeyboardInterrupt and SystemExit
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
