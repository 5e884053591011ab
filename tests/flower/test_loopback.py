"""A deployment on this machine, for real: processes of Flower's, sockets, TLS and keys."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs the extra flower, and Python 3.11 or newer")

SCRIPT = Path(__file__).parents[2] / "examples" / "deployment.py"
PROGRAMS = ("flwr", "flower-superlink", "flower-supernode")
LINES = (
    "a server and two sites have started",
    "the server's app is killed in the second round",
    "a site is killed",
    "a SuperNode that isn't registered is refused",
    "the other site is killed in the third round",
    "the site is back, and asked again",
    "the SuperLink is killed in the same round",
    "the run has ended by itself, with the bits of one process",
)
LIMIT = 1800
"""Seconds: four times what it took where five other processes ran."""


@pytest.mark.skipif("LOOPBACK" not in os.environ, reason="takes minutes and ten processes: LOOPBACK=1 runs it")
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
@pytest.mark.skipif(
    not all(shutil.which(program, path=str(Path(sys.executable).parent)) for program in PROGRAMS),
    reason="Flower's programs aren't beside Python",
)
def test_a_deployment_on_loopback():
    process = subprocess.Popen([sys.executable, str(SCRIPT)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        out, err = process.communicate(timeout=LIMIT)
    except BaseException:
        # not killed at once: it ends all that it has started, and shows what they said
        process.send_signal(signal.SIGTERM)
        try:
            print(*process.communicate(timeout=60), sep="\n")
        finally:
            process.kill()
        raise
    assert process.returncode == 0, out + err
    print(out)
    *said, phase = [line.partition(" s  ")[2] for line in out.splitlines()]
    assert said == list(LINES) and phase.startswith("the shortest phase took ")
