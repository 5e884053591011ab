"""Attack membership by likelihood ratios (LiRA) over several runs with different training samples.

    python benchmarks/lira.py --runs 16 --out runs/lira --config methods/fedavg --config protocols/digits_dir0.1

Everything but ``--runs`` and ``--out`` is as for ``pfl-lightning fit``. Each run divides the data by a seed of its own,
and half of each client's samples are test samples, so that a sample is trained on in about half of the runs. Each run
is attacked with all others as its shadows (Carlini et al., 2022, https://arxiv.org/abs/2112.03570), and by a threshold
on confidences, which needs no shadows. A run with its confidences is not run again.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pfl_lightning.callbacks.membership_audit import likelihood_ratios, told_apart
from pfl_lightning.cli.main import main as pfl_lightning
from pfl_lightning.runs.tables import markdown_table

FILE = "confidences.csv"
MEASURES = {"auc": "AUC", "tpr_at_1": "TPR at 1 % FPR", "tpr_at_01": "TPR at 0.1 % FPR"}


def collected(files: Sequence[Path], model: str) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return confidences ``[runs, samples]``, NaN for samples without one, and memberships ``[runs, samples]``.

    Args:
        files: written by `MembershipAudit`, one a run.
        model: column of the files: ``model`` or ``upload``.
    """
    tables: list[Any] = [np.genfromtxt(file, delimiter=",", names=True, dtype=np.float64) for file in files]
    size = 1 + int(max(table["sample"].max() for table in tables))
    confidences: NDArray[np.float64] = np.full((len(files), size), np.nan)
    members: NDArray[np.bool_] = np.zeros((len(files), size), dtype=bool)
    for run, table in enumerate(tables):
        rows = table["sample"].astype(np.int64)
        confidences[run, rows], members[run, rows] = table[model], table["member"] == 1
    return confidences, members


def attacks(confidences: NDArray[np.float64], members: NDArray[np.bool_]) -> dict[str, list[dict[str, float]]]:
    """Return how well members are told, by attack and run.

    Args:
        confidences: ``[runs, samples]``.
        members: ``[runs, samples]``.
    """
    found: dict[str, list[dict[str, float]]] = {"threshold": [], "LiRA": []}
    for run in range(len(confidences)):
        ratios = likelihood_ratios(confidences, members, run)
        # the same samples for both, as no shadow knows some of them
        known = ~np.isnan(ratios)
        inside, outside = known & members[run], known & ~members[run]
        found["LiRA"].append(told_apart(-ratios[inside], -ratios[outside]))
        found["threshold"].append(told_apart(-confidences[run, inside], -confidences[run, outside]))
    return found


def main() -> None:
    """Run missing runs, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=16, help="how many, at least 3")
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    own, settings = parser.parse_known_args()
    if own.runs < 3:
        parser.error(f"--runs={own.runs} must be 3 or more: each needs shadows")
    for seed in range(own.runs):
        folder = own.out / str(seed)
        if not list(folder.glob(f"*/*/{FILE}")):
            audit = ["--trainer.callbacks+=MembershipAudit", "--trainer.callbacks.scores", FILE]
            seeds = ["--seed_everything", str(seed), "--data.seed", str(seed), "--data.test_fraction", "0.5"]
            pfl_lightning(["fit", *settings, *seeds, *audit, "--trainer.default_root_dir", str(folder)])
    files = [next((own.out / str(seed)).glob(f"*/*/{FILE}")) for seed in range(own.runs)]
    lines = [["attack", *MEASURES.values()]]
    columns = files[0].read_text().splitlines()[0].split(",")
    for model in ("model", "upload"):
        if model in columns:
            for name, runs in attacks(*collected(files, model)).items():
                values = [[run[measure] for run in runs] for measure in MEASURES]
                lines.append([f"{name}, {model}", *(f"{fmean(each):.3f} ± {stdev(each):.3f}" for each in values)])
    print(markdown_table(lines))


if __name__ == "__main__":
    main()
