"""Draws accuracy of benign clients against how many are bad, a panel a partition and a line a rule; prints the tables.

The last tables are of runs whose server has samples of its own, and of nets with BatchNorm, which are in no panel.

python docs/plot_robustness.py docs/robustness.png runs/robustness
"""

import argparse
import json
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

TITLES = {"unlike": "Dirichlet(0.1)", "alike": "alike"}
RULES = ("mean", "median", "trimmed", "geometric", "multi-Krum", "clipping", "bound", "FLTrust")

Values = dict[tuple[str, int], list[float]]


def read(folder: Path) -> Values:
    """Test accuracies of benign clients in per cent, of all seeds, by rule and by per cent of bad clients."""
    values: Values = {}
    for path in sorted(folder.rglob("summary.json")):
        rule, percent = path.relative_to(folder).parts[:2]
        final = json.loads(path.read_text())["final"]
        values.setdefault((rule, int(percent)), []).append(100 * final["benign/test/acc"])
    return values


def shown(values: Values) -> list[str]:
    """The rows of the table: a column a share of bad clients, means and deviations over seeds."""
    percents = sorted({percent for _, percent in values})
    heads = ["rule", *(f"{percent} % bad" for percent in percents)]
    rows = [f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]
    for rule in (rule for rule in RULES if any(rule == found for found, _ in values)):
        cells = [values.get((rule, percent), []) for percent in percents]
        spreads = [f" ± {np.std(cell, ddof=1):.1f}" if len(cell) > 1 else "" for cell in cells]
        texts = [f"{np.mean(c):.1f}{spread}" if c else "" for c, spread in zip(cells, spreads, strict=True)]
        rows.append(f"| {' | '.join([rule, *texts])} |")
    return rows


def main() -> None:
    """Reads the runs of benchmarks/robustness.py, prints the tables and writes the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path)
    parser.add_argument("folder", type=Path, help="of the runs")
    args = parser.parse_args()
    figure = Figure(figsize=(4.2 * len(TITLES), 3.6), layout="constrained")
    panels = figure.subplots(1, len(TITLES), sharey=True)
    for axes, (name, title) in zip(panels, TITLES.items(), strict=True):
        values = read(args.folder / name)
        print("\n".join([title, "", *shown(values), ""]))
        percents = sorted({percent for _, percent in values})
        for place, rule in enumerate(rule for rule in RULES if (rule, percents[0]) in values):
            means = np.array([np.mean(values[rule, percent]) for percent in percents])
            spread = np.array([np.std(values[rule, percent], ddof=1) for percent in percents])
            colour = "black" if rule == "mean" else f"C{place}"
            axes.plot(percents, means, "o-", color=colour, markersize=4, label=rule)
            axes.fill_between(percents, means - spread, means + spread, color=colour, alpha=0.1, linewidth=0)
        axes.set(xlabel="bad clients, %", xticks=percents, title=title)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("test accuracy of benign clients, %")
    panels[0].legend(loc="lower left", fontsize=8, frameon=False)
    figure.savefig(args.picture, dpi=150)
    for name, title in TITLES.items():
        print("\n".join([f"{title}, samples at the server", "", *shown(read(args.folder / f"{name}-served")), ""]))
    print("\n".join(["alike, BatchNorm", "", *shown(read(args.folder / "alike-normed")), ""]))


if __name__ == "__main__":
    main()
