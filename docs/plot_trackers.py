"""Draws what a run leaves for others to see: the panels of an offline run of W&B, and the page of a comparison.

python docs/plot_trackers.py wandb docs/wandb.png                          # makes a run, half a minute
python docs/plot_trackers.py report docs/report.png runs/hospitals         # the comparison's folder; needs Chromium
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# W&B has no public reader of its offline files; the tests have one
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from wandb_files import records

FIT = (
    "fit --config quickstart --trainer.logger WandbLogger --trainer.logger.project digits --trainer.logger.offline true"
)
CURVES = ("val/acc", "val/acc_worst", "train/loss", "bytes/up")
SHOWN = 12
"""Lines of the summary and of the configuration in the picture."""


def items(entries: Any) -> dict[str, Any]:
    """Return a record's entries, values out of JSON."""
    return {entry.key or "/".join(entry.nested_key): json.loads(entry.value_json) for entry in entries}


def offline_run(folder: Path) -> Path:
    """Make a run in a folder, and return its offline file."""
    settings = {f"WANDB_{name}_DIR": str(folder / name.lower()) for name in ("CACHE", "CONFIG", "DATA", "ARTIFACT")}
    words = [sys.executable, "-m", "pfl_lightning", *FIT.split(), "--trainer.logger.save_dir", str(folder)]
    subprocess.run(words, cwd=folder, env=os.environ | settings | {"WANDB_SILENT": "true"}, check=True)
    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    return path


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings by dotted names."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found


def listed(axes: Axes, title: str, values: dict[str, Any], names: list[str]) -> None:
    """Write some values below each other, and how many more there are."""
    axes.set_axis_off()
    axes.set_title(f"{title}: {len(values)} entries", fontsize=9, loc="left")
    for k, name in enumerate(names[:SHOWN]):
        value = values[name]
        text = f"{value:.4g}" if isinstance(value, float) else str(value)
        axes.text(0, 1 - (k + 1) / (SHOWN + 1), f"{name}  {text}"[:46], fontsize=7, family="monospace")


def draw(path: Path) -> Figure:
    """Return the panels of an offline run: curves, partition, table of clients, summary and configuration."""
    history: list[dict[str, Any]] = []
    summary: dict[str, Any] = {}
    config: dict[str, Any] = {}
    for record in records(path):
        if record.WhichOneof("record_type") == "history":
            history.append(items(record.history.item))
        config |= items(record.run.config.update) | items(record.config.update)
        summary |= items(record.summary.update)
    media = path.parent / "files" / "media"
    figure = Figure(figsize=(11, 8.2), layout="constrained")
    grid = figure.add_gridspec(3, 4, height_ratios=(1, 1.35, 1.3))
    for place, name in enumerate(CURVES):
        axes = figure.add_subplot(grid[0, place])
        rows = [row for row in history if name in row]
        axes.plot([row["round"] for row in rows], [row[name] for row in rows])
        axes.set_title(name, fontsize=9, loc="left")
        axes.set_xlabel("round", fontsize=8)
        axes.tick_params(labelsize=7)
        axes.grid(alpha=0.25)
    axes = figure.add_subplot(grid[1, :2])
    (picture,) = media.rglob("partition*.png")
    axes.imshow(plt.imread(picture))
    axes.set_axis_off()
    axes.set_title("partition (image)", fontsize=9, loc="left")
    table = json.loads(next(media.rglob("*.table.json")).read_text())
    axes = figure.add_subplot(grid[1, 2:])
    axes.set_axis_off()
    axes.set_title("clients (table)", fontsize=9, loc="left")
    cells = [[f"{cell:.4g}" if isinstance(cell, float) else cell for cell in row] for row in table["data"]]
    drawn = axes.table(cells, colLabels=table["columns"], edges="horizontal", bbox=(0, 0, 1, 0.97))
    for cell in drawn.get_celld().values():
        cell.set(linewidth=0.3)
    drawn.auto_set_font_size(False)
    drawn.set_fontsize(7.5)
    chosen = {
        name: value for name, value in flat(summary).items() if not name.startswith(("_", "partition", "clients"))
    }
    settings = {name: value for name, value in flat(config).items() if not name.startswith("_")}
    listed(
        figure.add_subplot(grid[2, :2]), "summary", chosen, sorted(chosen, key=lambda name: ("acc" not in name, name))
    )
    listed(figure.add_subplot(grid[2, 2:]), "config", settings, sorted(settings))
    return figure


def page(comparison: Path, picture: Path) -> None:
    """Take a picture of a comparison's page in Chromium."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        raise SystemExit("the picture of a page needs Chromium")
    words = ["--headless", "--no-sandbox", "--hide-scrollbars", "--window-size=1100,1330"]
    address = (comparison / "report.html").resolve().as_uri()
    subprocess.run([browser, *words, f"--screenshot={picture.resolve()}", address], check=True, capture_output=True)


def main() -> None:
    """Write one of the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("of", choices=["wandb", "report"])
    parser.add_argument("picture", type=Path)
    parser.add_argument("comparison", type=Path, nargs="?", help="folder of compare, for a report")
    args = parser.parse_args()
    if args.of == "report":
        page(args.comparison, args.picture)
        return
    with tempfile.TemporaryDirectory() as folder:
        draw(offline_run(Path(folder))).savefig(args.picture, dpi=110)


if __name__ == "__main__":
    main()
