"""Processes that are forked from one import."""

import os
import signal
import time
from contextlib import closing
from pathlib import Path

import pytest

from pfl_lightning.cli.compare.starter import Forked, Starter

PROGRAM = """
import os, shared, signal, sys
if sys.argv[1] == "needs":
    import sometimes
    sys.exit(sometimes.PID != os.getpid())
assert shared.first.called and "sometimes" not in sys.modules
print(*sys.argv[1:], os.environ["ALL"], os.environ["ONE"], shared.PID, os.getppid())
print("an error", file=sys.stderr)
if sys.argv[1] == "kill":
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(3)
"""

SHARED = """
import os, signal, sys, warnings
PID = os.getpid()
# an interrupt during the import, which goes on
os.kill(PID, signal.SIGINT)
forked = os.fork

def fork():
    # Python's own from 3.12 on, where a library has a thread
    warnings.warn("This process is multi-threaded, use of fork() may deadlock", DeprecationWarning, stacklevel=2)
    return forked()

def first():
    first.called = True
    os.fork = fork
    sys.stderr = open("terminal.txt", "w", buffering=1)
"""


@pytest.fixture
def starter(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("shared.py").write_text(SHARED)
    Path("sometimes.py").write_text("import os\nPID = os.getpid()\n")
    Path("program.py").write_text(PROGRAM)
    with closing(Starter("program", "shared:first", ["sometimes"], {"ALL": "a"})) as starter:
        yield starter


def ended(process: Forked) -> int:
    while (code := process.poll()) is None:
        time.sleep(0.01)
    return code


def test_imports_can_be_waited_for(starter):
    starter.wait()
    # the import of `shared:first` has opened the file
    assert Path("terminal.txt").exists()
    assert ended(starter.start(["x"], Path("x.txt"), {"ONE": "x"})) == 3


def test_a_fork_has_its_arguments_variables_output_and_exit_code(starter):
    processes = [starter.start([name, str(k)], Path(f"{k}.txt"), {"ONE": name}) for k, name in enumerate(("x", "kill"))]
    assert [ended(process) for process in processes] == [3, -signal.SIGKILL]
    for k, name in enumerate(("x", "kill")):
        said = Path(f"{k}.txt").read_text().splitlines()
        assert "an error" in said
        (line,) = set(said) - {"an error"}
        *words, imported_by, parent = line.split()
        assert words == [name, str(k), "a", name]
        # the import was the parent's
        assert imported_by == parent
    assert "ALL" not in os.environ


def test_what_one_fork_imports_the_next_one_has(starter):
    # the exit code says who has imported: the fork itself, then the process that forks
    assert [ended(starter.start(["needs"], Path("out.txt"), {})) for _ in range(3)] == [0, 1, 1]
    assert Path("terminal.txt").read_text() == ""


def test_forks_end_with_what_started_them(starter):
    Path("program.py").write_text("import time\nprint(flush=True)\ntime.sleep(60)\n")
    process = starter.start([], Path("out.txt"), {})
    assert process.poll() is None
    starter.close()
    assert process.poll() == -signal.SIGKILL
    deadline = time.monotonic() + 10
    while Path(f"/proc/{process.pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not Path(f"/proc/{process.pid}").exists()
