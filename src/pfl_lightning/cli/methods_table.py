"""Print the table of methods, ``pfl-lightning methods``: bytes sent and kept, and data needed, of each method."""

import csv
import io
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path

from pfl_lightning.cli.usage import Arguments
from pfl_lightning.runs.tables import markdown_table, text_table

STORED = Path(__file__).parents[1] / "methods" / "table.csv"
"""The measured table; tests compare it with new measurements."""

SHORT = ("method", "paper", "configuration", "up", "stays")
"""Columns of the short table, for the README."""

NOTE = """\
Measured in the second round of 4 clients that all take part, with default settings, 10 classes and the CNN
(FedBN: CifarResNet, for its BatchNorm layers; methods of adapters: Adapted, the CNN with frozen features and
adapters of rank 8). Up and down: what a client sends and receives per round. Stays:
what a client keeps between rounds. All three are in bytes, as multiples of the model's. "Of its own": clients
receive different payloads. Weighs by samples, with default settings: "yes" if a client that reports more
samples, and else sends the same, changes what the server sends; "no" if clients count alike, or by another
rule. Needs, "classes": updates show which classes a client holds; "class counts": also how many samples of
each. Different nets: clients may have nets with different bodies, if their features have one width. With every
method, clients may miss rounds."""


def markdown(rows: Sequence[Mapping[str, str]]) -> str:
    """Return the table in Markdown, with links to the papers and a note on the columns.

    Args:
        rows: the stored rows.
    """
    return f"{markdown_table(cells(list(map(linked, rows))))}\n\n{NOTE}"


def short(rows: Sequence[Mapping[str, str]]) -> str:
    """Return the columns `SHORT` of the table in Markdown.

    Args:
        rows: the stored rows.
    """
    return markdown_table(cells([{name: row[name] for name in SHORT} for row in map(linked, rows)]))


def linked(row: Mapping[str, str]) -> dict[str, str]:
    """Return a row with the paper as a link, and with names of classes and files as code."""
    code = {name: f"`{row[name]}`" for name in ("configuration", "client module", "aggregator")}
    return {**row, "paper": f"[{row['paper']}]({row['url']})" if row["url"] else "", **code}


def text(rows: Sequence[Mapping[str, str]]) -> str:
    """Return the table for terminals, with a note on the columns.

    Args:
        rows: the stored rows.
    """
    return f"{text_table(cells(rows))}\n\n{NOTE}"


def cells(rows: Sequence[Mapping[str, str]]) -> list[list[str]]:
    """Return the header and the rows, without the column of web addresses."""
    names = [name for name in rows[0] if name != "url"]
    return [names, *([row[name] for name in names] for row in rows)]


def comma_separated(rows: Sequence[Mapping[str, str]]) -> str:
    """Return the table as CSV, in the format of the stored table.

    Args:
        rows: the stored rows.
    """
    file = io.StringIO()
    writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue().rstrip()


FORMATS = {"text": text, "markdown": markdown, "short": short, "csv": comma_separated}


def main(args: list[str]) -> int:
    """Run ``pfl-lightning methods``.

    Args:
        args: the command's arguments.

    Returns:
        The exit code.
    """
    parser = Arguments("methods", description="Print the table of methods: bytes sent and kept, and data needed.")
    parser.add_argument("--format", choices=list(FORMATS), default="text", help="format of the table (default: text)")
    parser.add_argument(
        "--measure",
        nargs="*",
        metavar="NAME",
        help="measure these methods again, or all, in minutes, instead of printing stored figures",
    )
    given = parser.parse_args(args)
    rows = stored()
    if given.measure is not None:
        # imported on demand: the stored table needs no torch, and prints at once
        rows = import_module("pfl_lightning.cli.measuring").measured(given.measure)
    print(FORMATS[given.format](rows))
    return 0


def stored() -> list[dict[str, str]]:
    """Return the stored rows of all methods."""
    with STORED.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))
