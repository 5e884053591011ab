"""SIGTERM and Ctrl-C: who is told to end ends at once, and says by the exit code that it didn't finish."""

import math
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType


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


class _Stop:
    """Handles a signal; what follows within a second is an echo, as of programs that pass their own signals on."""

    def __init__(self) -> None:
        self._last = -math.inf
        self._postponed = 0
        self._waiting: int | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if now - self._last > 1:
            self._last = now
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


_stop = _Stop()


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
