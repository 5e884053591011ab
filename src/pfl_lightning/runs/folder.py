"""The folder of a run, and the folders of earlier runs of the same method."""

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
from pfl_lightning.runs.run_status import STAMP, RunStatus
from pfl_lightning.runs.whole_files import PARTIAL

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers of a full disk and of an exhausted quota."""
STATES = "states"
"""The folder of client states inside a run's folder, and the prefix of names in it."""
OWN_STATES: set[str] = set()
"""Folders of client states that this process uses."""


@contextmanager
def at_work(trainer: Trainer) -> Iterator[None]:
    """Hold a run's folder as a context, and explain file errors inside.

    Args:
        trainer: the Trainer of the run.

    Raises:
        MisconfigurationException: as in `held` and `explained`.
    """
    with explained(Path(trainer.log_dir or trainer.default_root_dir)):
        folder = run_folder(trainer)
        # a new run of Weights & Biases has no version yet, and gets a folder that no other process can have
        if folder is None or trainer.loggers[0].version is None:
            yield
            return
        with leaving_nothing_if_refused(trainer), held(folder):
            remove_leftovers(folder)
            yield


@contextmanager
def leaving_nothing_if_refused(trainer: Trainer) -> Iterator[None]:
    """Remove a new folder of a run refused before the end of the first round.

    Args:
        trainer: the Trainer of the run.

    Raises:
        MisconfigurationException: the refusal itself.
    """
    folder = run_folder(trainer)
    new = [] if folder is None else [place for place in (folder, *folder.parents) if not place.exists()]
    try:
        yield
    except MisconfigurationException:
        if folder is not None and folder in new and not RunStatus(folder).rows:
            shutil.rmtree(folder, ignore_errors=True)
            # parents that this run made go too, unless another run has begun in them: rmdir fails on folders that
            # aren't empty
            for place in new[1:]:
                with suppress(OSError):
                    place.rmdir()
        raise


def states_folder(parent: Path | None) -> str:
    """Make a folder for client states, named after the process that uses the folder.

    Folders left by dead processes of this host are removed: from the system's temporary folder, or from all runs of the
    method.

    Args:
        parent: the folder ``states`` of a run, made if missing; None takes the system's temporary folder.

    Returns:
        Path of the new folder.
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
    """Remove a folder made by `states_folder`."""
    shutil.rmtree(folder, ignore_errors=True)
    OWN_STATES.discard(os.path.realpath(folder))


def user_of(states: Path) -> tuple[str, int]:
    """Return host and process in the name of a folder made by `states_folder`; no host for another name.

    >>> user_of(Path("states-71-node-3-x1y2")), user_of(Path("states-x1y2"))
    (('node-3', 71), ('', 0))

    Args:
        states: the folder.
    """
    found = re.search(rf"{STATES}-(\d+)-(.*)-", states.name)
    return (found[2], int(found[1])) if found else ("", 0)


def remove_leftovers(folder: Path) -> None:
    """Remove the leftovers of a killed process in a run's folder: client states and partial files.

    Args:
        folder: the run's folder, held by this process, so that no other run is at work there; client states of an
            evaluation in a living process of this host stay.
    """
    for left in (folder / STATES).glob(f"{STATES}-*"):
        host, process = user_of(left)
        # in a container, each main process has the same number: a folder with our own number may be a dead one's
        alive = host == socket.gethostname() and process != os.getpid() and is_alive(process)
        if not alive and os.path.realpath(left) not in OWN_STATES:
            remove_states(str(left))
    for partial in folder.rglob(f"*{PARTIAL}"):
        partial.unlink(missing_ok=True)


def run_folder(trainer: Trainer) -> Path | None:
    """Return the run's folder, or None if nothing shall be written.

    Nothing is written without a logger, in a trial run, and by all ranks but the first.

    Args:
        trainer: the Trainer of the run.
    """
    if not trainer.loggers or trainer.log_dir is None or trainer.fast_dev_run or not trainer.is_global_zero:  # type: ignore[attr-defined]
        return None
    return Path(trainer.log_dir)


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Keep other processes out of a folder until the end of the context or of this process.

    Args:
        folder: the folder, made if missing; a file ``.lock`` inside names the process.

    Raises:
        MisconfigurationException: if another process holds the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("a+", encoding="utf-8") as file:
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
    """Explain in one sentence why a file in a folder can't be written.

    Args:
        folder: the folder of one run, or of several.

    Raises:
        MisconfigurationException: instead of the error of a full disk or of a limit on file sizes, and of every other
            system error that names a file in this folder or in a folder above.
    """
    try:
        yield
    except OSError as error:
        if error.errno in NO_ROOM:
            advice = f"{folder}: {error.strerror}; make room and go on: the checkpoints there are whole."
        elif error.errno == errno.EFBIG:
            advice = f"{folder}: {error.strerror}; let files be larger (ulimit -f) and go on."
        # a user's own missing file is no matter of this folder: its error passes unchanged
        elif not isinstance(error.filename, str) or not is_about(folder, error.filename):
            raise
        elif isinstance(error, FileNotFoundError):
            advice = f"{error.filename}: {error.strerror}; if {folder} was moved, put it back and go on from there."
        else:
            advice = f"{error.filename}: {error.strerror}; take another folder, or let it be made there."
        raise MisconfigurationException(advice) from error


def is_about(folder: Path, name: str) -> bool:
    """Return whether a file lies in a folder, or is one of the folder's parents."""
    place, path = folder.resolve(), Path(name).resolve()
    return path.is_relative_to(place) or place.is_relative_to(path)


def checkpoint_of_run(root: Path, name: str, begun: bool) -> Path | None:
    """Return the checkpoint of the newest run, the run with the latest `stamp`.

    Args:
        root: parent of the runs' folders.
        name: ``best`` or ``last``.
        begun: if True, the newest run counts even without a checkpoint, so that a run interrupted before its first
            checkpoint starts anew; else the newest run with this checkpoint.

    Returns:
        The file, which may not exist if ``begun``; None if there is no run.

    Raises:
        MisconfigurationException: if several runs wrote last, such as copies of one run.
    """
    # a training run writes its record at its beginning, and an evaluation none
    mark = "rounds.csv" if begun else f"checkpoints/{name}.ckpt"
    runs = sorted(root / found.relative_to(root).parts[0] for found in root.glob(f"*/{mark}"))
    if not runs:
        return None
    # time 0 without a stamp, as of a process that was killed between its record and its stamp
    written = {run: stamped(run) for run in runs}
    latest = max(time for time, _ in written.values())
    newest = [run for run in runs if written[run][0] == latest]
    # the stamp names the folder: in a copy under another name, the two differ
    newest = [run for run in newest if written[run][1] == run.name] or newest
    # the times of the folders don't decide: copying a run, or opening it in another program, changes them
    if len(newest) > 1:
        raise MisconfigurationException(
            f"ckpt_path={name!r} could be of {' or of '.join(map(str, newest))}, "
            f"{'which were written at the same time' if latest else f'which have no {STAMP}, the time of writing'}; "
            "give the path of a checkpoint."
        )
    return newest[0] / "checkpoints" / f"{name}.ckpt"


def stamp(folder: Path) -> None:
    """Write time and folder name into a run's folder, to find the newest run later.

    Times of files and folders tell less: they change when a folder is copied, or opened by other programs.

    Args:
        folder: the run's folder.
    """
    # in place: a file that is emptied before it is written goes to the disk at once on some file systems, every round
    with open(
        folder / STAMP, "w", encoding="utf-8", opener=lambda path, flags: os.open(path, flags & ~os.O_TRUNC)
    ) as file:
        file.write(f"{time.time():.6f} {folder.name}\n")
        # a folder's earlier name may have been longer
        file.truncate()


def stamped(folder: Path) -> tuple[float, str]:
    """Return time and folder name of a folder's `stamp`; 0 and an empty name without a stamp.

    Args:
        folder: the run's folder.
    """
    try:
        written, _, name = (folder / STAMP).read_text(encoding="utf-8").partition(" ")
        return float(written), name.rstrip("\n")
    except (OSError, ValueError):
        return 0.0, ""
