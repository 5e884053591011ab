"""Draws test accuracy against samples a client, a line and a band of one standard deviation over seeds a method.

python docs/plot_pay.py docs/pay_mnist.png 25=runs/pay-25 50=runs/compare-pay_mnist
"""

import argparse
import csv
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter

COLUMN = "final/test/acc"


def main() -> None:
    """Reads the comparisons' runs and writes the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path)
    parser.add_argument("comparisons", nargs="+", metavar="SAMPLES=FOLDER", help="folders of compare")
    args = parser.parse_args()
    folders = dict(word.split("=", 1) for word in args.comparisons)
    values: dict[str, dict[int, list[float]]] = {}
    for samples, folder in folders.items():
        for row in csv.DictReader(Path(folder, "runs.csv").open()):
            name = row["method"].replace("+fine_tuned_0.1", ", fine-tuned").partition("+")[0]
            values.setdefault(name, {}).setdefault(int(samples), []).append(100 * float(row[COLUMN]))
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    for place, (name, by_size) in enumerate(sorted(values.items(), key=lambda each: -np.mean(each[1][min(each[1])]))):
        sizes = sorted(by_size)
        means = np.array([np.mean(by_size[size]) for size in sizes])
        spread = np.array([np.std(by_size[size], ddof=1) if len(by_size[size]) > 1 else 0.0 for size in sizes])
        alone = name == "Local"
        colour = "black" if alone else f"C{place % 10}"
        axes.plot(sizes, means, "o--" if alone else "o-", color=colour, markersize=4, label=name)
        axes.fill_between(sizes, means - spread, means + spread, color=colour, alpha=0.12, linewidth=0)
    axes.set(xlabel="samples a client trains on", ylabel="test accuracy, %", xscale="log")
    axes.set_xticks(sorted(map(int, folders)))
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", frameon=False)
    figure.savefig(args.picture, dpi=150)


if __name__ == "__main__":
    main()
