"""Processes that end with the one that started them, however that ends.

As a program, ``python parent.py PARENT MODULE ARGUMENTS``, it is ``python -m MODULE ARGUMENTS`` that ends with the
process PARENT. It imports nothing of its package: while that is read, which takes seconds, a parent may already end.
"""

import ctypes
import os
import runpy
import signal
import sys
import threading
import time

PR_SET_PDEATHSIG = 1
PAUSE = 0.5
"""Seconds between two looks at the parent, where the kernel doesn't look."""


def end_with(parent: int) -> None:
    """Lets this process be killed when its parent ends.

    On Linux the kernel does so, whatever this process is at; the parent is then the thread that started it. Elsewhere
    a thread of this process looks every half second.

    Args:
        parent: id of the process that has started this one.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        # the parent may have ended before
        if os.getppid() != parent:
            os._exit(1)
    else:
        threading.Thread(target=watch, args=(parent,), daemon=True).start()


def watch(parent: int) -> None:
    """Waits for the parent's end, and ends this process."""
    while os.getppid() == parent:
        time.sleep(PAUSE)
    os._exit(1)


if __name__ == "__main__":
    end_with(int(sys.argv.pop(1)))
    if sys.path[0] == os.path.dirname(os.path.realpath(__file__)):
        # as by `python -m`
        sys.path[0] = os.getcwd()
    runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
