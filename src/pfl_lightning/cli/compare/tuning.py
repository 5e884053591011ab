"""Tune settings for each method on validation, with the same number of trials for all.

Without it a comparison often compares how well a default learning rate happens to suit each method.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import isnan, nan
from statistics import fmean

from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.cli.compare.results import Result
from pfl_lightning.cli.compare.runs import Run
from pfl_lightning.cli.load_config import complaint
from pfl_lightning.runs.report import Row


@dataclass(frozen=True)
class Trial:
    """One combination of values to try.

    Args:
        settings: (name, value) pairs, as on the command line without dashes.
    """

    settings: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        """Short name, for folders and messages.

        >>> Trial((("model.init_args.optimizer.init_args.lr", "0.1"),)).name
        'lr=0.1'
        """
        return ",".join(f"{name.rpartition('.')[2]}={value}" for name, value in self.settings)

    @property
    def arguments(self) -> tuple[str, ...]:
        """Arguments of ``fit``."""
        return tuple(word for name, value in self.settings for word in (f"--{name}", value))


def axes(words: Sequence[str]) -> dict[str, list[str]]:
    """Return the values to try by setting, without dashes.

    >>> axes(["model.lr=0.1,0.2", "model.mu=1"])
    {'model.lr': ['0.1', '0.2'], 'model.mu': ['1']}

    Args:
        words: settings with values, each ``NAME=VALUE,VALUE``.

    Raises:
        MisconfigurationException: if a word has another form, or a setting is given twice.
    """
    grid: dict[str, list[str]] = {}
    for word in words:
        name, _, values = word.lstrip("-").partition("=")
        given = [value for value in values.split(",") if value]
        if not name or not given:
            raise MisconfigurationException(
                f"compare: --tune {word} must be a setting with values to try, such as "
                "model.init_args.optimizer.init_args.lr=0.01,0.1."
            )
        if name in grid:
            raise MisconfigurationException(f"compare: --tune {name} is given twice; give all of its values in one.")
        grid[name] = list(dict.fromkeys(given))
    return grid


def trials(tried: Mapping[str, Sequence[str]]) -> list[Trial]:
    """Return all combinations of the values to try.

    >>> [trial.name for trial in trials({"model.lr": ["0.1", "0.2"], "model.mu": ["1"]})]
    ['lr=0.1,mu=1', 'lr=0.2,mu=1']

    Args:
        tried: values by setting; an empty mapping gives one empty trial.
    """
    return [Trial(settings) for settings in product(*([(name, value) for value in tried[name]] for name in tried))]


def missing(arguments: Mapping[str, Sequence[str]], tried: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Return each method's missing settings.

    Args:
        arguments: arguments of ``fit`` by method.
        tried: values by setting.

    Raises:
        MisconfigurationException: if no method has a setting, or a value has the wrong type.
    """
    # a command line that is refused without the setting shows nothing about it; the method's runs fail with the reason
    readable = [method for method in arguments if complaint(arguments[method]) is None]
    settings: dict[str, list[str]] = {method: [] for method in arguments}
    for name, values in tried.items():
        unknown = {}
        for method in readable:
            # each value is parsed, so that a typing mistake ends the comparison before the first trial
            for value in values:
                wrong = complaint([*arguments[method], f"--{name}={value}"])
                if wrong is not None and not wrong.unknown:
                    raise MisconfigurationException(f"compare: --tune {name}={value}: {wrong}")
                if wrong is not None:
                    unknown[method] = wrong
                    break
        if unknown and len(unknown) == len(readable):
            # of all methods' sentences, one with a suggestion helps most
            sentence = max(map(str, unknown.values()), key=lambda said: "did you mean" in said)
            raise MisconfigurationException(f"compare: --tune {name} is a setting of no method here: {sentence}")
        for method in unknown:
            settings[method].append(name)
    return settings


def best(tried: Sequence[tuple[Trial, Sequence[Run]]]) -> tuple[Trial, float, int] | None:
    """Return the trial with the best validation value, the value, and the number of trials with a value.

    Args:
        tried: a method's trials with their runs, one for each fold.

    Returns:
        None if no trial has a value; of equally good trials the first.
    """
    # a trial that diverged has no value, or NaN, and can't be compared
    candidates = [(trial, *valued) for trial, runs in tried if (valued := mean_of(runs)) and not isnan(valued[0])]
    if not candidates:
        return None
    trial, value, _ = max(candidates, key=lambda each: each[2] * each[1])
    return trial, value, len(candidates)


def mean_of(runs: Sequence[Run]) -> tuple[float, int] | None:
    """Return the mean validation value of a trial's runs, NaN if one has none, and its sign; None if one is unfinished.

    Args:
        runs: the runs, at least one.
    """
    found = [valued for run in runs if (valued := validation_of(run))]
    return (fmean(value for value, _ in found), found[0][1]) if len(found) == len(runs) else None


def validation_of(run: Run) -> tuple[float, int] | None:
    """Return a finished run's validation value, NaN without one, and its sign; None if unfinished.

    It is the last round's, as that round is reported; the best round's if the last one didn't validate.

    Args:
        run: the run.
    """
    if run.finished is None:
        return None
    result = Result(run, run.finished)
    name = f"val/{result.monitor.metric}"
    value = result.rows[-1].get(name) or result.summary["selected"].get(name)
    return nan if value is None else float(value), result.monitor.sign


def rows_of(method: str, tried: Sequence[tuple[Trial, Sequence[Run]]]) -> list[Row]:
    """Return a method's rows of ``tuning.csv``, one for each trial: settings, and the mean validation value.

    Args:
        method: the method's label.
        tried: the method's trials with their runs.
    """
    values = [mean_of(runs) for _, runs in tried]
    return [
        {"method": method, **dict(trial.settings), "validation": value[0] if value else None}
        for (trial, _), value in zip(tried, values, strict=True)
    ]


def at_edge(chosen: Trial, tried: Mapping[str, Sequence[str]]) -> list[tuple[str, str]]:
    """Return the chosen settings that are the smallest or the largest number tried, as (last part of name, value).

    A value of 0 is no edge, as it switches a term off and nothing lies below; words, and settings with a single value,
    have no edge.

    >>> grid = {"model.lr": ["0.1", "1", "0.5"], "model.mu": ["0", "0.1"], "model.kind": ["a", "b"]}
    >>> at_edge(Trial((("model.lr", "1"), ("model.mu", "0"), ("model.kind", "a"))), grid)
    [('lr', '1')]

    Args:
        chosen: the best trial.
        tried: values by setting.
    """
    edges = []
    for name, value in chosen.settings:
        try:
            numbers = [float(each) for each in tried[name]]
        except ValueError:
            continue
        if len(numbers) > 1 and float(value) in (min(numbers), max(numbers)) and float(value) != 0:
            edges.append((name.rpartition(".")[2], value))
    return edges
