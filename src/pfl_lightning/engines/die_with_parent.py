"""Kill worker processes when the parent process ends.

As a program, ``python die_with_parent.py PARENT MODULE ARGUMENTS`` runs ``python -m MODULE ARGUMENTS`` and ends with
process PARENT. ``python die_with_parent.py PARENT --forks DESCRIPTOR FIRST LATER MODULE`` imports the
module FIRST once, or calls ``FIRST`` as ``module:function``, and forks a process that runs MODULE for each message of a
connection. Modules of LATER, with commas between, are imported once a fork has imported them.

This file imports nothing of its package, because that import takes seconds, in which the parent may end.
"""

import atexit
import ctypes
import gc
import mmap
import os
import runpy
import signal
import sys
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection

PR_SET_PDEATHSIG = 1
PAUSE = 0.5
"""Seconds between two looks at the parent, on systems whose kernel doesn't send a signal."""
FORKS_PAUSE = 0.02
"""Seconds between two looks at the ends of forks."""


def end_with(parent: int) -> None:
    """Let this process be killed when the parent ends.

    On Linux the kernel kills it, whatever it is doing; there the parent is the thread that started this process.
    Elsewhere a thread of this process checks twice a second.

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
    while os.getppid() == parent:
        time.sleep(PAUSE)
    os._exit(1)


def serve(connection: Connection, later: Sequence[str]) -> list[str] | None:
    """Fork a process for each message, and report each end, until the other side closes.

    Args:
        connection: to the process that orders forks, which sends arguments, a file for the output and variables.
        later: modules to import before the next fork once a fork has imported them, as the next may need them too.

    Returns:
        In a fork the arguments of its program; in this process None, at the end.
    """
    own, running = os.getpid(), set[int]()
    # a byte for each module, in memory shared with the forks
    imported = mmap.mmap(-1, len(later) + 1)
    with suppress(EOFError, ConnectionError):
        # what the other side takes for the end of no fork: the imports are done
        connection.send(("ready", 0, 0))
        while True:
            if connection.poll(FORKS_PAUSE):
                arguments, output, environment = connection.recv()
                for place, name in enumerate(later):
                    if imported[place] and name not in sys.modules:
                        import_module(name)
                        gc.freeze()
                pid = fork()
                if pid == 0:
                    become(output, environment, own)
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
    """Give a fork its output and its variables, and let it end with its parent.

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
    end_with(int(sys.argv.pop(1)))
    if sys.path[0] == os.path.dirname(os.path.realpath(__file__)):
        # `python -m` puts the working directory first, not the folder of this file.
        sys.path[0] = os.getcwd()
    if sys.argv[1] == "--forks":
        descriptor, first, later, program = sys.argv[2:]
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
        sys.argv[1:] = [program, *arguments]
    runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
