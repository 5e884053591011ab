"""The process of a site that stays for the messages of a run; `pfl_lightning.resident` starts it."""

import json
import os
import sys
import threading
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

from flwr.app import Context, RecordDict

from pfl_lightning.flower.apps import worker_of
from pfl_lightning.flower.client_app import Worker, answer
from pfl_lightning.runs.locks import is_alive

IDLE = 1800.0
"""Seconds without a message after which the process ends; the next message starts another one."""
PAUSE = 0.5
"""Seconds between two looks at the node's process."""


class Resident:
    """Answers messages one after another, by a worker that is made once.

    Args:
        settings: folder of the app, ids of run and node, and the settings of both.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.settings = settings
        self.busy = False
        self.used = time.monotonic()
        self._worker: Worker | None = None

    def worker(self, state: RecordDict) -> Worker:
        """Return the site's worker, made at the first message that needs it.

        Args:
            state: the node's record of secrets of sums.
        """
        told = self.settings
        if self._worker is None:
            context = Context(told["run"], told["node"], told["node_config"], state, told["run_config"])
            self._worker = worker_of(Path(told["folder"]), context)
        self._worker.memory = state
        return self._worker

    def serve(self, connection: Connection) -> None:
        """Answer the message of a connection."""
        self.busy = True
        try:
            kind, content, state, ttl = connection.recv()
            clients = str(self.settings["node_config"].get("clients", ""))
            connection.send((answer(kind, content, lambda: self.worker(state), ttl, clients), state))
        # the process that has brought the message can be killed
        except (EOFError, ConnectionError):
            pass
        finally:
            self.busy, self.used = False, time.monotonic()

    def watch(self, parent: int, address: Path) -> None:
        """End this process when the node's process has ended, or after a time without messages."""
        # polled, since a process can't wait for the end of one that isn't its child
        while is_alive(parent) and (self.busy or time.monotonic() - self.used < IDLE):
            time.sleep(PAUSE)
        address.unlink(missing_ok=True)
        os._exit(0)


def main(address: Path) -> None:
    """Serve the messages that come to a socket.

    Args:
        address: the socket.
    """
    settings = json.load(sys.stdin)
    sys.path[:] = settings["path"]
    resident = Resident(settings)
    # no message waits for the imports above: the socket is made after them
    with Listener(str(address), "AF_UNIX") as listener:
        threading.Thread(target=resident.watch, args=(settings["parent"], address), daemon=True).start()
        while True:
            with listener.accept() as connection:
                resident.serve(connection)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
