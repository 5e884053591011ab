r"""Rounds a second, accuracy and the GPU's utilisation by engine, precision and number of clients, on real data.

    python benchmarks/gpu.py --config protocols/cifar10_dir0.1 --data.root DATA

Other options are those of `pfl-lightning fit`; FedAvg with the data configuration's network, by default the CNN of
cwFedAvg. Each run is a process of its own. A round's seconds are those of training and aggregation, the median without
the first two rounds; accuracy is of the last round, the mean and the sample standard deviation over seeds. Utilisation
is the mean of what nvidia-smi says once a second from the first round's end on, memory its maximum. On a CPU (with
--trainer.accelerator cpu) the script runs too, without these two.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch

from pfl_lightning.runs.run_status import read_rows

METHOD = Path(__file__).parent.parent / "configs" / "methods" / "fedavg.yaml"
QUERY = ["nvidia-smi", "--query-gpu=utilization.gpu,memory.used", "--format=csv,noheader,nounits", "--id=0"]


class Run(NamedTuple):
    """What one run gave."""

    seconds: float
    """Of a round."""
    accuracy: float
    """Of the last round, in per cent."""
    utilisation: float
    """Of the GPU, in per cent; NaN without one."""
    memory: float
    """The GPU's, in MiB; NaN without one."""


def watch(process: subprocess.Popen[bytes], folder: str) -> tuple[float, float]:
    """Utilisation of the GPU, and its memory, while a run makes its rounds."""
    samples: list[tuple[float, float]] = []
    while process.poll() is None:
        if shutil.which(QUERY[0]) and list(Path(folder).rglob("rounds.csv")):
            used, memory = subprocess.check_output(QUERY, text=True).split(",")
            samples.append((float(used), float(memory)))
        time.sleep(1)
    if not samples:
        return float("nan"), float("nan")
    used, memory = zip(*samples, strict=True)
    return statistics.fmean(used), max(memory)


def run(options: list[str]) -> Run:
    """Makes a run."""
    with tempfile.TemporaryDirectory() as folder:
        quiet = ["--trainer.enable_progress_bar", "false", "--trainer.enable_model_summary", "false"]
        command = [sys.executable, "-m", "pfl_lightning.cli.main", "fit", "--config", str(METHOD), *options, *quiet]
        with (Path(folder) / "output.txt").open("wb") as output:
            process = subprocess.Popen(
                [*command, "--trainer.default_root_dir", folder], stdout=output, stderr=subprocess.STDOUT
            )
            utilisation, memory = watch(process, folder)
        if process.returncode:
            sys.exit((Path(folder) / "output.txt").read_text())
        (record,) = Path(folder).rglob("rounds.csv")
        rows = read_rows(record)[2:]
        accuracy = json.loads((record.parent / "summary.json").read_text())["final"]["test/acc"]
    seconds = [float(row["time/train"]) + float(row["time/aggregate"]) for row in rows]
    return Run(statistics.median(seconds), 100 * accuracy, utilisation, memory)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", default=["sequential", "vectorised"])
    parser.add_argument("--clients", nargs="+", default=["20", "100"])
    parser.add_argument("--precisions", nargs="+", default=["32-true", "bf16-mixed"])
    parser.add_argument("--seeds", nargs="+", default=["0", "1"])
    parser.add_argument("--rounds", type=int, default=50, help="rounds of a run, at least 3")
    args, options = parser.parse_known_args()
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name() if torch.cuda.is_available() else 'no GPU'}")
    titles = ["clients", "precision", "engine", "rounds/s", "speed-up", "accuracy", "std", "utilisation %", "MiB"]
    print("".join(f"{title:>14}" for title in titles))
    for clients, precision in product(args.clients, args.precisions):
        first = None
        for engine in args.engines:
            own = ["--data.num_clients", clients, "--trainer.precision", precision, "--trainer.engine", engine]
            length = ["--trainer.max_rounds", str(max(args.rounds, 3))]
            runs = [run([*options, *own, *length, "--seed_everything", seed]) for seed in args.seeds]
            seconds = statistics.median(r.seconds for r in runs)
            first = first or seconds
            accuracies = [r.accuracy for r in runs]
            values = [
                1 / seconds,
                first / seconds,
                statistics.fmean(accuracies),
                statistics.stdev(accuracies) if len(runs) > 1 else float("nan"),
                statistics.fmean(r.utilisation for r in runs),
                max(r.memory for r in runs),
            ]
            print(
                "".join(f"{cell:>14}" for cell in (clients, precision, engine, *(f"{v:.2f}" for v in values))),
                flush=True,
            )


if __name__ == "__main__":
    main()
