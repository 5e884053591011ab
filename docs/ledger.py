"""The ledger from its data: writes the tables of claims.md from ledger.yaml, and makes the cheap runs again.

python docs/ledger.py                                     # write the tables of docs/claims.md
python docs/ledger.py --check --budget 10m --root DATA    # run, cheapest first, and compare with the printed figures
"""

import argparse
import csv
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
PAGE, DATA = HERE / "claims.md", HERE / "ledger.yaml"
COLUMNS = ("claim", "paper", "here", "scale", "verdict", "section")
CHECKED = "Checked figures"
"""The section of claims.md with the figures that `--check` compares."""
README = "What README says"
"""The section of claims.md with README's sentences, each with the cells of the tables that it rests on."""


def ledger() -> dict[str, Any]:
    """The content of ledger.yaml: ``claims`` by section, ``checks``, ``readme``, and tables by clients in ``which``."""
    return yaml.safe_load(DATA.read_text())


def table(header: tuple[str, ...], rows: list[list[str]]) -> str:
    """A table in Markdown, as the page writes it."""
    lines = [header, ("---",) * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n".replace("|  |", "| |") for line in lines)


def figures(checks: list[dict[str, Any]]) -> str:
    """The table of checked figures, a row a command."""
    rows = []
    for each in sorted(checks, key=lambda check: check["hours"]):
        expected = (f"{one['method']} {one['expected']:g} ± {one['tolerance']:g}" for one in each["figures"])
        rows.append([each["where"], "; ".join(expected), f"{each['hours']:g}", f"`{each['command']}`"])
    return table(("section", "figures and tolerances", "hours", "command"), rows)


def sentences(readme: list[dict[str, Any]]) -> str:
    """The table of README's sentences, a row a cell that one rests on."""
    rows = [
        [
            each["says"] if cell is each["cells"][0] else "",
            f"{'' if cell['page'] == PAGE.name else 'results, '}{cell['section']}",
            cell["row"],
            cell["cell"].replace(" | ", "; "),
        ]
        for each in readme
        for cell in each["cells"]
    ]
    return table(("sentence", "table", "row", "figures"), rows)


def written(page: str, data: dict[str, Any]) -> str:
    """The page with the tables of the data: each is the first table behind its section's head."""
    tables = {
        section: table(COLUMNS, [[row.get(name, "") for name in COLUMNS] for row in rows])
        for section, rows in data["claims"].items()
    }
    made = {CHECKED: figures(data["checks"]), README: sentences(data["readme"])}
    for section, text in (tables | made).items():
        before, head, after = page.partition(f"\n## {section}\n")
        if not head:
            raise SystemExit(f"{PAGE.name} has no section {section}")
        start = after.index("\n|") + 1
        end = after.find("\n\n", start)
        rest = "" if end < 0 else after[end + 1 :]
        page = before + head + after[:start] + text + rest
    return page


def run(command: str, out: Path, root: str, seconds: float) -> dict[str, dict[str, str]]:
    """Runs a comparison, and returns its rows by method.

    Args:
        command: arguments of ``pfl-lightning``, with DATA for the folder of data sets.
        out: the comparison's folder.
        root: the folder of data sets.
        seconds: limit, after which `subprocess.TimeoutExpired` is raised.
    """
    words = [word.replace("DATA", root) for word in shlex.split(command)]
    words = [sys.executable, "-m", "pfl_lightning", *words, "--out", str(out)]
    ended = subprocess.run(words, timeout=seconds, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if ended.returncode:
        # the last line has the reason
        raise OSError((ended.stderr.splitlines() or [f"exit code {ended.returncode}"])[-1])
    with (out / "comparison.csv").open(newline="") as file:
        return {row["method"]: row for row in csv.DictReader(file)}


def check(
    checks: list[dict[str, Any]],
    budget: float,
    root: str,
    out: Path,
    runs: Callable[[str, Path, str, float], dict[str, dict[str, str]]] = run,
) -> int:
    """Makes the runs that fit the budget, cheapest first, and prints a line a figure.

    Args:
        checks: the ledger's checks.
        budget: seconds.
        root: the folder of data sets.
        out: folder of the runs; finished runs in it count.
        runs: runs a command.

    Returns:
        1 if a figure is off or a command failed, else 0; a check that lacks its files or its time is no failure.
    """
    begun, wrong = time.monotonic(), 0
    for number, each in enumerate(sorted(checks, key=lambda check: check["hours"])):
        left = budget - (time.monotonic() - begun)
        if 3600 * each["hours"] > left:
            print(f"skipped  {each['command']}: {60 * each['hours']:.0f} min don't fit in {max(left, 0) / 60:.0f} min")
            continue
        if (needed := each.get("needs")) and not Path(root, needed).exists():
            print(f"skipped  {each['command']}: there is no {Path(root, needed)}")
            continue
        try:
            rows = runs(each["command"], out / f"check_{number}", root, left)
        except subprocess.TimeoutExpired:
            print(f"stopped  {each['command']}: the budget is spent; the same check goes on from there")
            continue
        except OSError as error:
            print(f"failed   {each['command']}: {error}")
            wrong += 1
            continue
        for figure in each["figures"]:
            text = rows.get(figure["method"], {}).get(figure["column"]) or "nan"
            off = abs(float(text) - figure["expected"])
            # NaN, as of a missing method, is never within the tolerance
            said = "ok     " if off <= figure["tolerance"] else "OFF    "
            wrong += said != "ok     "
            print(
                f"{said}  {each['where']}, {figure['method']}: {float(text):.4g}, expected {figure['expected']:g} "
                f"± {figure['tolerance']:g}",
                flush=True,
            )
    return min(wrong, 1)


def main(words: list[str] | None = None) -> int:
    """Writes the page, or checks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="make the cheap runs again, and compare their figures")
    parser.add_argument("--budget", default="10m", metavar="TIME", help="limit of --check: 90s, 10m, 2h (default: 10m)")
    parser.add_argument("--root", default="data", help="folder of the data sets (default: data)")
    parser.add_argument("--out", type=Path, default=Path("runs/ledger"), help="folder of the runs")
    given = parser.parse_args(words)
    data = ledger()
    if not given.check:
        PAGE.write_text(written(PAGE.read_text(), data))
        return 0
    from pfl_lightning.cli.advise.command import budget

    try:
        limit = budget(given.budget)
    except argparse.ArgumentTypeError as error:
        parser.error(str(error))
    if limit.unit != "seconds":
        parser.error("--budget is a time here, such as 10m")
    return check(data["checks"], limit.amount, given.root, given.out)


if __name__ == "__main__":
    sys.exit(main())
