"""The command ``pfl-lightning compare``."""

import os
import sys
from argparse import Namespace
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import get_args

from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.cli.argv import CommandLine, resolved, settings_in
from pfl_lightning.cli.compare.choices import Choice, choose, stored_table
from pfl_lightning.cli.compare.report import titles, write
from pfl_lightning.cli.compare.results import Result
from pfl_lightning.cli.compare.runs import Run, files, new_starter, run_all
from pfl_lightning.cli.compare.significance import Population, reference_among
from pfl_lightning.cli.compare.starter import Starter
from pfl_lightning.cli.compare.tuning import Trial, at_edge, axes, best, missing, rows_of, trials
from pfl_lightning.cli.configs import FOLDER, nearest
from pfl_lightning.cli.load_config import complaint
from pfl_lightning.cli.refusals import refuse_at_sight
from pfl_lightning.cli.usage import Arguments, UsageError
from pfl_lightning.runs.folder import explained
from pfl_lightning.runs.report import Row, write_rows

DESCRIPTION = """\
Run several methods with several seeds on one data configuration, and write one table of their results. Each run is

    pfl-lightning fit --config METHOD OPTIONS --seed_everything SEED

in a process of its own. At each seed all methods have the same partition, cohorts and initial weights, and the table
says if they don't. Stopped at any moment, the same command continues; methods and seeds can be added to it.

The partition depends on data.seed alone, so all seeds share one partition, and the standard deviations in the table are
those of training. --vary_data gives each seed a partition of its own.
"""

EPILOG = """\
All other options go to the fit of every run:

    pfl-lightning compare --methods local fedavg fedprox+paper/fedprox_fedrema \\
        --config protocols/mnist_dir0.1 --seeds 0 1 2 --trainer.max_rounds 20 --data.root DATA --jobs 2

--trainer.logger WandbLogger logs all runs to one group of Weights & Biases, named like the folder.
"""

EDGE = "At the edge of the grid, so that a value beyond it may be better (try more values by --tune)"
"""Beginning of the note on settings whose best value is the smallest or the largest tried."""

REFUSED = {
    "--seed_everything": "give --seeds",
    "--ckpt_path": "a comparison goes on by itself where it stopped",
    "--trainer.default_root_dir": "give --out",
    "--model": "give --methods",
    "--print_config": "each run's folder has its config.yaml",
}
"""Options of ``fit`` that a comparison sets itself, each with advice."""


def main(args: list[str]) -> int:
    """Run ``pfl-lightning compare``.

    Args:
        args: the command's arguments.

    Returns:
        The exit code: 1 if a run failed.
    """
    given, passed = parse(args)
    methods = choose(given.methods, given.configs)
    reference = reference_among([method.label for method in methods], given.columns, given.reference)
    for method in methods:
        refuse_at_sight(CommandLine(["fit", *method.among(passed)]))
    if not given.collect:
        refuse_all(methods, passed)
    comparison = Comparison(given, passed)
    with explained(comparison.out), comparison:
        # trials finish before the first run, whose arguments depend on the best trial
        chosen = comparison.tune(methods) if given.tune else {method.label: Trial() for method in methods}
        methods = [method for method in methods if method.label in chosen]
        runs = [
            comparison.run(method, seed, comparison.out, chosen[method.label].arguments)
            # seed by seed: stopped half-way, a comparison has all methods at the first seeds
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
        if comparison.trials:
            write_rows(comparison.out / "tuning.csv", comparison.trials)
        if given.collect:
            print(f"runs that have finished: {sum(map(len, results.values()))} of {len(runs)}")
        shared = (given.seeds, tuning, given.paper, given.columns, reference, given.interval)
        print(write(comparison.out, results, failures, *shared))
    return 1 if failures else 0


def refuse_all(methods: Sequence[Choice], passed: Sequence[str]) -> None:
    """Refuse options of ``fit`` unknown to every method, before any run starts or has a folder.

    An option that fits some of the methods passes; the runs of the others fail with the reason.

    Args:
        methods: the methods.
        passed: options of ``fit`` common to all methods.

    Raises:
        UsageError: with the first method's sentence.
    """
    sentences = []
    for method in methods:
        # one method that takes all options is enough: the mistake isn't the option's
        wrong = complaint(method.among(passed))
        if wrong is None:
            return
        sentences.append(str(wrong))
    raise UsageError(sentences[0])


class Comparison(AbstractContextManager["Comparison"]):
    """The folder, environment and runs of a comparison; at its end the process that starts the runs ends too.

    Args:
        given: parsed options of ``compare``.
        passed: options of ``fit``.
    """

    def __init__(self, given: Namespace, passed: Sequence[str]) -> None:
        self.given, self.passed = given, passed
        self.notes: dict[str, list[str]] = {}
        self.trials: list[Row] = []
        name = name_of(passed) if given.table is None else Path(given.table).stem
        self.out: Path = given.out or Path("runs", f"compare-{name}")
        # an existing variable holds: users set it to collect several comparisons in one group
        self.environment = {"WANDB_RUN_GROUP": os.environ.get("WANDB_RUN_GROUP", self.out.name)}
        if given.jobs > 1:
            # several runs with a thread per core each would slow one another down
            self.environment["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
        self._starter: Starter | None = None

    def __exit__(self, *error: object) -> None:
        if self._starter:
            self._starter.close()
            self._starter = None

    def run(self, method: Choice, seed: int, folder: Path, more: Sequence[str]) -> Run:
        """Return a method's run with a seed.

        Args:
            method: the method.
            seed: the seed.
            folder: the folder of runs.
            more: further options of ``fit``.
        """
        if self.given.vary_data:
            data = ("--data.seed", str(seed))
        else:
            # intervals over samples need the scores of the test samples, which all seeds share
            data = ("--trainer.callbacks+=SampleScores", "--trainer.callbacks.optional=true")
        arguments = (*method.among(self.passed), *more, "--seed_everything", str(seed), *data)
        return Run(method.label, seed, folder / method.label / f"seed_{seed}", arguments)

    def make(self, runs: Sequence[Run], report: "Progress | None" = None) -> dict[Run, str]:
        """Make all unfinished runs, and return why some failed.

        With ``--commands`` the runs' commands are printed instead; with ``--collect`` nothing runs.

        Args:
            runs: the runs.
            report: prints each ended run; None prints a line about all of these runs first.

        Raises:
            MisconfigurationException: if a run's folder holds a run with other settings.
        """
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
        if report is None:
            found = f", {len(earlier)} of them made earlier" if earlier else ""
            print(f"runs: {len(runs)}{found}; each writes to output.txt in its folder under {self.out}", flush=True)
        if len(earlier) < len(runs):
            self.start()
        report = report or Progress(len(runs), earlier)
        return run_all(runs, self.given.jobs, self.environment, report, self._starter)

    def start(self) -> None:
        """Start the process that forks the runs, and wait for its imports."""
        # one for all calls, as the imports take seconds
        if self._starter is None:
            self._starter = new_starter(self.environment)
            if self._starter:
                self._starter.wait()

    def tune(self, methods: Sequence[Choice]) -> dict[str, Trial]:
        """Return each method's best trial, and add notes for the table.

        A method with only some of the settings is tuned by these; a method with none of them runs untuned.

        Args:
            methods: the methods.

        Raises:
            MisconfigurationException: if no method has a setting, or a value is invalid for its setting.
        """
        tried = axes(self.given.tune)
        lacking = missing({method.label: method.among(self.passed) for method in methods}, tried)
        rounds = self.given.tune_rounds
        short = () if rounds is None else ("--trainer.max_rounds", str(rounds))
        # every sample outside test validates once, so that a choice depends less on which few do
        numbers = range(self.given.tune_folds)
        folds = {f"fold_{k}": ("--data.val_fold", str(k)) for k in numbers} if len(numbers) > 1 else {"": ()}
        made: dict[str, list[tuple[Trial, list[Run]]]] = {}
        for method in methods:
            settings = {name: values for name, values in tried.items() if name not in lacking[method.label]}
            # one seed for all trials: the chosen value holds for every seed, at a fraction of the cost
            folder, seed = self.out / "tuning", self.given.seeds[0]
            made[method.label] = [
                (
                    trial,
                    [
                        self.run(method, seed, folder / trial.name / name, trial.arguments + short + fold)
                        for name, fold in folds.items()
                    ],
                )
                for trial in (trials(settings) if settings else [])
            ]
        grid = "; ".join(f"{name.rpartition('.')[2]} {', '.join(values)}" for name, values in tried.items())
        length = "" if rounds is None else f", for {rounds} rounds"
        length += f", on each of {len(numbers)} folds" if len(numbers) > 1 else ""
        self.note(f"Tried for each method at seed {self.given.seeds[0]}, one of the table's seeds{length}", grid)
        self.make(
            [
                replace(run, method=f"{run.method} {trial.name}")
                for each in made.values()
                for trial, runs in each
                for run in runs
            ]
        )
        chosen: dict[str, Trial] = {}
        for label, each in made.items():
            self.trials += rows_of(label, each)
            without = f"no {' and no '.join(lacking[label])}"
            if self.given.commands and not all(run.finished for _, runs in each for run in runs):
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
                for name, at in at_edge(chosen[label], tried):
                    said += f"; {name}={at} is at the edge of the grid"
                    self.note(EDGE, f"{label} {name}={at}")
            else:
                said = "no trial has a validation value, so it is left out"
                self.note("Left out, without a validation value in any trial", label)
            print(f"{label}: {said}", file=sys.stderr if self.given.commands else sys.stdout, flush=True)
        return chosen

    def note(self, what: str, method: str) -> None:
        """Add a method to a note for the table."""
        self.notes.setdefault(what, []).append(method)


class Progress:
    """Print one line for each ended run.

    Args:
        total: number of runs.
        earlier: runs that had finished before.
    """

    def __init__(self, total: int, earlier: Collection[Run]) -> None:
        self.total, self.earlier, self.done = total, earlier, 0

    def __call__(self, run: Run, failure: str) -> None:
        """Print a run's line."""
        self.done += 1
        if run.finished is None:
            said = f"failed: {failure}"
        else:
            result = Result(run, run.finished)
            monitor = result.monitor
            # clients' own test sets first; some data have a central one only
            names = (f"final/test/{monitor.metric}", f"final/test/global_{monitor.metric}")
            value = next((result.values[name] for name in names if name in result.values), None)
            of = "" if monitor.metric == "acc" or value is None else f"{monitor.metric} "
            said = f"{of}{monitor.written(value)} "
            said += f"after {result.summary['final']['round']} rounds, {result.values['seconds']:.1f} seconds"
            said += ", made earlier" if run in self.earlier else ""
        print(f"[{self.done}/{self.total}] {run.method}, seed {run.seed}: {said}", flush=True)


LARGEST_SEED = 2**32 - 1
"""Largest seed that NumPy takes, as `lightning.seed_everything` seeds it too."""


def parse(args: list[str]) -> tuple[Namespace, list[str]]:
    """Split the options of ``compare`` from the options of ``fit``.

    Args:
        args: the command's arguments.

    Raises:
        MisconfigurationException: if an option's value is invalid.
    """
    parser = Arguments(
        "compare",
        usage="%(prog)s --methods METHOD [METHOD ...] [--seeds SEED ...] [options] [options of fit]",
        description=DESCRIPTION,
        epilog=EPILOG,
    )
    # a table's words come first, so that options given by hand hold against the table's
    table = stored_table(args)
    parser.add_argument("--table", metavar="NAME", help="take methods, seeds and options from a file of configs/tables")
    parser.add_argument(
        "--methods",
        nargs="+",
        required=not table.words,
        metavar="METHOD",
        help="names of methods such as cwFedAvg, paths of files, or client modules such as my_methods.Mine; "
        "METHOD+FILE adds a file that overrides all other files",
    )
    parser.add_argument(
        "--seeds", nargs="+", type=int, default=[0], metavar="SEED", help="seeds of the runs (default: 0)"
    )
    parser.add_argument("--jobs", type=int, default=1, help="number of runs at a time (default: 1)")
    parser.add_argument("--out", type=Path, help="folder of the runs and tables (default: runs/compare-DATA or -TABLE)")
    parser.add_argument(
        "--configs",
        type=Path,
        default=FOLDER / "methods",
        help="folder of the methods' files (default: the package's)",
    )
    parser.add_argument("--vary_data", action="store_true", help="give each seed a partition of its own (data.seed)")
    parser.add_argument(
        "--tune",
        action="append",
        default=[],
        metavar="NAME=VALUE,VALUE",
        help="tune a setting for each method: try all values at the first seed and keep the best on validation, such "
        "as model.init_args.optimizer.init_args.lr=0.01,0.1; repeat the option for further settings",
    )
    parser.add_argument("--tune_rounds", type=int, metavar="N", help="rounds of a trial (default: as many as the runs)")
    parser.add_argument(
        "--tune_folds",
        type=int,
        default=1,
        metavar="K",
        help="make each trial K times, with another fold of the training samples to validate on, and take the mean "
        "(default: 1); K is at most 1 / data.val_fraction",
    )
    parser.add_argument(
        "--columns",
        type=titles,
        default=[],
        metavar="TITLE,TITLE",
        help='columns of the table, such as "last, mean of last five, ten best, std over clients, rank"',
    )
    parser.add_argument(
        "--reference",
        metavar="METHOD",
        help="the method that all others are compared with (default: Local, else FedAvg, else the first)",
    )
    parser.add_argument(
        "--interval",
        choices=get_args(Population),
        help="intervals of gains hold for other test samples of the same clients and other seeds, for other seeds on "
        "these test samples alone, or for other clients of their kind and seeds (default: samples where all seeds "
        "share the test samples, else seeds)",
    )
    parser.add_argument("--commands", action="store_true", help="print one command per run, and run nothing")
    parser.add_argument("--collect", action="store_true", help="run nothing, and write the table of all finished runs")
    # options unknown here are fit's, which has several hundred
    given, passed = parser.parse_known_args(resolved([*table.words, *args]))
    given.paper = table.paper
    given.seeds = list(dict.fromkeys(given.seeds))
    if wrong := [seed for seed in given.seeds if not 0 <= seed <= LARGEST_SEED]:
        raise MisconfigurationException(
            f"compare: --seeds {wrong[0]} must be seeds from 0 to {LARGEST_SEED}, such as --seeds 0 1 2."
        )
    if given.jobs < 1:
        raise MisconfigurationException(f"compare: --jobs {given.jobs} must be at least 1.")
    if given.tune_rounds is not None and (given.tune_rounds < 1 or not given.tune):
        raise MisconfigurationException(
            f"compare: --tune_rounds {given.tune_rounds} must be at least 1, and goes with --tune."
        )
    if given.tune_folds < 1 or (given.tune_folds > 1 and not given.tune):
        raise MisconfigurationException(
            f"compare: --tune_folds {given.tune_folds} must be at least 1, and goes with --tune."
        )
    check(passed, given.vary_data)
    return given, passed


def check(passed: Sequence[str], vary_data: bool) -> None:
    """Refuse options set by the comparison itself, no logger, and configurations missing or with a model.

    Args:
        passed: options of ``fit``.
        vary_data: if each seed has its own partition.

    Raises:
        MisconfigurationException: for the first such option.
    """
    # with --vary_data a run's data.seed is its seed
    refused = REFUSED | ({"--data.seed": "--vary_data sets it"} if vary_data else {})
    # options come as --name=value or as two words; the last word has none behind
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
        # a model in a data configuration replaces every method: the table would compare one method with itself
        settings = settings_in(str(path))
        model = settings.get("model") if isinstance(settings, dict) else None
        if isinstance(model, str) or (isinstance(model, dict) and "class_path" in model):
            raise MisconfigurationException(
                f"compare: --config {path} names a model, which would replace every method's; give a configuration "
                "of the data alone, or leave out class_path under model."
            )


def name_of(passed: Sequence[str]) -> str:
    """Return a name for the comparison's folder: the last configuration's, else the data's."""
    given = files(passed)
    data = [after for word, after in pairwise(passed) if word == "--data"]
    return given[-1].stem if given else data[-1] if data else "fit"
