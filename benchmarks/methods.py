r"""Seconds a round of methods, as ratios to the first one's.

    python benchmarks/methods.py --methods fedavg fedrema fedpac --config protocols/mnist_dominant_s0.2 \
        --data.root DATA [--turns 3] [--rounds 3]

Other options are those of `pfl-lightning fit`. All runs are in one process, one intra-op thread, and methods take turns
of a few rounds: what else the machine does hits all of them. The first round of a turn isn't counted. A round is
training and aggregation, what the server does; evaluation stands beside it, because how often to evaluate is not the
method's matter.
"""

import argparse
import contextlib
import io
import statistics
import tempfile
from pathlib import Path

import torch

from pfl_lightning.cli.main import main as command
from pfl_lightning.runs.run_status import read_rows

METHODS = Path(__file__).parent.parent / "configs" / "methods"


def turn(method: str, rounds: int, options: list[str]) -> list[tuple[float, ...]]:
    """Seconds of training with aggregation, of aggregation, and of evaluation, of each round but the first."""
    with tempfile.TemporaryDirectory() as folder:
        own = ["--config", str(METHODS / f"{method}.yaml"), *options, "--trainer.default_root_dir", folder]
        quiet = ["--trainer.enable_progress_bar", "false", "--trainer.enable_model_summary", "false"]
        with contextlib.redirect_stdout(io.StringIO()):
            command(["fit", *own, "--trainer.max_rounds", str(rounds), *quiet])
        (record,) = Path(folder).rglob("rounds.csv")
        rows = read_rows(record)[1:]
    parts = [[float(row[f"time/{part}"]) for part in ("train", "aggregate", "evaluate")] for row in rows]
    return [(train + aggregate, aggregate, evaluate) for train, aggregate, evaluate in parts]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", required=True, help="names of files in configs/methods")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3, help="rounds a turn, at least 2")
    args, options = parser.parse_known_args()
    torch.set_num_threads(1)
    seconds: dict[str, list[tuple[float, ...]]] = {method: [] for method in args.methods}
    for _ in range(args.turns):
        for method, times in seconds.items():
            times += turn(method, max(args.rounds, 2), options)
    medians = {
        method: [statistics.median(column) for column in zip(*times, strict=True)] for method, times in seconds.items()
    }
    first = medians[args.methods[0]]
    print(f"torch {torch.__version__}, one thread, medians of {len(seconds[args.methods[0]])} rounds")
    print(
        f"{'method':<20} {'round':>10} {'ratio':>6} {'the server':>11} {'evaluation':>12} {'ratio with evaluation':>22}"
    )
    for method, (round_, server, evaluation) in medians.items():
        ratios = round_ / first[0], (round_ + evaluation) / (first[0] + first[2])
        print(
            f"{method:<20} {round_:>8.3f} s {ratios[0]:>6.2f} {server:>9.3f} s {evaluation:>10.3f} s {ratios[1]:>22.2f}"
        )


if __name__ == "__main__":
    main()
