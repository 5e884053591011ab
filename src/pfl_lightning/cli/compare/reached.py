"""What a target costs: rounds, bytes and seconds until validation reaches it for the first time."""

import re
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, stdev

from pfl_lightning.cli.compare.results import Result

TITLE = re.compile(r"(rounds|MiB|seconds) to (\d+(?:\.\d+)?)")
COSTS: dict[str, Callable[[Mapping[str, str]], float]] = {
    "rounds": lambda row: 1.0,
    "MiB": lambda row: sum(float(row.get(f"bytes/{way}") or 0) for way in ("up", "down")) / 2**20,
    "seconds": lambda row: sum(float(value or 0) for name, value in row.items() if name.startswith("time/")),
}
"""What a round of a record costs."""
FORMS = {"rounds": ".0f", "MiB": ".2f", "seconds": ".1f"}


def is_target(title: str) -> bool:
    """Whether a column's title asks for what a target costs.

    >>> is_target("rounds to 90"), is_target("MiB to 0.5"), is_target("last")
    (True, True, False)
    """
    return TITLE.fullmatch(title) is not None


def reached(title: str, methods: Mapping[str, Sequence[Result]]) -> dict[str, str]:
    """What a target costs each method: mean and deviation over seeds, and how many of them came to it if not all did.

    Args:
        title: such as ``MiB to 90``, of validation accuracy in per cent, or of another metric as it is.
        methods: finished runs by method.
    """
    what, _, target = title.partition(" to ")
    return {
        method: cell([cost(result, what, float(target)) for result in results], FORMS[what])
        for method, results in methods.items()
        if results
    }


def cost(result: Result, what: str, target: float) -> float | None:
    """What a run's rounds cost up to the first that reaches a target; None where none does.

    Args:
        result: the run.
        what: ``rounds``, ``MiB`` or ``seconds``.
        target: of the metric that selects.
    """
    monitor, total = result.monitor, 0.0
    wanted = target / 100 if monitor.metric == "acc" else target
    for row in result.rows:
        total += COSTS[what](row)
        value = row.get(f"val/{monitor.metric}")
        if value and monitor.sign * float(value) >= monitor.sign * wanted:
            return total
    return None


def cell(costs: Sequence[float | None], form: str) -> str:
    """Costs by seed as a table writes them.

    >>> cell([3.0, 5.0], ".0f"), cell([3.0, None], ".0f"), cell([None], ".0f"), cell([7.25], ".1f")
    ('4 ± 1', '3 (1 of 2 seeds)', 'never', '7.2')

    Args:
        costs: of each seed, None where it never came so far.
        form: of the numbers.
    """
    known = [each for each in costs if each is not None]
    if not known:
        return "never"
    if len(known) < len(costs):
        return f"{fmean(known):{form}} ({len(known)} of {len(costs)} seeds)"
    return f"{fmean(known):{form}}" + (f" ± {stdev(known):{form}}" if len(known) > 1 else "")
