"""Several devices: Lightning starts the ranks, no module is wrapped, and all ranks end when one does."""

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

from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch.strategies import DDPStrategy, Strategy
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher

from pfl_lightning.stopping import POLL, STARTED_BY, RankLost, Stopped, stoppable

ASKED = 1.0
"""Seconds that ranks have to end by themselves; then they are killed."""

FORCED = 3.0
"""Seconds after which a rank ends that can't be interrupted, as in a collective that waits for a rank that is gone."""


class RankLauncher(_SubprocessScriptLauncher):
    """Starts ranks as Lightning does, without its observer: that kills all of them, with nobody left to say why."""

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Start the other ranks unless this is one of them, and call a function.

        Args:
            function: What each rank calls.
            *args: Its arguments.
            trainer: Not used, as in Lightning's.
            **kwargs: Its arguments by name.
        """
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not self.cluster_environment.creates_processes_externally:
            os.environ[STARTED_BY] = str(os.getpid())
            self._call_children_scripts()
            # not for what this process starts later, which is no rank and may outlive it
            del os.environ[STARTED_BY]
        _set_num_threads_if_needed(num_processes=self.num_processes)
        return function(*args, **kwargs)


class ClientParallel(DDPStrategy):
    """Lightning's processes and collectives for a federation whose clients are shared out to devices.

    Nothing is reduced between steps, as a client trains on one device; `Sharded` gathers once a round. The Trainer
    takes it where ``devices`` or ``num_nodes`` ask for more than one.

    Args:
        **kwargs: the arguments of Lightning's ``DDPStrategy``, such as ``start_method``, ``timeout`` or
            ``process_group_backend``.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._watch: RankWatch | None = None
        # every rank logs the same value
        warnings.filterwarnings("ignore", message=".*sync_dist=True")

    def configure_ddp(self) -> None:
        """Leaves the federation as it is."""

    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        if isinstance(self._launcher, _SubprocessScriptLauncher):
            assert self.cluster_environment is not None
            self._launcher = RankLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    def setup_environment(self) -> None:
        """Watch the process that has forked or spawned this rank, and join the other ranks."""
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
        """Processes of the ranks that this process has started."""
        return getattr(self._launcher, "procs", [])

    def end_ranks(self) -> None:
        """End the ranks that this process has started, by force where they take long."""
        for process in self.started:
            process.terminate()
        deadline = time.monotonic() + ASKED
        while not all(map(is_over, self.started)) and time.monotonic() < deadline:
            time.sleep(POLL / 10)
        for process in self.started:
            process.kill()


class RankWatch:
    """Watches other ranks from a thread, as no signal reaches a main thread that waits for them in a collective.

    A signal to this process is passed on to the ranks that it has started. Where one of those has failed, or the
    process that started this rank is gone, this one is told to end. If it hasn't after `FORCED` seconds, it is ended.

    Args:
        strategy: The strategy of this rank.
        parent: Process that started this rank; None where something else looks after it.
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
            # where the interpreter writes the number of a signal at once, whatever the main thread does
            self._before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._run, name="rank-watch", daemon=True)
        self._thread.start()

    def lost(self) -> RankLost | None:
        """Return which process's end ends this rank; None where all are there."""
        if self.parent is not None and os.getppid() != self.parent:
            return RankLost("the process that started this rank is gone", 1)
        if isinstance(self.strategy.launcher, RankLauncher):
            for rank, process in enumerate(self.strategy.started, start=1):
                if code := process.poll():
                    return RankLost.by_exit_code(rank, code)
        # of ranks that were forked or spawned torch tells what has ended one, with its traceback
        return None

    def cause_of(self, error: BaseException) -> RankLost | Stopped | None:
        """Return what is behind an error: a rank that is lost, or a signal; None where the error is this rank's own.

        Args:
            error: What has ended this rank's work.
        """
        if isinstance(error, Stopped):
            return self.cause
        if not of_a_collective(error):
            return None
        # the others may be about to end
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
        while not self._over.is_set():
            readable, _, _ = select.select([self._read], [], [], POLL)
            numbers = set(os.read(self._read, 64) if readable else b"") & {signal.SIGTERM, signal.SIGINT}
            if numbers:
                self._end(Stopped(min(numbers)))
            elif lost := self.lost():
                self._end(lost)

    def _end(self, cause: RankLost | Stopped) -> None:
        """End the ranks that this one has started, and this one by force where it doesn't end by itself."""
        self.cause = cause
        begun = time.monotonic()
        if isinstance(cause, RankLost) and self._before is not None and not self._over.wait(POLL):
            # a main thread that computes hears this; one that waits for the lost rank has an error by now
            os.kill(os.getpid(), signal.SIGTERM)
        self.strategy.end_ranks()
        if not self._over.wait(begun + FORCED - time.monotonic()):
            if self.parent is None or isinstance(cause, RankLost):
                print(f"pfl-lightning: {cause}; waited for another rank, and was ended", file=sys.stderr, flush=True)
            os._exit(int(cause.code or 1))


def is_over(process: Any) -> bool:
    """Tell whether a process has ended.

    Args:
        process: of ``subprocess`` or ``multiprocessing``; the latter's exit code is for the thread alone that joins it.
    """
    return bool(wait([process.sentinel], 0)) if hasattr(process, "sentinel") else process.poll() is not None


def of_a_collective(error: BaseException) -> bool:
    """Tell whether an error comes from the exchange with other ranks.

    Args:
        error: The error.
    """
    frames = list(traceback.walk_tb(error.__traceback__))
    return (
        isinstance(error, RuntimeError)
        and bool(frames)
        and str(frames[-1][0].f_globals.get("__name__")).startswith("torch.distributed")
    )


@contextmanager
def ended_together(strategy: Strategy) -> Iterator[None]:
    """Let SIGTERM and SIGINT end what it contains, and all ranks end when one does.

    Args:
        strategy: The Trainer's.

    Raises:
        Stopped: This process was told to end.
        RankLost: Another rank has ended.
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
