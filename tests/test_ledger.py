"""The ledger's data: the page made from them, and the check of cheap figures."""

import re
import runpy
import shlex
import subprocess
from pathlib import Path

import pytest

from pfl_lightning.cli.compare.choices import choose
from pfl_lightning.cli.compare.command import parse

DOCS = Path(__file__).parents[1] / "docs"
LEDGER = runpy.run_path(str(DOCS / "ledger.py"))
DATA = LEDGER["ledger"]()
PAGE = (DOCS / "claims.md").read_text()


def test_the_page_is_made_from_the_data():
    assert LEDGER["written"](PAGE, DATA) == PAGE
    changed = {**DATA, "claims": {**DATA["claims"], "FedReMa": DATA["claims"]["FedReMa"][1:]}}
    first = DATA["claims"]["FedReMa"][0]["claim"]
    assert first in PAGE and first not in LEDGER["written"](PAGE, changed)


def test_a_section_that_the_page_lacks_is_refused():
    with pytest.raises(SystemExit, match="no section FedNew"):
        LEDGER["written"](PAGE, {**DATA, "claims": {"FedNew": []}})


@pytest.mark.parametrize("check", DATA["checks"], ids=lambda check: check["where"])
def test_a_check_has_methods_that_are_there_and_figures_that_are_printed(check):
    given, _ = parse(shlex.split(check["command"])[1:])
    labels = {method.label for method in choose(given.methods, given.configs)}
    assert {figure["method"] for figure in check["figures"]} <= labels
    printed = "".join((DOCS / name).read_text() for name in ("results.md", "language_models.md"))
    tables = printed + PAGE.partition("## Checked figures")[0]
    for figure in check["figures"]:
        # of accuracies and errors, and of perplexities
        value = figure["expected"]
        forms = (f"{100 * value:.2f} ±", f"{value:.3f} ±") if value < 1 else (f"{value:.2f} ±",)
        assert any(form in tables for form in forms)


@pytest.mark.parametrize("row", DATA["which"], ids=lambda row: row["name"])
def test_figures_of_the_picture_over_all_tables_are_printed(row):
    pages = "".join((DOCS / name).read_text() for name in ("claims.md", "results.md"))
    assert {"Local", "FedAvg"} < row["accuracy"].keys()
    for method, value in row["accuracy"].items():
        assert re.search(rf"\| {re.escape(method)} \|[^\n]*\b{value:.2f} ±", pages.replace("**", "")), method


@pytest.mark.parametrize("sentence", DATA["readme"], ids=lambda sentence: sentence["says"][:40])
def test_a_sentence_of_readme_rests_on_cells_of_tables(sentence):
    readme = " ".join((DOCS.parent / "README.md").read_text().split())
    assert sentence["says"] in readme
    for cell in sentence["cells"]:
        page = (DOCS / cell["page"]).read_text()
        head = re.search(rf"^#+ {re.escape(cell['section'])}$|^\*\*{re.escape(cell['section'])}", page, re.MULTILINE)
        section = re.split(r"^#+ ", page[head.end() :], maxsplit=1, flags=re.MULTILINE)[0].replace("**", "")
        rows = [line for line in section.splitlines() if line.startswith(f"| {cell['row']} |")]
        assert any(cell["cell"] in row for row in rows), cell


def test_every_sentence_of_readme_with_figures_of_tables_is_in_the_ledger():
    readme = (DOCS.parent / "README.md").read_text()
    part = " ".join(readme.partition("Does it pay?")[2].partition("\n## ")[0].split())
    said = " ".join(sentence["says"] for sentence in DATA["readme"])
    # numbers with a decimal are figures of tables; others are sizes and counts
    assert {number for number in re.findall(r"\d+\.\d+", part) if number not in said} <= {"0.5"}


def figure(method, expected, tolerance=0.01):
    return {"method": method, "column": "acc mean", "expected": expected, "tolerance": tolerance}


def checked(capsys, *checks, budget=600.0, runs=None):
    """The exit code of a check with rows in place of runs, and the first word of each printed line."""
    rows = {"Local": {"acc mean": "0.5"}, "FedAvg": {"acc mean": ""}}
    code = LEDGER["check"](list(checks), budget, ".", Path("out"), runs or (lambda *given: rows))
    return code, [line.split()[0] for line in capsys.readouterr().out.splitlines()]


def test_figures_are_compared_within_their_tolerance(capsys):
    one = {"command": "compare", "where": "here", "hours": 0.01}
    assert checked(capsys, one | {"figures": [figure("Local", 0.509), figure("Local", 0.491)]}) == (0, ["ok", "ok"])
    assert checked(capsys, one | {"figures": [figure("Local", 0.52), figure("Local", 0.5)]}) == (1, ["OFF", "ok"])
    # a method without a value, and one without a row
    assert checked(capsys, one | {"figures": [figure("FedAvg", 0.5), figure("Ditto", 0.5)]}) == (1, ["OFF", "OFF"])


def test_the_cheapest_come_first_and_what_doesnt_fit_is_skipped(capsys):
    made = []

    def runs(command, out, root, seconds):
        made.append(command)
        assert 0 < seconds <= 600
        return {"Local": {"acc mean": "0.5"}}

    checks = [
        {"command": name, "where": "here", "hours": hours, "figures": [figure("Local", 0.5)]}
        for name, hours in (("middle", 0.05), ("long", 0.5), ("short", 0.01))
    ]
    checks.append({**checks[0], "command": "elsewhere", "needs": "no_such_folder"})
    assert checked(capsys, *checks, runs=runs) == (0, ["ok", "ok", "skipped", "skipped"])
    assert made == ["short", "middle"]


def test_a_run_that_fails_is_wrong_and_one_that_the_budget_ends_isnt(capsys):
    one = {"command": "compare", "where": "here", "hours": 0.01, "figures": [figure("Local", 0.5)]}

    def failing(error):
        def runs(*given):
            raise error

        return runs

    assert checked(capsys, one, runs=failing(OSError("no such data"))) == (1, ["failed"])
    assert checked(capsys, one, runs=failing(subprocess.TimeoutExpired("compare", 1))) == (0, ["stopped"])
