"""The process engine: the clients of a round shared out to worker processes, for the cores of a CPU."""

import gc
import io
import mmap
import multiprocessing
import os
import signal
import statistics
import struct
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar, cast

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.engines.base import Evaluated, Job, Outcome
from pfl_lightning.engines.layout import Layout
from pfl_lightning.engines.parent import end_with
from pfl_lightning.engines.sequential import Sequential
from pfl_lightning.engines.shared_memory import Packer, Unpacker
from pfl_lightning.engines.threads import one_thread

Result = TypeVar("Result")

WORTH = 0.1
"""Seconds of work from which a worker is worth the time that it takes to fork it and to copy what it writes to."""
NUMBERS = 500
"""Pieces that a round's jobs are taken in, at most."""
FORGETTING = 0.97
"""What a time with workers counts a round later, so that they are tried again after one bad round, or after some."""


class Processes(Sequential):
    """Trains and evaluates several clients at once, each in a process with one thread.

    Workers are forked for each round: they see the module, the data and the jobs without a copy, take one job after
    another until none is left, and send back what came of it, its tensors in memory that was shared before. This
    process is one of the workers. A job's result depends on the job alone, so that any number of workers gives the bits
    of the sequential engine with one thread. That lets this engine look at the clock: what takes less time than to fork
    workers and to hear from them is done in this process. A worker that dies ends the run with a message; the last
    checkpoint stands. However this process ends, its workers end with it.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.device.type != "cpu" or "fork" not in multiprocessing.get_all_start_methods():
            raise MisconfigurationException(
                f"trainer.engine=processes forks processes that train on the CPU, which {self.device.type} on "
                f"{sys.platform} doesn't allow; take engine=vectorised or sequential."
            )
        # of a job, by what is done, of the last time: by itself, and with its share of forking and sending
        self._alone: dict[str, float] = {}
        self._forked: dict[str, float] = {}
        # bytes of the tensors of a result, by what is done, as far as known
        self._room: dict[str, int] = {}

    def run(self, jobs: Iterable[Job]) -> Iterator[Outcome]:
        """Yields outcomes in the order in which clients finish."""
        layout = Layout.of(self.module)
        with self.leaks.of_a_round():
            yield from self._share_out("training", lambda job: self.train(job, layout), list(jobs))

    def evaluate_all(self, jobs: Iterable[Job]) -> Iterator[Evaluated]:
        """Yields metrics in the order in which clients finish."""
        return self._share_out("evaluation", lambda job: (job.client, self.evaluate(job)), list(jobs))

    def _share_out(self, what: str, function: Callable[[Job], Result], jobs: list[Job]) -> Iterator[Result]:
        """Results of all jobs; the first ones are made here until it is clear that workers pay."""
        here: list[float] = []
        if what in self._forked:
            self._forked[what] *= FORGETTING
        while len(here) < len(jobs) and self._workers_for(what, len(jobs) - len(here)) < 2:
            start = time.perf_counter()
            with one_thread():
                result = function(jobs[len(here)])
            here.append(time.perf_counter() - start)
            self._alone[what] = statistics.fmean(here)
            yield result
        left = jobs[len(here) :]
        if not left:
            return
        start = time.perf_counter()
        side_by_side: list[float] = []
        workers, room = self._workers_for(what, len(left)), self._room.get(what, 0)
        for result, seconds, needed in self._fork(function, left, workers, room):
            side_by_side.append(seconds)
            self._room[what] = max(needed, self._room.get(what, 0))
            # now and not after the last one: who has all results may not ask for an end
            self._forked[what] = (time.perf_counter() - start) / len(side_by_side)
            # whichever is nearer to undisturbed: the first job of all takes its time, and so do workers side by side
            self._alone[what] = min(map(statistics.fmean, filter(None, (here, side_by_side))))
            yield result

    def _workers_for(self, what: str, jobs: int) -> int:
        """Processes that are worth their time, judged by the jobs before."""
        alone = self._alone.get(what, 0.0)
        if self._forked.get(what, 0.0) > alone:
            return 1
        return int(min(self.workers or cores(), jobs, alone * jobs / WORTH))

    def _fork(
        self, function: Callable[[Job], Result], jobs: list[Job], count: int, room: int
    ) -> Iterator[tuple[Result, float, int]]:
        """Results of this process and of others, each with the seconds that it took and the bytes of its tensors.

        Args:
            function: what is done.
            jobs: with what.
            count: processes, this one among them.
            room: bytes of the tensors of a result, as far as known.
        """
        context = multiprocessing.get_context("fork")
        numbers = numbered(len(jobs))
        main = os.getpid()
        receivers: dict[Connection, Any] = {}
        # a page is there from when something is written to it
        rooms = [mmap.mmap(-1, room) if room else None for _ in jobs]

        def work(sender: Connection) -> None:
            end_with(main)
            # the main process answers to Ctrl-C, and ends its workers
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            # in the place of the main process's own handlers, which would make nothing of it here
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            torch.set_num_threads(1)
            # the collector would write to all that was there before, and so copy it
            gc.freeze()
            for index in taken_from(numbers):
                sender.send((index, *packed(function, jobs[index], rooms[index])))

        def arrived(at_once: bool) -> Iterator[tuple[Result, float, int]]:
            for index, needed, record in self._collect(receivers, at_once):
                result = Unpacker(record, rooms[index]).load()
                rooms[index] = None
                if isinstance(result, Exception):
                    raise result
                yield *result, needed

        try:
            for _ in range(count - 1):
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(target=work, args=(sender,), daemon=True)
                process.start()
                # the worker's end is the only one left: it closes when the worker is gone
                sender.close()
                receivers[receiver] = process
            for index in taken_from(numbers):
                start = time.perf_counter()
                with one_thread():
                    result = function(jobs[index])
                yield result, time.perf_counter() - start, 0
                yield from arrived(at_once=True)
            yield from arrived(at_once=False)
        finally:
            os.close(numbers)
            for receiver, process in receivers.items():
                receiver.close()
                process.kill()
                process.join()

    def _collect(self, receivers: dict[Connection, Any], at_once: bool) -> Iterator[Any]:
        """What the workers send, until all of them are done, or as far as it is there at once."""
        at_work = {receiver for receiver in receivers if not receiver.closed}
        while at_work and (ready := cast(list[Connection], wait(list(at_work), 0 if at_once else None))):
            for receiver in ready:
                try:
                    message = receiver.recv()
                except EOFError:
                    process = receivers[receiver]
                    process.join()
                    if process.exitcode == -signal.SIGTERM:
                        # as all of its group, of which this process only hears later
                        signal.raise_signal(signal.SIGTERM)
                    if process.exitcode:
                        raise RuntimeError(
                            f"a worker process of engine=processes died with exit code {process.exitcode} "
                            "(-9: killed, often for lack of memory); resume with --ckpt_path last, or with fewer "
                            "trainer.workers."
                        ) from None
                    at_work.discard(receiver)
                    receiver.close()
                    continue
                yield message


def numbered(jobs: int) -> int:
    """A pipe's end with the numbers of jobs, of which each process takes as it needs.

    Whoever reads takes, all at once: no lock is left behind by a process that is killed.

    Args:
        jobs: how many there are.
    """
    reader, writer = os.pipe()
    # neighbours together where there are many, as a pipe is sure to hold one page
    together = -(-jobs // NUMBERS)
    for first in range(0, jobs, together):
        os.write(writer, struct.pack("II", first, min(first + together, jobs)))
    os.close(writer)
    return reader


def taken_from(numbers: int) -> Iterator[int]:
    """One job's number after another, until nobody has any left.

    Args:
        numbers: what `numbered` gave.
    """
    while some := os.read(numbers, struct.calcsize("II")):
        yield from range(*struct.unpack("II", some))


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def packed(function: Callable[[Job], Any], job: Job, room: mmap.mmap | None) -> tuple[int, bytes]:
    """What a function makes of a job and the seconds that took, or the exception that it ends with.

    Args:
        function: what is done.
        job: with what.
        room: where tensors go.

    Returns:
        How many bytes they need, and the rest as an `Unpacker` reads it.
    """
    start = time.perf_counter()
    result: Any
    try:
        result = function(job), time.perf_counter() - start
    except MisconfigurationException as error:
        result = error
    except Exception:
        # as text, since an exception loses its traceback on the way
        result = RuntimeError(f"in a worker process:\n{traceback.format_exc()}")
    packer = Packer(file := io.BytesIO(), room)
    packer.dump(result)
    return packer.needed, file.getvalue()
