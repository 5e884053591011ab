"""Errors while clients run: whose they are, how they get from one process to another, and clients that are missing."""

import pickle
import sys
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.engines.steps import reason_of

Result = TypeVar("Result")

NOTE = "Raised in the "
"""How each note begins that `during` adds to an error."""

WHEN = {"download": "for", "evaluation": "after"}


class ClientsLost(RuntimeError):
    """Clients have no result, because what ran them ended or left them out."""


class during:
    """Name the clients, the round and the phase in an error that leaves this context; its type and traceback stay.

    The note is printed below the traceback. Python 3.10 prints no notes: there it goes to stderr at once. ``sys.exit``
    in a hook would end the whole run, with exit code 0 even, so that it becomes an error.

    Args:
        phase: ``download``, ``training``, ``upload`` or ``evaluation``.
        round: number of the round that it belongs to, from 0; an evaluation to the one before it.
        *clients: their ids; several where they run in one computation.
    """

    def __init__(self, phase: str, round: int, *clients: int) -> None:
        self.phase = phase
        self.round = round
        self.clients = clients

    def __enter__(self) -> None:
        """Add nothing yet: this is entered several times for each client of a round."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Add the note, unless a context within has done so."""
        if error is None:
            return
        where = f"{self.phase} of {named(self.clients)} {moment(self.phase, self.round)}"
        # subclasses are those of signals
        if type(error) is SystemExit:
            raise RuntimeError(
                f"sys.exit({error.code!r}) was called in the {where}, and would end the run; raise an error instead."
            ) from error
        notes = getattr(error, "__notes__", [])
        # a setting's error is about no client
        about_setting = isinstance(error, MisconfigurationException)
        if about_setting or not isinstance(error, Exception) or any(note.startswith(NOTE) for note in notes):
            return
        error.__notes__ = [*notes, f"{NOTE}{where}."]
        if not hasattr(error, "add_note"):
            print(f"{type(error).__name__}: {error}\n{NOTE}{where}.", file=sys.stderr)


def moment(phase: str, round: int) -> str:
    """Return in words when a phase takes place, with rounds numbered from 1 as in the record.

    >>> moment("training", 0), moment("evaluation", 0)
    ('in round 1', 'after round 1')
    """
    return f"{WHEN.get(phase, 'in')} round {round + 1}"


def named(clients: tuple[int, ...] | list[int]) -> str:
    """Return clients in words.

    >>> named([3]), named([0, 2, 5])
    ('client 3', 'clients 0, 2, 5')
    """
    return f"client{'s' * (len(clients) != 1)} {', '.join(map(str, clients))}"


def computed(
    at_once: Callable[[], Result], alone: Callable[[], Any], refusal: Callable[[str], MisconfigurationException]
) -> Result:
    """Return a result that the client module's code gives in a way that not all code allows, such as under ``vmap``.

    If that fails, either the code can't be run in this way or it is wrong. Running it plainly tells which: an error of
    the plain run is the author's, and is raised as it is.

    Args:
        at_once: computes the result.
        alone: runs the same code plainly, for one client, without effects that last.
        refusal: makes an exception of the reason why the code can't be run in this way.
    """
    try:
        return at_once()
    except (MisconfigurationException, torch.cuda.OutOfMemoryError):
        raise
    except Exception as error:
        failed = error
    # not in the handler: an author's own error shall not come with torch's before it
    alone()
    raise refusal(reason_of(failed)) from failed


class OtherTraceback(Exception):
    """The traceback of an error that another process has raised, shown as the error's cause."""

    def __str__(self) -> str:
        """Return the traceback on lines of its own."""
        return f"\n{self.args[0]}"


class Failure(NamedTuple):
    """An error on its way to another process.

    Args:
        error: the pickled exception.
        traceback: its text, which a pickled exception loses.
    """

    error: bytes
    traceback: str

    @classmethod
    def of(cls, error: Exception) -> "Failure":
        """Return an error that can be sent; one that can't be pickled becomes a RuntimeError that names its type."""
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        try:
            packed = pickle.dumps(error)
            if type(pickle.loads(packed)) is type(error):
                return cls(packed, text)
        except Exception:
            # an `__init__` that takes other arguments than those of the exception fails in one way or another
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
