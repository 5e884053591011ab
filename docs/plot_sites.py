"""Draws each method's gain over training alone at each site, with 95 % intervals over seeds: a panel per site.

python docs/plot_sites.py docs/hospitals.png runs/compare-personal_heart
"""

import argparse
import csv
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

COLOURS = {"gain": "C0", "loss": "C3", "neither": "0.55"}


def label(method: str) -> str:
    """The method's name, without the name of a file that only sets its length."""
    name, _, more = method.partition("+")
    return f"{name}, fine-tuned" if more.startswith("fine_tuned") else name


def main() -> None:
    """Reads the comparison's table by client and writes the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path)
    parser.add_argument("comparison", type=Path, help="folder of compare")
    parser.add_argument("--unit", default="points of accuracy")
    parser.add_argument("--scale", type=float, default=100.0, help="factor of the metric")
    args = parser.parse_args()
    rows = list(csv.DictReader((args.comparison / "by_client.csv").open()))
    gain = next(name for name in rows[0] if name.startswith("gain over "))
    sites = list(dict.fromkeys(row["client"] for row in rows))
    found = {
        (row["method"], row["client"]): [args.scale * float(row[name] or row[gain]) for name in (gain, "low", "high")]
        for row in rows
        if row[gain]
    }
    methods = list(dict.fromkeys(method for method, _ in found))
    # the best mean of sites on top
    methods.sort(key=lambda method: np.mean([found[method, site][0] for site in sites]))
    figure = Figure(figsize=(2.3 + 1.75 * len(sites), 0.9 + 0.2 * len(methods)), layout="constrained")
    panels = figure.subplots(1, len(sites), sharey=True, sharex=True)
    for site, axes in zip(sites, panels, strict=True):
        axes.axvline(0, color="black", linewidth=0.8)
        for place, method in enumerate(methods):
            mean, low, high = found[method, site]
            colour = COLOURS["gain" if low > 0 else "loss" if high < 0 else "neither"]
            axes.plot([low, high], [place, place], color=colour, linewidth=1.6)
            axes.plot(mean, place, "o", color=colour, markersize=4.5)
        axes.set_title(site, fontsize=10)
        axes.grid(alpha=0.25)
        axes.set_yticks(range(len(methods)), [label(method) for method in methods], fontsize=9)
        axes.tick_params(axis="y", length=0)
    figure.supxlabel(f"{gain.replace('Local', 'training alone')}, {args.unit}", fontsize=10)
    figure.savefig(args.picture, dpi=150)


if __name__ == "__main__":
    main()
