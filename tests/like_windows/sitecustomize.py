"""Lets each Python that has this folder on its path run as on Windows: no modules and functions of POSIX, no links.

A file that is open or mapped can't be replaced or removed, and names are those that Windows allows.
"""

import ctypes
import importlib
import multiprocessing
import os
import re
import signal
import sys
from pathlib import Path

MODULES = ("fcntl", "resource", "pwd", "grp", "termios")
CALLS = ("fork", "forkpty", "getuid", "getgid", "geteuid", "getegid", "getpgid", "killpg", "memfd_create", "mkfifo")
CALLS += ("preadv", "pwritev", "sched_getaffinity", "waitid", "symlink")
SIGNALS = ("SIGKILL", "SIGHUP", "SIGALRM", "SIGCHLD", "SIGPIPE", "SIGUSR1", "SIGUSR2", "SIGSTOP", "SIGCONT")
DEVICES = {"con", "prn", "aux", "nul", *(f"{name}{number}" for name in ("com", "lpt") for number in range(10))}
# packages that look at the system when they are imported are as they are here
for package in (
    "torch",
    "torchvision",
    "lightning.pytorch",
    "sklearn.datasets",
    "matplotlib.pyplot",
    "torch.utils.data",
):
    importlib.import_module(package)
for module in list(sys.modules.values()):
    if "_IS_WINDOWS" in vars(module):
        module._IS_WINDOWS = True
kill = os.kill


class Kernel:
    """The functions of kernel32 that the package calls."""

    def OpenProcess(self, rights: int, inherits: bool, process: int) -> int:
        try:
            kill(process, 0)
        except ProcessLookupError:
            return 0
        return process

    def WaitForSingleObject(self, handle: int, milliseconds: int) -> int:
        return 0x102

    def CloseHandle(self, handle: int) -> bool:
        return True


def in_use(path) -> bool:
    """Whether this process has a file open, or mapped."""
    whole = os.path.realpath(path)
    opened = []
    for number in os.listdir("/proc/self/fd"):
        try:
            opened.append(os.readlink(f"/proc/self/fd/{number}"))
        except OSError:
            continue
    return whole in opened or f" {whole}\n" in Path("/proc/self/maps").read_text()


def guarded(call):
    """A call that refuses files in use."""

    def guard(*paths, **options):
        for path in paths:
            if in_use(path):
                raise PermissionError(13, "The process cannot access the file because it is being used", str(path))
        return call(*paths, **options)

    return guard


def hook(event: str, arguments: tuple) -> None:
    """Refuse names that Windows has for something else."""
    if event == "open" and isinstance(arguments[0], str) and isinstance(arguments[1], str) and "r" not in arguments[1]:
        name = os.path.basename(arguments[0])
        if re.search(r'[<>:"\\|?*]|[. ]$', name) or name.split(".")[0].lower() in DEVICES:
            raise OSError(22, "Invalid argument", arguments[0])


def terminate(process: int, number: int) -> None:
    """What os.kill does on Windows: it ends the process at once."""
    if number == 0:
        raise OSError(22, "signal 0 is Ctrl-C on Windows")
    os._exit(number) if process == os.getpid() else kill(process, 9)


for name in MODULES:
    sys.modules[name] = None
for name in CALLS:
    if hasattr(os, name):
        delattr(os, name)
for name in SIGNALS:
    delattr(signal, name)
os.kill, os.replace, os.unlink, os.remove = terminate, guarded(os.replace), guarded(os.unlink), guarded(os.remove)
signal.valid_signals = lambda: {
    signal.SIGABRT,
    signal.SIGFPE,
    signal.SIGILL,
    signal.SIGINT,
    signal.SIGSEGV,
    signal.SIGTERM,
}
multiprocessing.get_all_start_methods = lambda: ["spawn"]
ctypes.WinDLL = lambda *arguments, **options: Kernel()
ctypes.get_last_error = lambda: 0
sys.addaudithook(hook)
sys.platform = "win32"
