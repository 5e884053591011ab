"""Draws each method's gain over training alone, by both means over hospitals and at each hospital: a panel each.

python docs/plot_sites.py docs/hospitals.png     # reads the table of results.md

Intervals are those of the table: of 95 % for other test patients of these hospitals and other seeds.
"""

import argparse
import re
from pathlib import Path
from typing import Any

from gallery import cells
from matplotlib.figure import Figure

PAGE = Path(__file__).parent / "results.md"
HEADING = "### Personalised methods at the hospitals"
MEANS = {"over Local, by hospital": "mean of hospitals", "over Local, by patient": "all test patients"}
TITLE = "Does a federation pay at four hospitals? Each method's gain over training alone, in points of accuracy"
KEY = "dots: means of ten seeds; lines: 95 % intervals over patients and seeds; blue and red: intervals without 0"
COLOURS = {"gain": "C0", "loss": "C3", "neither": "0.55"}
CELL = re.compile(r"([+-][\d.]+)(?: \[([+-][\d.]+), ([+-][\d.]+)\])?")
"""A gain, and the ends of its interval if it has one."""


def table(text: str) -> tuple[list[str], list[list[str]]]:
    """Return the header and the rows of a section's table.

    Args:
        text: a page in Markdown, from the section on.
    """
    lines = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE)[0].splitlines()  # type: ignore[index]
    head, _, *rows = map(cells, lines)
    return head, rows


def main() -> None:
    """Read the table, and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path)
    args = parser.parse_args()
    head, rows = table(PAGE.read_text().partition(HEADING)[2])
    hospitals = head[head.index([*MEANS][-1]) + 1 :]
    panels = {**MEANS, **{name: name for name in hospitals}}
    gains = {row[0]: dict(zip(head, row, strict=True)) for row in rows if row[0] != "Local"}
    figure = Figure(figsize=(2.3 + 1.75 * len(panels), 1.2 + 0.2 * len(gains)), layout="constrained")
    drawn: Any = figure.subplots(1, len(panels), sharey=True)
    for (column, title), axes in zip(panels.items(), drawn, strict=True):
        axes.axvline(0, color="black", linewidth=0.8)
        # the best mean of hospitals, the table's first row, on top
        for place, row in enumerate(reversed(gains.values())):
            gain, *ends = CELL.match(row[column]).groups()  # type: ignore[union-attr]
            mean, low, high = (float(end or 0) for end in (gain, *ends))
            # by signs: an end of +0.0 is rounded
            signs = {end[0] for end in ends if end}
            colour = COLOURS["gain" if signs == {"+"} else "loss" if signs == {"-"} else "neither"]
            axes.plot([low, high], [place, place], color=colour, linewidth=1.6)
            axes.plot(mean, place, "o", color=colour, markersize=4.5)
        axes.set_title(title, fontsize=10, fontweight="bold" if column in MEANS else "normal")
        axes.set_xlabel("points", fontsize=9)
        axes.grid(alpha=0.25)
        axes.set_yticks(range(len(gains)), [*reversed(gains)], fontsize=9)
        axes.tick_params(axis="y", length=0)
    # each group of panels has a scale of its own: a hospital's intervals are wider
    for group in (drawn[: len(MEANS)], drawn[len(MEANS) :]):
        edges = [value for axes in group for value in axes.get_xlim()]
        for axes in group:
            axes.set_xlim(min(edges), max(edges))
    figure.suptitle(TITLE, fontsize=12)
    figure.supxlabel(KEY, fontsize=9)
    figure.savefig(args.picture, dpi=150)


if __name__ == "__main__":
    main()
