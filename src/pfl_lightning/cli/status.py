"""The command ``pfl-lightning status``: show the progress of runs, from the files in their folders alone."""

import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pfl_lightning.cli.usage import Arguments, UsageError
from pfl_lightning.runs.deployment_status import DeploymentStatus, is_app, status_file, waits
from pfl_lightning.runs.run_status import MARKS, RunStatus, is_run
from pfl_lightning.runs.tables import duration, labelled, text_table

DESCRIPTION = """\
Show how far a run has come, from the files in its folder. For a folder of several runs, such as a comparison's, print
one line per run. For the app of a deployment, such as `pfl-lightning status clinics`, show the sites and the last
round; the exit code is then 1 where the deployment has failed, was stopped or is dead.
"""

MISSED = 40.0
"""Seconds after which a site's heartbeat is overdue: Flower's nodes send one every 24 s or so."""
POLL = 1.0
"""Seconds between two looks with ``--wait``."""


def main(args: list[str]) -> int:
    """Run ``pfl-lightning status``.

    Args:
        args: the command's arguments.

    Returns:
        The exit code.

    Raises:
        UsageError: if the folder is missing or holds no run.
    """
    parser = Arguments("status", usage="%(prog)s [RUN] [--wait]", description=DESCRIPTION)
    parser.add_argument(
        "run",
        nargs="?",
        type=Path,
        default=Path("runs"),
        metavar="RUN",
        help="folder of one run, of several, or of a deployment's app (default: runs)",
    )
    parser.add_argument("--wait", action="store_true", help="of a deployment: print its rounds until it has ended")
    given = parser.parse_args(args)
    folder: Path = given.run
    if not os.path.isdir(folder):
        raise UsageError(f"status: {folder} is no folder; give that of a run, such as runs/METHOD-DATA/version_0.")
    deployed = status_file(folder)
    while given.wait and deployed is None and is_app(folder):
        time.sleep(POLL)
        deployed = status_file(folder)
    if given.wait and deployed is None:
        raise UsageError(f"status: --wait is for a deployment, and {folder} has none that has begun.")
    if deployed is not None:
        if given.wait:
            wait(deployed)
        deployment = DeploymentStatus(deployed)
        print(labelled(described_deployment(deployment)))
        # a folder of runs can have the file too, and its table follows
        if not any((path / mark).is_file() for mark in MARKS for path in folder.rglob("version_*")):
            return deployment.exit_code
        print()
    if is_run(folder):
        print(labelled(described(RunStatus(folder))))
        return 0
    # any of a run's files marks its folder: a run that has just begun has no summary yet
    runs = sorted({path.parent for mark in MARKS for path in folder.rglob(mark)})
    if not runs and is_app(folder):
        print(labelled([("state", "not begun: no server of this app has said anything yet")]))
        return 0
    if not runs:
        raise UsageError(f"status: {folder} holds no run; give the folder of one, or of several.")
    rows = [row(RunStatus(run), str(run.relative_to(folder))) for run in runs]
    print(text_table([["run", "round", "validation", "written", "left", "state"], *rows]))
    return 0 if deployed is None else DeploymentStatus(deployed).exit_code


def described(run: RunStatus) -> list[tuple[str, str]]:
    """Return a run's description as labels and values."""
    lines = [
        ("run", str(run.folder)),
        ("state", state(run) + (f", process {run.worker}" if run.worker else "")),
        ("round", rounds(run)),
        ("validation", validation(run)),
        ("last written", f"{ago(run)} ago"),
    ]
    if run.left is not None:
        lines.append(("time left", left(run)))
    lines.append(("checkpoints", ", ".join(run.checkpoints) or "none"))
    # the command itself isn't stored, so the advice names only what to add
    if not run.finished and not run.worker and "last.ckpt" in run.checkpoints:
        lines.append(("go on by", "the same command with --ckpt_path last"))
    return lines


def wait(path: Path) -> None:
    """Print the line of each round of a deployment until the deployment has ended.

    Args:
        path: the file with the deployment's state.
    """
    printed = ""
    while True:
        deployment = DeploymentStatus(path)
        line = str(deployment.content.get("last", {}).get("line", ""))
        if line and line != printed:
            printed = line
            print(line, flush=True)
        if deployment.state not in ("waiting", "running"):
            return
        time.sleep(POLL)


def described_deployment(deployment: DeploymentStatus) -> list[tuple[str, str]]:
    """Return a deployment's description as labels and values: state, round, sites, and whoever is missing."""
    content = deployment.content
    state = {"waiting": "waiting for sites", "dead": "dead, without a last word"}.get(
        deployment.state, deployment.state
    )
    lines = [
        ("state", state + (f", process {content['process']} on {content['host']}" if "process" in content else ""))
    ]
    if content.get("reason"):
        lines.append(("reason", str(content["reason"])))
    of = f" of {content['rounds']}" if content.get("rounds") else ""
    lines.append(("round", f"{content.get('round', 0)}{of}"))
    if content.get("run"):
        lines.append(("run", str(content["run"])))
    if "written" in content:
        lines.append(("last written", f"{duration(max(0.0, time.time() - content['written']))} ago"))
    if (now := content.get("now")) and deployment.state == "running":
        lines.append(("now", waits(now["round"], max(0.0, time.time() - now["since"]), now["clients"])))
    if last := content.get("last", {}).get("line"):
        lines.append(("last round", str(last)))
    lines += [("site", described_site(site)) for site in content.get("sites", ())]
    lines += [("late", f"client {client}: {words}") for client, words in content.get("late", {}).items()]
    if missing := content.get("without_site"):
        lines.append(("without a site", ", ".join(missing)))
    lines += [("refused", described_refusal(site)) for site in content.get("refused_sites", ())]
    if deployment.exit_code:
        lines.append(("go on by", "pfl-lightning flower run APP"))
    return lines


def described_site(site: Mapping[str, Any]) -> str:
    """Return a site's clients, whether it is connected, and when it was last heard."""
    silent = math.inf if site["seen"] is None else max(0.0, time.time() - site["seen"])
    heard = "never heard" if site["seen"] is None else f"last heard {duration(silent)} ago"
    state = "lost" if not site["present"] else "connected" if silent < MISSED else "silent"
    state += f", {heard}"
    return f"clients {', '.join(site['clients'])}: {state}, node {site['node']}"


def described_refusal(site: Mapping[str, Any]) -> str:
    """Return the clients and the node of a refused site, and the reason."""
    clients = f"clients {site['clients']}, " if site.get("clients") else ""
    return f"{clients}node {site['node']}: {site['reason']}"


def row(run: RunStatus, name: str) -> list[str]:
    """Return a run's cells in the table of runs."""
    return [name, rounds(run), validation(run), f"{ago(run)} ago", left(run), state(run)]


def state(run: RunStatus) -> str:
    """Return "running", "finished" or "stopped"."""
    return "running" if run.worker else "finished" if run.finished else "stopped"


def rounds(run: RunStatus) -> str:
    """Return the number of finished rounds, "of" the number of rounds asked for if known."""
    return str(run.round) if run.rounds is None else f"{run.round} of {run.rounds}"


def validation(run: RunStatus) -> str:
    """Return the last validation value: accuracies in per cent, other metrics with their name."""
    if run.validation is None:
        return "none"
    return f"{100 * run.validation:.2f} %" if run.metric == "acc" else f"{run.metric} {run.validation:.4g}"


def ago(run: RunStatus) -> str:
    """Return the time since the run last wrote a file."""
    # clocks of a file server and this machine may differ by a second
    return duration(max(0.0, time.time() - run.written))


def left(run: RunStatus) -> str:
    """Return the estimated time for the remaining rounds; empty if unknown."""
    return "" if run.left is None else duration(run.left)
