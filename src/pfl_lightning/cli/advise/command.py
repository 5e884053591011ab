"""The command ``pfl-lightning advise``: a tournament of a few methods within a budget, and its page."""

import json
import math
import re
import shlex
import time
from argparse import ArgumentTypeError, Namespace
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NamedTuple

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from pfl_lightning.cli.advise.look import Look, look_at, suggested
from pfl_lightning.cli.advise.page import Advice
from pfl_lightning.cli.argv import CommandLine, resolved
from pfl_lightning.cli.compare import command as compare
from pfl_lightning.cli.compare.choices import Choice, choose
from pfl_lightning.cli.compare.report import monitor_of, write
from pfl_lightning.cli.compare.results import Result
from pfl_lightning.cli.compare.runs import Run
from pfl_lightning.cli.compare.significance import reference_among
from pfl_lightning.cli.compare.tuning import Trial, at_edge, rows_of, validation_of
from pfl_lightning.cli.configs import FOLDER
from pfl_lightning.cli.load_config import complaint, configured
from pfl_lightning.cli.refusals import refuse_at_sight
from pfl_lightning.cli.usage import Arguments
from pfl_lightning.runs.folder import explained
from pfl_lightning.runs.report import write_json, write_rows
from pfl_lightning.runs.tables import duration, labelled

DESCRIPTION = """\
Advise which method suits which client. The clients' data are looked at; a few methods run with several seeds, as many
as fit the budget; validation rows choose; a page tells, site by site, what gains over training alone, and what the
data can't tell.
"""

EPILOG = """\
All other options go to the fit of every run:

    pfl-lightning advise --config protocols/flamby_heart --data.root DATA --budget 10m

Stopped at any moment, or with a larger budget, the same command goes on from its finished runs.
"""

RATE = "model.init_args.optimizer.init_args.lr"
"""The setting that is tuned for each method."""

FACTORS = (1.0, 5.0, 0.2, 25.0)
"""Learning rates that are tried, as multiples of the configured one, those first that a small budget has."""

STEP = 5.0
"""Factor from a method's best rate to the next one, if the best is the smallest or the largest tried."""

BEYOND = 2
"""Largest number of such further rates of a method."""

PROBE = 2
"""Rounds of the first runs, by which time is measured."""

SEED = 0
"""Seed of the probes and of the trials of learning rates; the table's seeds begin behind it."""

AGAIN = (10_000, 10_001)
"""Further seeds of the trials, where the budget holds them."""

PLANS = ((1.0, 4), (1.0, 3), (0.5, 3), (0.5, 1), (0.25, 1))
"""Plans, the best first: share of the configured rounds, and number of learning rates."""

FOLDS = 5
"""Number of folds of the training rows, each of which validates at one seed, and of seeds where there are no folds."""


@dataclass(frozen=True)
class Budget:
    """A limit for all runs together.

    Args:
        amount: seconds, or rounds.
        unit: what is counted.
    """

    amount: float
    unit: Literal["seconds", "rounds"]

    def __str__(self) -> str:
        return self.words(self.amount)

    def words(self, amount: float) -> str:
        """Return an amount in words.

        >>> Budget(600, "seconds").words(75), Budget(600, "rounds").words(75)
        ('1 min 15 s', '75 rounds')

        Args:
            amount: seconds, or rounds.
        """
        return duration(amount) if self.unit == "seconds" else f"{amount:.0f} rounds"


def budget(text: str) -> Budget:
    """Return the budget of ``--budget``.

    >>> budget("10m"), budget("300r")
    (Budget(amount=600.0, unit='seconds'), Budget(amount=300.0, unit='rounds'))

    Args:
        text: a number with ``s``, ``m``, ``h`` or ``r`` (rounds) behind it.

    Raises:
        ArgumentTypeError: if the text is no such number, or is 0.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhr])", text.strip())
    if found is None or float(found[1]) == 0:
        raise ArgumentTypeError(f"{text!r} is no budget; give minutes such as 10m, 90s, 2h, or rounds such as 300r")
    if found[2] == "r":
        return Budget(float(found[1]), "rounds")
    return Budget(float(found[1]) * {"s": 1, "m": 60, "h": 3600}[found[2]], "seconds")


def main(args: list[str]) -> int:
    """Run ``pfl-lightning advise``.

    Args:
        args: the command's arguments.

    Returns:
        The exit code: 1 if a run failed.
    """
    start = time.perf_counter()
    given, passed = parse(args)
    compare.check(passed, vary_data=False)
    refuse_at_sight(CommandLine(["fit", *passed]))
    seen = see(passed)
    folds, notes = 1, []
    if seen.has_folds:
        passed += ["--data.val_fraction", str(1 / FOLDS)]
        folds, seen = FOLDS, see([*passed, "--data.val_fold", "0"])
        notes.append(f"Each seed trains without another one of {FOLDS} folds of the training rows, which validates.")
    elif not any(seen.look.val):
        raise MisconfigurationException(
            "advise: no row validates, and these data have no folds; give data.val_fraction."
        )
    passed += ["--trainer.callbacks+=RoundLogger", "--trainer.callbacks.client_rounds", "true"]
    print(f"{labelled(seen.look.lines)}\n", flush=True)
    words = given.methods or list(seen.methods)
    methods = choose(words, FOLDER / "methods")
    reasons = {
        method.label: seen.methods.get(word, "named by --methods") for method, word in zip(methods, words, strict=True)
    }
    reference = reference_among(list(reasons)) or methods[0].label
    out = given.out or Path("runs", f"advise-{compare.name_of(passed)}")
    options = Namespace(table=None, out=out, jobs=given.jobs, vary_data=False, commands=False, collect=False)
    comparison = compare.Comparison(options, passed)
    tournament = Tournament(comparison, methods, given.budget, seen.rounds, seen.rate, start, given.rates, folds)
    with explained(out), comparison:
        tournament.play(given.seeds, reference)
        results = tournament.results
        notes += tournament.notes
        seeds = sorted({result.run.seed for each in results.values() for result in each})
        # the whole tables and curves, for whoever wants more than the page
        write(out, results, tournament.failures, seeds, notes, {}, (), reference)
        write_rows(out / "tuning.csv", tournament.trials)

        def again(count: int) -> str:
            # twice what all seeds cost by the runs so far, so that the budget isn't what stops them
            minutes = 60 if given.budget.unit == "seconds" else 1
            limit = f"{math.ceil(2 * tournament.seed_cost * count / minutes) + 1}{'m' if minutes > 1 else 'r'}"
            return shlex.join(["pfl-lightning", "advise", *given.again, "--seeds", str(count), "--budget", limit])

        advice = Advice(
            title=f"Advice for {out.name.removeprefix('advise-')}",
            look=seen.look,
            folds=folds,
            reasons={label: why for label, why in reasons.items() if label in results},
            notes=notes,
            results=results,
            reference=reference,
            monitor=monitor_of(results),
            at_once=monitor_of(results).metric in seen.no_means,
            cost=lambda seeds: given.budget.words(seeds * tournament.seed_cost),
            again=again,
        )
        print(f"\n{advice.write(out)}\n\nadvice.md, advice.html, the tables of compare and all runs: {out}")
    return 1 if tournament.failures else 0


class Seen(NamedTuple):
    """What a command line's data, net and settings tell before any run."""

    look: Look
    """Facts about the clients."""
    methods: dict[str, str]
    """The suggested methods, each with its reason."""
    rate: float | None
    """The configured learning rate; None for an optimizer without one."""
    rounds: int
    """The configured number of rounds."""
    has_folds: bool
    """Whether the data can be validated on folds."""
    no_means: frozenset[str]
    """Names of the task's metrics that are no means over rows."""


def see(passed: Sequence[str]) -> Seen:
    """Return what a command line's data, net and settings tell; the data are let go afterwards.

    Args:
        passed: options of ``fit``, without a method.

    Raises:
        MisconfigurationException: if the samples are at sites.
    """
    (local,) = choose(["local"], FOLDER / "methods")
    built = configured(list(local.among(passed)))
    if built.datamodule.at_sites:
        raise MisconfigurationException("advise: samples at sites can't be looked at; give data that are here.")
    built.datamodule.setup("fit")
    look = look_at(built.datamodule)
    # an optimizer of one number tells the rate, wherever it was configured
    rate = built.model.optimizer([nn.Parameter(torch.zeros(1))]).param_groups[0].get("lr")
    data = built.datamodule
    # rows that the data name, or that are the latest ones, validate at each seed
    has_folds = data.client_split != "time" and "val" not in data.division.named
    has_folds &= complaint([*local.among(passed), "--data.val_fraction=0.2", "--data.val_fold=0"]) is None
    rounds = int(built.trainer.max_epochs or 1)
    # the concordance of all clients' samples isn't computed, and has no entry among these
    no_means = frozenset(["c_index", *data.task.pooled()])
    return Seen(look, suggested(look, built.model.net, data.task), rate, rounds, has_folds, no_means)


def trial_of(rate: str) -> Trial:
    """Return the trial of a learning rate."""
    return Trial(((RATE, rate),))


class Tournament:
    """Runs of a few methods, sweep by sweep, as long as the budget holds.

    A sweep is one run of every method, so that all methods have the same seeds.

    Args:
        comparison: the folder and the environment of the runs.
        methods: the methods; those that can't run are left out.
        budget: the limit.
        rounds: configured number of rounds.
        rate: configured learning rate; None tunes nothing.
        start: reading of `time.perf_counter` at the beginning, for a limit in seconds.
        rates: learning rates to try; empty for multiples of the configured one.
        folds: number of folds that validate in turn; 1 for the same validation rows at each seed.
    """

    def __init__(
        self,
        comparison: compare.Comparison,
        methods: Sequence[Choice],
        budget: Budget,
        rounds: int,
        rate: float | None,
        start: float,
        rates: Sequence[str] = (),
        folds: int = 1,
    ) -> None:
        self.given_rates, self.folds = list(rates), folds
        # largest number of seeds
        self.most = folds
        self.comparison, self.methods, self.budget, self.start = comparison, list(methods), budget, start
        self.configured = self.rounds = rounds
        self.rate = rate if rate and self._tunable() else None
        # runs by method and learning rate, at one seed or several
        self.tried: dict[str, dict[str, list[Run]]] = defaultdict(dict)
        self.chosen: dict[str, Trial] = {}
        self.left_out: dict[str, str] = {}
        self.failures: dict[Run, str] = {}
        self.trials: list[dict[str, Any]] = []
        self.results: dict[str, list[Result]] = {}
        self.rounds_made = 0
        # seconds of a run apart from its rounds, and of a round by method
        self.overhead, self.per_round = 0.0, dict[str, float]()
        self.factor = 1.0
        # seconds from start to end of each run made
        self.walls: list[float] = []

    def _fold(self, turn: int) -> tuple[str, ...]:
        """Return the options for the fold of a turn."""
        return ("--data.val_fold", str(turn % self.folds)) if self.folds > 1 else ()

    def _tunable(self) -> bool:
        return complaint([*self.methods[0].among(self.comparison.passed), f"--{RATE}=0.1"]) is None

    @property
    def left(self) -> float:
        """The rest of the budget, in its unit."""
        if self.budget.unit == "rounds":
            return self.budget.amount - self.rounds_made
        return self.budget.amount - (time.perf_counter() - self.start)

    def cost(self, labels: Sequence[str], rounds: int) -> float:
        """Return the expected cost of one run of each method, in the budget's unit.

        Args:
            labels: the methods.
            rounds: rounds of each run.
        """
        if self.budget.unit == "rounds":
            return float(len(labels) * rounds)
        # a method that wasn't measured, as the budget ended before, counts as the others do
        usual = fmean(self.per_round.values()) if self.per_round else 0.0
        seconds = sum(self.overhead + rounds * self.per_round.get(label, usual) for label in labels)
        return float(self.factor * seconds / self.comparison.given.jobs)

    @property
    def seed_cost(self) -> float:
        """Cost of a further seed of all methods, in the budget's unit."""
        return self.cost([method.label for method in self.methods], self.rounds)

    @property
    def reserve(self) -> float:
        """Cost of the seeds without which nothing is known, in the budget's unit."""
        return min(self.most, self.folds if self.folds > 1 else FOLDS) * self.seed_cost

    def sweep(self, name: str, runs: Mapping[str, Run], rounds: int, least: int = 1) -> bool:
        """Make the unfinished ones of some runs, and count their cost; stop in the middle where the budget ends.

        Args:
            name: name of the sweep, for the terminal.
            runs: a run by method.
            rounds: rounds of each run.
            least: number of runs that are made whatever the budget.

        Returns:
            True if every run was made, or failed.
        """
        earlier = {run for run in runs.values() if run.finished}
        waiting = [label for label, run in runs.items() if run not in earlier]
        print(f"{name}: {len(runs)} runs, {len(earlier)} of them made earlier", flush=True)
        report = compare.Progress(len(waiting), ())
        jobs = self.comparison.given.jobs
        for at in range(0, len(waiting), jobs):
            some = waiting[at : at + jobs]
            # a sweep planned on an idle machine may meet a busy one
            if at >= least and self.left < self.cost(some, rounds):
                return False
            begun, expected = time.perf_counter(), self.cost(some, rounds)
            self.failures |= self.comparison.make([runs[label] for label in some], report)
            self.rounds_made += rounds * len(some)
            self.walls += [(time.perf_counter() - begun) * jobs / len(some)] * len(some)
            if expected and self.budget.unit == "seconds":
                # the newest runs foretell the next ones best
                self.factor *= (time.perf_counter() - begun) / expected
        return True

    def play(self, seeds: int, reference: str) -> None:
        """Probe, plan, try learning rates, and make the seeds.

        Args:
            seeds: largest number of seeds.
            reference: the method that must run.

        Raises:
            MisconfigurationException: if the reference can't run, or the budget holds no seed.
        """
        self.most, stored = seeds, self.comparison.out / "plan.json"
        plan = self._stored(stored)
        if plan is None:
            self._probe(reference)
            rates = self._plan()
            plan = {"rounds": self.rounds, "rates": rates, "overhead": self.overhead, "per_round": self.per_round}
            plan |= {"settings": self._settings, "left_out": self.left_out}
            write_json(stored, plan)
        more = () if self.rounds == self.configured else ("--trainer.max_rounds", str(self.rounds))
        labels = [method.label for method in self.methods]
        # kept with the plan: with a larger budget more could be tried, and the seeds so far were made by these rates
        if "chosen" in plan:
            self.chosen = {label: trial_of(value) if value else Trial() for label, value in plan["chosen"].items()}
            self.trials = plan["trials"]
            for row in self.trials:
                self.tried[row["method"]].setdefault(row[RATE], [])
        else:
            self._try_rates(plan["rates"], more)
            chosen = {label: trial.settings[0][1] if trial.settings else None for label, trial in self.chosen.items()}
            write_json(stored, {**plan, "chosen": chosen, "trials": self.trials})
        for seed in range(SEED + 1, SEED + 1 + seeds):
            runs = {
                m.label: self.comparison.run(
                    m, seed, self.comparison.out, (*more, *self.chosen[m.label].arguments, *self._fold(seed - SEED - 1))
                )
                for m in self.methods
            }
            waiting = [label for label, run in runs.items() if run.finished is None]
            if self.left < self.cost(waiting, self.rounds) or not self.sweep(f"seed {seed}", runs, self.rounds):
                break
            for run in runs.values():
                if run.finished:
                    self.results.setdefault(run.method, []).append(Result(run, run.finished))
        # in the order of methods, of which the simple ones come first
        self.results = {label: self.results[label] for label in labels if label in self.results}
        if reference not in self.results:
            why = next((why for run, why in self.failures.items() if run.method == reference), None)
            raise MisconfigurationException(
                f"advise: {reference} failed: {why}"
                if why
                else f"advise: --budget {self.budget} holds no seed of {len(labels)} methods, which costs about "
                f"{self.budget.words(self.seed_cost)}; give more, or name fewer --methods."
            )

    @property
    def _settings(self) -> list[str]:
        # a plan holds for the same methods, data and options
        return [" ".join(method.among(self.comparison.passed)) for method in self.methods]

    def _stored(self, path: Path) -> dict[str, Any] | None:
        if not path.is_file():
            return None
        plan: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if plan["settings"] != self._settings:
            return None
        self.rounds, self.overhead, self.per_round = plan["rounds"], plan["overhead"], plan["per_round"]
        self.left_out = plan["left_out"]
        self.methods = [method for method in self.methods if method.label not in self.left_out]
        return plan

    def _probe(self, reference: str) -> None:
        short = min(PROBE, self.configured)
        folder = self.comparison.out / "probe"
        more = ("--trainer.max_rounds", str(short), *self._fold(0))
        runs = {method.label: self.comparison.run(method, SEED, folder, more) for method in self.methods}
        # the process that starts the runs imports first, once for all of them
        self.comparison.start()
        # the first run reads modules that the others find read: two tell what a run costs
        self.sweep(f"{short} rounds to measure by", runs, short, least=2 * self.comparison.given.jobs)
        self.left_out, self.failures = {run.method: why for run, why in self.failures.items()}, {}
        if reference in self.left_out:
            raise MisconfigurationException(f"advise: {reference} failed: {self.left_out[reference]}")
        self.methods = [method for method in self.methods if method.label not in self.left_out]
        seconds = {run.method: Result(run, run.finished).summary["seconds"] for run in runs.values() if run.finished}
        walls = self.walls[self.comparison.given.jobs :] or self.walls
        self.overhead = max(0.0, fmean(walls) - fmean(seconds.values())) if walls else 0.0
        self.per_round = {label: each / short for label, each in seconds.items()}

    def _plan(self) -> int:
        """Choose the number of rounds, and return the number of learning rates."""
        labels = [method.label for method in self.methods]
        for share, rates in PLANS:
            self.rounds = max(1, round(share * self.configured))
            # given rates are tried whatever the plan, and one rate needs no trial
            tried = len(self.given_rates) or rates
            trials = tried if self.rate and tried > 1 else 0
            if self.reserve + trials * self.cost(labels, self.rounds) <= self.left:
                return rates
        needed, seeds = self.budget.amount - self.left + self.reserve, round(self.reserve / self.seed_cost)
        raise MisconfigurationException(
            f"advise: --budget {self.budget} is too small: {seeds} seeds of {len(labels)} methods with a quarter of "
            f"the rounds cost about {self.budget.words(needed)}; give more, or name fewer --methods."
        )

    def _try_rates(self, number: int, more: Sequence[str]) -> None:
        """Try learning rates: a grid, values beyond its edges, and all of them again at further seeds.

        Args:
            number: number of rates of the grid.
            more: further options of ``fit``.
        """
        self.chosen = {method.label: Trial() for method in self.methods}
        if self.rate is None or not (self.given_rates or number > 1):
            return
        values = self.given_rates or [f"{self.rate * factor:.6g}" for factor in FACTORS[:number]]
        goes_on = all(self._try_rate(value, SEED, self.methods, more) for value in values)
        for _ in range(0 if self.given_rates else BEYOND):
            # a configuration's rate is that of one method, and others may need much more or less
            further: dict[str, list[Choice]] = {}
            for method in self.methods:
                if goes_on and (beyond := self._beyond(method.label)):
                    further.setdefault(beyond, []).append(method)
            goes_on = bool(further) and all(
                self._try_rate(value, SEED, methods, more) for value, methods in further.items()
            )
        for seed in AGAIN:
            # few validation rows make rates look alike at one seed
            cost = sum(len(tried) * self.cost([label], self.rounds) for label, tried in self.tried.items())
            if self.left < cost + self.reserve:
                break
            for value in self.rates:
                methods = [method for method in self.methods if value in self.tried[method.label]]
                if not self._try_rate(value, seed, methods, more):
                    break
        for label in self.tried:
            if (best := self._best(label)) is not None:
                self.chosen[label] = trial_of(best)

    def _best(self, label: str) -> str | None:
        """Return a method's rate with the best mean validation over seeds, the first of equal ones; None without."""
        tried = self.tried[label]
        most = max(map(len, tried.values()), default=0)
        means = {}
        for value, runs in tried.items():
            found = [valued for run in runs if (valued := validation_of(run))]
            # a rate that diverged, or that the budget left out at a seed, can't be compared
            if len(found) == most and not any(math.isnan(each) for each, _ in found):
                means[value] = fmean(sign * each for each, sign in found)
        return max(means, key=lambda value: means[value], default=None)

    def _beyond(self, label: str) -> str | None:
        """Return the next rate beyond the edge of a method's rates; None if the best one isn't at the edge."""
        best = self._best(label)
        if best is None or not at_edge(trial_of(best), {RATE: list(self.tried[label])}):
            return None
        value = float(best)
        return f"{value * STEP if value == max(map(float, self.tried[label])) else value / STEP:.6g}"

    def _try_rate(self, value: str, seed: int, methods: Sequence[Choice], more: Sequence[str]) -> bool:
        """Run some methods at a learning rate; return False if the budget doesn't hold them, and the seeds after them.

        Args:
            value: the rate.
            seed: the seed.
            methods: the methods.
            more: further options of ``fit``.
        """
        trial = trial_of(value)
        folder = self.comparison.out / "tuning" / trial.name
        words = (*more, *trial.arguments, *self._fold((SEED, *AGAIN).index(seed)))
        runs = {
            m.label: replace(self.comparison.run(m, seed, folder, words), method=f"{m.label} {trial.name}")
            for m in methods
        }
        waiting = [label for label, run in runs.items() if run.finished is None]
        # the seeds come first: a method with a good rate and no interval says nothing
        if self.left < self.cost(waiting, self.rounds) + self.reserve:
            return False
        made = self.sweep(trial.name if seed == SEED else f"{trial.name}, seed {seed}", runs, self.rounds)
        # a rate at which a method fails is no choice, and no failure of the tournament
        self.failures = {}
        if made:
            for label, run in runs.items():
                self.tried[label].setdefault(value, []).append(run)
                self.trials += [{"seed": seed, **row} for row in rows_of(label, [(trial, [run])])]
        return made

    @property
    def rates(self) -> list[str]:
        """All rates that were tried, by any method."""
        return list(dict.fromkeys(value for tried in self.tried.values() for value in tried))

    @property
    def notes(self) -> list[str]:
        """Return sentences on methods left out, rounds, learning rates and budget."""
        sentences = [f"{label} is left out: {why}" for label, why in self.left_out.items()]
        rounds = f"{self.rounds} rounds a run"
        if self.rounds < self.configured:
            rounds += f", of {self.configured} configured ones: the budget holds no more"
        sentences.append(f"{rounds}; all figures are of the last round.")
        if self.rates:
            chosen = "; ".join(f"{label} {trial.name}" for label, trial in self.chosen.items() if trial.settings)
            seeds = sorted({int(row["seed"]) for row in self.trials})
            sentences.append(
                f"Learning rates tried at seeds that aren't in the tables ({', '.join(map(str, seeds))}): "
                f"{', '.join(self.rates)}. Chosen on validation: {chosen}."
            )
            grids = {label: {RATE: list(tried)} for label, tried in self.tried.items()}
            edges = [label for label, trial in self.chosen.items() if at_edge(trial, grids[label])]
            if edges:
                sentences.append(f"At the edge of the rates tried, so that others may be better: {', '.join(edges)}.")
        else:
            sentences.append("Learning rates are the configured ones: nothing was tuned.")
        sentences.append(f"Budget {self.budget}; spent {self.budget.words(self.budget.amount - self.left)}.")
        return sentences


def parse(args: list[str]) -> tuple[Namespace, list[str]]:
    """Split the options of ``advise`` from the options of ``fit``.

    Args:
        args: the command's arguments.

    Raises:
        MisconfigurationException: if a number is below 1.
    """
    parser = Arguments("advise", usage="%(prog)s [options] [options of fit]", description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument(
        "--budget",
        type=budget,
        default=budget("10m"),
        metavar="TIME",
        help="limit for all runs: 90s, 10m, 2h, or rounds of all runs together, 300r (default: 10m)",
    )
    parser.add_argument(
        "--methods",
        nargs="+",
        metavar="METHOD",
        help="the tournament's methods (default: chosen by a look at the data)",
    )
    parser.add_argument(
        "--rates",
        nargs="+",
        default=[],
        metavar="RATE",
        help="learning rates to try, at least two (default: up to four multiples of the configured one)",
    )
    parser.add_argument("--seeds", type=int, default=10, metavar="N", help="largest number of seeds (default: 10)")
    parser.add_argument("--jobs", type=int, default=1, help="number of runs at a time (default: 1)")
    parser.add_argument("--out", type=Path, help="folder of the runs and pages (default: runs/advise-DATA)")
    given, passed = parser.parse_known_args(args)
    for name in ("seeds", "jobs"):
        if getattr(given, name) < 1:
            raise MisconfigurationException(f"advise: --{name} {getattr(given, name)} must be at least 1.")
    if len(given.rates) == 1:
        raise MisconfigurationException(
            f"advise: --rates {given.rates[0]} leaves no choice; give several, or set --{RATE} {given.rates[0]}."
        )
    # the same advice with other --seeds and another --budget
    given.again = [*(["--methods", *given.methods] if given.methods else []), *passed]
    given.again += ["--rates", *given.rates] if given.rates else []
    given.again += ["--jobs", str(given.jobs)] if given.jobs > 1 else []
    given.again += ["--out", str(given.out)] if given.out else []
    return given, resolved(passed)
