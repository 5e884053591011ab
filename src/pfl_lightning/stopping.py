"""SIGTERM and Ctrl-C: who is told to end ends at once, and says by the exit code that it didn't finish."""

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType

STARTED_BY = "PFL_LIGHTNING_STARTED_BY"
"""Environment variable that tells a rank of several devices which process has started it."""

POLL = 0.2
"""Seconds from one look at other processes to the next."""


class Stopped(SystemExit):
    """Raised where the process is when it is told to end; the exit code is 128 and the signal's number, as in shells.

    Args:
        number: the signal's number.
    """

    resumable = False
    """Whether a run has left a checkpoint to go on from."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.signal = signal.Signals(number).name

    def __str__(self) -> str:
        return f"stopped by {self.signal}"


class RankLost(RuntimeError):
    """Raised where another rank of several devices has ended, and so this one has to.

    Args:
        reason: what has happened.
        code: the exit code to end with.
    """

    resumable = False
    """Whether a run has left a checkpoint to go on from."""

    def __init__(self, reason: str, code: int) -> None:
        super().__init__(reason)
        self.code = code

    @classmethod
    def by_exit_code(cls, rank: int, code: int) -> "RankLost":
        """Return the error for a rank that has ended.

        Args:
            rank: its number.
            code: its exit code, negative for a signal.
        """
        number = -code if code < 0 else code - 128
        if number in set(signal.Signals):
            return cls(f"rank {rank} was stopped by {signal.Signals(number).name}", 128 + number)
        return cls(f"rank {rank} has failed with exit code {code}; see what it says above", code)


class _Stop:
    """Handles a signal; what follows within a second is an echo, as of programs that pass their own signals on."""

    def __init__(self) -> None:
        self._last = -math.inf
        self._postponed = 0
        self._waiting: int | None = None
        self._say: Callable[[Stopped], None] | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if now - self._last > 1:
            self._last = now
            if self._say is not None:
                self._say(Stopped(number))
                sys.stderr.flush()
                os._exit(128 + number)
            if self._postponed:
                self._waiting = number
            else:
                raise Stopped(number)

    @contextmanager
    def postponed(self) -> Iterator[None]:
        """Lets what it contains come to its end first."""
        self._postponed += 1
        try:
            yield
        finally:
            self._postponed -= 1
        if not self._postponed and self._waiting is not None:
            number, self._waiting = self._waiting, None
            raise Stopped(number)

    @contextmanager
    def at_once(self, say: Callable[[Stopped], None]) -> Iterator[None]:
        """Lets a signal, or the end of the process that has started this one as a rank, end it where it is.

        Args:
            say: what to say before.
        """
        self._say = say
        done = threading.Event()

        def watch(parent: int) -> None:
            while not done.wait(POLL):
                if os.getppid() != parent:
                    os._exit(1)

        if STARTED_BY in os.environ:
            threading.Thread(target=watch, args=(int(os.environ[STARTED_BY]),), daemon=True).start()
        try:
            yield
        finally:
            self._say = None
            done.set()


_stop = _Stop()


def ending_at_once(say: Callable[[Stopped], None]) -> AbstractContextManager[None]:
    """A context that has nothing to close, and where an exception would do harm: imports that it cuts fail elsewhere.

    Args:
        say: what to say before the process ends.
    """
    return _stop.at_once(say)


def postponed() -> AbstractContextManager[None]:
    """A context that is not stopped in its middle, but at its end: torch's writing of a file can abort the process."""
    return _stop.postponed()


@contextmanager
def stoppable() -> Iterator[None]:
    """Raises `Stopped` at SIGTERM and SIGINT while it is entered, in the main thread, unless they are ignored.

    Lightning ends at SIGTERM only between batches, with exit code 0, and at SIGINT with 1.
    """
    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            # shells ignore SIGINT for what runs in the background
            if (handler := signal.getsignal(number)) not in (signal.SIG_IGN, None):
                before[number] = handler
                signal.signal(number, _stop)
    try:
        yield
    except SystemExit as error:
        # whoever raises it has imported it; importing it here would take seconds
        exceptions = sys.modules.get("lightning.pytorch.utilities.exceptions")
        if exceptions is not None and isinstance(error, exceptions.SIGTERMException):
            raise Stopped(signal.SIGTERM) from None
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
