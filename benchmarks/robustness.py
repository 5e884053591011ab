"""The accuracy that bad clients leave to benign ones: a grid of rule x attack x share x partition x seed.

    python benchmarks/robustness.py --jobs 2

Digits, 20 clients, FedAvg, 25 rounds of three local epochs. Each run is a `pfl-lightning fit` in a folder of its own;
the same command, stopped and started again, goes on from the checkpoints, and further values can be added to it. At the
end it makes a CSV file, tables and heat maps of all runs in the folder, by docs/plot_robustness.py.

Rules are set for as many bad clients as there are; where there are none, for the smallest other share of the command.
FLTrust takes a partition with -served in its name, where the server holds 6 % of all samples; BufferAttack takes one
with -normed, whose net has BatchNorm.
"""

import argparse
import contextlib
import logging
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.cli.argv import resolved
from pfl_lightning.cli.compare.runs import Run, reason
from pfl_lightning.cli.main import main as command
from pfl_lightning.runs.folder import held
from pfl_lightning.stopping import Stopped, end_with

PLOT = Path(__file__).parents[1] / "docs" / "plot_robustness.py"
CLIENTS = 20
UNLIKE, ALIKE = "--config protocols/digits_dir0.1 --data.partitioner.min_size 10", "--config protocols/digits_iid"
SAMPLES = "--data.central_test 0.2 --data.server_fraction 0.3"
# sequential, as the engine of small machines would put a process on each core for each of the jobs
NORMED = "--model.net CifarResNet --model.net.depth 8 --trainer.engine sequential"
PARTITIONS = {
    "alike": ALIKE,
    "unlike": UNLIKE,
    "alike-served": f"{ALIKE} {SAMPLES}",
    "unlike-served": f"{UNLIKE} {SAMPLES}",
    "alike-normed": ALIKE,
    "alike-served-normed": f"{ALIKE} {SAMPLES}",
}
RULES = {
    "mean": "--aggregator WeightedAverage",
    "median": "--aggregator.mean CoordinateMedian",
    "trimmed": "--aggregator.mean TrimmedMean --aggregator.mean.trim {f}",
    "geometric": "--aggregator.mean GeometricMedian",
    "Krum": "--aggregator.mean Krum --aggregator.mean.f {f}",
    "multi-Krum": "--aggregator.mean MultiKrum --aggregator.mean.f {f}",
    "Bulyan": "--aggregator.mean Bulyan --aggregator.mean.f {f}",
    "clipping": "--aggregator.mean CentredClipping",
    "bound": "--aggregator.mean NormBound",
    "mixing": "--aggregator.mean NearestNeighbourMixing --aggregator.mean.f {f} "
    "--aggregator.mean.mean TrimmedMean --aggregator.mean.mean.trim {f}",
    "bucketing": "--aggregator.mean Bucketing --aggregator.mean.mean CoordinateMedian",
    "FLTrust": "--aggregator.mean FLTrust --aggregator.mean.epochs 3 --aggregator.mean.optimizer SGD "
    "--aggregator.mean.optimizer.lr 0.05",
}
ATTACKS = ("SignFlip", "ALIE", "IPM", "MinMax", "MinSum", "AdaptiveAttack", "BufferAttack", "LabelFlip")


def grid(given: argparse.Namespace) -> list[Run]:
    """Return the runs of the command, seed by seed, so that a grid that is stopped has whole seeds.

    Args:
        given: the command's options.
    """
    fewest = min((percent for percent in given.percents if percent), default=20)
    runs = []
    for seed, partition, percent, attack, rule in product(
        given.seeds, given.partitions, given.percents, given.attacks, given.rules
    ):
        # nobody attacks: one run for all attacks, with one of nobody for the columns on benign clients
        if not percent and attack != given.attacks[0]:
            continue
        label = attack if percent else "nobody"
        net = f" {NORMED}" if partition.endswith("-normed") else ""
        words = (
            f"{PARTITIONS[partition]} --model FedAvg{net} --data.num_clients {CLIENTS} "
            f"{RULES[rule].format(f=round((percent or fewest) / 100 * CLIENTS))} "
            f"--trainer.callbacks+={attack if percent else 'LabelFlip'} --trainer.callbacks.fraction {percent / 100} "
            f"--trainer.max_rounds {given.rounds} --trainer.local_epochs 3 --trainer.test_every_round false "
            f"--trainer.accelerator cpu --seed_everything {seed} --data.seed {seed}"
        )
        folder = given.out / partition / rule / label / str(percent) / str(seed)
        runs.append(Run(f"{partition} {rule} {label} {percent} %", seed, folder, tuple(resolved(words.split()))))
    return runs


def make(runs: Sequence[Run], parent: int | None = None) -> None:
    """Make the runs that have not finished and that no other process is making, and print a line for each.

    Args:
        runs: the runs.
        parent: id of the process that started this one, which it ends with; None where nobody did.
    """
    if parent is not None:
        end_with(parent)
    with contextlib.ExitStack() as levels:
        for logger in map(logging.getLogger, ("lightning.fabric", "lightning.pytorch")):
            # whoever calls this goes on afterwards, with the lines that it had
            levels.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.WARNING)
        made_each(runs)


def made_each(runs: Sequence[Run]) -> None:
    """Make runs in turn.

    Args:
        runs: the runs.
    """
    # Lightning warns where a program's own arguments and explicit ones come together
    sys.argv = sys.argv[:1]
    for run in runs:
        if run.finished:
            continue
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(held(run.folder))
            except MisconfigurationException:
                continue
            code = 0
            output = stack.enter_context(run.output.open("w"))
            with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
                try:
                    command(run.command)
                except Stopped:
                    raise
                except SystemExit as ended:
                    code = int(ended.code or 0)
            output.flush()
            print(f"{run.method}, seed {run.seed}: {'done' if run.finished else reason(run, code)}", flush=True)


def main() -> int:
    """Make the grid, its tables and its picture; return 1 if a run failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/robustness"))
    parser.add_argument("--partitions", nargs="+", choices=list(PARTITIONS), default=["alike", "unlike"])
    parser.add_argument("--rules", nargs="+", choices=list(RULES), default=["mean", "median", "trimmed", "multi-Krum"])
    parser.add_argument("--attacks", nargs="+", choices=ATTACKS, default=list(ATTACKS[:6]))
    parser.add_argument("--percents", nargs="+", type=int, default=[0, 20], help="shares of bad clients")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="of the partition, the net and the run")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--commands", action="store_true", help="print the commands of the runs, and end")
    given = parser.parse_args()
    if given.jobs < 1 or not all(0 <= percent < 100 for percent in given.percents):
        parser.error(f"--jobs {given.jobs} must be 1 or more, and --percents {given.percents} from 0 to below 100.")
    runs = grid(given)
    if given.commands:
        print("\n".join(run.line for run in runs))
        return 0
    try:
        for run in runs:
            run.refuse_others()
    except MisconfigurationException as error:
        parser.error(str(error))
    for run in runs:
        run.claim()
    print(f"runs: {len(runs)}, of which {sum(run.finished is not None for run in runs)} were made earlier", flush=True)
    # several runs that took all cores each would wait for one another
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    spawn = multiprocessing.get_context("spawn")
    others = [spawn.Process(target=make, args=(runs, os.getpid())) for _ in range(given.jobs - 1)]
    for process in others:
        process.start()
    make(runs)
    for process in others:
        process.join()
    subprocess.run([sys.executable, PLOT, given.out / "robustness.png", given.out], check=True)
    return int(not all(run.finished for run in runs))


if __name__ == "__main__":
    sys.exit(main())
