"""The command ``pfl-lightning compare``."""

import os
from argparse import Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import yaml
from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.cli.arguments import Arguments
from pfl_lightning.cli.compare.choices import choose
from pfl_lightning.cli.compare.report import write
from pfl_lightning.cli.compare.results import Result
from pfl_lightning.cli.compare.runs import Run, files, run_all
from pfl_lightning.cli.configs import FOLDER, nearest, resolved
from pfl_lightning.runs.folder import explained

DESCRIPTION = """\
Runs several methods with several seeds on one data configuration, and makes one table of them. Each run is

    pfl-lightning fit --config METHOD OPTIONS --seed_everything SEED

in a process of its own. At a seed all methods have the same partition, the same cohorts and the same initial weights,
and it is checked that they do. Stopped at any moment, the same command goes on where it stopped; new methods and seeds
can be added to it.

The partition depends on data.seed alone, so it is the same for all seeds too: the spread in the table is that of
training on it. --vary_data gives each seed a partition of its own.
"""

EPILOG = """\
All other options are those of fit, and are given to every run:

    pfl-lightning compare --methods local fedavg fedprox+paper/fedprox_fedrema \\
        --config protocols/mnist_dir0.1 --seeds 0 1 2 --trainer.max_rounds 20 --data.root DATA --jobs 2

--trainer.logger WandbLogger logs all runs to one group of Weights & Biases, which has the name of the folder.
"""

REFUSED = {
    "--seed_everything": "give --seeds",
    "--ckpt_path": "a comparison goes on by itself where it stopped",
    "--trainer.default_root_dir": "give --out",
    "--model": "give --methods",
    "--print_config": "each run's folder has its config.yaml",
}
"""Options of ``fit`` that a comparison sets itself."""


def main(args: list[str]) -> int:
    """Runs ``pfl-lightning compare``.

    Args:
        args: the command's arguments.

    Returns:
        The exit code: 1 if a run failed.
    """
    given, passed = parse(args)
    out: Path = given.out or Path("runs", f"compare-{name_of(passed)}")
    methods = choose(given.methods, given.configs)
    runs = [
        Run(
            method.label,
            seed,
            out / method.label / f"seed_{seed}",
            (
                *method.among(passed),
                *("--seed_everything", str(seed)),
                *(("--data.seed", str(seed)) if given.vary_data else ()),
            ),
        )
        for seed in given.seeds
        for method in methods
    ]
    environment = {"WANDB_RUN_GROUP": os.environ.get("WANDB_RUN_GROUP", out.name)}
    if given.jobs > 1:
        # several runs that take all cores each would wait for one another
        environment["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
    with explained(out):
        for run in runs:
            run.claim()
        print(f"runs: {len(runs)}; what each says is in {out}/METHOD/seed_SEED/output.txt", flush=True)
        failures = run_all(runs, given.jobs, environment, Progress(len(runs)))
        results = {
            method.label: [Result(run, run.finished) for run in runs if run.method == method.label and run.finished]
            for method in methods
        }
        print(write(out, results, failures, given.seeds))
    return 1 if failures else 0


class Progress:
    """Prints a line for each run that ends.

    Args:
        total: number of runs.
    """

    def __init__(self, total: int) -> None:
        self.total, self.done = total, 0

    def __call__(self, run: Run, failure: str) -> None:
        """Prints a run's line."""
        self.done += 1
        if run.finished is None:
            said = f"failed: {failure}"
        else:
            result = Result(run, run.finished)
            monitor = result.monitor
            names = (f"final/test/{monitor.metric}", f"final/test/global_{monitor.metric}")
            value = next((result.values[name] for name in names if name in result.values), None)
            of = "" if monitor.metric == "acc" or value is None else f"{monitor.metric} "
            said = f"{of}{monitor.written(value)} "
            said += f"after {result.summary['final']['round']} rounds, {result.values['seconds']:.1f} seconds"
        print(f"[{self.done}/{self.total}] {run.method}, seed {run.seed}: {said}", flush=True)


def parse(args: list[str]) -> tuple[Namespace, list[str]]:
    """Our own options, and those of ``fit``.

    Raises:
        MisconfigurationException: if one can't be used.
    """
    parser = Arguments(
        "compare",
        usage="%(prog)s --methods METHOD [METHOD ...] [--seeds SEED ...] [options] [options of fit]",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--methods",
        nargs="+",
        required=True,
        metavar="METHOD",
        help="names of methods such as cwFedAvg, paths of files, or client modules such as my_methods.Mine; "
        "METHOD+FILE adds a file whose settings win over those of all other files",
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], metavar="SEED", help="by default 0")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, by default 1")
    parser.add_argument("--out", type=Path, help="folder of the runs and tables, by default runs/compare-DATA")
    parser.add_argument(
        "--configs",
        type=Path,
        default=FOLDER / "methods",
        help="folder of the methods' files: the package's",
    )
    parser.add_argument("--vary_data", action="store_true", help="give each seed a partition of its own (data.seed)")
    given, passed = parser.parse_known_args(resolved(args))
    given.seeds = list(dict.fromkeys(given.seeds))
    if given.jobs < 1:
        raise MisconfigurationException(f"compare: --jobs {given.jobs} must be at least 1.")
    check(passed, given.vary_data)
    return given, passed


def check(passed: Sequence[str], vary_data: bool) -> None:
    """Refuses options of ``fit`` that a comparison sets itself, and files that aren't there."""
    refused = REFUSED | ({"--data.seed": "--vary_data sets it"} if vary_data else {})
    for word, after in pairwise([*passed, ""]):
        name, _, value = word.partition("=")
        if name in refused:
            raise MisconfigurationException(f"compare: {name} can't be given here: {refused[name]}.")
        if name == "--trainer.logger" and (value or after).lower() in ("false", "true", "null", "none", "[]"):
            raise MisconfigurationException(
                f"compare: --trainer.logger {value or after} is no logger; leave it out, and each run has its record."
            )
    for path in files(passed):
        if not path.is_file():
            raise MisconfigurationException(f"compare: --config {path} is no file{nearest(str(path))}")
        settings = yaml.safe_load(path.read_text())
        if isinstance(settings, dict) and "class_path" in (settings.get("model") or {}):
            raise MisconfigurationException(
                f"compare: --config {path} names a model, which would stand in every method's place; give one of the "
                "data alone, or without class_path under model."
            )


def name_of(passed: Sequence[str]) -> str:
    """A name for a comparison: that of its data."""
    given = files(passed)
    data = [after for word, after in pairwise(passed) if word == "--data"]
    return given[-1].stem if given else data[-1] if data else "fit"
