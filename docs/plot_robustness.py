"""Draws heat maps of benchmarks/robustness.py's runs, one a partition, prints the tables, and writes runs.csv.

A column is an attack by a share of bad clients, a row a rule, a cell the test accuracy of benign clients.

    python docs/plot_robustness.py docs/robustness.png runs/robustness
"""

import argparse
import csv
import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

ORDER = (
    *("alike", "unlike", "alike-served", "unlike-served", "alike-normed", "alike-served-normed"),
    *("mean", "median", "trimmed", "geometric", "Krum", "multi-Krum"),
    *("Bulyan", "clipping", "bound", "mixing", "bucketing", "FLTrust"),
    *("nobody", "SignFlip", "ALIE", "IPM", "MinMax", "MinSum", "AdaptiveAttack", "BufferAttack", "LabelFlip"),
)
"""Partitions, rules and attacks in the order of the tables."""


class Row(NamedTuple):
    """A run.

    Args:
        partition: the partition's name.
        rule: the rule's name.
        attack: the attack's name, or ``nobody``.
        percent: share of bad clients, in per cent.
        seed: the seed.
        accuracy: test accuracy of the benign clients after the last round, over samples, in per cent.
    """

    partition: str
    rule: str
    attack: str
    percent: int
    seed: int
    accuracy: float


def read(folder: Path) -> list[Row]:
    """Return the finished runs of a folder."""
    rows = []
    for path in sorted(folder.glob("*/*/*/*/*/*/*/summary.json")):
        partition, rule, attack, percent, seed, *_ = path.relative_to(folder).parts
        accuracy = 100 * json.loads(path.read_text())["final"]["benign/test/acc"]
        rows.append(Row(partition, rule, attack, int(percent), int(seed), accuracy))
    return rows


def ordered(names: set[str]) -> list[str]:
    """Return the names that stand in `ORDER`, sorted as there."""
    return sorted(names, key=ORDER.index)


class Table:
    """Accuracies of a partition, a row a rule and a column an attack with its share of bad clients.

    Args:
        rows: the partition's runs, at least one.
    """

    def __init__(self, rows: list[Row]) -> None:
        self.rules = ordered({row.rule for row in rows})
        cells = {(row.percent, row.attack) for row in rows}
        self.columns = sorted(cells, key=lambda cell: (cell[0], ORDER.index(cell[1])))
        self.seeds = len({row.seed for row in rows})
        self.values: dict[tuple[str, int, str], list[float]] = {}
        for row in rows:
            self.values.setdefault((row.rule, row.percent, row.attack), []).append(row.accuracy)

    def mean(self, rule: str, column: tuple[int, str]) -> float:
        """Return the mean over seeds; NaN of a cell without runs."""
        values = self.values.get((rule, *column))
        return float(np.mean(values)) if values else float("nan")

    def text(self, rule: str, column: tuple[int, str]) -> str:
        """Return mean and standard deviation over seeds; a cell that lacks seeds says how many there are."""
        values = self.values.get((rule, *column), [])
        spread = f" ± {np.std(values, ddof=1):.1f}" if len(values) > 1 else ""
        short = f" ({len(values)})" if 0 < len(values) < self.seeds else ""
        return f"{np.mean(values):.1f}{spread}{short}" if values else ""

    def worst(self, rule: str, percent: int) -> float:
        """Return the least mean over the attacks of a share; NaN if a cell has no runs."""
        means = [self.mean(rule, column) for column in self.columns if column[0] == percent]
        return float(np.min(means))

    def lines(self, percent: int) -> list[str]:
        """Return a table of one share of bad clients, beside the column of nobody.

        Args:
            percent: the share, above 0.
        """
        columns = [column for column in self.columns if column[0] in (0, percent)]
        several = sum(column[0] == percent for column in columns) > 1
        heads = ["rule", *(attack for _, attack in columns), *(["worst"] if several else [])]
        lines = [f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]
        for rule in self.rules:
            cells = [rule, *(self.text(rule, column) for column in columns)]
            if several:
                worst = self.worst(rule, percent)
                cells.append("" if np.isnan(worst) else f"{worst:.1f}")
            lines.append(f"| {' | '.join(cells)} |")
        return lines


def draw(tables: dict[str, Table], picture: Path) -> None:
    """Draw a heat map of each table, below one another.

    Args:
        tables: the tables, by partition.
        picture: the file.
    """
    heights = [len(table.rules) + 4.5 for table in tables.values()]
    width = max(len(table.columns) for table in tables.values())
    figure = Figure(figsize=(2.2 + 0.62 * width, 0.32 * sum(heights)), layout="constrained")
    panels = figure.subplots(len(tables), 1, height_ratios=heights, squeeze=False)[:, 0]
    for axes, (partition, table) in zip(panels, tables.items(), strict=True):
        means = np.array([[table.mean(rule, column) for column in table.columns] for rule in table.rules])
        image = axes.imshow(means, cmap="viridis", vmin=0, vmax=100, aspect="auto")
        for (row, column), mean in np.ndenumerate(means):
            if not np.isnan(mean):
                axes.text(column, row, f"{mean:.0f}", ha="center", va="center", color="white" if mean < 60 else "black")
        heads = [attack if not percent else f"{attack} {percent} %" for percent, attack in table.columns]
        axes.set_xticks(range(len(heads)), heads, rotation=35, ha="right", fontsize=8)
        axes.set_yticks(range(len(table.rules)), table.rules, fontsize=8)
        axes.set_title(partition, fontsize=9)
        for place, (one, other) in enumerate(zip(table.columns, table.columns[1:], strict=False)):
            if one[0] != other[0]:
                axes.axvline(place + 0.5, color="white", linewidth=3)
    figure.colorbar(image, ax=list(panels), label="test accuracy of benign clients, %", shrink=0.6)
    figure.savefig(picture, dpi=130)


def main() -> None:
    """Read the runs, write runs.csv, print the tables and draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path)
    parser.add_argument("folder", type=Path, help="the runs' --out")
    args = parser.parse_args()
    rows = read(args.folder)
    if not rows:
        parser.error(f"{args.folder} has no finished run; make some with benchmarks/robustness.py --out {args.folder}.")
    with (args.folder / "runs.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(Row._fields)
        writer.writerows(rows)
    partitions = ordered({row.partition for row in rows})
    tables = {name: Table([row for row in rows if row.partition == name]) for name in partitions}
    for name, table in tables.items():
        percents = sorted({percent for percent, _ in table.columns if percent}) or [0]
        for percent in percents:
            print("\n".join([f"{name}, {percent} % bad, {table.seeds} seeds", "", *table.lines(percent), ""]))
    draw(tables, args.picture)
    print(f"{args.picture} and {args.folder / 'runs.csv'}: {len(rows)} runs")


if __name__ == "__main__":
    main()
