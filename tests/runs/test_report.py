"""The final table."""

import csv
import math
import os
from importlib.metadata import version
from pathlib import Path

import pytest

from pfl_lightning.runs.report import append_row, installed, summary_table, write_rows
from pfl_lightning.runs.whole_files import replacing

SUMMARY = {
    "method": "FedAvg",
    "aggregator": "FedAWA",
    "name": "FedAWA",
    "monitor": {"metric": "acc", "mode": "max"},
    "final": {"round": 2, "test/acc": 0.5},
    "selected": {"round": 1, "val/acc": 0.7, "test/acc": 0.25},
    "seconds": 1.26,
}
ROWS = [{"round": 2, "bytes/up": 2048, "bytes/down": 10}]
CENTRAL = {"best_global": {"round": 1, "test/global_acc": 0.75}}


def lines(summary, clients, rows=None):
    clients = [{"client": client} | row for client, row in enumerate(clients)]
    text = summary_table(summary, rows or ROWS, clients, Path("folder"))
    return [line.split("  ")[0] for line in text.splitlines() if line and not line.startswith("  ")], text


def test_clients_have_their_lines():
    names, text = lines(SUMMARY, [{"test/acc": 0.9}, {"test/acc": 0.1}, {"test/acc": 0.4}])
    assert names == [
        "method",
        "rounds, clients",
        "test accuracy, last round",
        "test accuracy, round 1 (best on validation)",
        "sent up and down a round",
        "seconds",
        "files",
    ]
    assert "10.00 % (client 1), 40.00 % (client 2)" in text
    assert "2.0 KiB and 10 B" in text


def test_a_client_for_which_accuracy_is_not_defined_is_left_out():
    assert (
        "10.00 % (client 2), 90.00 % (client 0)"
        in lines(SUMMARY, [{"test/acc": 0.9}, {"test/acc": math.nan}, {"test/acc": 0.1}])[1]
    )


def test_a_central_test_set_adds_its_lines():
    summary = SUMMARY | CENTRAL | {"final": SUMMARY["final"] | {"test/global_acc": 0.6}}
    names, text = lines(summary, [{"test/acc": 0.9}])
    assert names[4] == "server's model on the central test set"
    assert "60.00 %" in text and "75.00 %" in text and "90.00 % (client 0), 90.00 % (client 0)" in text


def test_alone_it_has_no_lines_of_clients_beside_it():
    nothing = {"final": {"round": 2, "test/acc": None, "test/global_acc": 0.6}}
    names, text = lines(SUMMARY | CENTRAL | nothing, [{}, {}])
    assert not any(name.startswith("test accuracy") for name in names)
    assert "not evaluated" not in text


def test_what_was_not_evaluated_is_told():
    nothing = {"final": {"round": 2, "test/acc": None}, "selected": {"round": None, "test/acc": None}}
    names, text = lines(SUMMARY | nothing, [{}])
    assert "test accuracy, best on validation" in names and text.count("not evaluated") == 3


def test_a_simulated_clock_adds_its_seconds():
    rows = [{"bytes/up": 0.0, "bytes/down": 0.0, "time/simulated": seconds} for seconds in (1.5, 2.0)]
    names, text = lines(SUMMARY, [{"test/acc": 0.9}], rows)
    assert names[-2] == "simulated seconds" and "3.5" in text
    assert "simulated seconds" not in lines(SUMMARY, [{"test/acc": 0.9}])[0]


def test_other_metrics_are_numbers_and_have_their_lines():
    test = {"test/mae": 0.51234, "test/r2": 0.25, "test/r2_pooled": 0.5, "test/mae_worst": 0.9}
    other = {
        "monitor": {"metric": "mae", "mode": "min"},
        "final": {"round": 2} | test,
        "selected": {"round": 1, "val/mae": 0.4, "test/mae": 0.45},
    }
    names, text = lines(SUMMARY | other, [{"test/mae": value} for value in (0.2, 0.9, 0.5)])
    assert "test mae, last round" in names and "0.5123" in text
    assert "0.9 (client 1), 0.5 (client 2)" in text
    assert "test r2_pooled, last round" in names
    assert "test mae_worst, last round" not in names


def test_a_package_that_is_on_the_path_alone_has_no_version():
    assert installed("torch") == version("torch") and installed("no-such-package") == "not installed"


FORMULAS = ["=1+1", "+49 421", "-2+3", "@SUM(A1)", "\t=1", "\r=1", '=HYPERLINK("x")', "-"]
PLAIN = ["Ulm", "+2.5 [-1, +3.25]", "-0.5", "+1e-3", "-inf", "1-2", "'=1", "", -3, -0.5, None, True]


def test_texts_that_a_spreadsheet_would_compute_have_an_apostrophe(tmp_path):
    row = {"=who": "=1", "x": -1.5}
    write_rows(tmp_path / "a.csv", [{"=who": text, "x": -1.5} for text in FORMULAS + PLAIN])
    append_row(tmp_path / "a.csv", row)
    with (tmp_path / "a.csv").open(newline="", encoding="utf-8") as file:
        columns, *rows = csv.reader(file)
    assert columns == ["'=who", "x"] and {each[1] for each in rows} == {"-1.5"}
    cells = [each[0] for each in rows]
    plain = ["" if cell is None else str(cell) for cell in PLAIN]
    assert cells == [*(f"'{text}" for text in FORMULAS), *plain, "'=1"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes among its files")
def test_a_file_is_replaced_behind_a_link_and_a_pipe_is_written_to(tmp_path):
    (tmp_path / "real.csv").write_text("old")
    (tmp_path / "link.csv").symlink_to(tmp_path / "real.csv")
    write_rows(tmp_path / "link.csv", [{"a": 1}])
    assert (tmp_path / "link.csv").is_symlink() and (tmp_path / "real.csv").read_text() == "a\n1\n"
    with replacing(Path("/dev/null")) as path:
        assert path == Path("/dev/null")
    assert not Path("/dev/null").is_file()
    with pytest.raises(RuntimeError), replacing(tmp_path / "real.csv") as path:
        path.write_text("half")
        raise RuntimeError
    assert (tmp_path / "real.csv").read_text() == "a\n1\n" and len(list(tmp_path.iterdir())) == 2
