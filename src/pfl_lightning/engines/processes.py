"""The process engine: the clients of a round shared out to worker processes, for the cores of a CPU."""

import gc
import multiprocessing
import os
import signal
import statistics
import struct
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple, TypeVar, cast

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.engines.base import Evaluated, Job, Outcome
from pfl_lightning.engines.errors import ClientsLost, Failure
from pfl_lightning.engines.layout import Layout
from pfl_lightning.engines.parent import end_with
from pfl_lightning.engines.sequential import Sequential
from pfl_lightning.engines.shared_memory import Shelf
from pfl_lightning.engines.threads import one_thread

Result = TypeVar("Result")

WORTH = 0.1
"""Seconds of work from which a worker is worth the time that it takes to fork it and to copy what it writes to."""
NUMBERS = 500
"""Pieces that a round's jobs are taken in, at most."""
FORGETTING = 0.97
"""What a time with workers counts a round later, so that they are tried again after one bad round, or after some."""


class Worker(NamedTuple):
    """A process that was forked, and where it puts tensors."""

    process: BaseProcess
    shelf: Shelf


class Processes(Sequential):
    """Trains and evaluates several clients at once, each in a process with one thread.

    Workers are forked for each round: they see the module, the data and the jobs without a copy, take one job after
    another until none is left, and send back what came of it, its tensors in memory that both reach. This
    process is one of the workers. A job's result depends on the job alone, so that any number of workers gives the bits
    of the sequential engine with one thread. That lets this engine look at the clock: what takes less time than to fork
    workers and to hear from them is done in this process. A worker that dies ends the run with a message; the last
    checkpoint stands. However this process ends, its workers end with it.
    """

    when_clients_miss = (
        "a worker process ended in the middle of its work with exit code 0, as by os._exit(0) in a hook or a library; "
        "take that call out, or find it with trainer.engine=sequential, where it ends the run at once"
    )

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
        # those that no worker has, from round to round
        self._shelves: list[Shelf] = []

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
        for result, seconds in self._fork(function, left, self._workers_for(what, len(left))):
            side_by_side.append(seconds)
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

    def _fork(self, function: Callable[[Job], Result], jobs: list[Job], count: int) -> Iterator[tuple[Result, float]]:
        """Results of this process and of others, each with the seconds that it took.

        Args:
            function: what is done.
            jobs: with what.
            count: processes, this one among them.
        """
        context = multiprocessing.get_context("fork")
        numbers = numbered(len(jobs))
        main = os.getpid()
        workers: dict[Connection, Worker] = {}
        shelves = [self._shelves.pop() if self._shelves else Shelf() for _ in range(count - 1)]

        def work(sender: Connection, shelf: Shelf) -> None:
            end_with(main)
            # the main process answers to Ctrl-C, and ends its workers
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            # in the place of the main process's own handlers, which would make nothing of it here
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            torch.set_num_threads(1)
            # the collector would write to all that was there before, and so copy it
            gc.freeze()
            for index in taken_from(numbers):
                sender.send_bytes(shelf.pack(timed(function, jobs[index])))

        def arrived(at_once: bool) -> Iterator[tuple[Result, float]]:
            for result in self._collect(workers, at_once):
                if isinstance(result, Failure):
                    result.throw("a worker process")
                yield result

        try:
            for shelf in shelves:
                receiver, sender = context.Pipe(duplex=False)
                worker = Worker(context.Process(target=work, args=(sender, shelf), daemon=True), shelf)
                worker.process.start()
                # the worker's end is the only one left: it closes when the worker is gone
                sender.close()
                workers[receiver] = worker
            for index in taken_from(numbers):
                start = time.perf_counter()
                with one_thread():
                    result = function(jobs[index])
                yield result, time.perf_counter() - start
                yield from arrived(at_once=True)
            yield from arrived(at_once=False)
        finally:
            os.close(numbers)
            for receiver, (process, _) in workers.items():
                receiver.close()
                process.kill()
                process.join()
            for shelf in shelves:
                shelf.clear()
            self._shelves += shelves

    def _collect(self, workers: dict[Connection, Worker], at_once: bool) -> Iterator[Any]:
        """What the workers send, until all of them are done, or as far as it is there at once."""
        at_work = {receiver for receiver in workers if not receiver.closed}
        while at_work and (ready := cast(list[Connection], wait(list(at_work), 0 if at_once else None))):
            for receiver in ready:
                process, shelf = workers[receiver]
                try:
                    message = receiver.recv_bytes()
                except EOFError:
                    process.join()
                    if process.exitcode == -signal.SIGTERM:
                        # as all of its group, of which this process only hears later
                        signal.raise_signal(signal.SIGTERM)
                    if process.exitcode:
                        raise ClientsLost(
                            f"a worker process of engine=processes died with exit code {process.exitcode} "
                            "(-9: killed, often for lack of memory); resume with --ckpt_path last, or with fewer "
                            "trainer.workers."
                        ) from None
                    at_work.discard(receiver)
                    receiver.close()
                    continue
                yield shelf.unpack(message)


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


def timed(function: Callable[[Job], Any], job: Job) -> Any:
    """Return what a function makes of a job with the seconds that took, or the `Failure` that it ends with.

    Args:
        function: what is done.
        job: with what.
    """
    start = time.perf_counter()
    try:
        return function(job), time.perf_counter() - start
    except Exception as error:
        return Failure.of(error)
