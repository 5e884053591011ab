"""What a run shows of itself, on a terminal and elsewhere."""

import fcntl
import os
import pty
import re
import struct
import sys
import termios
from types import SimpleNamespace

import pytest
from lightning.pytorch.callbacks import TQDMProgressBar

from federations import Blobs, blobs, fit, make_client
from pfl_lightning import FederatedTrainer
from pfl_lightning.callbacks import RunBanner, RunBar, progress
from pfl_lightning.tasks import Monitor

SHOWN = {"enable_progress_bar": True, "enable_model_summary": True}
COLUMNS = 100


def recorded(run) -> str:
    """What a process writes to a terminal."""
    process, terminal = pty.fork()
    if not process:
        fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 30, COLUMNS, 0, 0))
        os.environ.pop("COLUMNS", None)
        code = 1
        try:
            # pytest has put its own in their places
            with open(1, "w", closefd=False) as out, pytest.MonkeyPatch.context() as patch:
                patch.setattr("sys.stdout", out)
                patch.setattr("sys.stderr", out)
                run()
            code = 0
        finally:
            os._exit(code)
    written = b""
    while True:
        try:
            part = os.read(terminal, 65536)
        except OSError:
            break
        if not part:
            break
        written += part
    assert os.waitpid(process, 0)[1] == 0, written.decode()
    os.close(terminal)
    return written.decode()


def screen(written: str) -> list[str]:
    """The lines that are left on a terminal."""
    lines = [""]
    at = 0
    for part in re.findall(r"\r|\n|\x1b\[K|[^\r\n\x1b]+", written):
        if part == "\n":
            lines.append("")
        elif part == "\x1b[K":
            lines[-1] = lines[-1][:at]
        elif part != "\r":
            lines[-1] = lines[-1][:at] + part + lines[-1][at + len(part) :]
        at = 0 if part in "\r\n" else at if part == "\x1b[K" else at + len(part)
    return lines


@pytest.mark.exhaustive
def test_a_terminal_has_one_line_that_is_gone_when_the_table_comes(tmp_path, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(progress, "REDRAWN", 0.0)
    written = recorded(lambda: fit(make_client(), root=tmp_path, max_rounds=50, clients_per_round=3, **SHOWN))
    drawn = re.findall(r"\r(round [^\r\x1b]*)\x1b\[K", written)
    assert all(len(text) < COLUMNS for text in drawn)
    assert drawn[0] == f"round 1 of 50 [{' ' * 20}], clients 0 of 3"
    told = r"round 11 of 50 \[={4} {16}\], clients 2 of 3, \d+ s left, validation accuracy [\d.]+ %"
    assert any(re.fullmatch(told, text) for text in drawn)
    assert not re.search(r"it/s|v_num|FLOP|Epoch", written)
    left = screen(written)
    assert [line for line in left if line.startswith(("round ", "all rounds"))] == []
    assert len(left) < 25
    assert left[-2].startswith("files ")


def test_elsewhere_there_is_a_line_each_tenth_of_the_rounds(capsys):
    fit(make_client(), max_rounds=50, **SHOWN)
    printed = capsys.readouterr().out
    told = re.findall(r"^round (\d+) of 50, (?:\d+ s left, )?validation accuracy [\d.]+ %$", printed, re.MULTILINE)
    assert list(map(int, told)) == [1, *range(5, 51, 5)]
    assert "\r" not in printed and "\x1b" not in printed
    assert "50 of 50, validation accuracy" in printed


@pytest.mark.exhaustive
def test_slow_rounds_are_told_of_more_often(capsys, monkeypatch):
    monkeypatch.setattr(progress, "SILENT", 0.0)
    fit(make_client(), max_rounds=30, **SHOWN)
    assert capsys.readouterr().out.count("\nround ") == 30


def test_a_run_without_validation_says_nothing_of_it(capsys):
    fit(make_client(), max_rounds=2, limit_val_batches=0, **SHOWN)
    printed = capsys.readouterr().out
    assert "round 2 of 2\n" in printed and "validation" not in printed


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(at=100.0)
    monkeypatch.setattr(progress, "time", SimpleNamespace(perf_counter=lambda: now.at))
    return now


def test_the_time_left_is_the_mean_of_the_rounds_of_this_process(clock, capsys):
    bar, trainer = RunBar(), SimpleNamespace(max_epochs=200, fast_dev_run=False)
    federation = SimpleNamespace(round=100, monitor=Monitor("mae", "min"), metrics={"val/mae": 0.25})
    bar.on_train_start(trainer, federation)
    for _ in range(20):
        bar.on_round_start(trainer, federation, [3, 4])
        clock.at += 90
        federation.round += 1
        bar.on_train_epoch_end(trainer, federation)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "round 101 of 200, 2 h 28 min left, validation mae 0.25"
    assert lines[-1] == "round 120 of 200, 2 h 0 min left, validation mae 0.25"


def test_a_finished_round_s_validation_is_on_the_terminal_at_once(clock, capsys, monkeypatch):
    monkeypatch.setattr(progress, "on_terminal", lambda: True)
    bar, trainer = RunBar(), SimpleNamespace(max_epochs=2, fast_dev_run=False)
    federation = SimpleNamespace(round=0, monitor=Monitor("mae", "min"), metrics={"val/mae": 0.25})
    bar.on_train_start(trainer, federation)
    bar.on_round_start(trainer, federation, [3, 4])
    clock.at += 90
    federation.round = 1
    bar.on_train_epoch_end(trainer, federation)
    assert "validation mae 0.25" in screen(capsys.readouterr().out)[-1]


def test_a_resumed_run_goes_on_where_it_was(tmp_path, capsys):
    first = fit(make_client(), root=tmp_path, max_rounds=3)
    capsys.readouterr()
    fit(make_client(), root=tmp_path, max_rounds=4, ckpt_path=first.last, **SHOWN)
    printed = capsys.readouterr().out
    assert "goes on  behind round 3" in printed and "round 4 of 4, validation" in printed and "round 1" not in printed


def test_the_bar_makes_room_for_an_error(monkeypatch, capsys):
    monkeypatch.setattr(progress, "on_terminal", lambda: True)

    class Broken(RunBanner):
        def on_train_epoch_end(self, trainer, pl_module):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fit(make_client(), max_rounds=2, enable_progress_bar=True, callbacks=[Broken()])
    assert screen(capsys.readouterr().out)[-1] == ""


def test_a_notebook_has_one_bar_that_stays_full(monkeypatch, capsys):
    bars = []
    shell = SimpleNamespace(kernel="a kernel")
    place = SimpleNamespace(update=bars.append)
    drawn = SimpleNamespace(HTML=str, display=lambda bar, display_id: bars.append(bar) or place)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setitem(sys.modules, "IPython.display", drawn)
    fit(make_client(), max_rounds=12, enable_progress_bar=True)
    assert 'value="1.0000"' in bars[-1] and "round 12 of 12, validation accuracy" in bars[-1]
    assert "round " not in capsys.readouterr().out


@pytest.mark.exhaustive
def test_a_real_notebook_has_bar_results_and_picture(tmp_path):
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    code = """
from pfl_lightning import FederatedTrainer
from pfl_lightning.data import Digits
from pfl_lightning.methods import FedPer
from pfl_lightning.nets import MLP

data = Digits(num_clients=4)
trainer = FederatedTrainer(max_rounds=12)
trainer.fit(FedPer(MLP, data.input_shape, data.num_classes), data)
"""
    cells = [nbformat.v4.new_code_cell(source) for source in (code, "trainer.results")]
    nbclient.NotebookClient(
        nbformat.v4.new_notebook(cells=cells), resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    (bar,) = (each.data["text/html"] for each in cells[0].outputs if each.output_type == "display_data")
    assert "<progress" in bar and "round 12 of 12" in bar
    (shown,) = (each.data["text/html"] for each in cells[1].outputs if each.output_type == "execute_result")
    assert "FedPer-Digits" in shown and "data:image/png" in shown


def kinds(**settings):
    callbacks = FederatedTrainer(accelerator="cpu", **settings).callbacks
    return {type(callback).__name__ for callback in callbacks}


def test_a_user_can_have_lightning_s_or_nothing():
    assert {"RunBar", "RunBanner"} <= kinds()
    own = kinds(callbacks=[TQDMProgressBar()])
    assert "RunBar" not in own and "RoundProgress" in own
    hidden = kinds(enable_progress_bar=False, enable_model_summary=False)
    assert not any(part in name for part in ("Bar", "Progress", "Banner", "Summary") for name in hidden)


def test_the_head_tells_what_runs(tmp_path, capsys):
    run = fit(make_client(), root=tmp_path, max_rounds=1, enable_model_summary=True)
    head = capsys.readouterr().out.split("\n\n")[0]
    assert head.splitlines()[0] == "method  FedAvg (client FedAvg, aggregator WeightedAverage)"
    assert "data    Blobs, 4 clients with" in head and "rounds  1, each of 4 clients" in head
    assert re.search(r"net     \w+, \d+ parameters\n", head)
    assert head.endswith(f"files   {run.folder}")


def test_the_head_has_the_lines_of_the_data(capsys):
    class Told(Blobs):
        head_lines = [("features", "6; codes of town (3 texts)")]

    fit(make_client(), blobs(data=Told), max_rounds=1, enable_model_summary=True)
    assert re.search(r"^data .*\nfeatures +6; codes of town \(3 texts\)\nnet ", capsys.readouterr().out, re.M)
