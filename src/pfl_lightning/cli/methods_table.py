"""The table of methods: what a pair of client module and aggregator sends, keeps and needs, measured and stored."""

import csv
import io
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path

from pfl_lightning.cli.arguments import Arguments
from pfl_lightning.runs.tables import markdown_table, text_table

STORED = Path(__file__).parents[1] / "methods" / "table.csv"
"""What was measured, which the tests keep true."""

CLIENTS = 4
"""Clients of the federations that are measured."""

SHORT = ("method", "paper", "configuration", "up", "stays")
"""The columns of the short table."""

NOTE = f"""\
Measured, with the defaults, in the second round of {CLIENTS} clients that all take part, with 10 classes and the CNN
(FedBN: CifarResNet, whose BatchNorm layers stay): what a client and round sends up and down, and what stays with the
client between rounds, in bytes as a multiple of the model's. "Of its own" says that clients receive different things;
"classes" that what a client sends shows which classes it holds, and "class counts" how many samples of each; "different
nets" that clients can have networks of different bodies whose features have one width. In all methods some clients can
stay away from a round."""


def markdown(rows: Sequence[Mapping[str, str]]) -> str:
    """The table in Markdown, with links to the papers, and what its columns say.

    Args:
        rows: as they are stored.
    """
    return f"{markdown_table(cells(list(map(linked, rows))))}\n\n{NOTE}"


def short(rows: Sequence[Mapping[str, str]]) -> str:
    """Five columns of the table in Markdown.

    Args:
        rows: as they are stored.
    """
    return markdown_table(cells([{name: row[name] for name in SHORT} for row in map(linked, rows)]))


def linked(row: Mapping[str, str]) -> dict[str, str]:
    """A row with a link in Markdown to the paper, and names of classes and files as code."""
    code = {name: f"`{row[name]}`" for name in ("configuration", "client module", "aggregator")}
    return {**row, "paper": f"[{row['paper']}]({row['url']})" if row["url"] else "", **code}


def text(rows: Sequence[Mapping[str, str]]) -> str:
    """The table for terminals, and what its columns say.

    Args:
        rows: as they are stored.
    """
    return f"{text_table(cells(rows))}\n\n{NOTE}"


def cells(rows: Sequence[Mapping[str, str]]) -> list[list[str]]:
    """The header and the rows, without the addresses."""
    names = [name for name in rows[0] if name != "url"]
    return [names, *([row[name] for name in names] for row in rows)]


def comma_separated(rows: Sequence[Mapping[str, str]]) -> str:
    """The table as CSV, without the line about its columns.

    Args:
        rows: as they are stored.
    """
    file = io.StringIO()
    writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue().rstrip()


FORMATS = {"text": text, "markdown": markdown, "short": short, "csv": comma_separated}


def main(args: list[str]) -> int:
    """Runs ``pfl-lightning methods``.

    Args:
        args: the command's arguments.

    Returns:
        The exit code.
    """
    parser = Arguments("methods", description=__doc__)
    parser.add_argument("--format", choices=list(FORMATS), default="text")
    parser.add_argument(
        "--measure", action="store_true", help="measure the methods anew, in the place of the figures that are stored"
    )
    given = parser.parse_args(args)
    print(FORMATS[given.format](import_module("pfl_lightning.cli.measuring").measured() if given.measure else stored()))
    return 0


def stored() -> list[dict[str, str]]:
    """The rows of all methods, as they were measured."""
    with STORED.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))
