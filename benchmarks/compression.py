"""Compare compressions of updates on digits: test accuracy, and bytes that clients send in a round.

    python benchmarks/compression.py --out runs/compression

FedAvg, 20 clients by Dirichlet(0.1), 25 rounds of one local epoch, three seeds of partition, net and run. A
run with a summary is not run again. Test accuracy is of the last round, mean and sample standard deviation.
"""

import argparse
import csv
import json
from pathlib import Path
from statistics import fmean, stdev

from pfl_lightning.cli.main import main as pfl_lightning
from pfl_lightning.runs.tables import markdown_table

SETTINGS = """
    --config methods/fedavg --config protocols/digits_dir0.1 --data.num_clients 20 --data.partitioner.min_size 10
    --trainer.max_rounds 25 --trainer.engine vectorised --trainer.enable_progress_bar false
    --trainer.enable_model_summary false --trainer.enable_checkpointing false
"""
KINDS = {
    "whole weights": "",
    "HalfPrecision": "--trainer.compression HalfPrecision",
    "EightBits": "--trainer.compression EightBits",
    "TopK, share 0.1": "--trainer.compression TopK --trainer.compression.share 0.1",
    "Sign": "--trainer.compression Sign",
    "TopK, share 0.01": "--trainer.compression TopK --trainer.compression.share 0.01",
}


def measured(folder: Path, kind: str, seed: int) -> tuple[float, float]:
    """Return the test accuracy of a run's last round, and the bytes sent up in that round.

    Args:
        folder: of the run, which is made where it is missing.
        kind: one of `KINDS`.
        seed: of partition, net and run.
    """
    if not list(folder.glob("*/*/summary.json")):
        seeds = ["--seed_everything", str(seed), "--data.seed", str(seed)]
        settings = [*SETTINGS.split(), *KINDS[kind].split(), *seeds]
        pfl_lightning(["fit", *settings, "--trainer.default_root_dir", str(folder)])
    (summary,) = folder.glob("*/*/summary.json")
    with (summary.parent / "rounds.csv").open(newline="") as file:
        *_, last = csv.DictReader(file)
    return json.loads(summary.read_text())["final"]["test/acc"], float(last["bytes/up"])


def main() -> None:
    """Run missing runs, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="two or more")
    own = parser.parse_args()
    lines = [["updates", "KiB up", "test accuracy"]]
    for kind in KINDS:
        name = kind.replace(", share ", "-")
        runs = [measured(own.out / f"fedavg-{name}-{seed}", kind, seed) for seed in own.seeds]
        accuracies = [100 * accuracy for accuracy, _ in runs]
        size = fmean(size for _, size in runs) / 1024
        lines.append([kind, f"{size:.1f}", f"{fmean(accuracies):.1f} ± {stdev(accuracies):.1f}"])
    print(markdown_table(lines))


if __name__ == "__main__":
    main()
