"""The folders of runs: a run's own, and those of earlier runs of its method."""

import errno
import os
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer

from pfl_lightning.runs.locks import LOCK, is_alive, is_locked
from pfl_lightning.runs.standing import STAMP, Standing
from pfl_lightning.runs.whole_files import PARTIAL

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
STATES = "states"
"""The folder within a run's in which clients' states are, and the beginning of the names in it."""
OWN_STATES: set[str] = set()
"""Folders of clients' states that this process uses."""


@contextmanager
def at_work(trainer: Trainer) -> Iterator[None]:
    """Holds a run's folder, and explains what goes wrong there.

    Raises:
        MisconfigurationException: as `held` and `explained` do.
    """
    with explained(Path(trainer.log_dir or trainer.default_root_dir)):
        folder = run_folder(trainer)
        # Weights & Biases give a new run a folder that nobody else can have
        if folder is None or trainer.loggers[0].version is None:
            yield
            return
        with leaving_nothing_if_refused(trainer), held(folder):
            remove_leftovers(folder)
            yield


@contextmanager
def leaving_nothing_if_refused(trainer: Trainer) -> Iterator[None]:
    """Removes a run's folder, if it is new, where the run is refused before its first round is done.

    Raises:
        MisconfigurationException: what the run is refused for.
    """
    folder = run_folder(trainer)
    new = [] if folder is None else [place for place in (folder, *folder.parents) if not place.exists()]
    try:
        yield
    except MisconfigurationException:
        if folder is not None and folder in new and not Standing(folder).rows:
            shutil.rmtree(folder, ignore_errors=True)
            for place in new[1:]:
                with suppress(OSError):
                    place.rmdir()
        raise


def states_folder(parent: Path | None) -> str:
    """Make a folder for clients' states, whose name tells the process that uses it.

    What ended processes of this host have left is removed: from the system's folder, or from all runs of the method.

    Args:
        parent: the folder ``states`` of a run, which is made if need be; None takes the system's folder for temporary
            files.
    """
    if parent is not None:
        parent.mkdir(parents=True, exist_ok=True)
    prefix = STATES if parent is not None else f"pfl-lightning-{STATES}"
    places = [Path(tempfile.gettempdir())] if parent is None else parent.parent.parent.glob(f"*/{STATES}")
    for left in [left for place in places for left in place.glob(f"{prefix}-*")]:
        host, process = user_of(left)
        if host == socket.gethostname() and not is_alive(process):
            remove_states(str(left))
    made = tempfile.mkdtemp(prefix=f"{prefix}-{os.getpid()}-{socket.gethostname()}-", dir=parent)
    OWN_STATES.add(os.path.realpath(made))
    return made


def remove_states(folder: str) -> None:
    """Remove what `states_folder` has made."""
    shutil.rmtree(folder, ignore_errors=True)
    OWN_STATES.discard(os.path.realpath(folder))


def user_of(states: Path) -> tuple[str, int]:
    """Return host and process of what `states_folder` has made; no host for a name that doesn't tell them.

    >>> user_of(Path("states-71-node-3-x1y2")), user_of(Path("states-x1y2"))
    (('node-3', 71), ('', 0))
    """
    found = re.search(rf"{STATES}-(\d+)-(.*)-", states.name)
    return (found[2], int(found[1])) if found else ("", 0)


def remove_leftovers(folder: Path) -> None:
    """Remove what a killed process has left in a run's folder: clients' states, and files that were being written.

    Args:
        folder: held by this process, so that no run of another one is at work there; states that an evaluation of a
            living process of this host has there stay.
    """
    for left in (folder / STATES).glob(f"{STATES}-*"):
        host, process = user_of(left)
        # in a container every process has the same number, so that of this one tells nothing
        alive = host == socket.gethostname() and process != os.getpid() and is_alive(process)
        if not alive and os.path.realpath(left) not in OWN_STATES:
            remove_states(str(left))
    for partial in folder.rglob(f"*{PARTIAL}"):
        partial.unlink(missing_ok=True)


def run_folder(trainer: Trainer) -> Path | None:
    """The run's folder.

    None where nothing shall be written: without a logger, in a trial run, and by every rank but the first.
    """
    if not trainer.loggers or trainer.log_dir is None or trainer.fast_dev_run or not trainer.is_global_zero:  # type: ignore[attr-defined]
        return None
    return Path(trainer.log_dir)


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Keeps other processes out of a folder until this one leaves or ends, however it ends.

    Args:
        folder: made if need be; a file ``.lock`` in it tells who is there.

    Raises:
        MisconfigurationException: if another process holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("a+") as file:
        if is_locked(file):
            file.seek(0)
            raise MisconfigurationException(
                f"{folder}: process {file.read() or 'of another run'} is at work there; wait for its end or stop it, "
                "or take another folder."
            )
        file.truncate(0)
        file.write(f"{os.getpid()} on {socket.gethostname()}")
        file.flush()
        try:
            yield
        finally:
            file.truncate(0)


@contextmanager
def explained(folder: Path) -> Iterator[None]:
    """Says in one sentence why something in a folder can't be written or made.

    Args:
        folder: that of a run, or of several.

    Raises:
        MisconfigurationException: in the place of the error of a full disk or of a limit on the size of files, and of
            each other of the system's errors that names a file in this folder or a folder above it.
    """
    try:
        yield
    except OSError as error:
        if error.errno in NO_ROOM:
            advice = f"{folder}: {error.strerror}; make room and go on: the checkpoints there are whole."
        elif error.errno == errno.EFBIG:
            advice = f"{folder}: {error.strerror}; let files be larger (ulimit -f) and go on."
        elif not isinstance(error.filename, str) or not is_about(folder, error.filename):
            raise
        elif isinstance(error, FileNotFoundError):
            advice = f"{error.filename}: {error.strerror}; if {folder} was moved, put it back and go on from there."
        else:
            advice = f"{error.filename}: {error.strerror}; take another folder, or let it be made there."
        raise MisconfigurationException(advice) from error


def is_about(folder: Path, name: str) -> bool:
    """Whether a file is in a folder, or one of the folders that it is in."""
    place, path = folder.resolve(), Path(name).resolve()
    return path.is_relative_to(place) or place.is_relative_to(path)


def checkpoint_of_run(root: Path, name: str, begun: bool) -> Path | None:
    """Return the checkpoint of the newest run: the one that wrote last, by its own `stamp`.

    Args:
        root: the folder of runs, each in a folder of its own.
        name: ``best`` or ``last``.
        begun: whether the newest run counts that has begun, with a checkpoint or without, so that what was
            interrupted before its first checkpoint starts anew; else the newest that has this checkpoint.

    Returns:
        The file, which may not be there if ``begun``; None if there is no run.

    Raises:
        MisconfigurationException: if several runs wrote last, as copies of one did.
    """
    # a run that began has one of these; an evaluation leaves a folder without them
    marks = ("config.yaml", "rounds.csv") if begun else (f"checkpoints/{name}.ckpt",)
    runs = sorted({root / mark.relative_to(root).parts[0] for pattern in marks for mark in root.glob(f"*/{pattern}")})
    if not runs:
        return None
    written = {run: stamped(run) for run in runs}
    latest = max(time for time, _ in written.values())
    newest = [run for run in runs if written[run][0] == latest]
    # a copy tells the name of the folder that it was made of
    newest = [run for run in newest if written[run][1] == run.name] or newest
    if not latest:
        # earlier versions left no stamp: a run's folder is touched when files come into it, first when it starts
        newest = [max(runs, key=lambda run: run.stat().st_mtime)]
    if len(newest) > 1:
        raise MisconfigurationException(
            f"ckpt_path={name!r} could be of {' or of '.join(map(str, newest))}, which were written at the same time; "
            "give the path of a checkpoint."
        )
    return newest[0] / "checkpoints" / f"{name}.ckpt"


def stamp(folder: Path) -> None:
    """Write the time into a run's folder, with the folder's name, so that the run that wrote last can be told.

    The times of files and folders tell less: they change when a folder is copied, or looked into by other programs.
    """
    (folder / STAMP).write_text(f"{time.time()} {folder.name}\n")


def stamped(folder: Path) -> tuple[float, str]:
    """Return the time of a folder's `stamp`, 0 where there is none, and the name that the folder had."""
    try:
        written, _, name = (folder / STAMP).read_text().partition(" ")
        return float(written), name.rstrip("\n")
    except (OSError, ValueError):
        return 0.0, ""
