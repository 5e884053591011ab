"""Errors while clients run: name the client, round and phase, cross processes, and report missing clients."""

import pickle
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

Result = TypeVar("Result")

NOTE = "Raised in the "
"""The beginning of each note that `during` adds to an error."""

MACHINERY = ("pfl_lightning.engines.", "pfl_lightning.federation.", "lightning.", "torch.")
"""Beginnings of the names of modules between a Trainer and a client module's hooks. PyTorch's are among them, because
its decorators and ``nn.Module.__call__`` add frames."""

WHEN = {"download": "for", "evaluation": "after"}


class ClientsLost(RuntimeError):
    """Clients have no result, because a process ended or the engine skipped a job."""


@contextmanager
def during(phase: str, round: int, *clients: int) -> Iterator[None]:
    """Add the clients, round and phase to an error leaving this context; the error's type and traceback stay.

    The note is printed below the traceback. Python 3.10 doesn't print notes, so there it goes to stderr at once. A
    ``sys.exit`` in a hook becomes an error, as it would end the whole run, perhaps even with exit code 0.

    Args:
        phase: ``download``, ``training``, ``upload`` or ``evaluation``.
        round: the round's number, from 0; for an evaluation, that of the round before.
        *clients: the clients' ids; several if they run in one computation.
    """
    try:
        yield
    except BaseException as error:
        where = f"{phase} of {named(clients)} {moment(phase, round)}"
        # Exactly SystemExit: its subclasses come from signals and must pass.
        if type(error) is SystemExit:
            raise RuntimeError(
                f"sys.exit({error.code!r}) was called in the {where}, and would end the run; raise an error instead."
            ) from error
        notes = getattr(error, "__notes__", [])
        # An error about a setting concerns every client, so no client is named.
        about_setting = isinstance(error, MisconfigurationException)
        # An inner context may have added the note already.
        if not about_setting and isinstance(error, Exception) and not any(note.startswith(NOTE) for note in notes):
            error.__notes__ = [*notes, f"{NOTE}{where}."]
            if not hasattr(error, "add_note"):
                print(f"{type(error).__name__}: {error}\n{NOTE}{where}.", file=sys.stderr)
        raise


def cut_to_hook(error: BaseException) -> None:
    """Remove the frames above a client module's hook from the traceback of an error that `during` has noted.

    A user's mistake in a loss would otherwise stand below some twenty frames of Lightning's loops and of engines. The
    first frame stays, and so does a traceback without a hook, as of an engine's own mistake.

    Args:
        error: the error, whose traceback begins in the caller.
    """
    first = frame = error.__traceback__
    noted = any(note.startswith(NOTE) for note in getattr(error, "__notes__", []))
    in_engine = False
    while first is not None and frame is not None and noted:
        module = f"{frame.tb_frame.f_globals.get('__name__')}."
        if in_engine and not module.startswith(MACHINERY):
            first.tb_next = frame
            return
        in_engine = in_engine or module.startswith("pfl_lightning.engines.")
        frame = frame.tb_next


def tell_names(error: Exception, label: Callable[[int], str]) -> None:
    """Put clients' names behind their ids in an error's note, which an engine writes without knowing any name.

    Args:
        error: an error that has left `during`; without a note of `during` it stays unchanged.
        label: returns a client's id and name.
    """
    notes = getattr(error, "__notes__", [])
    for place, note in enumerate(notes):
        if note.startswith(NOTE):
            text = re.sub(r"(?<=client )\d+|(?<=clients )\d+(, \d+)*", lambda found: labels(found[0], label), note)
            error.__notes__ = [*notes[:place], text, *notes[place + 1 :]]


def labels(ids: str, label: Callable[[int], str]) -> str:
    """Return clients' ids and names.

    >>> labels("0, 2", lambda client: f"{client} ({'abc'[client]})")
    '0 (a), 2 (c)'

    Args:
        ids: the ids, separated by commas.
        label: returns a client's id and name.
    """
    return ", ".join(label(int(client)) for client in ids.split(", "))


def moment(phase: str, round: int) -> str:
    """Return the time of a phase in words, with rounds numbered from 1 as in the record.

    >>> moment("training", 0), moment("evaluation", 0)
    ('in round 1', 'after round 1')
    """
    return f"{WHEN.get(phase, 'in')} round {round + 1}"


def named(clients: tuple[int, ...] | list[int]) -> str:
    """Return client ids in words.

    >>> named([3]), named([0, 2, 5])
    ('client 3', 'clients 0, 2, 5')
    """
    return f"client{'s' * (len(clients) != 1)} {', '.join(map(str, clients))}"


def reason_of(error: Exception) -> str:
    """Return the first sentence of an error's message, without the full stop, in at most 200 characters."""
    return " ".join(str(error).split()).split(". ")[0].rstrip(".")[:200]


def place_of(error: Exception) -> str:
    """Return the file and line of a method's own code where an error arose, in brackets; empty if none is on the way.

    Args:
        error: an error from a method's code, raised by torch as a rule.
    """
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        if not str(frame.f_globals.get("__name__", "")).startswith(NOT_OF_METHODS):
            return f" ({Path(frame.f_code.co_filename).name}, line {line})"
    return ""


NOT_OF_METHODS = ("torch.", "torchvision.", "lightning.", "pfl_lightning.engines.", "pfl_lightning.client.")
"""Beginnings of names of modules that call a method's code, or are called by it."""


def computed(
    at_once: Callable[[], Result],
    alone: Callable[[], Any],
    refusal: Callable[[str], MisconfigurationException],
    prepared: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Result:
    """Run the client module's code under a transform such as ``vmap``; if the code fails, find out why.

    Not all code can run under a transform. After a failure the same code runs plainly: an error of the plain run is the
    author's own and is raised unchanged; without one, the transform is refused.

    Args:
        at_once: runs the code under the transform.
        alone: runs the same code plainly, for one client, without lasting effects.
        refusal: makes the exception from the reason for the failure.
        prepared: the context for the plain run.
    """
    try:
        return at_once()
    except (MisconfigurationException, torch.cuda.OutOfMemoryError):
        raise
    except Exception as error:
        failed = error
    # Outside the except block, so that an author's own error isn't chained to torch's.
    with prepared():
        alone()
    raise refusal(reason_of(failed) + place_of(failed)) from failed


class OtherTraceback(Exception):
    """The traceback of an error from another process, shown as the error's cause."""

    def __str__(self) -> str:
        """Return the traceback on separate lines."""
        return f"\n{self.args[0]}"


class Failure(NamedTuple):
    """An error on the way to another process.

    Args:
        error: the pickled exception.
        traceback: the traceback's text, which pickling loses.
    """

    error: bytes
    traceback: str

    @classmethod
    def of(cls, error: Exception) -> "Failure":
        """Pack an error; an unpicklable one becomes a RuntimeError with the type's name in the message."""
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        try:
            packed = pickle.dumps(error)
            if type(pickle.loads(packed)) is type(error):
                return cls(packed, text)
        except Exception:
            # Exceptions with an __init__ of other arguments than args fail on unpickling in various ways.
            pass
        other = RuntimeError(f"{type(error).__name__}: {error}")
        vars(other).update(__notes__=getattr(error, "__notes__", []))
        return cls(pickle.dumps(other), text)

    def throw(self, where: str) -> None:
        """Raise the error, with the other process's traceback as its cause.

        Args:
            where: the other process, such as ``a worker process``.
        """
        raise pickle.loads(self.error) from OtherTraceback(f"in {where}:\n{self.traceback}")
