"""End a run at SIGTERM or Ctrl-C at once, with an exit code for interruption, and processes with their parent.

``python -m pfl_lightning.stopping PARENT MODULE ARGUMENTS`` runs ``python -m MODULE ARGUMENTS``, and ends with process
PARENT. This module imports little, as imports take seconds in which the parent may end.
"""

import ctypes
import math
import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType

STARTED_BY = "PFL_LIGHTNING_STARTED_BY"
"""Environment variable that holds the process id of the process that started this rank."""

AGAIN = 0.01
"""Seconds after which a signal with a lost exception is sent once more."""

PR_SET_PDEATHSIG = 1
SYNCHRONIZE, ERROR_ACCESS_DENIED, WAIT_TIMEOUT = 0x100000, 5, 0x102
"""Numbers of Windows: the right to wait for a process, the error of a foreign process, a wait without an end."""
PAUSE = 0.5
"""Seconds between two looks at the parent, on systems whose kernel doesn't send a signal."""

POLL = 0.2
"""Seconds between two looks at other processes."""


class Stopped(SystemExit):
    """Raised at SIGTERM and SIGINT, with the exit code 128 + signal number, as in shells.

    Args:
        number: the signal's number.
    """

    resumable = False
    """Whether the run has left a checkpoint to resume from."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number = number
        self.signal = signal.Signals(number).name

    def __str__(self) -> str:
        return f"stopped by {self.signal}"


class RankLost(RuntimeError):
    """Raised on a rank when another rank of the run has ended.

    Args:
        reason: the event.
        code: the exit code to end with.
    """

    resumable = False
    """Whether the run has left a checkpoint to resume from."""

    def __init__(self, reason: str, code: int) -> None:
        super().__init__(reason)
        self.code = code

    @classmethod
    def by_exit_code(cls, rank: int, code: int) -> "RankLost":
        """Return the error for a rank that has ended.

        Args:
            rank: the rank's number.
            code: the rank's exit code, negative for a signal.
        """
        number = -code if code < 0 else code - 128
        if number in set(signal.Signals):
            return cls(f"rank {rank} was stopped by {signal.Signals(number).name}", 128 + number)
        return cls(f"rank {rank} has failed with exit code {code}; see what it says above", code)


class _Stop:
    """Handle signals; further signals within a second are echoes, as of launchers passing on signals."""

    def __init__(self) -> None:
        self._last = -math.inf
        self._postponed = 0
        self._waiting: int | None = None
        self._say: Callable[[Stopped], None] | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        # See the class: launchers pass on a signal that the terminal has sent to all processes.
        if now - self._last > 1:
            self._last = now
            if self._say is not None:
                self._say(Stopped(number))
                sys.stderr.flush()
                # No exception here: see `ending_at_once`.
                os._exit(128 + number)
            if self._postponed:
                self._waiting = number
            else:
                raise Stopped(number)

    @contextmanager
    def insisting(self) -> Iterator[None]:
        """Send a signal once more if Python ignores the exception, as in a finalizer or a callback of ``os.fork``."""
        before = sys.unraisablehook

        def again(ignored: "sys.UnraisableHookArgs") -> None:
            if not isinstance(ignored.exc_value, Stopped):
                before(ignored)
                return
            self._last = -math.inf
            # from a thread and later, as an exception in this hook would be ignored too
            sender = threading.Timer(AGAIN, os.kill, (os.getpid(), ignored.exc_value.number))
            sender.daemon = True
            sender.start()

        sys.unraisablehook = again
        try:
            yield
        finally:
            sys.unraisablehook = before

    @contextmanager
    def postponed(self) -> Iterator[None]:
        """Postpone a signal until the end of this context."""
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
        """End the process at a signal, or when the parent of this rank ends, without an exception.

        Args:
            say: reports the signal before the process ends.
        """
        self._say = say
        done = threading.Event()

        def watch(parent: int) -> None:
            while not done.wait(POLL):
                # An orphan gets another parent. os._exit, because a rank in a collective wouldn't return to Python.
                if os.getppid() != parent:
                    os._exit(1)

        if STARTED_BY in os.environ:
            # A thread, as the main thread may be inside C code for minutes.
            threading.Thread(target=watch, args=(int(os.environ[STARTED_BY]),), daemon=True).start()
        try:
            yield
        finally:
            self._say = None
            done.set()


_stop = _Stop()


def ending_at_once(say: Callable[[Stopped], None]) -> AbstractContextManager[None]:
    """Return a context in which a signal ends the process at once, without an exception.

    For code without anything to close, where an exception would do harm: an import that is cut off fails elsewhere
    later.

    Args:
        say: reports the signal before the process ends.
    """
    return _stop.at_once(say)


def postponed() -> AbstractContextManager[None]:
    """Return a context in which signals wait until the end.

    An exception amid torch's writing of a file can abort the process.
    """
    return _stop.postponed()


@contextmanager
def stoppable() -> Iterator[None]:
    """Raise `Stopped` at SIGTERM and SIGINT inside this context, in the main thread, unless the signals are ignored.

    Lightning alone ends at SIGTERM only between batches and with exit code 0, and at SIGINT with 1.
    """
    before = {}
    # Python sets signal handlers in the main thread only.
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            # Shells start background jobs with SIGINT ignored, which must stay so; None is a handler that isn't
            # Python's.
            if (handler := signal.getsignal(number)) not in (signal.SIG_IGN, None):
                before[number] = handler
                signal.signal(number, _stop)
    try:
        # of contexts within another one, the first sends again
        with _stop.insisting() if before and _stop not in before.values() else nullcontext():
            yield
    except SystemExit as error:
        # Looked up and not imported, as Lightning's import takes seconds; if it was raised, it has been imported.
        exceptions = sys.modules.get("lightning.pytorch.utilities.exceptions")
        if exceptions is not None and isinstance(error, exceptions.SIGTERMException):
            raise Stopped(signal.SIGTERM) from None
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end_with(parent: int) -> None:
    """Let this process be killed when the parent ends.

    On Linux the kernel kills it, whatever it is doing; there the parent is the thread that started this process.
    Elsewhere a thread of this process looks twice a second whether the parent runs.

    Args:
        parent: the process id of the parent.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        # The parent may have ended before prctl was called.
        if os.getppid() != parent:
            os._exit(1)
    else:
        threading.Thread(target=watch, args=(parent,), daemon=True).start()


def watch(parent: int) -> None:
    """Wait for the parent's end, then end this process."""
    # On Windows the parent may be a launcher of a virtual environment, and an orphan keeps the number of its parent.
    while is_there(parent) if sys.platform == "win32" else os.getppid() == parent:
        time.sleep(PAUSE)
    os._exit(1)


def is_there(process: int) -> bool:
    """Return whether a process with this id runs, or has ended without its parent's notice."""
    if sys.platform == "win32":
        kernel = ctypes.WinDLL("kernel32", use_last_error=True)
        # os.kill would end the process, or send Ctrl-C to it
        if not (handle := kernel.OpenProcess(SYNCHRONIZE, False, process)):
            return ctypes.get_last_error() == ERROR_ACCESS_DENIED
        try:
            return bool(kernel.WaitForSingleObject(handle, 0) == WAIT_TIMEOUT)
        finally:
            kernel.CloseHandle(handle)
    try:
        # signal 0 is never delivered: only the existence of the process is checked
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    # another user's process: alive, but not ours to signal
    except PermissionError:
        pass
    return True


if __name__ == "__main__":
    end_with(int(sys.argv.pop(1)))
    runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
