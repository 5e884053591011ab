"""Draws a metric of several runs against the rounds, a line a run.

python docs/plot_runs.py docs/mnist_dir0.1.png runs/*-MNIST/version_0 [--metric val/acc]
"""

import argparse
import csv
from pathlib import Path

from pfl_lightning.plots import plot_curves


def main() -> None:
    """Reads the runs' records and writes the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path)
    parser.add_argument("runs", type=Path, nargs="+", help="folders of runs; a line has the name of the folder above")
    parser.add_argument("--metric", default="val/acc", help="column of rounds.csv")
    args = parser.parse_args()
    rows = {run.resolve().parent.name: list(csv.DictReader((run / "rounds.csv").open())) for run in args.runs}
    plot_curves(rows, args.metric).savefig(args.picture, dpi=150)


if __name__ == "__main__":
    main()
