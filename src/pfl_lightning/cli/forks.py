"""A program that imports what runs need once, and forks a process for each run of a comparison.

``python -m pfl_lightning.cli.forks DESCRIPTOR FIRST LATER MODULE`` imports the module FIRST, or calls ``FIRST``
as ``module:function``, and forks a process that runs MODULE for each message of a connection. Modules of LATER, with
commas between, are imported once a fork has imported them.
"""

import atexit
import gc
import mmap
import os
import runpy
import signal
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection

from pfl_lightning.stopping import end_with

PAUSE = 0.02
"""Seconds between two looks at the ends of forks."""


def serve(connection: Connection, later: Sequence[str]) -> list[str] | None:
    """Fork a process for each message, and report each end, until the other side closes.

    Args:
        connection: to the process that orders forks, which sends arguments, a file for the output and variables.
        later: modules to import before the next fork once a fork has imported them, as the next may need them too.

    Returns:
        In a fork the arguments of its program; in this process None, at the end.
    """
    parent, running = os.getpid(), set[int]()
    # a byte for each module, in memory shared with the forks
    imported = mmap.mmap(-1, len(later) + 1)
    with suppress(EOFError, ConnectionError):
        # what the other side takes for the end of no fork: the imports are done
        connection.send(("ready", 0, 0))
        while True:
            if connection.poll(PAUSE):
                arguments, output, environment = connection.recv()
                for place, name in enumerate(later):
                    if imported[place] and name not in sys.modules:
                        import_module(name)
                        gc.freeze()
                pid = fork()
                if pid == 0:
                    become(output, environment, parent)
                    atexit.register(note, imported, later)
                    connection.close()
                    return list(arguments)
                running.add(pid)
                connection.send(("started", pid, 0))
            while running:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    break
                running.discard(pid)
                connection.send(("ended", pid, os.waitstatus_to_exitcode(status)))
    return None


def fork() -> int:
    """Fork this process, and return what ``os.fork`` does."""
    with warnings.catch_warnings():
        # From 3.12 on Python warns where a process has threads, into the user's terminal. The one here is of pyarrow's
        # allocator, jemalloc, which pandas and so scikit-learn import, and which prepares for forks. The threads of
        # numpy's OpenBLAS end by themselves before a fork, and start again on need.
        warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork", category=DeprecationWarning)
        return os.fork()


def note(imported: mmap.mmap, names: Sequence[str]) -> None:
    """Note the modules that this process has imported.

    Args:
        imported: a byte for each module.
        names: the modules.
    """
    for place, name in enumerate(names):
        imported[place] |= name in sys.modules


def become(output: str, environment: Mapping[str, str], parent: int) -> None:
    """Set a fork's output and variables, and end the fork with its parent.

    Args:
        output: file for the output.
        environment: additional variables.
        parent: process id of the process that forks.
    """
    end_with(parent)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(file, stream.fileno())
    os.close(file)
    os.environ.update(environment)


if __name__ == "__main__":
    descriptor, first, later, program = sys.argv[1:]
    # An interrupt of the terminal reaches the forks themselves; this process ends with the other side.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    module, _, function = first.partition(":")
    found = import_module(module)
    if function:
        getattr(found, function)()
    # What is imported stays: no fork need look through it for garbage, and so copy its memory.
    gc.freeze()
    arguments = serve(Connection(int(descriptor)), later.split(","))
    if arguments is None:
        sys.exit()
    sys.argv[1:] = arguments
    runpy.run_module(program, run_name="__main__", alter_sys=True)
