"""Flower's app of a site, with a process that stays for the messages of a federation.

Flower starts a process for every message, and the imports of torch and Lightning would take most of its time. The app
imports neither: it hands the message to a process with all imports and the site's data. This process is started at the
first message, serves resumed runs too, and ends with the federation, with the site's node, or after a time without
messages.
"""

import hashlib
import json
import os
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

MODULE = "pfl_lightning.flower.stay"
"""The module that the staying process runs."""
STEPS = ("first", "offer", "share", "reveal")
"""Names of the queries before the first round, and of the steps of a secure sum."""
START = 300.0
"""Seconds for the staying process to start, on a busy machine."""
POLL = 0.05
"""Seconds between two tries to reach a process that starts."""


def client_app(folder: Path) -> ClientApp:
    """Return the client app, for sites.

    Args:
        folder: the folder of the app.
    """
    app = ClientApp()

    def answered(message: Message, context: Context) -> Message:
        connection = None
        # a site can have no room for sockets, and answers by itself then
        if stays(context):
            with suppress(OSError):
                connection = connected(folder, context)
        if connection is None:
            # imported here alone, as it takes seconds
            from pfl_lightning.flower import apps

            return apps.client_app(folder)(message, context)
        with connection:
            content, state = asked(connection, message, context)
        context.state = state
        return Message(content, reply_to=message)

    def ended(message: Message, context: Context) -> Message:
        # one that isn't there needn't end
        with suppress(OSError, EOFError), Client(str(place(settings_of(folder, context))), "AF_UNIX") as connection:
            connection.send(None)
            connection.recv()
        return Message(RecordDict(), reply_to=message)

    app.query("end")(ended)
    for kind in (app.query, app.train, app.evaluate):
        kind()(answered)
    for step in STEPS:
        app.query(step)(answered)
    return app


def stays(context: Context) -> bool:
    """Return whether the site's messages go to a process that stays, as ``resident`` of its settings says."""
    setting = str(context.node_config.get("resident", "true")).lower()
    return setting not in ("false", "0", "no") and hasattr(socket, "AF_UNIX")


def asked(connection: Connection, message: Message, context: Context) -> tuple[Any, Any]:
    """Return the content of the answer to a message, and the node's new record of secrets.

    Raises:
        ConnectionError: if the process ends before it has answered.
    """
    metadata = message.metadata
    try:
        # a resumed run has another number, and goes on with the same process
        run = context.run_id, dict(context.run_config)
        connection.send((metadata.message_type, message.content, context.state, metadata.ttl, *run))
        answer: tuple[Any, Any] = connection.recv()
    except EOFError as error:
        raise ConnectionError("the site's process has ended in the middle of a message") from error
    return answer


def connected(folder: Path, context: Context) -> Connection:
    """Return a connection to the process of a federation and site, which is started unless it runs.

    Raises:
        OSError: if there is no room for its socket, or it doesn't start in time.
    """
    settings = settings_of(folder, context)
    address = place(settings)
    with suppress(ConnectionError, FileNotFoundError):
        return Client(str(address), "AF_UNIX")
    with locked(address.with_suffix(".lock")):
        # another message may have started it meanwhile
        with suppress(ConnectionError, FileNotFoundError):
            return Client(str(address), "AF_UNIX")
        address.unlink(missing_ok=True)
        # as an argument others on this machine could read the settings
        process = subprocess.Popen([sys.executable, "-m", MODULE, str(address)], stdin=subprocess.PIPE, text=True)
        assert process.stdin is not None
        with process.stdin:
            json.dump(settings, process.stdin)
        end = time.monotonic() + START
        while process.poll() is None and time.monotonic() < end:
            with suppress(ConnectionError, FileNotFoundError):
                return Client(str(address), "AF_UNIX")
            time.sleep(POLL)
        process.kill()
    raise TimeoutError("the site's process doesn't start")


def settings_of(folder: Path, context: Context) -> dict[str, Any]:
    """Return what decides the process of a federation and site: an app, a node, and the settings of the node."""
    return {
        "folder": str(folder),
        "node": context.node_id,
        "node_config": dict(context.node_config),
        # an app's own modules are where Flower has put the app
        "path": [*sys.path],
        "parent": os.getppid(),
    }


def place(settings: Mapping[str, Any]) -> Path:
    """Return the socket of the process with some settings.

    Raises:
        OSError: if there is no room for it.
    """
    # other settings are another process; a restarted node has a new parent for it
    key = hashlib.blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=8).hexdigest()
    return sockets() / f"{key}.sock"


def sockets() -> Path:
    """Return the folder of sockets, which only its owner may open.

    Raises:
        PermissionError: if the folder is somebody else's.
    """
    folder = Path(tempfile.gettempdir(), f"pfl-lightning-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    # anybody can make a folder of this name in the system's temporary folder
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise PermissionError(f"{folder} is open to others")
    return folder


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock inside this context, which ends with this process at the latest."""
    import fcntl

    with path.open("w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
