"""The state of a deployment, in a small file that the server's app replaces and the command ``status`` reads."""

import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pfl_lightning.runs.locks import is_alive, started
from pfl_lightning.runs.whole_files import replacing

try:
    import tomllib
# Python 3.10
except ModuleNotFoundError:
    import tomli as tomllib  # type: ignore[no-redef]

FILE = "deployment.status"
"""The file's name; without the suffix of JSON, with which Flower would pack the file into the app."""

UNFINISHED = "unfinished"
"""The ``ckpt-path`` of an app that goes on with the deployment of its status file, unless that has finished."""
ENDED = "the server's app was ended from outside"
"""Beginning of the error of an app that a signal has ended, as Flower sends one where its SuperLink dies."""

SILENT = 300.0
"""Seconds without a new file after which a server on another machine counts as dead."""


def project_of(app: Path) -> dict[str, Any]:
    """Return the project file of an app of Flower.

    Args:
        app: the app's folder.

    Raises:
        OSError: if there is no such file.
        ValueError: if it can't be read.
    """
    return tomllib.loads((app / "pyproject.toml").read_text(encoding="utf-8"))


def is_app(place: Path) -> bool:
    """Return whether a folder is an app of Flower."""
    try:
        return "app" in project_of(place)["tool"]["flwr"]
    except (OSError, ValueError, LookupError, TypeError):
        return False


def status_file(place: Path) -> Path | None:
    """Return the file of a deployment's state; None for a folder without any.

    Args:
        place: the folder of an app, or the folder with the file.
    """
    # an app without such a setting, or that another tool has made, has its file under the default name
    try:
        settings = project_of(place)["tool"]["flwr"]["app"]["config"]
    except (OSError, ValueError, LookupError, TypeError):
        settings = {}
    file = Path(str(settings.get("status") or place / FILE))
    return next((path for path in (file, place / FILE) if path.is_file()), None)


def waits(round: int, seconds: float, clients: Sequence[str]) -> str:
    """Return for how long a round has been at work, and for whom it waits.

    >>> waits(7, 84.2, ["4 (Ulm)"])
    'round 7 for 84 s; waiting for client 4 (Ulm)'

    Args:
        round: the round's number from 1.
        seconds: the seconds of its phase.
        clients: the clients without an answer, as messages name them.
    """
    return f"round {round} for {seconds:.0f} s; waiting for client{'s' * (len(clients) > 1)} {', '.join(clients)}"


def write_status(path: Path, content: Mapping[str, Any]) -> None:
    """Write the state of a deployment in one step, with time, process and host.

    Args:
        path: the file.
        content: the state, as `DeploymentStatus` has it.
    """
    own = {"written": time.time(), "process": os.getpid(), "host": socket.gethostname()}
    own["started"] = started(os.getpid())
    with replacing(path) as partial:
        partial.write_text(json.dumps({**content, **own}, indent=2) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class DeploymentStatus:
    """The state of a deployment according to its file.

    Args:
        path: the file.
    """

    path: Path

    @cached_property
    def content(self) -> Mapping[str, Any]:
        """The content of the file; empty if it can't be read."""
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return content if isinstance(content, dict) else {}

    @property
    def state(self) -> str:
        """``waiting`` for sites, ``running``, ``finished``, ``stopped``, ``failed``, or ``dead`` without a word."""
        state = str(self.content.get("state", "dead"))
        if state not in ("waiting", "running"):
            return state
        # a process that was killed has had no time to write how it ended; those of other machines can't be asked
        here = self.content.get("host") == socket.gethostname()
        lives = self._lives if here else time.time() - self.content["written"] < SILENT
        return state if lives else "dead"

    @property
    def _lives(self) -> bool:
        """Whether the process of the file is alive, and no other one that has got its number."""
        process = int(self.content["process"])
        return is_alive(process) and self.content.get("started", "") in ("", started(process))

    @property
    def unfinished(self) -> Path | None:
        """The last checkpoint of a deployment that hasn't come to its end; None without one."""
        last = Path(str(self.content.get("checkpoint") or ""))
        return last if self.state != "finished" and last.is_file() else None

    @property
    def exit_code(self) -> int:
        """0 for a deployment that has finished or goes on, else 1."""
        return 0 if self.state in ("waiting", "running", "finished") else 1
