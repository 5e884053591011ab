"""The command ``pfl-lightning compare``."""

import os
import sys
from argparse import Namespace, RawDescriptionHelpFormatter
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.cli.arguments import Arguments
from pfl_lightning.cli.compare.choices import Choice, choose
from pfl_lightning.cli.compare.report import titles, write
from pfl_lightning.cli.compare.results import Result
from pfl_lightning.cli.compare.runs import Run, files, run_all
from pfl_lightning.cli.compare.stored import stored_table
from pfl_lightning.cli.compare.tuning import Trial, axes, best, missing, trials
from pfl_lightning.cli.configs import FOLDER, nearest, resolved
from pfl_lightning.cli.exclusive import settings_in
from pfl_lightning.cli.reading import complaint
from pfl_lightning.cli.refusals import refuse_at_sight
from pfl_lightning.cli.usage import UsageError
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
    methods = choose(given.methods, given.configs)
    for method in methods:
        refuse_at_sight(["fit", *method.among(passed)])
    if not given.collect:
        refuse_all(methods, passed)
    comparison = Comparison(given, passed)
    with explained(comparison.out):
        chosen = comparison.tune(methods) if given.tune else {method.label: Trial() for method in methods}
        methods = [method for method in methods if method.label in chosen]
        runs = [
            comparison.run(method, seed, comparison.out, chosen[method.label].arguments)
            for seed in given.seeds
            for method in methods
        ]
        failures = comparison.make(runs)
        if given.commands:
            return 0
        results = {
            method.label: [Result(run, run.finished) for run in runs if run.method == method.label and run.finished]
            for method in methods
        }
        tuning = [f"{what}: {'; '.join(labels)}." for what, labels in comparison.notes.items()]
        if given.collect:
            print(f"runs that have finished: {sum(map(len, results.values()))} of {len(runs)}")
        print(write(comparison.out, results, failures, given.seeds, tuning, given.paper, given.columns))
    return 1 if failures else 0


def refuse_all(methods: Sequence[Choice], passed: Sequence[str]) -> None:
    """Refuse options of ``fit`` that it takes for no method, before any run is started or has a folder.

    Args:
        methods: the methods.
        passed: the options of ``fit`` that they have in common.

    Raises:
        UsageError: in the sentence of the first method.
    """
    found = []
    for method in methods:
        wrong = complaint(method.among(passed))
        if wrong is None:
            return
        found.append(str(wrong))
    raise UsageError(found[0])


class Comparison:
    """Where and how the runs of a comparison are made.

    Args:
        given: our own options.
        passed: those of ``fit``.
    """

    def __init__(self, given: Namespace, passed: Sequence[str]) -> None:
        self.given, self.passed = given, passed
        self.notes: dict[str, list[str]] = {}
        name = name_of(passed) if given.table is None else Path(given.table).stem
        self.out: Path = given.out or Path("runs", f"compare-{name}")
        self.environment = {"WANDB_RUN_GROUP": os.environ.get("WANDB_RUN_GROUP", self.out.name)}
        if given.jobs > 1:
            # several runs that take all cores each would wait for one another
            self.environment["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")

    def run(self, method: Choice, seed: int, folder: Path, more: Sequence[str]) -> Run:
        """A method's run with a seed.

        Args:
            method: the method.
            seed: the seed.
            folder: the folder of runs.
            more: further options of ``fit``.
        """
        data = ("--data.seed", str(seed)) if self.given.vary_data else ()
        arguments = (*method.among(self.passed), *more, "--seed_everything", str(seed), *data)
        return Run(method.label, seed, folder / method.label / f"seed_{seed}", arguments)

    def make(self, runs: Sequence[Run]) -> dict[Run, str]:
        """Makes runs, unless their commands are asked for or what has finished; returns why some failed."""
        for run in runs:
            run.refuse_others()
        for run in runs:
            run.claim()
        if self.given.commands:
            for run in runs:
                if not run.finished:
                    print(run.line)
        if self.given.commands or self.given.collect:
            return {}
        earlier = {run for run in runs if run.finished}
        found = f", {len(earlier)} of them made earlier" if earlier else ""
        print(f"runs: {len(runs)}{found}; what each says is in its folder's output.txt, under {self.out}", flush=True)
        return run_all(runs, self.given.jobs, self.environment, Progress(len(runs), earlier))

    def tune(self, methods: Sequence[Choice]) -> dict[str, Trial]:
        """Return the best trial of each method that has one, and add notes for the table.

        A method that lacks a setting is tuned by the others, and runs untuned if it lacks all.

        Args:
            methods: the methods.

        Raises:
            MisconfigurationException: if no method has a setting, or a value is none of its setting.
        """
        tried = axes(self.given.tune)
        lacking = missing({method.label: method.among(self.passed) for method in methods}, tried)
        rounds = self.given.tune_rounds
        short = () if rounds is None else ("--trainer.max_rounds", str(rounds))
        made: dict[str, list[tuple[Trial, Run]]] = {}
        for method in methods:
            own = {name: values for name, values in tried.items() if name not in lacking[method.label]}
            folder, seed = self.out / "tuning", self.given.seeds[0]
            made[method.label] = [
                (trial, self.run(method, seed, folder / trial.name, trial.arguments + short))
                for trial in (trials(own) if own else [])
            ]
        self.make([replace(run, method=f"{run.method} {trial.name}") for each in made.values() for trial, run in each])
        chosen: dict[str, Trial] = {}
        for label, each in made.items():
            without = f"no {' and no '.join(lacking[label])}"
            if self.given.commands and not all(run.finished for _, run in each):
                said = "its runs' commands can be told once all of its trials are made"
            elif not each:
                chosen[label], said = Trial(), f"it has {without}, and runs untuned"
                self.note(f"Untuned, with {without}", label)
            elif found := best(each):
                chosen[label], value, valued = found
                said = f"{chosen[label].name}, best validation {value:.4g} of {len(each)} trials"
                self.note("Chosen on validation", f"{label} {chosen[label].name}")
                if valued < len(each):
                    said += f", {len(each) - valued} of them without one"
                    self.note("Trials without a validation value", f"{label} {len(each) - valued} of {len(each)}")
                if lacking[label]:
                    said += f"; it has {without}"
                    self.note(f"Tuned in part, with {without}", label)
            else:
                said = "no trial has a validation value, so it is left out"
                self.note("Left out, without a validation value in any trial", label)
            print(f"{label}: {said}", file=sys.stderr if self.given.commands else sys.stdout, flush=True)
        return chosen

    def note(self, what: str, method: str) -> None:
        """Note for the table what holds for a method."""
        self.notes.setdefault(what, []).append(method)


class Progress:
    """Prints a line for each run that ends.

    Args:
        total: number of runs.
        earlier: those that had ended before.
    """

    def __init__(self, total: int, earlier: Collection[Run]) -> None:
        self.total, self.earlier, self.done = total, earlier, 0

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
            said += ", made earlier" if run in self.earlier else ""
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
    table = stored_table(args)
    parser.add_argument("--table", metavar="NAME", help="a table of configs/tables: its methods, seeds and options")
    parser.add_argument(
        "--methods",
        nargs="+",
        required=not table.words,
        metavar="METHOD",
        help="names of methods such as cwFedAvg, paths of files, or client modules such as my_methods.Mine; "
        "METHOD+FILE adds a file whose settings win over those of all other files",
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], metavar="SEED", help="by default 0")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, by default 1")
    parser.add_argument(
        "--out", type=Path, help="folder of the runs and tables, by default runs/compare-DATA, or -TABLE"
    )
    parser.add_argument(
        "--configs",
        type=Path,
        default=FOLDER / "methods",
        help="folder of the methods' files: the package's",
    )
    parser.add_argument("--vary_data", action="store_true", help="give each seed a partition of its own (data.seed)")
    parser.add_argument(
        "--tune",
        action="append",
        default=[],
        metavar="NAME=VALUE,VALUE",
        help="a setting that each method gets for itself: the value that is best on validation at the first seed, such "
        "as model.init_args.optimizer.init_args.lr=0.01,0.1; may be given often",
    )
    parser.add_argument("--tune_rounds", type=int, metavar="N", help="rounds of a trial, by default those of the runs")
    parser.add_argument(
        "--columns",
        type=titles,
        default=[],
        metavar="TITLE,TITLE",
        help='columns of the table, such as "last, mean of last five, ten best, std over clients, rank"',
    )
    parser.add_argument("--commands", action="store_true", help="print the commands of the runs, one a line, and end")
    parser.add_argument("--collect", action="store_true", help="start nothing, and make the table of what has finished")
    given, passed = parser.parse_known_args(resolved([*table.words, *args]))
    given.paper = table.paper
    given.seeds = list(dict.fromkeys(given.seeds))
    if given.jobs < 1:
        raise MisconfigurationException(f"compare: --jobs {given.jobs} must be at least 1.")
    if given.tune_rounds is not None and (given.tune_rounds < 1 or not given.tune):
        raise MisconfigurationException(
            f"compare: --tune_rounds {given.tune_rounds} must be at least 1, and goes with --tune."
        )
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
        if not os.path.isfile(path):
            raise MisconfigurationException(f"compare: --config {path} is no file{nearest(str(path))}")
        settings = settings_in(str(path))
        model = settings.get("model") if isinstance(settings, dict) else None
        if isinstance(model, str) or (isinstance(model, dict) and "class_path" in model):
            raise MisconfigurationException(
                f"compare: --config {path} names a model, which would stand in every method's place; give one of the "
                "data alone, or without class_path under model."
            )


def name_of(passed: Sequence[str]) -> str:
    """A name for a comparison: that of its data."""
    given = files(passed)
    data = [after for word, after in pairwise(passed) if word == "--data"]
    return given[-1].stem if given else data[-1] if data else "fit"
