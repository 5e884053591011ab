"""Settings that each method gets for itself: tried on validation, with the same budget for all."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import nan

from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.cli.compare.results import Result
from pfl_lightning.cli.compare.runs import Run
from pfl_lightning.cli.reading import complaint


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


def axes(words: Sequence[str]) -> dict[str, list[str]]:
    """Return the values to try by setting, without dashes.

    >>> axes(["model.lr=0.1,0.2", "model.mu=1"])
    {'model.lr': ['0.1', '0.2'], 'model.mu': ['1']}

    Args:
        words: each a setting with its values, ``NAME=VALUE,VALUE``.

    Raises:
        MisconfigurationException: if one is something else, or a setting is given twice.
    """
    found: dict[str, list[str]] = {}
    for word in words:
        name, _, values = word.lstrip("-").partition("=")
        given = [value for value in values.split(",") if value]
        if not name or not given:
            raise MisconfigurationException(
                f"compare: --tune {word} must be a setting with values to try, such as "
                "model.init_args.optimizer.init_args.lr=0.01,0.1."
            )
        if name in found:
            raise MisconfigurationException(f"compare: --tune {name} is given twice; give all of its values in one.")
        found[name] = list(dict.fromkeys(given))
    return found


def trials(tried: Mapping[str, Sequence[str]]) -> list[Trial]:
    """Return all combinations of the values to try.

    >>> [trial.name for trial in trials({"model.lr": ["0.1", "0.2"], "model.mu": ["1"]})]
    ['lr=0.1,mu=1', 'lr=0.2,mu=1']

    Args:
        tried: values by setting; without any there is one trial, with nothing to it.
    """
    return [Trial(settings) for settings in product(*([(name, value) for value in tried[name]] for name in tried))]


def missing(arguments: Mapping[str, Sequence[str]], tried: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Return those of the settings to try that a method hasn't, by method.

    Args:
        arguments: of ``fit``, by method.
        tried: values by setting.

    Raises:
        MisconfigurationException: if no method has a setting, or a value is of another type than its setting.
    """
    # a command line that is refused already tells nothing of a setting; its runs will fail, and say why
    readable = [method for method in arguments if complaint(arguments[method]) is None]
    found: dict[str, list[str]] = {method: [] for method in arguments}
    for name, values in tried.items():
        unknown = {}
        for method in readable:
            for value in values:
                wrong = complaint([*arguments[method], f"--{name}={value}"])
                if wrong is not None and not wrong.unknown:
                    raise MisconfigurationException(f"compare: --tune {name}={value}: {wrong}")
                if wrong is not None:
                    unknown[method] = wrong
                    break
        if unknown and len(unknown) == len(readable):
            # the sentence that has a suggestion, if there is one
            sentence = max(map(str, unknown.values()), key=lambda said: "did you mean" in said)
            raise MisconfigurationException(f"compare: --tune {name} is a setting of no method here: {sentence}")
        for method in unknown:
            found[method].append(name)
    return found


def best(tried: Sequence[tuple[Trial, Run]]) -> tuple[Trial, float, int] | None:
    """Return the trial with the best validation, its value and the number of trials with one; None if none has one.

    Args:
        tried: a method's trials, with their runs; of several that are best the first is returned.
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
    return trial, value, len(found)
