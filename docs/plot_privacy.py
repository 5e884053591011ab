"""Draws test accuracy against epsilon, a panel a federation and a line a method; prints the table behind it.

python docs/plot_privacy.py docs/privacy_digits.png "20 clients, Dirichlet(0.1)=runs/privacy/20-*" ...
"""

import argparse
import json
from glob import glob
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter, LogLocator, NullFormatter

Values = dict[tuple[str, float | None], list[float]]


def read(pattern: str) -> Values:
    """Test accuracies in per cent, of all seeds, by method and epsilon; None is no privacy."""
    values: Values = {}
    for folder in sorted(glob(pattern)):
        for path in sorted(Path(folder).rglob("summary.json")):
            summary = json.loads(path.read_text())
            spent = summary["privacy"]["epsilon"] if "privacy" in summary else None
            values.setdefault((summary["method"], spent), []).append(100 * summary["final"]["test/acc"])
    return values


def shown(values: Values) -> list[str]:
    """The rows of the table: a column an epsilon, means and deviations over seeds."""
    columns = [None, *sorted({spent for _, spent in values if spent is not None})]
    methods = list(dict.fromkeys(name for name, _ in values))
    heads = ["none" if spent is None else f"epsilon {spent:.3g}" for spent in columns]
    rows = [f"| {' | '.join(['method', *heads])} |", "| --- " * (len(columns) + 1) + "|"]
    for name in methods:
        cells = [values.get((name, spent), []) for spent in columns]
        texts = [f"{np.mean(cell):.1f} ± {np.std(cell, ddof=1):.1f}" if cell else "" for cell in cells]
        rows.append(f"| {' | '.join([name, *texts])} |")
    return rows


def main() -> None:
    """Reads the comparisons' runs, prints the tables and writes the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path)
    parser.add_argument("panels", nargs="+", metavar="TITLE=FOLDERS", help="folders of compare, by a pattern")
    args = parser.parse_args()
    figure = Figure(figsize=(4.2 * len(args.panels), 3.6), layout="constrained")
    panels = figure.subplots(1, len(args.panels), sharey=True, squeeze=False)[0]
    for axes, panel in zip(panels, args.panels, strict=True):
        title, _, pattern = panel.rpartition("=")
        values = read(pattern)
        print("\n".join([title, "", *shown(values), ""]))
        for place, name in enumerate(dict.fromkeys(name for name, _ in values)):
            colour = "black" if name == "Local" else f"C{place}"
            private = sorted((spent, each) for (method, spent), each in values.items() if method == name and spent)
            if private:
                means = np.array([np.mean(each) for _, each in private])
                spread = np.array([np.std(each, ddof=1) for _, each in private])
                spent = [epsilon for epsilon, _ in private]
                axes.plot(spent, means, "o-", color=colour, markersize=4, label=name)
                axes.fill_between(spent, means - spread, means + spread, color=colour, alpha=0.12, linewidth=0)
            free = np.mean(values[name, None])
            label = "Local: epsilon 0" if name == "Local" else f"{name} without privacy"
            axes.axhline(free, color=colour, linestyle="--", linewidth=1, label=label)
        axes.set(xlabel="epsilon", xscale="log", title=title)
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(FormatStrFormatter("%g"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("test accuracy, %")
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=8, frameon=False
    )
    figure.savefig(args.picture, dpi=150)


if __name__ == "__main__":
    main()
