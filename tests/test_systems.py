"""What other systems lack: modules and calls of POSIX, links, names that differ by capitals alone."""

import ast
import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException

import pfl_lightning
from command import QUIET
from pfl_lightning import FederatedTrainer, stopping
from pfl_lightning.client.adapter_folders import folder_name

PACKAGE = Path(pfl_lightning.__file__).parent
TESTS = Path(__file__).parent
SIMULATED = pytest.mark.skipif(sys.platform != "linux", reason="plays Windows by what Linux tells of open files")


def as_on_windows(program: str, folder: Path) -> str:
    """Run a program in a Python like that of Windows; return all that it prints."""
    path = os.pathsep.join(map(str, (TESTS / "like_windows", PACKAGE.parent)))
    command = [sys.executable, "-c", f"from pfl_lightning.cli.main import main\n{program}"]
    variables = os.environ | {"PYTHONPATH": path, "PYTHONIOENCODING": "cp1252"}
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


PROGRAM = """
import os, socket
from pathlib import Path
from pfl_lightning.runs.folder import held

main([*LINE, "--trainer.max_rounds", "2"])
main([*LINE, "--trainer.max_rounds", "3", "--ckpt_path", "last"])
Path("held").mkdir()
for process in (os.getppid(), os.getpid(), 2**22 + 1):
    Path("held", ".lock").write_text(f"{process} on {socket.gethostname()}")
    try:
        with held(Path("held")):
            print("free")
    except Exception as error:
        print("refused", str(process) in str(error))
main(["status", "runs"])
"""


@pytest.mark.exhaustive
@SIMULATED
def test_the_quickstart_runs_and_goes_on_as_on_windows(tmp_path):
    line = f"fit --config quickstart {QUIET} --trainer.client_states disk".split()
    said = as_on_windows(f"LINE = {line}\n{PROGRAM}", tmp_path)
    (run,) = tmp_path.glob("runs/*/*")
    assert said.count("test accuracy, last round") == 2 and "3 of 3" in said
    paths = [path.relative_to(run).as_posix() for path in run.rglob("*")]
    assert len({path.casefold() for path in paths}) == len(paths) > 5
    # without locks the process counts that a file names, unless it is our own number
    assert [text for text in said.splitlines() if text.startswith(("free", "refused"))] == [
        "refused True",
        "free",
        "free",
    ]


EACH = """
for line in LINES:
    try:
        main(line.split())
    # compare ends its process
    except SystemExit as ended:
        assert not ended.code
"""


@pytest.mark.exhaustive
@SIMULATED
def test_engines_and_comparisons_run_as_on_windows(tmp_path):
    small = f"--config protocols/digits_dir0.1 {QUIET} --trainer.max_rounds 2"
    lines = [f"fit --config methods/fedper {small} --trainer.engine {engine}" for engine in ("vectorised", "auto")]
    lines += [
        f"compare --methods fedavg fedper --config protocols/digits_dir0.1 --trainer.max_rounds 2 --out {name}"
        for name in "ab"
    ]
    said = as_on_windows(f"LINES = {lines}\n{EACH}", tmp_path)
    assert said.count("report.html") == 2 and "failed" not in said
    tables = [(tmp_path / name / "comparison.csv").read_text().splitlines() for name in "ab"]
    assert len(tables[0]) == len(tables[1]) == 3


class Kernel:
    """kernel32 where one process runs, one is foreign, and one has ended while another still holds it."""

    def OpenProcess(self, rights, inherits, process):
        ctypes.error = 5 if process == 3 else 87
        return process if process in (1, 2) else 0

    def WaitForSingleObject(self, handle, milliseconds):
        return 0x102 if handle == 1 else 0

    def CloseHandle(self, handle):
        return True


def test_windows_is_asked_for_a_process_without_a_signal(monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(ctypes, "WinDLL", lambda name, use_last_error: Kernel(), raising=False)
    monkeypatch.setattr(ctypes, "get_last_error", lambda: ctypes.error, raising=False)
    monkeypatch.setattr(os, "kill", lambda *arguments: pytest.fail("signal 0 is Ctrl-C on Windows"))
    assert [stopping.is_there(process) for process in (1, 2, 3, 4)] == [True, False, True, False]


def test_a_process_ends_with_its_parent_as_on_windows(monkeypatch):
    there = iter([True, True, False])
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(stopping, "is_there", lambda process: next(there))
    monkeypatch.setattr(stopping, "PAUSE", 0)
    monkeypatch.setattr(os, "_exit", sys.exit)
    # an orphan there keeps its parent's number, and a launcher may stand between
    with pytest.raises(SystemExit):
        stopping.watch(os.getpid())
    assert not list(there)


@pytest.mark.parametrize("several", [{"devices": 2}, {"num_nodes": 2}])
def test_several_processes_are_refused_on_windows(monkeypatch, several):
    monkeypatch.setattr(sys, "platform", "win32")
    ((name, value),) = several.items()
    with pytest.raises(MisconfigurationException, match=rf"trainer\.{name}={value}\b.*Windows"):
        FederatedTrainer(max_rounds=1, accelerator="cpu", **several)


def test_no_folder_of_a_client_is_a_device_of_windows():
    assert [folder_name(name) for name in ("CON", "nul.x", "lpt1", "Conrad")] == ["CON_", "nul.x_", "lpt1_", "Conrad"]


def texts_without_encoding(source: str) -> list[str]:
    """Return calls that read or write texts in the system's own encoding."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or any(each.arg in ("encoding", None) for each in node.keywords):
            continue
        name = ast.unparse(node.func).rpartition(".")[2]
        if name == "read_text" and node.args:
            continue
        modes = [
            each.value
            for each in [*node.args, *(word.value for word in node.keywords)]
            if isinstance(each, ast.Constant)
        ]
        binary = any(isinstance(mode, str) and "b" in mode for mode in modes)
        if name in ("read_text", "write_text") or (
            name == "open" and not binary and ast.unparse(node.func) not in FOREIGN
        ):
            found.append(ast.unparse(node))
    return found


FOREIGN = ("Image.open", "os.open")
"""Calls of this name that open no text."""


@pytest.mark.exhaustive
def test_texts_are_utf8_on_each_system():
    assert texts_without_encoding("path.read_text()\nopen(path)\npath.open('w')\npath.open('rb')\nos.open(path)") == [
        "path.read_text()",
        "open(path)",
        "path.open('w')",
    ]
    found = {path.name: calls for path in PACKAGE.rglob("*.py") if (calls := texts_without_encoding(path.read_text()))}
    assert not found


def test_ci_draws_other_exhaustive_tests_for_other_commits(request):
    root, plugins = str(TESTS.parent / "conftest.py"), request.config.pluginmanager.get_plugins()
    (is_drawn,) = (plugin.is_drawn for plugin in plugins if getattr(plugin, "__file__", None) == root)
    tests = [f"test_{number}" for number in range(1000)]
    one, other = ({test for test in tests if is_drawn(test, 0.33, commit)} for commit in ("one", "other"))
    assert 250 < len(one) < 410 and 250 < len(other) < 410 and len(one & other) < 200
    assert not any(is_drawn(test, 0, "one") for test in tests) and all(is_drawn(test, 1, "one") for test in tests)
