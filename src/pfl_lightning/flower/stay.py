"""The process of a site that stays for the messages of a federation; `pfl_lightning.resident` starts it."""

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
        settings: folder of the app, the node's id, and the node's settings.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.settings = settings
        self.busy = False
        self.used = time.monotonic()
        self._worker: Worker | None = None

    def worker(self, state: RecordDict, run: int, run_config: Mapping[str, Any]) -> Worker:
        """Return the site's worker, made at the first message of a run that needs it.

        Args:
            state: the node's record of secrets of sums.
            run: Flower's id of the run.
            run_config: Flower's settings of the run.
        """
        settings = self.settings
        if self._worker is None or self._worker.run != run:
            # two at once would take twice the memory
            self._worker = None
            context = Context(run, settings["node"], settings["node_config"], state, dict(run_config))
            self._worker = worker_of(Path(settings["folder"]), context)
        self._worker.memory = state
        return self._worker

    def serve(self, connection: Connection) -> bool:
        """Answer the message of a connection; return False at the end of the federation."""
        self.busy = True
        try:
            if (message := connection.recv()) is None:
                connection.send(None)
                return False
            kind, content, state, ttl, run, run_config = message
            clients = str(self.settings["node_config"].get("clients", ""))
            content = answer(kind, content, lambda: self.worker(state, run, run_config), ttl, clients)
            connection.send((content, state))
        # the process that has brought the message can be killed
        except (EOFError, ConnectionError):
            pass
        finally:
            self.busy, self.used = False, time.monotonic()
        return True

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
        goes_on = True
        while goes_on:
            with listener.accept() as connection:
                goes_on = resident.serve(connection)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
