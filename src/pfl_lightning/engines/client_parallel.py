"""Several devices: Lightning starts the ranks, no module is wrapped, and all ranks end when one rank ends."""

import multiprocessing
import os
import select
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from typing import Any

from lightning.pytorch.strategies import DDPStrategy, Strategy

from pfl_lightning.engines.threads import divide_cores
from pfl_lightning.internals.of_lightning import ScriptLauncher, set_launcher, start_ranks
from pfl_lightning.stopping import POLL, STARTED_BY, RankLost, Stopped, stoppable

ASKED = 1.0
"""Seconds for ranks to end on request, before being killed."""

FORCED = 3.0
"""Seconds after which a rank that can't be interrupted is killed, such as one waiting in a collective for a lost
rank."""


class RankLauncher(ScriptLauncher):
    """Start ranks as Lightning does, without Lightning's observer, which kills all ranks without a message."""

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Start the other ranks, unless this process is one, and call a function.

        Args:
            function: the function that each rank calls.
            *args: positional arguments of the function.
            trainer: unused; keeps Lightning's signature.
            **kwargs: keyword arguments of the function.
        """
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not self.cluster_environment.creates_processes_externally:
            os.environ[STARTED_BY] = str(os.getpid())
            start_ranks(self)
            # Later child processes are no ranks, and may outlive this process.
            del os.environ[STARTED_BY]
        divide_cores(self.num_processes)
        return function(*args, **kwargs)


class ClientParallel(DDPStrategy):
    """Lightning's processes and collectives for a federation with clients distributed over devices.

    Nothing is reduced between steps, because a client trains on one device; `Sharded` gathers results once per round.
    The Trainer uses this strategy if ``devices`` or ``num_nodes`` ask for more than one.

    Args:
        **kwargs: the arguments of Lightning's ``DDPStrategy``, such as ``start_method``, ``timeout`` or
            ``process_group_backend``.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._watch: RankWatch | None = None
        # Lightning advises sync_dist=True for logged values, but every rank logs the same value.
        warnings.filterwarnings("ignore", message=".*sync_dist=True")

    def configure_ddp(self) -> None:
        """Leave the federation unwrapped."""

    def _configure_launcher(self) -> None:
        """Replace Lightning's launcher of scripts."""
        super()._configure_launcher()
        if isinstance(self.launcher, ScriptLauncher):
            assert self.cluster_environment is not None
            set_launcher(self, RankLauncher(self.cluster_environment, self.num_processes, self.num_nodes))

    def setup_environment(self) -> None:
        """Watch the parent process of a forked or spawned rank, and join the other ranks."""
        if (parent := multiprocessing.parent_process()) is not None and self._watch is None:
            self._watch = RankWatch(self, parent.pid)
        super().setup_environment()

    def teardown(self) -> None:
        """Leave the other ranks."""
        super().teardown()
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    @property
    def started(self) -> list[Any]:
        """Processes of the ranks started by this process."""
        return getattr(self.launcher, "procs", [])

    def end_ranks(self) -> None:
        """End the ranks started by this process, by force after a second."""
        for process in self.started:
            process.terminate()
        deadline = time.monotonic() + ASKED
        while not all(map(is_over, self.started)) and time.monotonic() < deadline:
            time.sleep(POLL / 10)
        for process in self.started:
            process.kill()


class RankWatch:
    """Watch other ranks from a thread, because a main thread waiting in a collective receives no signal.

    A signal to this process is passed on to the ranks it started. If one of these has failed, or the parent process is
    gone, this process is asked to end, and killed after `FORCED` seconds.

    Args:
        strategy: the strategy of this rank.
        parent: the process id of this rank's parent; None if something else watches the parent.
    """

    def __init__(self, strategy: ClientParallel, parent: int | None) -> None:
        self.strategy = strategy
        self.parent = parent
        self.cause: RankLost | Stopped | None = None
        self._over = threading.Event()
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._before: int | None = None
        if threading.current_thread() is threading.main_thread():
            # Python's C-level handler writes the signal's number here at once, even if the main thread runs no Python
            # code.
            self._before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._run, name="rank-watch", daemon=True)
        self._thread.start()

    def lost(self) -> RankLost | None:
        """Return the error for a lost parent or rank; None while all are alive."""
        if self.parent is not None and os.getppid() != self.parent:
            return RankLost("the process that started this rank is gone", 1)
        if isinstance(self.strategy.launcher, RankLauncher):
            for rank, process in enumerate(self.strategy.started, start=1):
                # None is a running rank, and 0 one that has finished.
                if code := process.poll():
                    return RankLost.by_exit_code(rank, code)
        # For forked or spawned ranks torch itself reports the failure, with a traceback.
        return None

    def cause_of(self, error: BaseException) -> RankLost | Stopped | None:
        """Return the cause behind an error: a lost rank or a signal; None if the error is this rank's own.

        Args:
            error: the exception that ended this rank's work.
        """
        if isinstance(error, Stopped):
            return self.cause
        if not of_a_collective(error):
            return None
        # A collective may fail before the other rank's exit is visible, so wait a little.
        deadline = time.monotonic() + ASKED
        while (cause := self.cause or self.lost()) is None and time.monotonic() < deadline:
            time.sleep(POLL / 10)
        return cause or RankLost("another rank of this run is gone, or can't be reached", 1)

    def close(self) -> None:
        """End the watch."""
        self._over.set()
        self._thread.join()
        if self._before is not None:
            signal.set_wakeup_fd(self._before)
        os.close(self._read)
        os.close(self._write)

    def _run(self) -> None:
        """Wait for signals, and look for lost ranks in between."""
        while not self._over.is_set():
            readable, _, _ = select.select([self._read], [], [], POLL)
            numbers = set(os.read(self._read, 64) if readable else b"") & {signal.SIGTERM, signal.SIGINT}
            if numbers:
                self._end(Stopped(min(numbers)))
            elif lost := self.lost():
                self._end(lost)

    def _end(self, cause: RankLost | Stopped) -> None:
        """End the ranks started by this one, then this one, by force if necessary."""
        self.cause = cause
        begun = time.monotonic()
        if isinstance(cause, RankLost) and self._before is not None and not self._over.wait(POLL):
            # A computing main thread is interrupted by this signal; a main thread in a collective has got an error by
            # now.
            os.kill(os.getpid(), signal.SIGTERM)
        self.strategy.end_ranks()
        if not self._over.wait(begun + FORCED - time.monotonic()):
            if self.parent is None or isinstance(cause, RankLost):
                print(f"pfl-lightning: {cause}; killed while waiting for a rank", file=sys.stderr, flush=True)
            # A main thread that hangs in a collective never returns to raise an exception.
            os._exit(int(cause.code or 1))


def is_over(process: Any) -> bool:
    """Return True if a process has ended.

    Args:
        process: from ``subprocess`` or ``multiprocessing``; for the latter the sentinel is read, because the exit code
            is only for the thread that joins the process.
    """
    return bool(wait([process.sentinel], 0)) if hasattr(process, "sentinel") else process.poll() is not None


def of_a_collective(error: BaseException) -> bool:
    """Return True if an error comes from communication with other ranks.

    Args:
        error: the exception.
    """
    frames = list(traceback.walk_tb(error.__traceback__))
    return (
        isinstance(error, RuntimeError)
        and bool(frames)
        and str(frames[-1][0].f_globals.get("__name__")).startswith("torch.distributed")
    )


@contextmanager
def ended_together(strategy: Strategy) -> Iterator[None]:
    """Let SIGTERM and SIGINT end the work inside this context, and end all ranks when one ends.

    Args:
        strategy: the Trainer's strategy.

    Raises:
        Stopped: if this process was asked to end.
        RankLost: if another rank has ended.
    """
    if not isinstance(strategy, ClientParallel):
        with stoppable():
            yield
        return
    watch = RankWatch(strategy, int(os.environ[STARTED_BY]) if STARTED_BY in os.environ else None)
    try:
        with stoppable():
            yield
    except BaseException as error:
        cause = watch.cause_of(error)
        strategy.end_ranks()
        if cause is not None:
            raise cause from None
        raise
    finally:
        watch.close()
