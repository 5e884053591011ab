"""How often `pfl-lightning advise` gives the right answer on data whose right answer is known.

    python benchmarks/advice.py [--draws 8] [--noise 20] [--only identical noise] [--out runs/advice]

Each draw makes a table with a seed and runs the whole command: the look, the probes, five folds of each method, and the
decision. Nets are linear, and all runs are in this process, which saves half of their time. Printed are the right
answer, how often the advice was it, and wrong claims: a method named as better that isn't among the right ones. A
further figure is the share of sites that take a right method. Stopped and started again, the same command goes on from
its finished runs.
"""

import argparse
import contextlib
import csv
import io
import logging
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from pfl_lightning.cli.compare.runs import Run
from pfl_lightning.cli.main import main as command

SETTINGS = (
    "--data TableData --data.task Classification --data.task.num_classes 2 --data.target y --data.client site "
    "--data.num_clients null --data.partitioner Natural --data.test_fraction 0.25 --data.client_split stratified "
    "--data.batch_size 10 --model.net MLP --model.net.hidden [] --model.optimizer SGD --model.optimizer.lr 0.3 "
    "--trainer.max_rounds 16 --trainer.local_steps 20 --trainer.engine vectorised --trainer.check_val_every_n_epoch 4"
)
ADVISE = "--seeds 5 --budget 330r"
"""Five folds; the budget holds half of the configured rounds and no trials of rates, which makes a draw cheap."""

Rows = tuple[NDArray[np.float64], NDArray[np.int64]]


@dataclass(frozen=True)
class Case:
    """Data with a known answer.

    Args:
        words: what the data are.
        right: methods that are a right answer over all sites, by the beginnings of their labels; empty for no claim.
        sizes: number of rows by site.
        rule: the rule that a site's labels follow: the number of one of several directions.
        shift: deviation of the shift of each site's inputs.
        inputs: number of inputs of a row.
        slope: slope of the logistic regression that draws the labels; by 6 the best rule is right in 91 % of rows, by
            12 in 95 %.
        is_noise: whether labels are drawn without a look at the inputs.
    """

    words: str
    right: tuple[str, ...]
    sizes: tuple[int, ...]
    rule: Callable[[int], int] = lambda site: 0
    shift: float = 0.0
    inputs: int = 10
    slope: float = 6.0
    is_noise: bool = False

    def table(self, seed: int) -> list[tuple[str, Rows]]:
        """Return each site's name and rows.

        Args:
            seed: the draw.
        """
        rng = np.random.default_rng(seed)
        directions = rng.normal(size=(len(self.sizes), self.inputs))
        directions /= np.linalg.norm(directions, axis=1, keepdims=True)
        found = []
        for site, size in enumerate(self.sizes):
            x = rng.normal(size=(size, self.inputs))
            number = self.rule(site)
            # every second rule is the opposite of the one before
            logits = self.slope * (x @ directions[number // 2]) * (-1) ** number
            y = rng.random(size) < (0.5 if self.is_noise else 1 / (1 + np.exp(-logits)))
            # the labels were drawn before: a shifted site's rule is the same about another centre
            x += self.shift * rng.normal(size=self.inputs)
            found.append((f"s{site:02}", (x, y.astype(np.int64))))
        return found


ONE = ("FedAvg", "FedProx")
"""One model for all."""
CASES = {
    "identical": Case("ten identical sites of 30 rows", ONE, (30,) * 10),
    "unequal": Case("a site of 2,000 rows and nine of 20", ONE, (2000,) + (20,) * 9),
    "shifted": Case(
        "inputs shifted, 8 x 80 rows",
        ("FedAvg+fine_tuned", "Ditto", "APFL", "kNN-Per"),
        (80,) * 8,
        shift=1.0,
        inputs=20,
        slope=12.0,
    ),
    "clusters": Case("two clusters, 12 x 40 rows", ("IFCA", "CFL"), (40,) * 12, rule=lambda site: site % 2),
    "codes": Case("private label codes, 8 x 200 rows", ("Local",), (200,) * 8, rule=lambda site: 2 * site),
    "noise": Case("pure noise, 10 x 60 rows", (), (60,) * 10, is_noise=True),
}
NOTHING = "Train alone for now"
"""Beginning of the page where the rows can't tell."""


def advised(case: Case, seed: int, out: Path) -> tuple[str, list[str]]:
    """Return the first line of the advice, and the method that each site takes.

    Args:
        case: the data.
        seed: the draw.
        out: the folder of the draw.
    """
    out.mkdir(parents=True, exist_ok=True)
    path = out / "table.csv"
    if not path.exists():
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["site", "y", *(f"x{place}" for place in range(case.inputs))])
            for name, (x, y) in case.table(seed):
                writer.writerows([name, label, *row] for row, label in zip(x.tolist(), y.tolist(), strict=True))
    words = ["advise", *SETTINGS.split(), *ADVISE.split(), "--data.path", str(path), "--out", str(out / "advice")]
    text = io.StringIO()
    here = mock.patch.multiple("pfl_lightning.cli.compare.command", run_all=run_all, new_starter=lambda _: None)
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text), here:
        if code := exit_code(words):
            raise RuntimeError(f"{out}: exit code {code}: {text.getvalue()[-1000:]}")
    page = (out / "advice" / "advice.md").read_text()
    first = next(line for line in page.splitlines() if re.match("Use|Train|Take", line))
    with (out / "advice" / "advice.csv").open(newline="") as file:
        return first, [row["take"] for row in csv.DictReader(file)]


def exit_code(words: Sequence[str]) -> object:
    """Run a command, which ends as a program does, and return its exit code."""
    try:
        command(list(words))
    except SystemExit as ended:
        return ended.code
    return 0


def run_all(
    runs: Sequence[Run], jobs: int, environment: object, report: Callable[[Run, str], None], starter: object
) -> dict[Run, str]:
    """Make the unfinished runs one after another in this process, and return why some failed."""
    failures = {}
    for run in runs:
        if run.finished is None and (code := exit_code(run.command)):
            failures[run] = f"exit code {code}"
        report(run, failures.get(run, ""))
    return failures


def answer_in(first: str) -> str:
    """Return the answer of a page's first line: a method, Local, or a question mark."""
    if first.startswith(NOTHING):
        return "?"
    return "Local" if first.startswith("Train alone") else first.removeprefix("Use ").partition(":")[0]


def main() -> None:
    """Run the draws, and print how often the advice was right."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--draws", type=int, default=8, help="draws of each data set with an answer")
    parser.add_argument("--noise", type=int, default=20, help="draws of noise")
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES), help="data sets")
    parser.add_argument("--out", type=Path, default=Path("runs", "advice"), help="folder of tables and runs")
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    for name in given.only:
        case = CASES[name]
        answers, at_sites, begun = [], Counter[bool](), time.perf_counter()
        for seed in range(given.noise if case.is_noise else given.draws):
            first, sites = advised(case, seed, given.out / name / f"draw_{seed}")
            answers.append(answer_in(first))
            at_sites.update(take in (case.right or ("Local",)) for take in sites)
            print(f"{name}, draw {seed}: {first}", flush=True)
        right = sum(answer == "?" if case.is_noise else answer in case.right for answer in answers)
        claims = sum(answer not in ("?", "Local", *case.right) for answer in answers)
        seconds = (time.perf_counter() - begun) / max(1, len(answers))
        share = at_sites[True] / max(1, at_sites.total())
        print(
            f"{case.words}: right in {right} of {len(answers)} draws ({' or '.join(case.right) or 'no claim'}), wrong "
            f"claims in {claims}; {100 * share:.0f} % of sites take it; answers {dict(Counter(answers))}; "
            f"{math.ceil(seconds)} s a draw",
            flush=True,
        )


if __name__ == "__main__":
    main()
