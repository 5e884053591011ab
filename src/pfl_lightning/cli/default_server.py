"""Name the model's own aggregator on a command line with ``--aggregator.mean`` and no aggregator.

Without a class the parser couldn't tell to which aggregator the mean belongs.
"""

from collections.abc import Sequence
from contextlib import suppress

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.seed import isolate_rng

from pfl_lightning.cli.argv import grouped, settings_in, value_of
from pfl_lightning.cli.class_names import KINDS, subclasses

MEAN = "--aggregator.mean"


def with_server(words: Sequence[str]) -> list[str]:
    """Insert ``--aggregator CLASS`` before ``--aggregator.mean`` where a command line names no aggregator.

    >>> with_server(["fit", "--model", "FedAvg", "--aggregator.mean", "Krum"])
    ['fit', '--model', 'FedAvg', '--aggregator', 'WeightedAverage', '--aggregator.mean', 'Krum']

    Args:
        words: the command's arguments, with paths of configurations.
    """
    arguments = grouped(words)
    first = next((k for k, argument in enumerate(arguments) if is_mean(argument[0])), None)
    if first is None or any(named(argument, "aggregator") for argument in arguments):
        return list(words)
    # reversed, as the last --model or --config holds; FedAvg is the command line's default
    model = next((name for argument in reversed(arguments) if (name := named(argument, "model"))), "FedAvg")
    server = ["--aggregator", own_server(model)]
    return [word for argument in [*arguments[:first], server, *arguments[first:]] for word in argument]


def is_mean(word: str) -> bool:
    """Return True for ``--aggregator.mean`` and for options below."""
    option = word.partition("=")[0]
    return option == MEAN or option.startswith(f"{MEAN}.")


def named(argument: list[str], setting: str) -> str | None:
    """Return the class given to a setting, by option or by configuration; None if none is given.

    Args:
        argument: a list from ``grouped``.
        setting: ``model`` or ``aggregator``.
    """
    if name := value_of(argument, f"--{setting}", f"--{setting}.class_path"):
        return name
    path = value_of(argument, "-c", "--config")
    settings = None if path is None else settings_in(path)
    given = settings.get(setting) if isinstance(settings, dict) else None
    return given.get("class_path") if isinstance(given, dict) else given if isinstance(given, str) else None


def own_server(model: str) -> str:
    """Return the class name of a client module's own aggregator; ``WeightedAverage`` for an unknown module.

    Args:
        model: the class of the client module, with or without its module.
    """
    found = [cls for cls in subclasses(KINDS["model"]) if cls.__name__ == model.rpartition(".")[2]]
    # a class that is unknown, or that needs settings, gets its sentence from the parser afterwards
    # building the module draws initial weights, which must not move the run's random state
    with suppress(IndexError, TypeError, MisconfigurationException), isolate_rng():
        return type(found[0]().configure_aggregator()).__name__
    return "WeightedAverage"
