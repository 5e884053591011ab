"""Locks on folders, with the name of the process at work."""

import os
import socket
from pathlib import Path
from typing import IO

LOCK = ".lock"
"""The lock file, which contains ``PROCESS on HOST``."""


def is_locked(file: IO[str]) -> bool:
    """Lock a file for this process; return True if another process holds the lock.

    Forked processes don't inherit the lock: it ends with this process even if they live on. On file systems without
    locks, as on some clusters, the process named in the file decides, if it is of this host.

    Args:
        file: the lock file, open for reading and writing.
    """
    try:
        import fcntl
    except ImportError:
        return False
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    # POSIX leaves the choice between EAGAIN and EACCES
    except (BlockingIOError, PermissionError):
        return True
    except OSError:
        file.seek(0)
        process, _, host = file.read().partition(" on ")
        return host == socket.gethostname() and is_alive(int(process))
    return False


def is_alive(process: int) -> bool:
    """Return whether a process with this id runs; one that has ended and whose parent hasn't looked yet doesn't."""
    try:
        # signal 0 is never delivered: only the existence of the process is checked
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    # another user's process: alive, but not ours to signal
    except PermissionError:
        pass
    return stat_of(process)[:1] != ["Z"]


def started(process: int) -> str:
    """Return when a process began, as the system counts, by which a number given again is told apart; empty if unknown.

    Args:
        process: the process's id.
    """
    fields = stat_of(process)
    return fields[19] if len(fields) > 19 else ""


def stat_of(process: int) -> list[str]:
    """Return what Linux tells of a process from its state on; nothing on other systems."""
    try:
        # the name before it may have spaces and parentheses
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def at_work_in(folder: Path) -> str:
    """Return process and host at work in a folder; an empty text for an idle folder.

    A process of another host counts as long as the lock file names it.

    Args:
        folder: the run's folder.
    """
    try:
        said = (folder / LOCK).read_text()
    except OSError:
        return ""
    process, _, host = said.partition(" on ")
    # a process of another host can't be looked up from here
    ended = host == socket.gethostname() and process.isdigit() and not is_alive(int(process))
    return "" if ended else said
