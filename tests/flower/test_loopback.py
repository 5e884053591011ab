"""A deployment on this machine, for real: processes of Flower's, sockets, TLS and keys."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs the extra flower, and Python 3.11 or newer")

SCRIPT = Path(__file__).parents[2] / "examples" / "deployment.py"


@pytest.mark.skipif("LOOPBACK" not in os.environ, reason="takes minutes and five processes: LOOPBACK=1 runs it")
@pytest.mark.parametrize(
    ("part", "lines"),
    [
        ("--calm", ["fedper: the same bits as in one process"]),
        (
            "--stormy",
            [
                "a SuperNode that isn't registered is refused",
                "site 1 is killed in the second round",
                "it is back, and was asked again",
                "the server's app is killed, and goes on from its last checkpoint",
                "scaffold: the same bits as in one process",
            ],
        ),
    ],
)
def test_a_deployment_on_loopback(part, lines):
    done = subprocess.run([sys.executable, str(SCRIPT), part], capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if line in lines]
    assert said == lines
