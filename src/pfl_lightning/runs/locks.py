"""Locks on folders, with the name of the process at work."""

import os
import socket
from pathlib import Path
from typing import IO

from pfl_lightning.stopping import is_there

LOCK = ".lock"
"""The lock file, which contains ``PROCESS on HOST``."""


def is_locked(file: IO[str]) -> bool:
    """Lock a file for this process; return True if another process holds the lock.

    Forked processes don't inherit the lock: it ends with this process even if they live on. On systems and file systems
    without such locks, as Windows and some clusters, the process named in the file decides, if it is of this host.

    Args:
        file: the lock file, open for reading and writing.
    """
    try:
        import fcntl

        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    # POSIX leaves the choice between EAGAIN and EACCES
    except (BlockingIOError, PermissionError):
        return True
    except (OSError, ImportError):
        file.seek(0)
        process, _, host = file.read().partition(" on ")
        # in a container each main process has the same number: our own in the file is a dead one's
        return host == socket.gethostname() and int(process) != os.getpid() and is_alive(int(process))
    return False


def is_alive(process: int) -> bool:
    """Return whether a process with this id runs; one that has ended and whose parent hasn't looked yet doesn't."""
    return is_there(process) and stat_of(process)[:1] != ["Z"]


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
        return Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return []


def at_work_in(folder: Path) -> str:
    """Return process and host at work in a folder; an empty text for an idle folder.

    A process of another host counts as long as the lock file names it.

    Args:
        folder: the run's folder.
    """
    try:
        said = (folder / LOCK).read_text(encoding="utf-8")
    except OSError:
        return ""
    process, _, host = said.partition(" on ")
    # a process of another host can't be looked up from here
    ended = host == socket.gethostname() and process.isdigit() and not is_alive(int(process))
    return "" if ended else said
