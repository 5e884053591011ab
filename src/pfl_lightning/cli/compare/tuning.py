"""Settings that each method gets for itself: tried on validation, with the same budget for all."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import nan

from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.cli.compare.results import Result
from pfl_lightning.cli.compare.runs import Run


@dataclass(frozen=True)
class Trial:
    """Settings of a method that are tried.

    Args:
        settings: names and values, as on the command line without dashes.
    """

    settings: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        """A name for folders and people.

        >>> Trial((("model.init_args.optimizer.init_args.lr", "0.1"),)).name
        'lr=0.1'
        """
        return ",".join(f"{name.rpartition('.')[2]}={value}" for name, value in self.settings)

    @property
    def arguments(self) -> tuple[str, ...]:
        """What ``fit`` is given."""
        return tuple(word for name, value in self.settings for word in (f"--{name}", value))


def trials(words: Sequence[str]) -> list[Trial]:
    """All combinations of the values to try.

    >>> [trial.name for trial in trials(["model.lr=0.1,0.2", "model.mu=1"])]
    ['lr=0.1,mu=1', 'lr=0.2,mu=1']

    Args:
        words: each a setting with its values, ``NAME=VALUE,VALUE``.

    Raises:
        MisconfigurationException: if one is something else.
    """
    axes = []
    for word in words:
        name, _, values = word.lstrip("-").partition("=")
        given = [value for value in values.split(",") if value]
        if not name or not given:
            raise MisconfigurationException(
                f"compare: --tune {word} must be a setting with values to try, such as "
                "model.init_args.optimizer.init_args.lr=0.01,0.1."
            )
        axes.append([(name, value) for value in dict.fromkeys(given)])
    return [Trial(settings) for settings in product(*axes)]


def best(tried: Sequence[tuple[Trial, Run]]) -> tuple[Trial, float] | None:
    """The trial with the best validation, and its value; of several the first; None where none has one.

    Args:
        tried: a method's trials, with their runs.
    """
    found: list[tuple[float, Trial, float]] = []
    for trial, run in tried:
        if run.finished is None:
            continue
        result = Result(run, run.finished)
        value = result.summary["selected"].get(f"val/{result.monitor.metric}")
        value = nan if value is None else value
        if value == value:
            found.append((result.monitor.sign * value, trial, value))
    if not found:
        return None
    _, trial, value = max(found, key=lambda each: each[0])
    return trial, value
