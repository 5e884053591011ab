"""What bad clients do to a federation, by rules in the place of the mean: the runs behind docs/robustness.md.

    python benchmarks/robustness.py

Digits, 20 clients, FedAvg, 25 rounds: five rules, three seeds of partition, net and run, and a sign flip of 0, 20 and
40 % of the clients, where clients are unlike (Dirichlet 0.1) and where they are alike. Rules are set for as many bad
clients as there are, and for 20 % where there are none. The mean, multi-Krum and FLTrust once more where the server has
samples of its own, 6 % of all. And three rounds of a net with BatchNorm, where one client of the 20 trains as all do
and sends running means of a million. A run that is there isn't made again. Prints the command of each run before it is
made; docs/plot_robustness.py makes the tables and the picture of them.
"""

import argparse
import sys
from pathlib import Path

from pfl_lightning.cli.main import main

CLIENTS = 20
UNLIKE, ALIKE = "protocols/digits_dir0.1 --data.partitioner.min_size 10", "protocols/digits_iid"
SAMPLES = "--data.central_test 0.2 --data.server_fraction 0.3"
PARTITIONS = {
    "unlike": UNLIKE,
    "alike": ALIKE,
    "unlike-served": f"{UNLIKE} {SAMPLES}",
    "alike-served": f"{ALIKE} {SAMPLES}",
    "alike-normed": ALIKE,
}
RULES = {
    "mean": "--aggregator WeightedAverage",
    "median": "--aggregator.mean CoordinateMedian",
    "trimmed": "--aggregator.mean TrimmedMean --aggregator.mean.trim {f}",
    "geometric": "--aggregator.mean GeometricMedian",
    "multi-Krum": "--aggregator.mean MultiKrum --aggregator.mean.f {f}",
    "clipping": "--aggregator.mean CentredClipping",
    "bound": "--aggregator.mean NormBound",
    "FLTrust": "--aggregator.mean FLTrust --aggregator.mean.epochs 3 --aggregator.mean.optimizer SGD "
    "--aggregator.mean.optimizer.lr 0.05",
}
WITHOUT_SAMPLES = ("mean", "median", "trimmed", "geometric", "multi-Krum")
WITH_SAMPLES = ("mean", "multi-Krum", "FLTrust")
NORMED = (*WITHOUT_SAMPLES, "clipping", "bound")
"""Which rules are compared where the server has no samples, where it has some, and where nets have BatchNorm."""
ATTACK = "--trainer.callbacks+=SignFlip --trainer.callbacks.fraction {fraction}"
BUFFERS = (
    "--model.net CifarResNet --model.net.depth 8 "
    "--trainer.callbacks+=BufferAttack --trainer.callbacks.fraction {fraction}"
)
QUIET = "--trainer.enable_progress_bar false --trainer.enable_model_summary false --trainer.accelerator cpu"


def command(partition: str, rule: str, percent: int, seed: int, rounds: int, folder: Path) -> str:
    """The words of a run, behind ``pfl-lightning``.

    Args:
        partition: of `PARTITIONS`.
        rule: of `RULES`.
        percent: how many clients are bad.
        seed: of the partition, the net and the run.
        rounds: how many.
        folder: where it is kept.
    """
    bad = round((percent or 20) / 100 * CLIENTS)
    return " ".join(
        [
            f"fit --config {PARTITIONS[partition]} --model FedAvg --data.num_clients {CLIENTS}",
            RULES[rule].format(f=bad),
            (BUFFERS if partition == "alike-normed" else ATTACK).format(fraction=percent / 100),
            f"--trainer.max_rounds {rounds} --trainer.local_epochs 3 --trainer.test_every_round false",
            f"--seed_everything {seed} --data.seed {seed} --trainer.default_root_dir {folder}",
        ]
    )


def run() -> None:
    """Makes the runs that aren't there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/robustness"))
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--percents", type=int, nargs="+", default=[0, 20, 40])
    parser.add_argument("--partitions", nargs="+", choices=list(PARTITIONS), default=list(PARTITIONS))
    parser.add_argument("--rules", nargs="+", choices=list(RULES), default=list(RULES))
    parser.add_argument("--commands", action="store_true", help="print the commands, and run nothing")
    args = parser.parse_args()
    # Lightning warns where a program's own arguments and explicit ones come together
    sys.argv = sys.argv[:1]
    for seed in args.seeds:
        for partition in args.partitions:
            normed = partition == "alike-normed"
            rules = NORMED if normed else WITH_SAMPLES if SAMPLES in PARTITIONS[partition] else WITHOUT_SAMPLES
            rounds = min(args.rounds, 3) if normed else args.rounds
            for percent in (0, 5) if normed else args.percents:
                for rule in rules:
                    if rule not in args.rules:
                        continue
                    folder = args.out / partition / rule / str(percent) / str(seed)
                    words = command(partition, rule, percent, seed, rounds, folder)
                    if args.commands or not list(folder.rglob("summary.json")):
                        print(f"pfl-lightning {words}", flush=True)
                    if not args.commands and not list(folder.rglob("summary.json")):
                        main(f"{words} {QUIET}".split())


if __name__ == "__main__":
    run()
