"""Who is at work in a folder."""

import os
import socket
from pathlib import Path
from typing import IO

LOCK = ".lock"
"""The file that tells it, as ``PROCESS on HOST``."""


def is_locked(file: IO[str]) -> bool:
    """Locks a file for this process; True where another one has it.

    Processes that are forked meanwhile don't inherit the lock: it ends with this one even if they live on. Where there
    are no such locks, as on some clusters' file systems, the process counts that the file names, if it is of this host.
    """
    try:
        import fcntl
    except ImportError:
        return False
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return True
    except OSError:
        file.seek(0)
        process, _, host = file.read().partition(" on ")
        return host == socket.gethostname() and is_alive(int(process))
    return False


def is_alive(process: int) -> bool:
    """Whether there is a process with this id."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def at_work_in(folder: Path) -> str:
    """The process that is at work in a folder, and its host; empty where there is none.

    A process of another host counts as long as the folder names it.
    """
    try:
        said = (folder / LOCK).read_text()
    except OSError:
        return ""
    process, _, host = said.partition(" on ")
    ended = host == socket.gethostname() and process.isdigit() and not is_alive(int(process))
    return "" if ended else said
