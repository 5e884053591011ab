"""The methods by family: the gallery of the site."""

import inspect
import re
import sys
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import catalogue
import ideas

from pfl_lightning.cli.configs import squeezed
from pfl_lightning.cli.methods_table import stored
from pfl_lightning.methods.registry import METHODS, Method

HERE = Path(__file__).parent
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


def bearer(method: Method) -> type:
    """Return the class with the docstring of a method: aggregator if it has the name or is a choice, or client."""
    server = type(method.new_aggregator())
    is_named = squeezed(server.__name__) == squeezed(method.name)
    own = server if is_named or method.aggregator is not None else method.client
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


def by_the_tables(name: str) -> str:
    """Return a method's figures of our tables, each with a link; an empty text without any.

    Args:
        name: the method's name.
    """
    own = figures().get(name, {})
    return "; ".join(
        f"{data} [{figure.translate(ESCAPED)}]({address})"
        for data, (figure, address) in own.items()
        if FEWER.get(data) not in own
    )


def card(method: Method, row: dict[str, str], page: str) -> str:
    """Return a method's card: its idea as a picture and in words, its paper, its traffic, and figures of our tables.

    Args:
        method: the method.
        row: its row of methods/table.csv.
        page: the method's own page, relative to the gallery.
    """
    paper = f"[{row['paper']}]({row['url']}). " if row["url"] else ""
    pays = by_the_tables(method.name)
    lines = [
        f":::{{grid-item-card}} [{method.name}]({page})\n",
        ideas.picture(method.name, row),
        f"{idea(method)}\n",
        f"{paper}*Up: {row['up']}. Stays: {row['stays']}.*\n",
        f"**By the tables**: {pays}.\n" if pays else "",
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
    for family in catalogue.families():
        parts.append(f"## {family['family']}\n\n{family['idea']}\n")
        if family["pays"]:
            parts.append(f"**When it pays.** {family['pays']} [The tables](../{family['section']}).\n")
        cards = "".join(card(by_name[name], rows[name], pages[name]) for name in catalogue.members(family["family"]))
        parts.append(f"::::{{grid}} 1 2 3 3\n:gutter: 2\n\n{cards}::::\n")
    return "\n".join(parts)


def measured() -> dict[str, dict[str, str]]:
    """Return the row of each method in methods/table.csv, by its name."""
    return {row["method"]: row for row in stored()}
