"""Write a comparison as one HTML page: table, curves, clients, partition and settings."""

import io
import math
from collections.abc import Collection, Mapping, Sequence
from html import escape
from string import Template
from typing import TYPE_CHECKING

import yaml

from pfl_lightning.cli.compare.by_client import MANY, ByClient
from pfl_lightning.cli.compare.results import Result
from pfl_lightning.cli.compare.significance import counted
from pfl_lightning.federation.resuming import flat
from pfl_lightning.plots.runs import plot_clients, plot_mean_curves, plot_sizes
from pfl_lightning.tasks import Monitor

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLE = """<style>
  body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
  table { border-collapse: collapse; font-variant-numeric: tabular-nums; display: block; overflow-x: auto; }
  th, td { padding: .25rem .7rem; text-align: right; white-space: nowrap; border-bottom: 1px solid #ddd; }
  th:first-child, td:first-child { text-align: left; }
  thead th { border-bottom: 2px solid #888; }
  th button { all: unset; cursor: pointer; font-weight: 600; }
  th button:focus-visible { outline: 2px solid #47a; }
  th[aria-sort=ascending] button::after { content: " \\2191"; }
  th[aria-sort=descending] button::after { content: " \\2193"; }
  td.settings { text-align: left; white-space: normal; }
  .best { font-weight: 700; }
  svg { max-width: 100%; height: auto; }
  .caption { color: #555; max-width: 60rem; }
  summary { cursor: pointer; font-weight: 600; }
</style>
"""
"""The look of the page, for pages beside it too."""

# one file without links: it opens from disk, can be mailed, and still opens in ten years
PAGE = Template(
    """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
"""
    + STYLE
    + """<h1>$title</h1>
<table id="comparison">$table</table>
<p class="caption">$caption</p>
<ul>$notes</ul>
$sites
$pictures
$settings
<script>
  for (const head of document.querySelectorAll("thead th")) {
    head.querySelector("button").addEventListener("click", () => {
      const body = head.closest("table").tBodies[0], column = head.cellIndex;
      const down = head.getAttribute("aria-sort") === "ascending";
      const value = row => row.cells[column].dataset.value;
      const number = row => value(row) === "" ? NaN : Number(value(row));
      const rows = [...body.rows].sort((a, b) => {
        const [x, y] = [number(a), number(b)];
        if (column === 0) return value(a).localeCompare(value(b)) * (down ? -1 : 1);
        // rows without a value come last in both directions
        if (isNaN(x) || isNaN(y)) return isNaN(x) - isNaN(y);
        return (x - y) * (down ? -1 : 1);
      });
      for (const other of head.parentElement.cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      body.append(...rows);
    });
  }
</script>
</html>
"""
)

KEPT = ("trainer.logger", "trainer.callbacks", "trainer.default_root_dir", "trainer.enable_", "data.root")
"""Beginnings of settings left out of the page: where runs are stored and logged, not how they train."""

BY_THE_DATA = ("model.num_classes", "model.input_shape")
"""Settings that the data determine."""


def page(
    title: str,
    cells: Sequence[Sequence[str]],
    marked: Collection[tuple[int, int]],
    caption: str,
    notes: Sequence[str],
    methods: Mapping[str, Sequence[Result]],
    curves: str | None,
    monitor: Monitor,
    sites: ByClient | None = None,
) -> str:
    """Return the page as HTML, without links to other files.

    Args:
        title: title of the page.
        cells: the table, the header first.
        marked: (row, column) of the best cells.
        caption: the table's caption.
        notes: sentences below the table.
        methods: finished runs by method.
        curves: column of the records to draw; None if no run has one.
        monitor: the metric that selects.
        sites: the comparison by client; None leaves it out.
    """
    finished = {name: list(results) for name, results in methods.items() if results}
    pictures = []
    if curves is not None:
        rows = {name: [result.rows for result in results] for name, results in finished.items()}
        pictures.append(("Rounds", plot_mean_curves(rows, curves)))
    # clients of all seeds together: a point per client and seed
    tested = f"test/{monitor.metric}"
    clients = {name: [row for result in results for row in result.clients] for name, results in finished.items()}
    values = {name: [float(row[tested]) for row in rows if row.get(tested)] for name, rows in clients.items()}
    values = {name: [value for value in each if not math.isnan(value)] for name, each in values.items()}
    if any(values.values()):
        some = {name: each for name, each in values.items() if each}
        pictures.append(("Clients", plot_clients(some, tested, note=counted(finished))))
    # one picture is enough: at a seed all methods have the same partition
    first = next((results[0].clients for results in finished.values()), [])
    if first:
        pictures.append(("Partition", plot_sizes(first)))
    return PAGE.substitute(
        title=escape(title),
        table=html_table(cells, marked),
        caption=escape(caption),
        notes="".join(f"<li>{escape(note)}</li>" for note in notes),
        sites=by_client_section(sites) if sites else "",
        pictures="".join(f"<h2>{name}</h2>\n{svg(figure, name)}\n" for name, figure in pictures),
        settings=settings_table(finished),
    )


def by_client_section(sites: ByClient) -> str:
    """Return HTML of the comparison by client: the picture, and the tables for a number of clients that can be read.

    Args:
        sites: the comparison by client.
    """
    tables = [] if len(sites.clients) > MANY else sites.tables
    return "\n".join(
        [
            "<h2>By client</h2>",
            svg(sites.figure(), "By client"),
            *(f"<h3>{escape(title)}</h3>\n<table>{html_table(cells, ())}</table>" for title, cells in tables),
            *(f'<p class="caption">{escape(note)}</p>' for note in sites.notes),
            *([] if tables else [f"<p>The tables of {len(sites.clients)} clients are in by_client.csv.</p>"]),
        ]
    )


def html_table(cells: Sequence[Sequence[str]], marked: Collection[tuple[int, int]]) -> str:
    """Return the table's head and body; each cell carries the number to sort by.

    >>> html_table([["method", "last"], ["FedAvg", "78.20 ± 0.11"]], {(1, 1)}).count('data-value="78.20"')
    1

    Args:
        cells: the table, the header first.
        marked: (row, column) of the best cells.
    """
    header, *rows = cells
    head = "".join(f'<th scope="col"><button type="button">{escape(cell)}</button></th>' for cell in header)
    body = []
    for at, row in enumerate(rows, 1):
        written = []
        for column, cell in enumerate(row):
            best = ' class="best"' if (at, column) in marked else ""
            sorted_by = cell if column == 0 else leading_number(cell)
            written.append(f'<td{best} data-value="{escape(sorted_by)}">{escape(cell)}</td>')
        body.append(f"<tr>{''.join(written)}</tr>")
    return f"<thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody>"


def leading_number(cell: str) -> str:
    """Return the number at a cell's beginning; empty if none.

    >>> leading_number("+2.2 (75 %)"), leading_number("-")
    ('+2.2', '')
    """
    word = cell.partition(" ")[0]
    try:
        float(word)
    except ValueError:
        return ""
    return word


def svg(figure: "Figure", name: str) -> str:
    """Return a figure as an SVG element, with text as text.

    Args:
        figure: the figure.
        name: the figure's name, unique on the page.
    """
    from matplotlib import rc_context

    drawn = io.StringIO()
    # matplotlib derives ids of clip paths from the salt: equal ids on one page would clip the wrong figure
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        # without the date, so that the same runs give the same page
        figure.savefig(drawn, format="svg", metadata={"Date": None})
    return drawn.getvalue()[drawn.getvalue().index("<svg") :]


def settings_table(methods: Mapping[str, Sequence[Result]]) -> str:
    """Return HTML of the settings common to all methods and of each method's own settings.

    Args:
        methods: finished runs by method.
    """
    settings = {name: settings_of(results[0]) for name, results in methods.items()}
    if not any(settings.values()):
        return ""
    every = list(dict.fromkeys(key for own in settings.values() for key in own))
    # compared by repr, as values may be lists, which can't be in a set
    same = {key for key in every if len({repr(own.get(key)) for own in settings.values()}) == 1}
    common = "".join(
        f"<tr><td>{escape(key)}</td><td>{escape(str(next(iter(settings.values()))[key]))}</td></tr>"
        for key in every
        if key in same
    )
    rows = []
    for name, own in settings.items():
        words = ", ".join(f"{key}={own[key]}" for key in every if key in own and key not in same)
        rows.append(f'<tr><td>{escape(name)}</td><td class="settings">{escape(words)}</td></tr>')
    return (
        f"<h2>Settings</h2>\n<details><summary>of each method</summary><table>{''.join(rows)}</table></details>\n"
        f"<details><summary>of all of them</summary><table>{common}</table></details>"
    )


def settings_of(result: Result) -> dict[str, object]:
    """Return a run's settings by dotted name, from ``config.yaml``."""
    config = yaml.safe_load((result.folder / "config.yaml").read_text(encoding="utf-8")) or {}
    named = {
        key: value
        for part in ("model", "aggregator", "data", "trainer")
        for key, value in flat(part, config.get(part)).items()
    }
    return {
        key: value for key, value in named.items() if value is not None and not key.startswith((*KEPT, *BY_THE_DATA))
    }
