"""Files written in one step, either complete or absent."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PARTIAL = ".partial"
"""Suffix of the name of a file being written."""


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
