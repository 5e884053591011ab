"""Compare compressions of updates on digits: test accuracy, and bytes that clients send in a round.

    python benchmarks/compression.py --out runs/compression

FedAvg and FedPer, 20 clients by Dirichlet(0.1), 25 rounds of one local epoch, three seeds of partition, net and run. A
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
    --config protocols/digits_dir0.1 --data.num_clients 20 --data.partitioner.min_size 10 --trainer.max_rounds 25
    --trainer.engine vectorised --trainer.enable_progress_bar false --trainer.enable_model_summary false
    --trainer.enable_checkpointing false
"""
KINDS = {
    "whole weights": "",
    "EightBits": "--trainer.compression EightBits",
    "TopK, share 0.1": "--trainer.compression TopK --trainer.compression.share 0.1",
    "Sign": "--trainer.compression Sign",
    "TopK, share 0.01": "--trainer.compression TopK --trainer.compression.share 0.01",
}
METHODS = ("fedavg", "fedper")


def measured(folder: Path, method: str, kind: str, seed: int) -> tuple[float, float]:
    """Return the test accuracy of a run's last round, and the bytes sent up in that round.

    Args:
        folder: of the run, which is made where it is missing.
        method: name of its configuration.
        kind: one of `KINDS`.
        seed: of partition, net and run.
    """
    if not list(folder.glob("*/*/summary.json")):
        seeds = ["--seed_everything", str(seed), "--data.seed", str(seed)]
        settings = ["--config", f"methods/{method}", *SETTINGS.split(), *KINDS[kind].split(), *seeds]
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
    found = {
        (kind, method): [
            measured(own.out / f"{method}-{kind.replace(', share ', '-')}-{seed}", method, kind, seed)
            for seed in own.seeds
        ]
        for method in METHODS
        for kind in KINDS
    }
    lines = [["updates", *(f"{method}, KiB up" for method in METHODS), *METHODS]]
    for kind in KINDS:
        sent = [f"{fmean(size for _, size in found[kind, method]) / 1024:.1f}" for method in METHODS]
        accuracies = [[100 * accuracy for accuracy, _ in found[kind, method]] for method in METHODS]
        lines.append([kind, *sent, *(f"{fmean(each):.1f} ± {stdev(each):.1f}" for each in accuracies)])
    print(markdown_table(lines))


if __name__ == "__main__":
    main()
