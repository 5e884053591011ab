"""The command ``pfl-lightning flower run``: an app's run to its end, though server or SuperLink die meanwhile."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.runs.deployment_status import ENDED, UNFINISHED, project_of

PAUSE = 5.0
"""Seconds between two questions to a SuperLink that doesn't answer, or about a run whose log has ended."""
LOST = 5
"""Largest number of runs that may be lost one after another, without the end of a round in between."""
UNSTARTED = 300.0
"""Seconds in which Flower has to start a run's server's app; a busy machine takes one minute."""
OWN_ERROR = "ServerApp failed with exception"
"""Flower's words for a server's app that has ended by an error, which another run would repeat."""


WAITS = ("pending", "starting")
"""Flower's words for a run whose server's app doesn't run yet."""
UNSTARTABLE = "unstarted"
"""Our word for a run that stays so."""


NAME = "given"
"""Name of a connection that the command line gives by its address."""
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
"""Hosts that are this machine, which need no certificate."""


class Runner:
    """Runs an app until its federation has finished: a run whose server dies is followed by one that goes on.

    Args:
        app: the folder of the app.
        connection: name of the connection to the SuperLink in Flower's settings, or the address of a SuperLink, such as
            ``127.0.0.1:8000``; empty for Flower's default.
        settings: settings of the app, each in the form of ``flwr run -c``.
        anew: whether a new run begins where the last one hasn't finished.
        certificates: the certificate of the authority by which a SuperLink at an address is known; None for one on this
            machine without any.

    Raises:
        MisconfigurationException: if the folder is no app, Flower isn't installed, or a setting is the command's own.
    """

    def __init__(
        self,
        app: Path,
        connection: str = "",
        settings: Sequence[str] = (),
        anew: bool = False,
        certificates: Path | None = None,
    ) -> None:
        if any("ckpt-path" in setting for setting in settings):
            raise MisconfigurationException(
                "flower run: -c 'ckpt-path=...' is for `flwr run`; this command finds the last checkpoint of a run "
                "that hasn't finished, and --anew begins a new run."
            )
        try:
            project = project_of(app)
            self.name = f"{project['tool']['flwr']['app']['publisher']}/{project['project']['name']}"
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise MisconfigurationException(
                f"flower run: {app} is no app of Flower; give a folder from `pfl-lightning flower new`."
            ) from error
        # the program of this environment, which may not be the shell's
        program = shutil.which("flwr", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
        if program is None:
            raise MisconfigurationException(
                "flower run: Flower isn't installed; pip install 'pfl-lightning[flower]', with Python 3.11 or newer."
            )
        self.program, self.app, self.anew = program, app, anew
        self.environment = dict(os.environ)
        if ":" in connection:
            # Flower takes the names of connections alone, from a file in its folder
            self._home = tempfile.TemporaryDirectory(prefix="pfl-lightning-flwr-")
            Path(self._home.name, "config.toml").write_text(connections(connection, certificates), encoding="utf-8")
            self.environment["FLWR_HOME"], connection = self._home.name, NAME
        elif certificates is not None:
            raise MisconfigurationException(
                f"flower run: --root-certificates={certificates} is for an address such as server.example:8000, and "
                f"the connection {connection or 'by default'} has its own in Flower's settings; leave it out."
            )
        self.connection = [connection] if connection else []
        self.settings = [word for setting in settings for word in ("-c", setting)]
        self._lines = self._rounds = 0

    def run(self) -> int:
        """Run the app to its end; return 0 for a finished federation, and 1 for an error or a stop."""
        # a command that was killed itself, and is started again, goes on with the run that it has left
        number = "" if self.anew else self._under_way()
        lost = 0
        while True:
            if not (number := number or self._begun(after_loss=lost > 0)):
                return 1
            rounds = self._rounds
            status, details = self._followed(number)
            if status == "finished:completed":
                return 0
            if status == UNSTARTABLE:
                tell(f"run {number} is waiting: {details}")
                return 1
            if status != "finished:failed" or (details.startswith(OWN_ERROR) and ENDED not in details):
                tell(f"run {number} has {status.removeprefix('finished:')}: {details}")
                return 1
            lost = lost + 1 if self._rounds == rounds else 1
            if lost > LOST:
                tell(f"{lost} runs were lost one after another; `flwr log {number}` has the last one's words.")
                return 1
            tell(f"run {number} is lost ({details}), and another goes on from its last round.")
            number = ""

    def _under_way(self) -> str:
        """Return the number of the app's run that hasn't ended; empty without one."""
        runs = self._asked("list").get("runs", [])
        found = [run for run in runs if run["fab-id"] == self.name and not run["status"].startswith("finished")]
        if found:
            tell(f"run {found[0]['run-id']} is under way.")
        return str(found[0]["run-id"]) if found else ""

    def _begun(self, after_loss: bool) -> str:
        """Begin a run, and return its number; empty if that fails.

        Args:
            after_loss: whether a run was lost before, after which the SuperLink is waited for.
        """
        warned = False
        while True:
            resume = "" if self.anew else UNFINISHED
            answer = self._asked("run", str(self.app), after=[*self.settings, "-c", f'ckpt-path="{resume}"'])
            if number := answer.get("run-id"):
                self._lines = 0
                tell(f"run {number} begins.")
                return str(number)
            if not warned:
                tell(" ".join(str(answer.get("error-message", answer)).split()))
                warned = True
            if not after_loss:
                return ""
            time.sleep(PAUSE)

    def _followed(self, number: str) -> tuple[str, str]:
        """Print what a run's server says until the run has ended; return Flower's status of the run, and its reason."""
        warned, printed, handed = False, False, time.monotonic()
        while True:
            answer = self._asked("list")
            if answer.get("success"):
                warned = False
                # a SuperLink without a database knows none of the runs before its start
                unknown = {"run-id": number, "status": "finished:failed", "status-details": "the SuperLink forgot it"}
                run = next((run for run in answer["runs"] if str(run["run-id"]) == number), unknown)
                if run["status"].startswith("finished"):
                    if not printed:
                        self._print_log(number)
                    return run["status"], run["status-details"]
                # the log of a run that doesn't start has no end
                if run["status"] not in WAITS:
                    if printed:
                        time.sleep(PAUSE)
                    self._print_log(number)
                    printed = True
                    continue
                if time.monotonic() - handed > UNSTARTED:
                    return UNSTARTABLE, (
                        f"it hasn't started in {UNSTARTED:.0f} s, as Flower's flower-superexec is busy or has ended; "
                        "look at what flower-superlink says, start it again with the same --database, and then this "
                        "command."
                    )
            else:
                if not warned:
                    tell("the SuperLink doesn't answer; it is asked again until it does.")
                warned, printed = True, False
            time.sleep(PAUSE)

    def _print_log(self, number: str) -> None:
        """Print new lines of a run's log, until the log has ended or the connection is lost."""
        command = [self.program, "log", number, *self.connection, "--stream"]
        environment = self.environment | {"PYTHONUNBUFFERED": "1"}
        lines = 0
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
        ) as log:
            assert log.stdout is not None
            for line in log.stdout:
                lines += 1
                # each stream begins with a log's first line
                if lines > self._lines:
                    self._lines = lines
                    self._rounds += line.startswith("round ")
                    # before its first word the server has left the state of an earlier run as it was
                    self.anew = self.anew and not line.startswith("waiting for sites")
                    print(line, end="", flush=True)

    def _asked(self, command: str, *words: str, after: Sequence[str] = ()) -> dict[str, Any]:
        """Return the answer of a command of Flower.

        Args:
            command: the command's name.
            *words: its arguments before the connection.
            after: its arguments after the connection.
        """
        process = subprocess.run(
            [self.program, command, *words, *self.connection, *after, "--format", "json"],
            capture_output=True,
            text=True,
            env=self.environment,
        )
        try:
            answer = json.loads(process.stdout)
        except ValueError:
            return {"success": False, "error-message": process.stdout + process.stderr}
        return answer if isinstance(answer, dict) else {"success": False}


def connections(address: str, certificates: Path | None) -> str:
    """Return Flower's file of connections with one connection, named `NAME`.

    Args:
        address: host and port of the SuperLink.
        certificates: the authority's certificate; None for a SuperLink on this machine without TLS.

    Raises:
        MisconfigurationException: if the SuperLink is on another machine and there is no certificate.
    """
    if certificates is None and address.rpartition(":")[0] not in LOOPBACK:
        raise MisconfigurationException(
            f"flower run: {address} is on another machine; give --root-certificates ca.pem, the certificate of the "
            "authority that has signed the SuperLink's."
        )
    how = (
        "insecure = true" if certificates is None else f"root-certificates = {json.dumps(str(certificates.resolve()))}"
    )
    return f"[superlink]\ndefault = {NAME!r}\n\n[superlink.{NAME}]\naddress = {json.dumps(address)}\n{how}\n"


def tell(text: str) -> None:
    """Print a line of the command's own, apart from the server's lines."""
    print(f"pfl-lightning: {text}", file=sys.stderr)
