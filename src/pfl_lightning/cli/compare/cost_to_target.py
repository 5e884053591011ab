"""The cost of a target: rounds, bytes and seconds up to the first validation as good as the target."""

import re
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, stdev

from pfl_lightning.cli.compare.results import Result
from pfl_lightning.runs.run_status import SIMULATED, measured_seconds

TITLE = re.compile(r"(rounds|MiB|seconds|simulated seconds) to (\d+(?:\.\d+)?)")
COSTS: dict[str, Callable[[Mapping[str, str]], float]] = {
    "rounds": lambda row: 1.0,
    "MiB": lambda row: sum(float(row.get(f"bytes/{way}") or 0) for way in ("up", "down")) / 2**20,
    "seconds": measured_seconds,
    "simulated seconds": lambda row: float(row[SIMULATED] or 0),
}
"""Cost of one round, from its row of ``rounds.csv``."""
FORMS = {"rounds": ".0f", "MiB": ".2f", "seconds": ".1f", "simulated seconds": ".1f"}


def is_target(title: str) -> bool:
    """Return True if a column's title asks for the cost of a target.

    >>> is_target("rounds to 90"), is_target("MiB to 0.5"), is_target("last")
    (True, True, False)
    """
    return TITLE.fullmatch(title) is not None


def cost_to_target(title: str, methods: Mapping[str, Sequence[Result]]) -> dict[str, str]:
    """Return the cost of a target by method: mean and standard deviation over seeds, as a cell.

    Args:
        title: such as ``MiB to 90``; the target is a validation accuracy in per cent, or a value of another metric.
        methods: finished runs by method.
    """
    what, _, target = title.partition(" to ")
    if what == "simulated seconds":
        # a run without a clock costs an unknown time, and not none
        methods = {name: [each for each in own if SIMULATED in each.rows[0]] for name, own in methods.items()}
    return {
        method: cell([cost(result, what, float(target)) for result in results], FORMS[what])
        for method, results in methods.items()
        if results
    }


def cost(result: Result, what: str, target: float) -> float | None:
    """Return a run's cost up to the first round at the target; None if no round gets so far.

    Args:
        result: the run.
        what: ``rounds``, ``MiB``, ``seconds`` or ``simulated seconds``.
        target: value of the metric that selects, in per cent for accuracy.
    """
    monitor, total = result.monitor, 0.0
    wanted = target / 100 if monitor.metric == "acc" else target
    for row in result.rows:
        # added before the comparison: the round that reaches the target is paid for as well
        total += COSTS[what](row)
        value = row.get(f"val/{monitor.metric}")
        if value and monitor.sign * float(value) >= monitor.sign * wanted:
            return total
    return None


def cell(costs: Sequence[float | None], form: str) -> str:
    """Return costs by seed as a cell; with a count of seeds if some never reached the target.

    >>> cell([3.0, 5.0], ".0f"), cell([3.0, None], ".0f"), cell([None], ".0f"), cell([7.25], ".1f")
    ('4 ± 1', '3 (1 of 2 seeds)', 'never', '7.2')

    Args:
        costs: one per seed; None if the seed never reached the target.
        form: format of the numbers.
    """
    # "never" is no number: a mean over seeds could only be of those that got there
    known = [each for each in costs if each is not None]
    if not known:
        return "never"
    if len(known) < len(costs):
        # a mean over some seeds alone looks too good, so the cell says how many
        return f"{fmean(known):{form}} ({len(known)} of {len(costs)} seeds)"
    return f"{fmean(known):{form}}" + (f" ± {stdev(known):{form}}" if len(known) > 1 else "")
