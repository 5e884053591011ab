"""Train the clients of a round in worker processes, one per core of a CPU."""

import gc
import multiprocessing
import os
import signal
import statistics
import struct
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple, TypeVar, cast

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.engines.base import Job, Outcome
from pfl_lightning.engines.client_metrics import Evaluated
from pfl_lightning.engines.errors import ClientsLost, Failure
from pfl_lightning.engines.sequential import Sequential
from pfl_lightning.engines.shared_memory import Shelf
from pfl_lightning.engines.steps import Layout
from pfl_lightning.engines.threads import cores, one_thread
from pfl_lightning.stopping import end_with

Result = TypeVar("Result")

WORTH = 0.1
"""Seconds of work that pay for forking a worker and copying the memory pages it writes to."""
NUMBERS = 500
"""The largest number of pieces that a round's jobs are divided into."""
FORGETTING = 0.97
"""Factor per round on the measured time with workers, so that workers are tried again some rounds after a bad one."""


class Worker(NamedTuple):
    """A forked process, with the shelf for the process's tensors."""

    process: BaseProcess
    shelf: Shelf


class Processes(Sequential):
    """Train and evaluate several clients at once, each in a process with one thread.

    Workers are forked for each round: they see module, data and jobs without copies, take one job after another, and
    send back results, with tensors in shared memory. This process is one of the workers. A job's result depends on the
    job alone, so any number of workers gives the bits of the sequential engine with one thread. The number of workers
    may therefore depend on the clock: rounds shorter than forking and communication run in this process. A worker's
    death ends the run with a message; the last checkpoint remains. However this process ends, its workers end with it.

    The arguments are those of `Sequential`.
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
        # Seconds per job in the last round, by kind of work: computed alone, and with the share of forking and sending.
        self._alone: dict[str, float] = {}
        self._forked: dict[str, float] = {}
        # Shelves without a worker, kept from round to round.
        self._shelves: list[Shelf] = []

    def run(self, jobs: Iterable[Job]) -> Iterator[Outcome]:
        """Train each job's client, and yield outcomes in the order of finishing."""
        layout = Layout.of(self.module)
        with self.leaks.of("local work", whole_round=True):
            yield from self._share_out("training", lambda job: self.train(job, layout), list(jobs))

    def evaluate_all(self, jobs: Iterable[Job]) -> Iterator[Evaluated]:
        """Evaluate each job's clients, and yield metrics in the order of finishing."""
        return chain.from_iterable(self._share_out("evaluation", self.evaluate_each, list(jobs)))

    def _share_out(self, what: str, function: Callable[[Job], Result], jobs: list[Job]) -> Iterator[Result]:
        """Yield the results of all jobs; compute the first ones here until workers are known to pay.

        Args:
            what: the kind of work, for the measured times.
            function: computes a job's result.
            jobs: the jobs.
        """
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
            # Updated at each result, because a caller with all results may not exhaust this iterator.
            self._forked[what] = (time.perf_counter() - start) / len(side_by_side)
            # The smaller mean: the very first job includes warm-up, and workers side by side slow each other down.
            self._alone[what] = min(map(statistics.fmean, filter(None, (here, side_by_side))))
            yield result

    def _workers_for(self, what: str, jobs: int) -> int:
        """Return the worthwhile number of processes, judged by the jobs so far."""
        alone = self._alone.get(what, 0.0)
        # With workers a job took longer than alone.
        if self._forked.get(what, 0.0) > alone:
            return 1
        return int(min(self.workers or cores(), jobs, alone * jobs / WORTH))

    def _fork(self, function: Callable[[Job], Result], jobs: list[Job], count: int) -> Iterator[tuple[Result, float]]:
        """Yield results of this process and of forked workers, each with the seconds taken.

        Args:
            function: computes a job's result.
            jobs: the jobs.
            count: the number of processes, including this one.
        """
        context = multiprocessing.get_context("fork")
        numbers = numbered(len(jobs))
        main = os.getpid()
        workers: dict[Connection, Worker] = {}
        shelves = [self._shelves.pop() if self._shelves else Shelf() for _ in range(count - 1)]

        def work(sender: Connection, shelf: Shelf) -> None:
            end_with(main)
            # The main process handles Ctrl-C, and ends the workers.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            # The main process's own handlers, inherited by the fork, would do nothing here.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            torch.set_num_threads(1)
            # Without freeze the garbage collector would write to all inherited objects, and so copy their memory pages.
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
                # With this end closed, the worker holds the only one: the pipe closes when the worker ends.
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
            # Reached after errors too, and when the caller abandons this iterator.
            os.close(numbers)
            for receiver, (process, _) in workers.items():
                receiver.close()
                process.kill()
                process.join()
            for shelf in shelves:
                shelf.clear()
            self._shelves += shelves

    def _collect(self, workers: dict[Connection, Worker], at_once: bool) -> Iterator[Any]:
        """Yield the workers' results until all workers are done, or only results already sent.

        Args:
            workers: the workers by receiver.
            at_once: whether to return without waiting.
        """
        at_work = {receiver for receiver in workers if not receiver.closed}
        while at_work and (ready := cast(list[Connection], wait(list(at_work), 0 if at_once else None))):
            for receiver in ready:
                process, shelf = workers[receiver]
                try:
                    message = receiver.recv_bytes()
                except EOFError:
                    process.join()
                    if process.exitcode == -signal.SIGTERM:
                        # A SIGTERM to the whole process group reaches this process a little later; act on it now.
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
    """Return the read end of a pipe with the numbers of all jobs, from which each process takes pieces.

    A read takes a whole piece at once, so no lock is left behind by a killed process.

    Args:
        jobs: the number of jobs.
    """
    reader, writer = os.pipe()
    # A pipe holds at least one page, so many jobs are grouped.
    together = -(-jobs // NUMBERS)
    for first in range(0, jobs, together):
        os.write(writer, struct.pack("II", first, min(first + together, jobs)))
    os.close(writer)
    return reader


def taken_from(numbers: int) -> Iterator[int]:
    """Yield one job's number after another, until the pipe is empty.

    Args:
        numbers: the pipe from `numbered`.
    """
    while some := os.read(numbers, struct.calcsize("II")):
        yield from range(*struct.unpack("II", some))


def timed(function: Callable[[Job], Any], job: Job) -> Any:
    """Return a job's result with the seconds taken, or a `Failure` if it raises.

    Args:
        function: computes a job's result.
        job: the job.
    """
    start = time.perf_counter()
    try:
        return function(job), time.perf_counter() - start
    except Exception as error:
        return Failure.of(error)
