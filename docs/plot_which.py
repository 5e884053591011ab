"""Draws what one model, a fine-tuned one and the best personal ones gain in all tables, against what clients are like.

Gains are by sample: each test sample counts alike. The axis of gains is linear up to 5 points, and logarithmic beyond.

python docs/plot_which.py docs/which.png --root DATA
"""

import argparse
import shlex
from pathlib import Path
from statistics import median
from typing import Any

from ledger import ledger
from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter

from pfl_lightning.cli.advise.look import look_at
from pfl_lightning.cli.compare.choices import choose, stored_table
from pfl_lightning.cli.configs import FOLDER
from pfl_lightning.cli.load_config import configured

SERIES = {"one model (FedAvg)": "C3", "one model, fine-tuned": "C1", "best personal models": "C0"}
PANELS = (
    "labels: share of variance between clients",
    "training samples a client (median)",
    "clients",
)


def options(line: str, root: str) -> list[str]:
    """The data's options of a line, with those of its table, if it names one."""
    words = shlex.split(line.replace("DATA", root))
    if words[0] == "--table":
        table = stored_table(words[:2]).words
        words = [*table[table.index("--config") :], *words[2:]]
    return words


def clients(line: str, root: str) -> tuple[float, float, int]:
    """The share of the labels' variance between clients, the median of training samples, and the number of clients."""
    (local,) = choose(["local"], FOLDER / "methods")
    data = configured(list(local.among(options(line, root)))).datamodule
    data.setup("fit")
    look = look_at(data)
    return look.labels or 0.0, median(look.train), len(look.clients)


def gains(accuracy: dict[str, float]) -> dict[str, float]:
    """The gain over Local by series, in points."""
    personal = [value for name, value in accuracy.items() if name != "Local" and "FedAvg" != name[:6]]
    found = {"one model (FedAvg)": accuracy["FedAvg"], "best personal models": max(personal)}
    if "FedAvg, fine-tuned" in accuracy:
        found["one model, fine-tuned"] = accuracy["FedAvg, fine-tuned"]
    return {series: value - accuracy["Local"] for series, value in found.items()}


def draw(points: list[tuple[tuple[float, float, int], dict[str, float]]], path: Path) -> None:
    """Draws a panel for each number that tells what clients are like."""
    figure = Figure(figsize=(11, 4), layout="constrained")
    panels: Any = figure.subplots(1, 3, sharey=True)
    for at, (title, axes) in enumerate(zip(PANELS, panels, strict=True)):
        axes.axhline(0, color="black", linewidth=0.8)
        for number, (series, colour) in enumerate(SERIES.items()):
            here = [(like[at], gain[series]) for like, gain in points if series in gain]
            # side by side where clients are alike in this number
            shift = (number - 1) * 0.006 if at == 0 else 1 + (number - 1) * 0.03
            xs = [x + shift if at == 0 else x * shift for x, _ in here]
            axes.plot(xs, [y for _, y in here], "os^"[number], color=colour, alpha=0.75, label=series)
        axes.set(xlabel=title)
        axes.set_yscale("symlog", linthresh=5)
        axes.set_yticks([-40, -20, -10, -5, 0, 5, 10, 20], ["-40", "-20", "-10", "-5", "0", "5", "10", "20"])
        if at:
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter(ScalarFormatter())
            axes.minorticks_off()
            axes.set_xticks([25, 50, 100, 200, 400] if at == 1 else [4, 10, 20, 50, 100])
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("gain over training alone by sample, points\n(logarithmic beyond 5)")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False)
    figure.savefig(path, dpi=130)


def main() -> None:
    """Looks at the clients of each table and writes the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--root", default="data", help="folder of the data sets (default: data)")
    given = parser.parse_args()
    points = []
    for row in ledger()["which"]:
        like, gain = clients(row["data"], given.root), gains(row["accuracy"])
        points.append((like, gain))
        told = ", ".join(f"{series} {value:+.1f}" for series, value in gain.items())
        print(f"{row['name']}: labels {like[0]:.2f}, {like[1]:g} samples, {like[2]} clients; {told}", flush=True)
    draw(points, given.picture)


if __name__ == "__main__":
    main()
