"""The steps of docs/deployment.md as they are printed there, for real: processes of Flower's and sockets."""

import csv
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from contextlib import suppress
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs the extra flower, and Python 3.11 or newer")
pytest.importorskip("pandas", reason="needs the extra tables")

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "deployment.md"
PROGRAMS = ("flwr", "flower-superlink", "flower-supernode")
LIMIT = 1800


def section(title):
    """A part of the page."""
    (found,) = re.findall(rf"^## {title}\n(.*?)(?=^## )", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return found


def indented(text):
    """The indented blocks of a part of the page, one after another."""
    return textwrap.dedent("".join(re.findall(r"(?:^    .*\n)+", text, re.MULTILINE)))


def ran(script, folder):
    """What a script of the page has put out, with ports that are free and nothing left behind."""
    spec = importlib.util.spec_from_file_location("deployment", ROOT / "examples" / "deployment.py")
    deployment = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(deployment)
    for port, free in zip((8000, 9101, 9102, 9103), deployment.free_ports(4), strict=True):
        script = script.replace(str(port), str(free))
        if port == 8000:
            script = script.replace("flower-superlink ", f"flower-superlink --port {free} ")
            # nothing is there that the page doesn't write
            (folder / "flwr").mkdir()
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "FLWR_HOME": str(folder / "flwr"),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "OMP_NUM_THREADS": "1",
    }
    process = subprocess.Popen(
        ["bash", "-euc", script],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    lines = []
    # whoever waits for output waits for ever where everything hangs
    timer = threading.Timer(LIMIT, lambda: os.killpg(process.pid, signal.SIGKILL))
    timer.start()
    try:
        for line in process.stdout:
            lines.append(line)
            # what the script has started holds its output open
            if line == "THE END\n":
                return "".join(lines)
        raise AssertionError("".join(lines))
    finally:
        timer.cancel()
        for way in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, way)
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)


@pytest.mark.skipif("LOOPBACK" not in os.environ, reason="takes minutes and ten processes: LOOPBACK=1 runs it")
@pytest.mark.skipif(
    not all(shutil.which(program, path=str(Path(sys.executable).parent)) for program in PROGRAMS),
    reason="Flower's programs aren't beside Python",
)
@pytest.mark.parametrize("title", ["Two sites on one laptop", "Three sites with tables"])
def test_the_steps_of_the_page_run(title, tmp_path):
    text = section(title)
    if title.startswith("Two"):
        commands = re.sub(r"\\\n *", "", indented(text)).splitlines()
        # what is printed as the way to other settings takes the place of the whole run
        short = re.search(r"`(pfl-lightning flower run [^`]*--trainer.max_rounds) 50\"'`", text)[1] + " 2\"'"
        lines = [
            short if line.startswith("pfl-lightning flower run") else line + " &" * line.startswith("flower-")
            for line in commands
            if not line.startswith("pip ")
        ]
        script = "\n".join(lines)
    else:
        script = "".join(re.findall(r"```sh\n(.*?)```", text, re.DOTALL))
    said = ran(script + "\necho THE END\n", tmp_path)
    (path,) = [path for path in tmp_path.rglob("rounds.csv") if "checkpoints" not in str(path)]
    rows = list(csv.DictReader(path.open()))
    print(said)
    if title.startswith("Two"):
        assert [(row["clients"], row["absent"]) for row in rows] == [("10", "")] * 2
        return
    assert len(rows) == 10 and rows[0]["cohort"] == "0 1" and rows[-1]["cohort"] == "0 1 2"
    assert [row["joined"] for row in rows if row["joined"]] == ["2"]
    assert [row["name"] for row in csv.DictReader((path.parent / "clients.csv").open())] == ["Bremen", "Ulm", "Kiel"]
    predicted = list(csv.DictReader((tmp_path / "predictions.csv").open()))
    assert len(predicted) == 60
    assert re.search(r"^state +finished", said, re.MULTILINE)
