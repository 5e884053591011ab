"""The methods by family: the gallery of the site, and the table in README.md.

python docs/gallery.py        # write README's table from docs/families.yaml
"""

import csv
import inspect
import re
from pathlib import Path
from typing import Any

import yaml

from pfl_lightning.methods.registry import METHODS, Method

HERE = Path(__file__).parent
README = HERE.parent / "README.md"
BEGIN, END = "<!-- families: written by `python docs/gallery.py` -->", "<!-- end of families -->"
LISTED = 8
"""Names in a row of README's table; the site has all."""


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


def card(method: Method, row: dict[str, str], page: str) -> str:
    """Return a method's card: its idea, its paper, and its traffic.

    Args:
        method: the method.
        row: its row of methods/table.csv.
        page: the method's own page, relative to the gallery.
    """
    paper = f"[{row['paper']}]({row['url']}). " if row["url"] else ""
    lines = [
        f":::{{grid-item-card}} [{method.name}]({page})\n",
        f"{idea(method)}\n",
        f"{paper}*Up: {row['up']}. Stays: {row['stays']}.*",
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
