"""The methods by family: the gallery of the site, and the table in README.md.

python docs/gallery.py        # write README's table from docs/families.yaml
"""

import csv
import inspect
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parent))

import ideas

from pfl_lightning.methods.registry import METHODS, Method

HERE = Path(__file__).parent
README = HERE.parent / "README.md"
BEGIN, END = "<!-- families: written by `python docs/gallery.py` -->", "<!-- end of families -->"
LISTED = 8
"""Names in a row of README's table; the site has all."""
GAIN, HOSPITALS, LEVEL = "over Local, 95 % interval", "over Local, by hospital", "last"
TABLES = (
    ("mean of four hospitals", "results.md", "Personalised methods at the hospitals", "mean of hospitals", HOSPITALS),
    ("mean of four hospitals", "results.md", "Newer methods", "mean of hospitals", HOSPITALS),
    ("few digits of few classes", "claims.md", "When does it pay?", "25 samples", "25 samples"),
    ("digits, 50 rounds", "results.md", "Newer methods", "mean of clients", GAIN),
    ("five domains of digits", "results.md", "Feature shift", "mean of clients", GAIN),
    ("digits, 20 rounds", "results.md", "All methods", "last", LEVEL),
)
"""Tables with figures of methods: the data, page and heading, a column of the table, and the column of the figures.

Figures are gains over Local, or levels. A card has one figure for each of the data, of the first table with the method.
"""
FEWER = {"digits, 20 rounds": "digits, 50 rounds"}
"""Data left out on a card that has other data."""
ESCAPED = str.maketrans({"[": r"\[", "]": r"\]", "*": r"\*"})
"""Brackets and stars of a figure in the text of a link."""


def families() -> list[dict[str, Any]]:
    """Return the families of families.yaml, and a last one of methods without a family, where there are any."""
    known: list[dict[str, Any]] = yaml.safe_load((HERE / "families.yaml").read_text())
    named = {name for family in known for name in family["methods"]}
    rest = [method.name for method in METHODS if method.name not in named]
    return known + ([{"family": "More methods", "idea": "", "pays": "", "methods": rest}] if rest else [])


def table() -> str:
    """Return README's table: a row per family, with the first names of each."""
    rows = ["| family | methods |", "| --- | --- |"]
    for family in families():
        names = family["methods"]
        more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
        rows.append(f"| **{family['family']}**. {family['idea']} | {', '.join(names[:LISTED])}{more} |")
    return "\n".join(rows)


def written(page: str) -> str:
    """Return a page with the table between its two marks."""
    before, after = page.split(BEGIN)[0], page.split(END)[1]
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


def bearer(method: Method) -> type:
    """Return the class with the docstring of a method: client module or aggregator, by the module that defines it."""
    own = method.client if method.aggregator is None else type(method.new_aggregator())
    return own if own.__module__.startswith("pfl_lightning.methods.") else method.client


def idea(method: Method) -> str:
    """Return the first paragraph of a method's docstring in MyST: formulas as roles, names as code."""
    text = " ".join(inspect.cleandoc(bearer(method).__doc__ or "").split("\n\n")[0].split())
    return re.sub(r":math:`", r"{math}`", text).replace("``", "`")


def cells(line: str) -> list[str]:
    """Return the cells of a table's row in Markdown."""
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def methods_of(cell: str) -> list[str]:
    """Return the methods that a row of a table is of.

    >>> methods_of("FENDA-FL, PerFCL"), methods_of("**FedPM+adam_0.1**"), methods_of("FedAvg, fine-tuned")
    (['FENDA-FL', 'PerFCL'], ['FedPM'], [])

    Args:
        cell: the row's first cell.
    """
    known = {method.name for method in METHODS}
    names = [name if name in known else name.partition("+")[0] for name in cell.replace("*", "").split(", ")]
    return names if known.issuperset(names) else []


@cache
def figures() -> dict[str, dict[str, tuple[str, str]]]:
    """Return the figures of each method by data, each with the address of its table, read from the pages' tables."""
    found: dict[str, dict[str, tuple[str, str]]] = {}
    for data, page, heading, column, figure in TABLES:
        text = (HERE / page).read_text()
        section = re.split(rf"^#+ {re.escape(heading)}$", text, maxsplit=1, flags=re.MULTILINE)[1]
        section = re.split(r"^#+ ", section, maxsplit=1, flags=re.MULTILINE)[0]
        address = f"../{page}#{re.sub(r'[^a-z -]', '', heading.lower()).replace(' ', '-')}"
        tables = [table.splitlines() for table in re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE)]
        for head, _, *rows in (table for table in tables if column in cells(table[0])):
            of = {name: cells(row)[cells(head).index(figure)] for row in rows for name in methods_of(cells(row)[0])}
            for name, cell in of.items():
                if figure == LEVEL and name != "Local":
                    found.setdefault(name, {}).setdefault(data, (f"{cell} % (Local {of['Local']})", address))
                elif cell[:1] in ("+", "-"):
                    found.setdefault(name, {}).setdefault(data, (cell, address))
    return found


def card(method: Method, row: dict[str, str], page: str) -> str:
    """Return a method's card: its idea as a picture and in words, its paper, its traffic, and figures of our tables.

    Args:
        method: the method.
        row: its row of methods/table.csv.
        page: the method's own page, relative to the gallery.
    """
    paper = f"[{row['paper']}]({row['url']}). " if row["url"] else ""
    own = figures().get(method.name, {})
    pays = [
        f"{data} [{figure.translate(ESCAPED)}]({address})"
        for data, (figure, address) in own.items()
        if FEWER.get(data) not in own
    ]
    lines = [
        f":::{{grid-item-card}} [{method.name}]({page})\n",
        ideas.picture(method.name, row),
        f"{idea(method)}\n",
        f"{paper}*Up: {row['up']}. Stays: {row['stays']}.*\n",
        f"**By the tables**: {'; '.join(pays)}.\n" if pays else "",
        ":::\n",
    ]
    return "\n".join(lines)


def gallery(pages: dict[str, str], rows: dict[str, dict[str, str]]) -> str:
    """Return the gallery: a section per family with its cards.

    Args:
        pages: each method's page, by the method's name.
        rows: each method's row of methods/table.csv, by its name.
    """
    by_name = {method.name: method for method in METHODS}
    parts = [
        "# Gallery of methods\n",
        "All methods by family, with figures of our own tables: gains are over clients that train alone (Local), on"
        " the data named. Traffic is in multiples of the model's bytes. [One table](../methods.md) has all columns, and"
        " [`pfl-lightning advise`](../advise.md) tries the likely ones on your clients.\n",
        "Each picture has three clients, with their layers as boxes, and the server above; the arrows name the entries"
        " that travel. **By the tables**: figures with a sign are gains over training alone in points, with a 95 %"
        " interval or the share of clients that gain; a star: clear after Holm's correction.\n",
        ideas.block(ideas.legend()),
    ]
    for family in families():
        parts.append(f"## {family['family']}\n\n{family['idea']}\n")
        if family["pays"]:
            parts.append(f"**When it pays.** {family['pays']} [The tables](../{family['section']}).\n")
        cards = "".join(card(by_name[name], rows[name], pages[name]) for name in family["methods"])
        parts.append(f"::::{{grid}} 1 2 3 3\n:gutter: 2\n\n{cards}::::\n")
    return "\n".join(parts)


def measured(table: Path) -> dict[str, dict[str, str]]:
    """Return what each method sends, keeps and needs, by its name.

    Args:
        table: methods/table.csv.
    """
    with table.open() as file:
        return {row["method"]: row for row in csv.DictReader(file)}


if __name__ == "__main__":
    README.write_text(written(README.read_text()))
