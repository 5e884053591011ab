"""Ranks that end together: any signal to any of them, at any time."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from threading import Event
from types import SimpleNamespace

import pytest
from lightning.fabric.plugins.environments import LightningEnvironment
from torch import distributed

from command import QUIET
from pfl_lightning.engines.client_parallel import RankLauncher, RankWatch, of_a_collective
from pfl_lightning.stopping import STARTED_BY, RankLost, Stopped
from sweeps import swept

FIT = (
    "fit --model FedPer --model.net MLP --data Digits --data.num_clients 4 --data.max_samples 200 "
    f"--trainer.max_rounds 100000 --trainer.devices 2 {QUIET}"
)


def ranks() -> list[int]:
    """The processes of the two ranks, by what each writes about itself."""
    return [int(path.read_text()) for path in sorted(Path().glob("rank-?"))]


def exists(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


METHOD = """
import os
from pathlib import Path
from pfl_lightning.methods import FedPer

class Known(FedPer):
    def on_download(self, payload, data):
        super().on_download(payload, data)
        rank = os.environ.get("LOCAL_RANK", "0")
        Path(f"rank-{rank}.new").write_text(str(os.getpid()))
        Path(f"rank-{rank}.new").rename(f"rank-{rank}")
"""

CASES = [(0, "SIGTERM"), (0, "SIGKILL"), (1, "SIGTERM"), (1, "SIGINT"), (1, "SIGKILL")]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize("case", swept(CASES, (), lambda case: f"{case[0]}-{case[1]}"))
def test_a_signal_to_one_rank_ends_all_with_a_sentence_of_our_own(case):
    rank, name = case
    number = signal.Signals[name]
    Path("mine.py").write_text(METHOD)
    command = [sys.executable, "-m", "pfl_lightning.cli.main", *FIT.replace("FedPer", "mine.Known").split()]
    with open("said", "w") as said:
        process = subprocess.Popen(
            # a shell has what it runs in the background ignore SIGINT
            command,
            stderr=said,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
    try:
        while not (len(ranks()) == 2 and list(Path().rglob("last.ckpt"))):
            assert process.poll() is None, Path("said").read_text()
            time.sleep(0.02)
        pids = ranks()
        os.kill(pids[rank], number)
        code = process.wait(60)
        while any(map(exists, pids)):
            time.sleep(0.02)
    finally:
        process.kill()
        for pid in filter(exists, ranks()):
            os.kill(pid, signal.SIGKILL)
    handled = rank == 1 or number in (signal.SIGTERM, signal.SIGINT)
    assert code == (128 + number if handled else -number)
    lines = Path("said").read_text().splitlines()
    assert not any("Traceback" in line for line in lines)
    who = "" if rank == 0 else "rank 1 was "
    start = f"pfl-lightning: {who}stopped by {name}" if handled else "pfl-lightning: the process that started this rank"
    assert lines[-1].startswith(start)
    assert "--ckpt_path last" in lines[-1]


def test_what_a_run_starts_later_is_not_taken_for_its_rank(monkeypatch):
    seen = []
    launcher = RankLauncher(LightningEnvironment(), 1, 1)
    monkeypatch.delenv(STARTED_BY, raising=False)
    monkeypatch.setattr(launcher, "_call_children_scripts", lambda: seen.append(os.environ[STARTED_BY]))
    assert launcher.launch(lambda: os.environ.get(STARTED_BY)) is None
    assert seen == [str(os.getpid())]


@pytest.mark.skipif(sys.platform == "win32", reason="waits for a pipe and a signal")
def test_a_watch_ends_the_ranks_at_a_signal_whatever_its_handler_does():
    ended, before = Event(), signal.signal(signal.SIGTERM, lambda *_: None)
    watch = RankWatch(SimpleNamespace(launcher=None, end_ranks=ended.set), None)
    try:
        signal.raise_signal(signal.SIGTERM)
        assert ended.wait(5)
    finally:
        watch.close()
        signal.signal(signal.SIGTERM, before)
    assert isinstance(watch.cause, Stopped) and watch.cause.code == 143
    # as it was before
    assert signal.set_wakeup_fd(-1) == -1


def test_a_mistake_in_a_call_is_no_lost_rank():
    with pytest.raises(ValueError, match="process group") as mistake:
        distributed.barrier()
    assert not of_a_collective(mistake.value)
    assert not of_a_collective(ZeroDivisionError())


@pytest.mark.parametrize(
    ("code", "says", "ends_with"),
    [(-9, "stopped by SIGKILL", 137), (143, "stopped by SIGTERM", 143), (3, "exit code 3", 3)],
)
def test_how_a_rank_has_ended_is_told_by_its_exit_code(code, says, ends_with):
    lost = RankLost.by_exit_code(1, code)
    assert says in str(lost) and lost.code == ends_with
