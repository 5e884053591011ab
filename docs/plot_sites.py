"""Draws each method's gain over training alone, by both means over sites and at each site: a panel each.

python docs/plot_sites.py docs/hospitals.png runs/compare-personal_heart --sites hospitals --rows patients

Intervals are those of the comparison: by default of 95 % for other test rows of these sites and other seeds.
"""

import argparse
import csv
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

COLOURS = {"gain": "C0", "loss": "C3", "neither": "0.55"}


def label(method: str) -> str:
    """The method's name, without the name of a file that only sets its length."""
    name, _, more = method.partition("+")
    if more.startswith("fine_tuned"):
        return f"{name}, fine-tuned"
    # FLamby's pooled training, beside the one by SGD
    return f"{name}, Adam" if name == "Pooled" and more.endswith("_pooled") else name


def read(path: Path) -> list[dict[str, str]]:
    """Rows of a CSV file."""
    return list(csv.DictReader(path.open()))


def main() -> None:
    """Reads the comparison's tables and writes the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path)
    parser.add_argument("comparison", type=Path, help="folder of compare")
    parser.add_argument("--unit", default="points of accuracy")
    parser.add_argument("--scale", type=float, default=100.0, help="factor of the metric")
    parser.add_argument("--sites", default="sites", help="the word for clients")
    parser.add_argument("--rows", default="rows", help="the word for test samples")
    args = parser.parse_args()
    overall, rows = read(args.comparison / "comparison.csv"), read(args.comparison / "by_client.csv")
    gain = next(name for name in rows[0] if name.startswith("gain over "))
    over = gain.removeprefix("gain ")
    found: dict[tuple[str, str], list[float]] = {}
    means = {f"mean of {args.sites}": f"{over} (by client)", f"all test {args.rows}": f"{over} (by sample)"}
    for row in overall:
        for title, column in means.items():
            if row[f"{column} mean"]:
                ends = [row[f"{column} {end}"] or row[f"{column} mean"] for end in ("mean", "low", "high")]
                found[row["method"], title] = [args.scale * float(end) for end in ends]
    for row in rows:
        if row[gain]:
            ends = [row[end] or row[gain] for end in (gain, "low", "high")]
            found[row["method"], row["client"]] = [args.scale * float(end) for end in ends]
    titles = [*means, *dict.fromkeys(row["client"] for row in rows)]
    # the best mean of sites on top
    methods = list(dict.fromkeys(method for method, _ in found))
    methods.sort(key=lambda method: found[method, titles[0]][0])
    figure = Figure(figsize=(2.3 + 1.75 * len(titles), 0.9 + 0.2 * len(methods)), layout="constrained")
    panels: Any = figure.subplots(1, len(titles), sharey=True)
    for title, axes in zip(titles, panels, strict=True):
        axes.axvline(0, color="black", linewidth=0.8)
        for place, method in enumerate(methods):
            if (method, title) not in found:
                continue
            mean, low, high = found[method, title]
            colour = COLOURS["gain" if low > 0 else "loss" if high < 0 else "neither"]
            axes.plot([low, high], [place, place], color=colour, linewidth=1.6)
            axes.plot(mean, place, "o", color=colour, markersize=4.5)
        axes.set_title(title, fontsize=10, fontweight="bold" if title in means else "normal")
        axes.grid(alpha=0.25)
        axes.set_yticks(range(len(methods)), [label(method) for method in methods], fontsize=9)
        axes.tick_params(axis="y", length=0)
    # each group of panels has a scale of its own: a site's intervals are wider
    for group in (panels[: len(means)], panels[len(means) :]):
        edges = [value for axes in group for value in axes.get_xlim()]
        for axes in group:
            axes.set_xlim(min(edges), max(edges))
    figure.supxlabel(f"{gain.replace('Local', 'training alone')}, {args.unit}", fontsize=10)
    figure.savefig(args.picture, dpi=150)


if __name__ == "__main__":
    main()
