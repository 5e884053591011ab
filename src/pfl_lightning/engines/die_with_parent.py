"""Kill worker processes when the parent process ends.

As a program, ``python die_with_parent.py PARENT MODULE ARGUMENTS`` runs ``python -m MODULE ARGUMENTS`` and ends with
process PARENT. This file imports nothing of its package, because that import takes seconds, in which the parent may
end.
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
"""Seconds between two looks at the parent, on systems whose kernel doesn't send a signal."""


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


if __name__ == "__main__":
    end_with(int(sys.argv.pop(1)))
    if sys.path[0] == os.path.dirname(os.path.realpath(__file__)):
        # `python -m` puts the working directory first, not the folder of this file.
        sys.path[0] = os.getcwd()
    runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
