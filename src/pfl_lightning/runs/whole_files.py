"""Files that are whole or not there."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PARTIAL = ".partial"
"""Ending of the name of a file that is being written."""


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Gives a path to write to, whose file then takes a file's place in one step; where writing fails, it goes.

    Args:
        path: the file; readers see the old one or the new one.
    """
    partial = path.with_name(f"{path.name}{PARTIAL}")
    try:
        yield partial
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
