"""Start the runs of a comparison as forks of one process, which has imported the package once.

The import takes several seconds of CPU time, which is more than a small run needs for everything else.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Pipe
from pathlib import Path


class Starter:
    """A process without threads that forks one process a run; all of them end with their parent.

    Only for Linux: other systems have no fork, or libraries that don't survive one.

    Args:
        program: the module that each fork runs.
        first: a module to import before the first fork, or a function to call for its imports, as ``module:function``.
        later: modules that forks may need; one is imported before the next fork once a fork has needed it.
        environment: variables of the process and of all forks, in addition to this process's.
    """

    def __init__(self, program: str, first: str, later: Sequence[str], environment: Mapping[str, str]) -> None:
        self._connection, other = Pipe()
        with other:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "pfl_lightning.stopping", str(os.getpid())),
                    *("pfl_lightning.cli.forks", str(other.fileno()), first, ",".join(later), program),
                ],
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                # what isn't a terminal is written in blocks, by the forks too
                stdout=subprocess.DEVNULL,
                pass_fds=[other.fileno()],
            )
        self._codes: dict[int, int] = {}

    def wait(self) -> None:
        """Wait until the process has imported the package; where it has ended, the next start says so."""
        with suppress(EOFError, OSError):
            self._connection.poll(None)

    def start(self, arguments: Sequence[str], output: Path, environment: Mapping[str, str]) -> "Forked":
        """Fork a process that runs the program.

        Args:
            arguments: arguments of the program.
            output: file for all that the process prints.
            environment: variables of the process, in addition to the starter's.

        Raises:
            RuntimeError: if the starter has ended.
        """
        try:
            self._connection.send((list(arguments), str(output), dict(environment)))
            while True:
                kind, pid, code = self._connection.recv()
                if kind == "started":
                    return Forked(self, pid)
                self._codes[pid] = code
        except (EOFError, OSError) as error:
            raise RuntimeError(
                f"compare: the process that starts runs ended, exit code {self._process.wait()}"
            ) from error

    def code(self, pid: int) -> int | None:
        """Return the exit code of an ended fork, minus the signal's number if one ended it; None if it still runs."""
        try:
            while self._connection.poll():
                _, ended, code = self._connection.recv()
                self._codes[ended] = code
        except (EOFError, OSError):
            # the kernel has ended the forks with their parent
            return self._codes.get(pid, -signal.SIGKILL)
        return self._codes.get(pid)

    def close(self) -> None:
        """End the process, and by force all forks that still run."""
        self._connection.close()
        self._process.wait()


class Forked:
    """A process forked by a `Starter`, with the methods of `subprocess.Popen` that a comparison needs.

    Args:
        starter: the starter.
        pid: the process id.
    """

    def __init__(self, starter: Starter, pid: int) -> None:
        self._starter, self.pid = starter, pid

    def poll(self) -> int | None:
        """Return the exit code, negative if a signal ended the process; None if it still runs."""
        return self._starter.code(self.pid)

    def terminate(self) -> None:
        """Send SIGTERM, unless the process has ended."""
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL, unless the process has ended."""
        self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)
