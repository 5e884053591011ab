"""Draws test accuracy against samples a client, or against partitions: a line and a band of one deviation over seeds.

python docs/plot_pay.py docs/pay_mnist.png 25=runs/pay-25 50=runs/compare-pay_mnist
python docs/plot_pay.py docs/pay_partitions.png "two classes=runs/pay-pat2" "alpha 0.1=runs/compare-pay_mnist"
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
    parser.add_argument(
        "comparisons", nargs="+", metavar="SAMPLES=FOLDER", help="folders of compare, by samples or names"
    )
    args = parser.parse_args()
    folders = dict(word.split("=", 1) for word in args.comparisons)
    sizes = all(name.isdigit() for name in folders)
    places = {name: int(name) if sizes else place for place, name in enumerate(folders)}
    values: dict[str, dict[int, list[float]]] = {}
    for name, folder in folders.items():
        for row in csv.DictReader(Path(folder, "runs.csv").open()):
            method = row["method"].replace("+fine_tuned_0.1", ", fine-tuned").partition("+")[0]
            values.setdefault(method, {}).setdefault(places[name], []).append(100 * float(row[COLUMN]))
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    for number, (method, by_place) in enumerate(
        sorted(values.items(), key=lambda each: -np.mean(each[1][min(each[1])]))
    ):
        xs = sorted(by_place)
        means = np.array([np.mean(by_place[x]) for x in xs])
        spread = np.array([np.std(by_place[x], ddof=1) if len(by_place[x]) > 1 else 0.0 for x in xs])
        alone = method == "Local"
        colour = "black" if alone else f"C{number % 10}"
        axes.plot(xs, means, "o--" if alone else "o-", color=colour, markersize=4, label=method)
        axes.fill_between(xs, means - spread, means + spread, color=colour, alpha=0.12, linewidth=0)
    axes.set(xlabel="samples a client trains on" if sizes else "partition", ylabel="test accuracy, %")
    if sizes:
        axes.set(xscale="log")
        axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.set_xticks(list(places.values()), None if sizes else list(places))
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", frameon=False)
    figure.savefig(args.picture, dpi=150)


if __name__ == "__main__":
    main()
